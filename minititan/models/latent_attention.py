"""Multi-head latent attention: keys and values of all heads from one narrow latent per token.

Only the latent and one rotated key, which the heads share, are kept for generation. Names and the
interleaved order of the rotary channels are those of the published weights. Source: arXiv:2405.04434, 2.1.
"""

import torch
from torch import Tensor, nn

from minititan.models.attention import KeyValueCache
from minititan.models.masks import Mask, attend
from minititan.models.pointwise import RMSNorm, rotate

EPS = 1e-6  # of the latents' norms, in every published model


class LatentAttention(nn.Module):
    """Causal attention through latents: [B, T, D] -> [B, T, D]."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        q_rank: int | None,
        kv_rank: int,
        plain_dim: int,
        rotary_dim: int,
        value_dim: int,
        scale: float,
        bias: bool = False,
    ) -> None:
        """A query and key head has `plain_dim` channels without positions and `rotary_dim` with them.

        `q_rank` None: queries without a latent. `scale` is on the scores, `bias` of what makes the latents
        and of the output.
        """
        super().__init__()
        self.kv_rank, self.plain_dim, self.rotary_dim, self.value_dim = (
            kv_rank,
            plain_dim,
            rotary_dim,
            value_dim,
        )
        self.scale = scale
        head_dim = plain_dim + rotary_dim
        if q_rank is None:
            self.q_proj = nn.Linear(width, heads * head_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(width, q_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(q_rank, eps=EPS)
            self.q_b_proj = nn.Linear(q_rank, heads * head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, kv_rank + rotary_dim, bias=bias)
        self.kv_a_layernorm = RMSNorm(kv_rank, eps=EPS)
        self.kv_b_proj = nn.Linear(kv_rank, heads * (plain_dim + value_dim), bias=False)
        self.o_proj = nn.Linear(heads * value_dim, width, bias=bias)
        self.compresses_queries = q_rank is not None
        self.attend = attend  # context parallelism puts one in its place that meets other ranks' tokens

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Attend causally, or where the mask says; to what is in the cache too."""
        q = self.heads(self.queries(x), self.plain_dim + self.rotary_dim)
        q_plain, q_turned = q.split((self.plain_dim, self.rotary_dim), dim=-1)
        q = torch.cat((q_plain, rotate(halves(q_turned), cos, sin)), dim=-1)  # [B, H, T, C]

        # [B, 1, T, R] and [B, 1, T, rotary]
        latent, turned = (
            self.kv_a_proj_with_mqa(x).unsqueeze(1).split((self.kv_rank, self.rotary_dim), dim=-1)
        )
        latent, turned = self.kv_a_layernorm(latent), rotate(halves(turned), cos, sin)
        if cache is not None:
            latent, turned = cache.extend(latent, turned)
        kv = self.heads(self.kv_b_proj(latent.squeeze(1)), self.plain_dim + self.value_dim)
        k_plain, v = kv.split((self.plain_dim, self.value_dim), dim=-1)  # [B, H, keys, ...]
        k = torch.cat((k_plain, turned.expand(-1, kv.shape[1], -1, -1)), dim=-1)  # [B, H, keys, C]
        out = self.attend(q, k, v, mask, self.scale)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # [B, H, T, V] -> [B, T, H*V] -> [B, T, D]

    def queries(self, x: Tensor) -> Tensor:
        """Return the queries [B, T, H*C] of x [B, T, D]."""
        if not self.compresses_queries:
            return self.q_proj(x)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))

    def heads(self, x: Tensor, width: int) -> Tensor:
        """Return x [B, T, heads*width] as [B, heads, T, width]."""
        return x.unflatten(-1, (-1, width)).transpose(1, 2)


def halves(x: Tensor) -> Tensor:
    """Return x [..., C] with the channels of each pair, which lie side by side, C/2 apart."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)

"""Causal self-attention with grouped key/value heads.

Head counts are read off the local weights (`view(B, T, -1, head_dim)`), so the same module computes on the
slice of heads that tensor parallelism leaves it. Sources: GQA (arXiv:2305.13245); sinks
(arXiv:2309.17453).
"""

from typing import Protocol

import torch
from torch import Tensor, nn

from minititan.models.masks import Mask, attend
from minititan.models.pointwise import RMSNorm, rotate


class KeyValueCache(Protocol):
    """Keeps the keys and values of the tokens before, for generation."""

    @property
    def length(self) -> int:
        """How many tokens are kept."""
        ...

    def extend(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Return what is kept of each kind with the new put behind it along dimension 2, and keep that."""
        ...


class Attention(nn.Module):
    """Rotary causal attention: [B, T, D] -> [B, T, D]."""

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        bias: bool = False,
        out_bias: bool = False,
        norm_eps: float | None = None,
        sinks: bool = False,
    ) -> None:
        """`bias`: of queries, keys, values; `norm_eps`: of norms of query and key heads, None: no norms;
        `sinks`: each head has a score that takes its part of the softmax and has no value.
        """
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(width, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(width, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(width, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=out_bias)
        self.sinks = nn.Parameter(torch.empty(heads)) if sinks else None
        normed = norm_eps is not None
        self.q_norm = RMSNorm(head_dim, eps=norm_eps) if normed else nn.Identity()
        self.k_norm = RMSNorm(head_dim, eps=norm_eps) if normed else nn.Identity()
        self.attend = attend  # context parallelism puts one in its place that meets other ranks' tokens

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Attend causally, or where the mask says; to what is in the cache too."""
        q = rotate(self.q_norm(self.heads(self.q_proj(x))), cos, sin)  # [B, H, T, C]
        k = rotate(self.k_norm(self.heads(self.k_proj(x))), cos, sin)  # [B, K, T, C]
        v = self.heads(self.v_proj(x))  # [B, K, T, C]
        if cache is not None:
            k, v = cache.extend(k, v)
        out = self.attend(q, k, v, mask, sinks=self.sinks)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # [B, H, T, C] -> [B, T, H*C] -> [B, T, D]

    def heads(self, x: Tensor) -> Tensor:
        """Return x [B, T, heads*C] as [B, heads, T, C]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

"""A model of one's own: a GPT with learned positions, normalised queries and keys, and learned scales of the
residual branches.

    PYTHONPATH=docs/examples minititan train --job.config_file train_configs/debug.toml \
        --experimental.custom_import scaled_gpt --model.name scaled_gpt --model.flavor small
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minititan.registry import ModelSpec, register


@dataclass(frozen=True)
class Args:
    width: int = 128  # D
    depth: int = 4
    num_attention_heads: int = 4  # H; by this name the library checks that tensor parallelism can divide them
    max_position_embeddings: int = 2048  # by this name it checks that a sequence fits
    vocab_size: int | None = None  # V; None: the tokenizer's size


class Block(nn.Module):
    def __init__(self, args: Args) -> None:
        super().__init__()
        width, head_dim = args.width, args.width // args.num_attention_heads
        self.attention_norm = nn.LayerNorm(width)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.q_norm, self.k_norm = nn.LayerNorm(head_dim), nn.LayerNorm(head_dim)
        self.o_proj = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up_proj, self.down_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.attention_scale = nn.Parameter(torch.empty(width))
        self.mlp_scale = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        h = self.attention_norm(x)
        # The number of heads follows from the width of the projection: under tensor parallelism a rank has
        # its share of both.
        q, k, v = (
            proj(h).unflatten(-1, (-1, self.q_norm.normalized_shape[0])).transpose(1, 2)  # [B, H, T, C]
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.q_norm(q), self.k_norm(k)
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.attention_scale * self.o_proj(h.transpose(1, 2).flatten(2))  # [B, T, D]
        return x + self.mlp_scale * self.down_proj(F.gelu(self.up_proj(self.mlp_norm(x))))


class ScaledGPT(nn.Module):
    def __init__(self, args: Args) -> None:
        super().__init__()
        assert args.vocab_size is not None
        self.embed_tokens = nn.Embedding(args.vocab_size, args.width)
        self.embed_positions = nn.Embedding(args.max_position_embeddings, args.width)
        self.layers = nn.ModuleDict({str(i): Block(args) for i in range(args.depth)})
        self.norm = nn.LayerNorm(args.width)
        self.lm_head = nn.Linear(args.width, args.vocab_size, bias=False)

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        mask = None
        if document_ids is not None:
            mask = (document_ids[:, None, :, None] == document_ids[:, None, None, :]).tril()  # [B, 1, T, T]
        x = tokens  # in a pipeline: what the stage before it has returned
        if self.embed_tokens is not None:
            x = self.embed_tokens(tokens) + self.embed_positions(positions.expand_as(tokens))  # [B, T, D]
        for block in self.layers.values():
            x = block(x, mask)
        return x if self.norm is None else self.norm(x)  # the loss applies the head


def init_(name: str, tensor: Tensor, generator: torch.Generator, args: Args) -> None:
    if name.endswith("_scale"):
        tensor.fill_(1 / args.depth)
    elif name.endswith("bias"):
        tensor.zero_()
    elif name.endswith("norm.weight"):
        tensor.fill_(1.0)
    else:
        tensor.normal_(std=0.02, generator=generator)


def flops_per_token(args: Args, seq_len: int) -> int:
    assert args.vocab_size is not None
    weights = args.depth * 12 * args.width**2 + args.width * args.vocab_size
    return 6 * weights + 12 * args.depth * args.width * seq_len


PLAN = {
    "embed_tokens": "embedding",
    "embed_positions": "embedding",
    "layers.*": "residual",  # the block's own parameters: the two scales
    "layers.*.attention_norm": "norm",
    "layers.*.[qkv]_proj": "column",
    "layers.*.[qk]_norm": "replicated",
    "layers.*.o_proj": "row",
    "layers.*.mlp_norm": "norm",
    "layers.*.up_proj": "column",
    "layers.*.down_proj": "row",
    "norm": "norm",
    "lm_head": "head",
}

register(
    "scaled_gpt",
    ModelSpec(
        flavors={"small": Args(), "tiny": Args(width=32, depth=2, max_position_embeddings=64)},
        build=ScaledGPT,
        init_=init_,
        flops_per_token=flops_per_token,
        tensor_parallel_plan=PLAN,
    ),
)

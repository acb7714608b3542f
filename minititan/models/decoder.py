"""The decoder that every family shares: one block, one forward.

Module names are those of the Hugging Face checkpoints below `model.`, argument names those of their
`config.json`. `layers` is a ModuleDict and an absent part (None) is passed through, so that a pipeline stage
is the same class. The head is not applied here: the loss applies it in chunks, so that the logits of a whole
batch never exist.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minititan.models.attention import Attention
from minititan.models.feed_forward import FeedForward
from minititan.models.masks import Mask, document_mask
from minititan.models.rotary import RopeScaling, inverse_frequencies, rotary_tables

# Module-name pattern -> style of `parallelisms/tensor_parallel.py`.
TENSOR_PARALLEL_PLAN = {
    "embed_tokens": "embedding",
    "layers.*.input_layernorm": "norm",
    "layers.*.self_attn.q_proj": "column",
    "layers.*.self_attn.k_proj": "column",
    "layers.*.self_attn.v_proj": "column",
    "layers.*.self_attn.o_proj": "row",
    "layers.*.post_attention_layernorm": "norm",
    "layers.*.mlp.gate_proj": "column",
    "layers.*.mlp.up_proj": "column",
    "layers.*.mlp.down_proj": "row",
    "norm": "norm",
    "lm_head": "head",
}


SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")


@dataclass(frozen=True)
class DecoderArgs:
    """The shape of a decoder; a run overrides any field in `[model.args]`."""

    hidden_size: int = 256  # D
    num_hidden_layers: int = 4
    num_attention_heads: int = 8  # H
    num_key_value_heads: int = 4  # K; divides H
    head_dim: int | None = None  # C; None: hidden_size / num_attention_heads
    intermediate_size: int = 768  # F
    vocab_size: int | None = None  # V; None: the tokenizer's size
    max_position_embeddings: int = 8192  # longest sequence the positions are meant for
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False  # the head is the embedding
    initializer_range: float = 0.02  # standard deviation of the initial weights

    def __post_init__(self) -> None:
        for name in SIZES:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} ({value}) must be at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            kv_heads = f"num_key_value_heads ({self.num_key_value_heads})"
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of {kv_heads}"
            )
        if self.channels < 2 or self.channels % 2:
            raise ValueError(f"the width of a head ({self.channels}) must be even, for rotary positions")

    @property
    def channels(self) -> int:
        """The width C of one head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


class DecoderBlock(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream [B, T, D]."""

    def __init__(self, args: DecoderArgs) -> None:
        super().__init__()
        width = args.hidden_size
        self.input_layernorm = nn.RMSNorm(width, eps=args.rms_norm_eps)
        self.self_attn = Attention(width, args.num_attention_heads, args.num_key_value_heads, args.channels)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=args.rms_norm_eps)
        self.mlp = FeedForward(width, args.intermediate_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """A decoder-only transformer: tokens [B, T] -> hidden states [B, T, D] after the last norm."""

    def __init__(self, args: DecoderArgs) -> None:
        super().__init__()
        assert args.vocab_size is not None, "the vocabulary size is resolved before a model is built"
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = nn.ModuleDict({str(i): DecoderBlock(args) for i in range(args.num_hidden_layers)})
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)
        if args.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.args = args

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Tensor:
        """Return hidden states [B, T, D].

        positions [T] or [B, T] (default 0..T-1); document_ids [B, T]: attention stays inside runs of equal
        ids.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed_tokens(tokens) if self.embed_tokens is not None else tokens
        args = self.args
        frequencies = inverse_frequencies(args.channels, args.rope_theta, args.rope_scaling, positions.device)
        cos, sin = rotary_tables(positions, frequencies, x.dtype)
        mask = None if document_ids is None else document_mask(document_ids, args.channels, x.dtype)
        for layer in self.layers.values():
            x = layer(x, cos, sin, mask)
        return self.norm(x) if self.norm is not None else x


def init_parameter(name: str, tensor: Tensor, generator: torch.Generator, args: DecoderArgs) -> None:
    """Fill rows of the parameter `name`: norms with one, the rest normal, cut at three standard deviations.

    What is added to the residual stream is scaled down by the depth of its layer, std / sqrt(2 (layer + 1)).
    """
    if tensor.ndim == 1:
        tensor.fill_(1.0)
        return
    std = args.initializer_range
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        std /= math.sqrt(2 * (int(name.split(".")[1]) + 1))
    nn.init.trunc_normal_(tensor, std=std, a=-3 * std, b=3 * std, generator=generator)


def flops_per_token(args: DecoderArgs, seq_len: int) -> int:
    """Return the floating-point operations of forward and backward for one token.

    Six for each weight of a matrix product (the embedding's look-up is none), and 12 H C T a layer for
    attention, counted without the saving of causality, as is usual for MFU (PaLM, arXiv:2204.02311, appendix
    B).
    """
    assert args.vocab_size is not None
    heads = args.num_attention_heads * args.channels
    kv_heads = args.num_key_value_heads * args.channels
    layer = args.hidden_size * (2 * heads + 2 * kv_heads + 3 * args.intermediate_size)
    weights = args.num_hidden_layers * layer + args.hidden_size * args.vocab_size
    return 6 * weights + 12 * args.num_hidden_layers * heads * seq_len

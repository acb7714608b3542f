"""The decoder that every family shares: one block, one forward.

Module names are those of the Hugging Face checkpoints below `model.`, argument names those of their
`config.json`. `layers` is a ModuleDict and an absent part (None) is passed through, so that a pipeline stage
is the same class. The head is not applied here: the loss applies it in chunks, so that the logits of a whole
batch never exist.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from minititan.models.arguments import DecoderArgs
from minititan.models.attention import KeyValueCache
from minititan.models.masks import Mask, cached_mask, causal_mask
from minititan.models.moe import Routing, RoutingRecord
from minititan.models.pointwise import RMSNorm
from minititan.models.rotary import inverse_frequencies, rotary_tables


class DecoderBlock(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream [B, T, D]."""

    def __init__(self, args: DecoderArgs, layer: int) -> None:
        super().__init__()
        width = args.hidden_size
        self.input_layernorm = RMSNorm(width, eps=args.rms_norm_eps)
        self.self_attn = args.attention(layer)
        self.post_attention_layernorm = RMSNorm(width, eps=args.rms_norm_eps)
        self.mlp = args.feed_forward(layer)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask, cache: KeyValueCache | None = None
    ) -> tuple[Tensor, Routing | None]:
        """Return the stream after the block and, of a mixture of experts, what the router did."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask, cache)
        out, routing = self.mlp(self.post_attention_layernorm(x))
        return x + out, routing


class Decoder(nn.Module):
    """A decoder-only transformer: tokens [B, T] -> hidden states [B, T, D] after the last norm."""

    def __init__(self, args: DecoderArgs) -> None:
        super().__init__()
        assert args.vocab_size is not None, "the vocabulary size is resolved before a model is built"
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = nn.ModuleDict({str(i): DecoderBlock(args, i) for i in range(args.num_hidden_layers)})
        self.norm = RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)
        if args.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.args = args
        self.routing = RoutingRecord()
        self.causal_mask = causal_mask  # context parallelism puts one in its place of a rank's own tokens

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        caches: Mapping[str, KeyValueCache] | None = None,
    ) -> Tensor:
        """Return hidden states [B, T, D].

        positions [T] or [B, T] (default 0..T-1); document_ids [B, T]: attention stays inside runs of equal
        ids. `caches`, by the name of the layer, have the tokens before these, one sequence; then positions
        [T] are needed.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed_tokens(tokens) if self.embed_tokens is not None else tokens
        args, scaling, device = self.args, self.args.rope_scaling, positions.device
        frequencies = inverse_frequencies(args.rotary_channels, args.rope_theta, scaling, device)
        factor = 1.0 if scaling is None else scaling.table_factor
        cos, sin = rotary_tables(positions, frequencies, x.dtype, factor)
        length = positions.shape[-1]
        windows = {name: args.window(int(name)) for name in self.layers}
        masks: dict[int | None, Mask] = {}
        for window in set(windows.values()):
            if caches is None:
                mask = self.causal_mask(length, window, document_ids, args.channels, x.dtype, device)
            else:
                mask = cached_mask(length, length + next(iter(caches.values())).length, window, device)
            masks[window] = mask
        for name, layer in self.layers.items():
            cache = None if caches is None else caches[name]
            x, routing = layer(x, cos, sin, masks[windows[name]], cache)
            if routing is not None and self.training:
                x = self.routing.add(name, routing, x)
        return self.norm(x) if self.norm is not None else x


def tensor_parallel_plan(args: DecoderArgs) -> dict[str, str]:
    """Return module-name pattern -> style of `parallelisms/tensor_parallel.py`."""
    sparse = [str(layer) for layer in range(args.num_hidden_layers) if args.is_sparse(layer)]
    return {
        # A router sees the tokens of its rank only.
        **{f"layers.{layer}.post_attention_layernorm": "residual" for layer in sparse},
        "embed_tokens": "embedding",
        "layers.*.input_layernorm": "norm",
        "layers.*.self_attn": "column",  # sinks
        "layers.*.self_attn.[qkv]_proj": "column",
        "layers.*.self_attn.[qk]_norm": "replicated",
        "layers.*.self_attn.*_a_proj*": "replicated",  # the latents, whole on each rank
        "layers.*.self_attn.*_a_layernorm": "replicated",
        "layers.*.self_attn.*_b_proj": "column",
        "layers.*.self_attn.o_proj": "row",
        "layers.*.post_attention_layernorm": "norm",
        "layers.*.mlp.gate": "router",
        "layers.*.mlp.experts": "experts",
        "layers.*.mlp.shared_experts": "gathered",
        "layers.*.mlp.shared_experts.gate_proj": "column",
        "layers.*.mlp.shared_experts.up_proj": "column",
        "layers.*.mlp.shared_experts.down_proj": "row",
        "layers.*.mlp.gate_proj": "column",
        "layers.*.mlp.up_proj": "column",
        "layers.*.mlp.down_proj": "row",
        "norm": "norm",
        "lm_head": "head",
    }


def init_parameter(name: str, tensor: Tensor, generator: torch.Generator, args: DecoderArgs) -> None:
    """Fill rows of the parameter `name`: norms with one, biases with zero, the rest normal, cut at three
    standard deviations.

    What is added to the residual stream is scaled down by the depth of its layer, std / sqrt(2 (layer + 1)).
    """
    if name.endswith("norm.weight"):
        tensor.fill_(1.0)
        return
    if name.endswith("bias"):
        tensor.zero_()
        return
    std = args.initializer_range
    if name.removesuffix(".weight").endswith(("o_proj", "down_proj")):
        std /= math.sqrt(2 * (int(name.split(".")[1]) + 1))
    nn.init.trunc_normal_(tensor, std=std, a=-3 * std, b=3 * std, generator=generator)

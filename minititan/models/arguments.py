"""The shape of a decoder as a table of numbers, and which modules its layers are made of.

Fields have the names of the Hugging Face checkpoints' `config.json`. A family whose attention or feed-forward
is of another kind overrides `attention` or `feed_forward`; the decoder asks for nothing else.
"""

import math
from dataclasses import dataclass
from typing import Literal

from torch import nn

from minititan.models.attention import Attention
from minititan.models.feed_forward import FeedForward
from minititan.models.moe import Experts, MoE, Router, SwiGLUExperts
from minititan.models.rotary import AnyScaling

SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
POSITIVE = ("rope_theta", "rms_norm_eps", "initializer_range")

NOT_NEGATIVE = (
    "first_k_dense_replace",
    "n_shared_experts",
    "router_aux_loss_coef",
    "router_z_loss_coef",
    "router_bias_update_speed",
)


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
    rope_scaling: AnyScaling | None = None
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False  # of the query, key and value projections
    qk_norm: bool = False  # RMSNorm of each query and key head, before rotation
    tie_word_embeddings: bool = False  # the head is the embedding
    initializer_range: float = 0.02  # standard deviation of the initial weights

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} ({value}) must be finite")
        for name in SIZES:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} ({value}) must be at least 1")
        for name in POSITIVE:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} ({getattr(self, name)}) must be above 0")
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

    @property
    def rotary_channels(self) -> int:
        """How many channels of a head the rotary positions turn."""
        return self.channels

    @property
    def attention_channels(self) -> int:
        """The widths of a key and of a value, added up over all query heads."""
        return 2 * self.num_attention_heads * self.channels

    def window(self, layer: int) -> int | None:
        """How many tokens, its own included, a token of a layer sees; None: all before it."""
        return None

    def attention(self, layer: int) -> nn.Module:
        """Return the attention of a layer."""
        return Attention(
            self.hidden_size,
            self.num_attention_heads,
            self.num_key_value_heads,
            self.channels,
            bias=self.attention_bias,
            norm_eps=self.rms_norm_eps if self.qk_norm else None,
        )

    def feed_forward(self, layer: int) -> nn.Module:
        """Return the feed-forward of a layer."""
        return FeedForward(self.hidden_size, self.intermediate_size)

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer's feed-forward is a mixture of experts."""
        return False


@dataclass(frozen=True)
class MoEArgs(DecoderArgs):
    """A decoder with mixtures of experts (arXiv:2401.06066, arXiv:2412.19437) in its layers."""

    num_experts: int = 0  # E; 0: every layer is dense
    num_experts_per_tok: int = 2  # K
    moe_intermediate_size: int = 256  # of one expert
    first_k_dense_replace: int = 0  # so many layers at the beginning are dense
    n_shared_experts: int = 0  # experts that every token goes through, as one of their joint width
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    norm_topk_prob: bool = True  # the weights of the chosen experts add up to one
    routed_scaling_factor: float = 1.0  # times the weights
    n_group: int = 1  # groups of experts, of which a token first chooses `topk_group`
    topk_group: int = 1
    router_bias: bool = False  # of the router's scores, trained
    router_aux_loss_coef: float = 0.0  # of the balancing loss, which is 1 for even loads
    router_aux_loss_scope: Literal["sequence", "batch"] = "sequence"
    router_z_loss_coef: float = 0.0  # of the mean square of the log-sum-exp of a token's logits
    score_correction: bool = False  # experts are chosen by score plus a bias that is no weight
    router_bias_update_speed: float = 0.0  # what a step changes of that bias

    def __post_init__(self) -> None:
        super().__post_init__()
        experts, groups, chosen = self.num_experts, self.n_group, self.topk_group
        if experts < 0:
            raise ValueError(f"num_experts ({experts}) must not be negative; 0 is a dense model")
        if not experts:
            return
        if not 1 <= self.num_experts_per_tok <= experts:
            found = f"num_experts_per_tok ({self.num_experts_per_tok})"
            raise ValueError(f"{found} must be between 1 and num_experts ({experts})")
        if groups < 1 or experts % groups:
            raise ValueError(f"n_group ({groups}) must divide num_experts ({experts})")
        if not 1 <= chosen <= groups:
            raise ValueError(f"topk_group ({chosen}) must be between 1 and n_group ({groups})")
        if self.num_experts_per_tok > chosen * (experts // groups):
            found = f"num_experts_per_tok ({self.num_experts_per_tok})"
            raise ValueError(
                f"{found} must be at most the {chosen * (experts // groups)} experts of topk_group groups"
            )
        if groups > 1 and self.score_correction and experts // groups < 2:
            raise ValueError(f"n_group ({groups}) must leave two of num_experts ({experts}) in a group")
        if self.moe_intermediate_size < 1:
            raise ValueError(f"moe_intermediate_size ({self.moe_intermediate_size}) must be at least 1")
        for name in NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} ({getattr(self, name)}) must not be negative")
        if self.router_bias_update_speed and not self.score_correction:
            raise ValueError("router_bias_update_speed needs score_correction = true")

    def is_sparse(self, layer: int) -> bool:
        return self.num_experts > 0 and layer >= self.first_k_dense_replace

    def feed_forward(self, layer: int) -> nn.Module:
        if not self.is_sparse(layer):
            return super().feed_forward(layer)
        return MoE(self.router(layer), self.experts(layer), self.shared_experts(layer))

    def router(self, layer: int) -> Router:
        """Return the router of a sparse layer."""
        return Router(
            self.hidden_size,
            self.num_experts,
            self.num_experts_per_tok,
            scoring=self.scoring_func,
            normalise=self.norm_topk_prob,
            scale=self.routed_scaling_factor,
            groups=self.n_group,
            chosen_groups=self.topk_group,
            bias=self.router_bias,
            correction=self.score_correction,
            correction_speed=self.router_bias_update_speed,
            balance_coef=self.router_aux_loss_coef,
            balance_scope=self.router_aux_loss_scope,
            z_coef=self.router_z_loss_coef,
        )

    def experts(self, layer: int) -> Experts:
        """Return the experts of a sparse layer."""
        return SwiGLUExperts(self.num_experts, self.hidden_size, self.moe_intermediate_size)

    def shared_experts(self, layer: int) -> nn.Module | None:
        """Return what every token of a sparse layer goes through beside its experts."""
        if not self.n_shared_experts:
            return None
        return FeedForward(self.hidden_size, self.n_shared_experts * self.moe_intermediate_size)

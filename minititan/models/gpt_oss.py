"""The gpt-oss family (model card of gpt-oss-120b and gpt-oss-20b): attention with sinks, full and within a
window by turns; experts with biases and a clamped SwiGLU. Numbers: config.json of both.
"""

from dataclasses import dataclass
from typing import Literal

from torch import nn

from minititan.models.arguments import MoEArgs
from minititan.models.attention import Attention
from minititan.models.hugging_face import REQUIRED, SOFTMAX_ROUTER, Field, HuggingFaceForm, decoder_fields
from minititan.models.moe import ClampedExperts, Experts
from minititan.models.rotary import ROPE_TYPES, YarnScaling


@dataclass(frozen=True)
class GptOssArgs(MoEArgs):
    """The shape of a gpt-oss decoder. Its config.json has `moe_intermediate_size` as `intermediate_size`."""

    rope_theta: float = 150_000.0
    attention_bias: bool = True  # of all four projections
    router_bias: bool = True
    sliding_window: int = 128  # tokens, its own included, that a token of a sliding layer sees
    # None: sliding and full by turns, the first sliding.
    layer_types: tuple[Literal["sliding_attention", "full_attention"], ...] | None = None
    swiglu_alpha: float = 1.702  # of the experts: gate * sigmoid(alpha * gate) * (up + 1)
    swiglu_limit: float = 7.0  # the gate is at most this, up within plus and minus this

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sliding_window < 1:
            raise ValueError(f"sliding_window ({self.sliding_window}) must be at least 1")
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            given = f"layer_types ({len(self.layer_types)} of them)"
            raise ValueError(
                f"{given} must have one for each of num_hidden_layers ({self.num_hidden_layers})"
            )

    def window(self, layer: int) -> int | None:
        sliding = layer % 2 == 0 if self.layer_types is None else self.layer_types[layer][0] == "s"
        return self.sliding_window if sliding else None

    def attention(self, layer: int) -> nn.Module:
        return Attention(
            self.hidden_size,
            self.num_attention_heads,
            self.num_key_value_heads,
            self.channels,
            bias=self.attention_bias,
            out_bias=self.attention_bias,
            norm_eps=self.rms_norm_eps if self.qk_norm else None,
            sinks=True,
        )

    def experts(self, layer: int) -> Experts:
        sizes = self.num_experts, self.hidden_size, self.moe_intermediate_size
        return ClampedExperts(*sizes, self.swiglu_alpha, self.swiglu_limit)


def _published(layers: int, experts: int) -> GptOssArgs:
    return GptOssArgs(
        hidden_size=2880,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=201_088,
        max_position_embeddings=131_072,
        rope_scaling=YarnScaling(factor=32.0, truncate=False),
        num_experts=experts,
        num_experts_per_tok=4,
        moe_intermediate_size=2880,
        router_aux_loss_coef=0.001,
    )


FLAVORS = {
    "debugmodel": GptOssArgs(
        128,
        4,
        8,
        4,
        sliding_window=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        router_aux_loss_coef=0.001,
    ),
    "20b": _published(24, 32),
    "120b": _published(36, 128),
}

# Without a rope_scaling `transformers` takes that of the published models.
_FIELDS = decoder_fields(
    max_position_embeddings=131_072, rope_theta=150_000.0, rope_scaling=REQUIRED, rms_norm_eps=1e-5
)

HUGGING_FACE = HuggingFaceForm(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    fields=(
        *(field for field in _FIELDS if field.argument != "intermediate_size"),
        Field("moe_intermediate_size", name="intermediate_size"),
        Field("num_experts", 128, "num_local_experts"),
        Field("num_experts_per_tok", 4),
        Field("router_aux_loss_coef", 0.001),
        Field("sliding_window", 128),
        Field("layer_types", None),
        Field("swiglu_alpha", 1.702),
        Field("swiglu_limit", 7.0),
    ),
    arguments={
        **SOFTMAX_ROUTER,
        "router_bias": True,
        "norm_topk_prob": True,
        "attention_bias": True,
        "qk_norm": False,
    },
    tensors={
        "lm_head.*": "lm_head.*",
        "layers.*.mlp.gate.*": "model.layers.*.mlp.router.*",
        "*": "model.*",
    },
    fixed={"hidden_act": "silu", "attention_bias": True, "attention_dropout": 0.0},
    rope_types=ROPE_TYPES,
)

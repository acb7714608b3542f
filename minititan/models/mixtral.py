"""The Mixtral family (arXiv:2401.04088): every layer has 8 experts, of which a token goes through 2.

Numbers: config.json of Mixtral 8x7B v0.1 and 8x22B v0.1.
"""

from minititan.models.arguments import MoEArgs
from minititan.models.hugging_face import SOFTMAX_ROUTER, Field, HuggingFaceForm, decoder_fields
from minititan.models.rotary import ROPE_TYPES


def _published(width: int, layers: int, heads: int, hidden: int, context: int, aux_loss: float) -> MoEArgs:
    return MoEArgs(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        vocab_size=32_000,
        max_position_embeddings=context,
        rope_theta=1_000_000.0,
        num_experts=8,
        moe_intermediate_size=hidden,
        router_aux_loss_coef=aux_loss,
    )


FLAVORS = {
    "debugmodel": MoEArgs(128, 4, 8, 4, num_experts=8, moe_intermediate_size=128, router_aux_loss_coef=0.02),
    "8x7B": _published(4096, 32, 32, 14_336, 32_768, 0.02),
    "8x22B": _published(6144, 56, 48, 16_384, 65_536, 0.001),
}

_FIELDS = decoder_fields(
    num_key_value_heads=8, max_position_embeddings=131_072, rope_theta=1_000_000.0, rms_norm_eps=1e-5
)
_EXPERT = "model.layers.*.block_sparse_moe.experts.#"

HUGGING_FACE = HuggingFaceForm(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    fields=(
        *(field for field in _FIELDS if field.argument != "intermediate_size"),
        Field("moe_intermediate_size", name="intermediate_size"),
        Field("num_experts", 8, "num_local_experts"),
        Field("num_experts_per_tok", 2),
        Field("router_aux_loss_coef", 0.001),
    ),
    arguments={"attention_bias": False, "qk_norm": False, "norm_topk_prob": True, **SOFTMAX_ROUTER},
    rope_types=ROPE_TYPES,
    tensors={
        "lm_head.*": "lm_head.*",
        "layers.*.mlp.experts.gate_proj": f"{_EXPERT}.w1.weight",
        "layers.*.mlp.experts.up_proj": f"{_EXPERT}.w3.weight",
        "layers.*.mlp.experts.down_proj": f"{_EXPERT}.w2.weight",
        "layers.*.mlp.gate.weight": "model.layers.*.block_sparse_moe.gate.weight",
        "*": "model.*",
    },
    fixed={"hidden_act": "silu", "attention_dropout": 0.0, "sliding_window": None},
)

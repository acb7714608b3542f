"""The Qwen3 family (arXiv:2505.09388): RMSNorm of queries and keys by head; dense, or with experts.

Numbers: config.json of the chat models of each size, whose context is 40,960.
"""

from dataclasses import replace
from typing import Any

from minititan.models.arguments import MoEArgs
from minititan.models.hugging_face import SOFTMAX_ROUTER, Field, HuggingFaceForm, decoder_fields
from minititan.models.rotary import ROPE_TYPES


def _published(
    width: int, layers: int, heads: int, kv_heads: int, hidden: int, *, tied: bool = False, **experts: Any
) -> MoEArgs:
    return MoEArgs(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        intermediate_size=hidden,
        vocab_size=151_936,
        max_position_embeddings=40_960,
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-6,
        qk_norm=True,
        tie_word_embeddings=tied,
        **experts,
    )


def _experts(hidden: int) -> dict[str, Any]:
    return {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": hidden,
        "router_aux_loss_coef": 0.001,
    }


_DEBUG = MoEArgs(128, 4, 8, 4, intermediate_size=384, rms_norm_eps=1e-6, qk_norm=True)

FLAVORS = {
    "debugmodel": _DEBUG,
    "debugmodel_moe": replace(
        _DEBUG, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128, router_aux_loss_coef=0.001
    ),
    "0.6B": _published(1024, 28, 16, 8, 3072, tied=True),
    "1.7B": _published(2048, 28, 16, 8, 6144, tied=True),
    "4B": _published(2560, 36, 32, 8, 9728, tied=True),
    "8B": _published(4096, 36, 32, 8, 12_288),
    "14B": _published(5120, 40, 40, 8, 17_408),
    "32B": _published(5120, 64, 64, 8, 25_600),
    "30B-A3B": _published(2048, 48, 32, 4, 6144, **_experts(768)),
    "235B-A22B": _published(4096, 94, 64, 4, 12_288, **_experts(1536)),
}
_ARGUMENTS = {"attention_bias": False, "qk_norm": True}
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
}

DENSE = HuggingFaceForm(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fields=decoder_fields(num_key_value_heads=32, head_dim=128, max_position_embeddings=32_768),
    arguments={**_ARGUMENTS, "num_experts": 0},
    rope_types=ROPE_TYPES,
    tensors={"lm_head.*": "lm_head.*", "*": "model.*"},
    fixed=_FIXED,
)

SPARSE = HuggingFaceForm(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    fields=(
        *decoder_fields(num_key_value_heads=4, max_position_embeddings=32_768),
        Field("num_experts", 128, other_name="num_local_experts"),
        Field("num_experts_per_tok", 8),
        Field("moe_intermediate_size", 768),
        Field("norm_topk_prob", False),
        Field("router_aux_loss_coef", 0.001),
    ),
    arguments={**_ARGUMENTS, **SOFTMAX_ROUTER},
    rope_types=ROPE_TYPES,
    tensors={
        "lm_head.*": "lm_head.*",
        "layers.*.mlp.experts.*": "model.layers.*.mlp.experts.#.*.weight",
        "*": "model.*",
    },
    fixed={**_FIXED, "mlp_only_layers": [], "decoder_sparse_step": 1},
)

HUGGING_FACE = (DENSE, SPARSE)

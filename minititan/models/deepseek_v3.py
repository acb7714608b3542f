"""The DeepSeek-V3 family (arXiv:2412.19437): latent attention, and mixtures with shared experts.

Numbers of 671B: config.json of DeepSeek-V3, without its layer that predicts a second token; of 16B
and 236B: of DeepSeek-V2-Lite and DeepSeek-V2 (arXiv:2405.04434), whose routers are the softmax alone; of
moonlight_16B: of Moonlight-16B-A3B (arXiv:2502.16982). Balancing is that of the papers.
"""

from dataclasses import dataclass, replace

from torch import nn

from minititan.models.arguments import MoEArgs
from minititan.models.hugging_face import Field, HuggingFaceForm, SameAs, decoder_fields
from minititan.models.latent_attention import LatentAttention
from minititan.models.rotary import ROPE_TYPES, YarnScaling

LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True)
class DeepseekV3Args(MoEArgs):
    """The shape of a decoder with latent attention. `num_key_value_heads` is `num_attention_heads`."""

    num_key_value_heads: int = 8
    rms_norm_eps: float = 1e-6
    q_lora_rank: int | None = None  # width of the compressed queries; None: they are not compressed
    kv_lora_rank: int = 512  # width of the compressed keys and values
    qk_nope_head_dim: int = 128  # channels of a query and key head without positions
    qk_rope_head_dim: int = 64  # channels of it with rotary positions; the heads share those of the key
    v_head_dim: int = 128  # channels of a value head

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (*LATENT_SIZES, "q_lora_rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} ({value}) must be at least 1")
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim ({self.qk_rope_head_dim}) must be even")
        for name in ("head_dim", "qk_norm"):
            if getattr(self, name):
                raise ValueError(f"{name} is no part of latent attention")
        if self.num_key_value_heads != self.num_attention_heads:
            raise ValueError(
                f"num_key_value_heads ({self.num_key_value_heads}) must be num_attention_heads "
                f"({self.num_attention_heads}): latent attention has no groups"
            )

    @property
    def channels(self) -> int:
        """The width of a query and key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def rotary_channels(self) -> int:
        return self.qk_rope_head_dim

    @property
    def attention_channels(self) -> int:
        return self.num_attention_heads * (self.channels + self.v_head_dim)

    def attention(self, layer: int) -> nn.Module:
        scaling, scale = self.rope_scaling, self.channels**-0.5
        return LatentAttention(
            self.hidden_size,
            self.num_attention_heads,
            q_rank=self.q_lora_rank,
            kv_rank=self.kv_lora_rank,
            plain_dim=self.qk_nope_head_dim,
            rotary_dim=self.qk_rope_head_dim,
            value_dim=self.v_head_dim,
            scale=scale * scaling.score_factor if isinstance(scaling, YarnScaling) else scale,
            bias=self.attention_bias,
        )


_DEBUG = DeepseekV3Args(
    hidden_size=128,
    num_hidden_layers=4,
    num_attention_heads=8,
    intermediate_size=384,
    kv_lora_rank=48,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=128,
    first_k_dense_replace=1,
    n_shared_experts=1,
    scoring_func="sigmoid",
    routed_scaling_factor=2.5,
    n_group=4,
    topk_group=2,
    router_aux_loss_coef=1e-4,
    score_correction=True,
    router_bias_update_speed=1e-3,
)

_SMALL = DeepseekV3Args(  # what the two models of 16B share
    hidden_size=2048,
    num_hidden_layers=27,
    num_attention_heads=16,
    num_key_value_heads=16,
    num_experts=64,
    num_experts_per_tok=6,
    moe_intermediate_size=1408,
    first_k_dense_replace=1,
    n_shared_experts=2,
)

_LARGE = DeepseekV3Args(  # what 236B and 671B share
    num_attention_heads=128,
    num_key_value_heads=128,
    max_position_embeddings=163_840,
    q_lora_rank=1536,
    n_group=8,
)

FLAVORS = {
    "debugmodel": _DEBUG,
    "16B": replace(
        _SMALL,
        intermediate_size=10_944,
        vocab_size=102_400,
        max_position_embeddings=163_840,
        rope_scaling=YarnScaling(mscale=0.707, mscale_all_dim=0.707),
        norm_topk_prob=False,
        router_aux_loss_coef=1e-3,
    ),
    "moonlight_16B": replace(
        _SMALL,
        intermediate_size=11_264,
        vocab_size=163_840,
        rope_theta=50_000.0,
        rms_norm_eps=1e-5,
        scoring_func="sigmoid",
        routed_scaling_factor=2.446,
        score_correction=True,
        router_bias_update_speed=1e-3,
    ),
    "236B": replace(
        _LARGE,
        hidden_size=5120,
        num_hidden_layers=60,
        intermediate_size=12_288,
        vocab_size=102_400,
        rope_scaling=YarnScaling(mscale=0.707, mscale_all_dim=0.707),
        num_experts=160,
        num_experts_per_tok=6,
        moe_intermediate_size=1536,
        first_k_dense_replace=1,
        n_shared_experts=2,
        norm_topk_prob=False,
        routed_scaling_factor=16.0,
        topk_group=3,
        router_aux_loss_coef=1e-3,
    ),
    "671B": replace(
        _LARGE,
        hidden_size=7168,
        num_hidden_layers=61,
        intermediate_size=18_432,
        vocab_size=129_280,
        rope_scaling=YarnScaling(mscale=1.0, mscale_all_dim=1.0),
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        first_k_dense_replace=3,
        n_shared_experts=1,
        scoring_func="sigmoid",
        routed_scaling_factor=2.5,
        topk_group=4,
        router_aux_loss_coef=1e-4,
        score_correction=True,
        router_bias_update_speed=1e-3,
    ),
}

_FIELDS = tuple(
    field
    for field in decoder_fields(num_key_value_heads=SameAs("num_attention_heads"))
    if field.argument not in ("head_dim", "max_position_embeddings")
)
_LATENT_FIELDS = (
    Field("q_lora_rank", 1536, null=True),
    Field("kv_lora_rank", 512),
    Field("qk_nope_head_dim", 128),
    Field("qk_rope_head_dim", 64),
    Field("v_head_dim", 128),
)
_TENSORS = {
    "lm_head.*": "lm_head.*",
    "layers.*.mlp.experts.*": "model.layers.*.mlp.experts.#.*.weight",
    "*": "model.*",
}
_ARGUMENTS = {"attention_bias": False, "qk_norm": False}
_FIXED = {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "moe_layer_freq": 1}

V3 = HuggingFaceForm(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    fields=(
        *_FIELDS,
        *_LATENT_FIELDS,
        Field("max_position_embeddings", 4096),
        Field("num_experts", 256, "n_routed_experts"),
        Field("num_experts_per_tok", 8),
        Field("moe_intermediate_size", 2048),
        Field("n_shared_experts", 1),
        Field("first_k_dense_replace", 3),
        Field("norm_topk_prob", True),
        Field("routed_scaling_factor", 2.5),
        Field("n_group", 8),
        Field("topk_group", 4),
    ),
    arguments={**_ARGUMENTS, "scoring_func": "sigmoid", "score_correction": True},
    tensors=_TENSORS,
    fixed={**_FIXED, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": True},
    rope_types=ROPE_TYPES,
    ignored=("model.layers.61.*",),  # of DeepSeek-V3: what predicts a second token
)

_V2_FIELDS = (
    *_FIELDS,
    *_LATENT_FIELDS,
    Field("max_position_embeddings", 2048),
    Field("num_experts", 64, "n_routed_experts"),
    Field("num_experts_per_tok"),
    Field("moe_intermediate_size", 1407),
    Field("n_shared_experts", 2),
    Field("first_k_dense_replace", 0),
    Field("routed_scaling_factor", 1.0),
)
_V2_ARGUMENTS = {
    "scoring_func": "softmax",
    "score_correction": False,
    "router_bias_update_speed": 0.0,
    "norm_topk_prob": False,
}
_V2_FIXED = {"mlp_bias": False, "scoring_func": "softmax", "norm_topk_prob": False}

V2 = HuggingFaceForm(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    fields=_V2_FIELDS,
    arguments={**_ARGUMENTS, **_V2_ARGUMENTS, "n_group": 1, "topk_group": 1},
    tensors=_TENSORS,
    fixed={**_FIXED, **_V2_FIXED, "topk_method": "greedy"},
    rope_types=ROPE_TYPES,
)
V2_GROUPS = replace(
    V2,
    fields=(*_V2_FIELDS, Field("n_group"), Field("topk_group")),
    arguments={**_ARGUMENTS, **_V2_ARGUMENTS},
    fixed={**_FIXED, **_V2_FIXED, "topk_method": "group_limited_greedy"},
)

HUGGING_FACE = (V3, V2, V2_GROUPS)

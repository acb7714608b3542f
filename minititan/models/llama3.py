"""The Llama 3 family (arXiv:2407.21783): the decoder as it is.

Numbers of 1B: config.json of Llama 3.2 1B; of 8B, 70B, 405B: config.json of Llama 3.1. The small flavors are
ours and take the tokenizer's vocabulary.
"""

from minititan.models.arguments import DecoderArgs
from minititan.models.hugging_face import Field, HuggingFaceForm, SameAs
from minititan.models.rotary import RopeScaling


def _published(
    width: int, layers: int, heads: int, hidden: int, rope_factor: float = 8.0, tied: bool = False
) -> DecoderArgs:
    return DecoderArgs(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        intermediate_size=hidden,
        vocab_size=128_256,
        max_position_embeddings=131_072,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(factor=rope_factor),
        tie_word_embeddings=tied,
    )


FLAVORS = {
    "debugmodel": DecoderArgs(128, 4, 8, 4, intermediate_size=384),
    "10M": DecoderArgs(256, 8, 8, 4, intermediate_size=832),
    "40M": DecoderArgs(512, 10, 8, 4, intermediate_size=1664),
    "1B": _published(2048, 16, 32, 8192, rope_factor=32.0, tied=True),
    "8B": _published(4096, 32, 32, 14_336),
    "70B": _published(8192, 80, 64, 28_672),
    "405B": _published(16_384, 126, 128, 53_248),
}

HUGGING_FACE = HuggingFaceForm(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields=(
        Field("hidden_size"),
        Field("num_hidden_layers"),
        Field("num_attention_heads"),
        Field("num_key_value_heads", SameAs("num_attention_heads")),
        Field("head_dim", None),
        Field("intermediate_size"),
        Field("vocab_size"),
        Field("max_position_embeddings", 2048),
        Field("rope_theta", 10_000.0),
        Field("rope_scaling", None),
        Field("rms_norm_eps", 1e-6),
        Field("tie_word_embeddings", False),
        Field("initializer_range", 0.02),
    ),
    tensors={"lm_head.*": "lm_head.*", "*": "model.*"},
    fixed={
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
    },
    rope_types={"llama3": RopeScaling},
    ignored=("model.layers.*.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"),
)

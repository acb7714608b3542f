"""The Llama family (arXiv:2307.09288, arXiv:2407.21783): the decoder as it is.

Numbers of 1B, 3B: config.json of Llama 3.2; of 8B, 70B, 405B: of Llama 3.1; of llama2_*: of Llama 2. The
small flavors are ours and take the tokenizer's vocabulary.
"""

from minititan.models.arguments import DecoderArgs
from minititan.models.hugging_face import HuggingFaceForm, SameAs, decoder_fields
from minititan.models.rotary import ROPE_TYPES, RopeScaling


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


def _llama2(width: int, layers: int, heads: int, kv_heads: int, hidden: int) -> DecoderArgs:
    return DecoderArgs(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=hidden,
        vocab_size=32_000,
        max_position_embeddings=4096,
    )


FLAVORS = {
    "debugmodel": DecoderArgs(128, 4, 8, 4, intermediate_size=384),
    "10M": DecoderArgs(256, 8, 8, 4, intermediate_size=832),
    "40M": DecoderArgs(512, 10, 8, 4, intermediate_size=1664),
    "125M": DecoderArgs(768, 12, 12, 4, intermediate_size=2048),
    "350M": DecoderArgs(1024, 24, 16, 8, intermediate_size=2816),
    "1B": _published(2048, 16, 32, 8192, rope_factor=32.0, tied=True),
    "3B": _published(3072, 28, 24, 8192, rope_factor=32.0, tied=True),
    "8B": _published(4096, 32, 32, 14_336),
    "70B": _published(8192, 80, 64, 28_672),
    "405B": _published(16_384, 126, 128, 53_248),
    "llama2_7B": _llama2(4096, 32, 32, 32, 11_008),
    "llama2_13B": _llama2(5120, 40, 40, 40, 13_824),
    "llama2_70B": _llama2(8192, 80, 64, 8, 28_672),
}

HUGGING_FACE = HuggingFaceForm(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields=decoder_fields(num_key_value_heads=SameAs("num_attention_heads"), max_position_embeddings=2048),
    arguments={"attention_bias": False, "qk_norm": False},
    rope_types=ROPE_TYPES,
    tensors={"lm_head.*": "lm_head.*", "*": "model.*"},
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0},
    ignored=("model.layers.*.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"),
)

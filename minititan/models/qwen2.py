"""The Qwen2 family (arXiv:2407.10671, arXiv:2412.15115): queries, keys and values with a bias.

Numbers of 0.5B to 7B and 72B: config.json of Qwen2; of 3B, 14B and 32B, which Qwen2 lacks: of Qwen2.5.
"""

from minititan.models.arguments import DecoderArgs
from minititan.models.hugging_face import HuggingFaceForm, decoder_fields
from minititan.models.rotary import ROPE_TYPES


def _published(
    width: int, layers: int, heads: int, kv_heads: int, hidden: int, *, tied: bool = False, eps: float = 1e-6
) -> DecoderArgs:
    return DecoderArgs(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=hidden,
        vocab_size=151_936 if tied else 152_064,
        max_position_embeddings=131_072,
        rope_theta=1_000_000.0,
        rms_norm_eps=eps,
        attention_bias=True,
        tie_word_embeddings=tied,
    )


FLAVORS = {
    "debugmodel": DecoderArgs(128, 4, 8, 4, intermediate_size=384, rms_norm_eps=1e-6, attention_bias=True),
    "0.5B": _published(896, 24, 14, 2, 4864, tied=True),
    "1.5B": _published(1536, 28, 12, 2, 8960, tied=True),
    "3B": _published(2048, 36, 16, 2, 11_008, tied=True),
    "7B": _published(3584, 28, 28, 4, 18_944),
    "14B": _published(5120, 48, 40, 8, 13_824, eps=1e-5),
    "32B": _published(5120, 64, 40, 8, 27_648, eps=1e-5),
    "72B": _published(8192, 80, 64, 8, 29_568),
}

HUGGING_FACE = HuggingFaceForm(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    fields=decoder_fields(num_key_value_heads=32, max_position_embeddings=32_768),
    arguments={"attention_bias": True, "qk_norm": False},
    rope_types=ROPE_TYPES,
    tensors={"lm_head.*": "lm_head.*", "*": "model.*"},
    fixed={"hidden_act": "silu", "attention_dropout": 0.0, "use_sliding_window": False},
)

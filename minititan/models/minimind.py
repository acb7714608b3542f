"""The MiniMind family: Qwen3's shapes at sizes for one machine, in files too, dense or with experts.

The shapes follow the project's published ones: 8 query and 4 key/value heads, hidden width
ceil(D pi / 64) 64, 6,400 tokens, a tied head; with experts: the best of 4, balanced by a loss.
"""

import math

from minititan.models import qwen3
from minititan.models.arguments import MoEArgs


def _flavor(width: int, layers: int, experts: int = 0, vocab_size: int | None = 6400) -> MoEArgs:
    hidden = math.ceil(width * math.pi / 64) * 64
    return MoEArgs(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=hidden,
        vocab_size=vocab_size,
        max_position_embeddings=32_768,
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-6,
        qk_norm=True,
        tie_word_embeddings=True,
        num_experts=experts,
        num_experts_per_tok=1,
        moe_intermediate_size=hidden,
        router_aux_loss_coef=5e-4,
    )


FLAVORS = {
    "debugmodel": _flavor(128, 4, vocab_size=None),
    "debugmodel_moe": _flavor(128, 4, experts=4, vocab_size=None),
    "30M": _flavor(512, 8),
    "64M": _flavor(768, 8),  # MiniMind-3
    "120M": _flavor(768, 16),
    "1B": _flavor(2048, 20),
    "198M-A64M": _flavor(768, 8, experts=4),  # MiniMind-3-MoE
    "1B-A320M": _flavor(1024, 24, experts=4),
}

HUGGING_FACE = (qwen3.DENSE, qwen3.SPARSE)

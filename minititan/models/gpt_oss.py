"""The gpt-oss family (model card of gpt-oss-120b and gpt-oss-20b): attention with sinks, full and within a
window by turns; experts with biases and a clamped SwiGLU.
"""

from dataclasses import dataclass
from typing import Literal

from torch import nn

from minititan.models.arguments import MoEArgs
from minititan.models.attention import Attention


@dataclass(frozen=True)
class GptOssArgs(MoEArgs):
    """The shape of a gpt-oss decoder. Its config.json has `moe_intermediate_size` as `intermediate_size`."""

    rope_theta: float = 150_000.0
    attention_bias: bool = True  # of all four projections
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

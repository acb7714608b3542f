"""Rotary position embeddings in the rotate-half form of the Hugging Face checkpoints.

Tables are computed from positions in each forward, never stored: nothing to save, nothing to get wrong on
resume. Sources: RoFormer (arXiv:2104.09864); the frequency scaling of Llama 3.1 (model card and
`config.json`, `rope_scaling.rope_type = "llama3"`); YaRN (arXiv:2309.00071).
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Discriminator, Tag
from torch import Tensor


def _check_positive(scaling: "RopeScaling | YarnScaling", *names: str) -> None:
    for name in names:
        value = getattr(scaling, name)
        if not 0 < value < math.inf:
            raise ValueError(f"{name} ({value}) must be above 0 and finite")


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of the low frequencies to a longer context."""

    required: ClassVar = (  # in a config.json
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    )
    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    rope_type: Literal["llama3"] = "llama3"

    def __post_init__(self) -> None:
        _check_positive(self, *self.required)
        if self.high_freq_factor <= self.low_freq_factor:
            low = f"low_freq_factor ({self.low_freq_factor})"
            raise ValueError(f"high_freq_factor ({self.high_freq_factor}) must be above {low}")

    @property
    def table_factor(self) -> float:
        """What cosines and sines are multiplied with."""
        return 1.0

    def kept(self, frequencies: Tensor, theta: float) -> Tensor:
        """Return how much of each frequency is kept, from 0 (stretched by the factor) to 1 (as it is)."""
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        # 0 where a pair turns fewer than low_freq_factor times over the original context, 1 above
        # high_freq_factor.
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return keep.clamp(0.0, 1.0)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN: a ramp over the pairs of channels between those that turn `beta_slow` and `beta_fast` times."""

    required: ClassVar = ("factor", "original_max_position_embeddings")
    factor: float = 40.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_position_embeddings: int = 4096
    attention_factor: float | None = None  # on cosines and sines; None: what the factor and mscales say
    mscale: float | None = None
    mscale_all_dim: float | None = None  # DeepSeek's, on the scores; None: they are as without scaling
    truncate: bool = True  # the ramp begins and ends at whole pairs
    rope_type: Literal["yarn"] = "yarn"

    def __post_init__(self) -> None:
        _check_positive(self, *self.required, "beta_fast", "beta_slow")

    @property
    def table_factor(self) -> float:
        """What cosines and sines are multiplied with."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._growth(self.mscale) / self._growth(self.mscale_all_dim)
        return self._growth(1.0)

    @property
    def score_factor(self) -> float:
        """What latent attention multiplies its scores with."""
        return self._growth(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _growth(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def kept(self, frequencies: Tensor, theta: float) -> Tensor:
        """Return how much of each frequency is kept, from 0 (stretched by the factor) to 1 (as it is)."""
        pairs = len(frequencies)
        begin, end = (self._pair(turns, pairs, theta) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            begin, end = math.floor(begin), math.ceil(end)
        begin, end = max(begin, 0), min(end, 2 * pairs - 1)
        ramp = torch.arange(pairs, dtype=torch.float32, device=frequencies.device) - begin
        return 1 - (ramp / max(end - begin, 0.001)).clamp(0.0, 1.0)

    def _pair(self, turns: float, pairs: int, theta: float) -> float:
        """Return the pair, as a real number, that turns so often over the original context."""
        context = self.original_max_position_embeddings
        return pairs * math.log(context / (turns * 2 * math.pi)) / math.log(theta)


ROPE_TYPES = {"llama3": RopeScaling, "yarn": YarnScaling}


def _rope_type(scaling: Any) -> str:
    return scaling.get("rope_type", "llama3") if isinstance(scaling, dict) else "llama3"


# A table of numbers of the type that its `rope_type` names; Llama 3.1's where it names none.
AnyScaling = Annotated[
    Annotated[RopeScaling, Tag("llama3")] | Annotated[YarnScaling, Tag("yarn")],
    Discriminator(
        _rope_type,
        custom_error_type="rope_type",
        custom_error_message=f"rope_type must be one of {', '.join(ROPE_TYPES)}",
    ),
]


def inverse_frequencies(
    head_dim: int, theta: float, scaling: AnyScaling | None, device: torch.device | None = None
) -> Tensor:
    """Return the angular frequency of each pair of channels, float32, [C/2]."""
    frequencies = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / -head_dim)
    if scaling is None:
        return frequencies
    keep = scaling.kept(frequencies, theta)
    return frequencies / scaling.factor * (1 - keep) + frequencies * keep


def rotary_tables(
    positions: Tensor, frequencies: Tensor, dtype: torch.dtype, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, times a factor, for positions [T] or [B, T], each [..., 1, T, C], ready for
    [B, H, T, C].
    """
    angles = positions[..., None].float() * frequencies  # [..., T, C/2]
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(-3)  # [..., 1, T, C]
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)

"""Rotary position embeddings in the rotate-half form of the Hugging Face checkpoints.

Tables are computed from positions in each forward, never stored: nothing to save, nothing to get wrong on
resume. Sources: RoFormer (arXiv:2104.09864); the frequency scaling of Llama 3.1 (model card and
`config.json`, `rope_scaling.rope_type = "llama3"`).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of the low frequencies to a longer context."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


def inverse_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device | None = None
) -> Tensor:
    """Return the angular frequency of each pair of channels, float32, [C/2]."""
    frequencies = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / -head_dim)
    if scaling is None:
        return frequencies
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    # 0 where a pair turns fewer than low_freq_factor times over the original context, 1 above
    # high_freq_factor.
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return frequencies / scaling.factor * (1 - keep) + frequencies * keep


def rotary_tables(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines for positions [T] or [B, T], each [..., 1, T, C], ready for [B, H, T, C]."""
    angles = positions[..., None].float() * frequencies  # [..., T, C/2]
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(-3)  # [..., 1, T, C]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [B, H, T, C] turned by the tables of `rotary_tables`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin

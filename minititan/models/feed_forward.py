"""The gated feed-forward layer SwiGLU (arXiv:2002.05202)."""

from torch import Tensor, nn

from minititan.models.pointwise import swiglu


class FeedForward(nn.Module):
    """SwiGLU: [B, T, D] -> [B, T, D] through a hidden width F."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Return the output, and that no router did anything."""
        # [B, T, D] -> [B, T, F] -> [B, T, D]
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x))), None

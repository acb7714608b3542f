"""Dynamic loss scaling for float16: gradients are computed larger than they are, so that small ones survive.

The rule is that of `torch.amp.GradScaler`: half the scale where a gradient overflows, twice after many steps
without. `guard.py` decides, for all ranks, what an overflow is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class LossScale:
    """The present scale; what must survive a restart is in `state`."""

    value: float
    growth_interval: int  # steps without an overflow before the scale is doubled
    good_steps: int = 0

    @property
    def can_shrink(self) -> bool:
        """Whether an overflow may be the scale's fault; at a scale of 1 it is the numbers' own."""
        return self.value > 1

    def shrink(self) -> None:
        """Take note of an overflow."""
        self.value, self.good_steps = max(self.value / 2, 1.0), 0

    def note_good_step(self) -> None:
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.value, self.good_steps = self.value * 2, 0

    def state(self) -> dict[str, Any]:
        """Return what a restart needs, as JSON."""
        return {"value": self.value, "good_steps": self.good_steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        self.value, self.good_steps = state["value"], state["good_steps"]

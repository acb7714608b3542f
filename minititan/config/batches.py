"""How many sequences each step takes."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSizes:
    """Global batch sizes by step: `sizes` holds (first step, size) pairs, ascending, from step 1 on."""

    sizes: tuple[tuple[int, int], ...]

    def at(self, step: int) -> int:
        """The size of a step; the first step is 1."""
        return self.sizes[self._run(step)][1]

    def run(self, step: int) -> tuple[int, int | None]:
        """The size of a step, and how many steps from it on have that size (None: all)."""
        run = self._run(step)
        last = run + 1 == len(self.sizes)
        return self.sizes[run][1], None if last else self.sizes[run + 1][0] - step

    def samples(self, first: int, last: int) -> int:
        """How many samples the steps `first` to `last` take together."""
        total = 0
        while first <= last:
            size, steps = self.run(first)
            steps = min(steps or last, last - first + 1)
            total, first = total + size * steps, first + steps
        return total

    def steps(self, first: int, samples: int) -> int:
        """How many whole steps from `first` on `samples` are enough for."""
        total = 0
        while samples > 0:
            size, steps = self.run(first)
            whole = samples // size if steps is None else min(steps, samples // size)
            total, samples = total + whole, samples - whole * size
            if whole != steps:
                break
            first += whole
        return total

    def _run(self, step: int) -> int:
        return bisect_right(self.sizes, step, key=lambda pair: pair[0]) - 1

"""Which checkpoints stay."""

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Keep:
    """What to keep: a checkpoint stays when any of the rules wants it."""

    latest_k: int = 0  # the newest; 0: all
    every_n_steps: int = 0  # the multiples of it, for ever; 0: none
    best_k: int = 0  # those of the lowest validation loss; 0: none


def steps_to_remove(keep: Keep, losses: Mapping[int, float | None], just_saved: int) -> list[int]:
    """Return the steps that go, ascending, of those in `losses`, never the one just saved.

    `losses` has the validation loss of each step that is there; None: not validated. Of equal ones the later
    is better.
    """
    if keep.latest_k == 0:
        return []
    others = sorted(step for step in losses if step != just_saved)
    stay = {just_saved, *others[max(len(others) - (keep.latest_k - 1), 0) :]}
    if keep.every_n_steps > 0:
        stay |= {step for step in losses if step % keep.every_n_steps == 0}
    known = {step: loss for step, loss in losses.items() if loss is not None and not math.isnan(loss)}
    stay |= set(sorted(known, key=lambda step: (known[step], -step))[: keep.best_k])
    return [step for step in others if step not in stay]

"""What one rank asks all ranks to do after a step: to stop, to save, to look at a save that has failed.

A signal may reach one rank only, and only rank 0's clock counts, but all must act after the same step. So the
requests travel with the flags that each step's guard reduces over all ranks anyway.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from minititan.signals import STOP_SIGNALS, StopSignals


def on_any_rank(flags: list[Tensor]) -> list[bool]:
    """Return for each flag whether it is set on any rank of the whole run."""
    found = torch.stack(flags).to(torch.int32)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [flag > 0 for flag in found.tolist()]


class StepRequests:
    """The requests of this rank, and what all ranks agreed on at the last step."""

    def __init__(
        self, stop: StopSignals, wants_save: Callable[[], bool], save_has_failed: Callable[[], bool]
    ) -> None:
        self._stop, self._wants_save, self._save_has_failed = stop, wants_save, save_has_failed
        self.stop: str | None = None  # the signal that the run stops of
        self.save = False
        self.save_has_failed = False

    def on_any_rank(self, flags: list[Tensor]) -> list[bool]:
        """Do what the function of this name does, and agree on the requests; every rank must call it."""
        own = [self._stop.first == number.name for number in STOP_SIGNALS]
        own += [self._wants_save(), self._save_has_failed()]
        asked = torch.tensor(own, device=flags[0].device)
        found = on_any_rank([*flags, *asked])
        *stops, self.save, self.save_has_failed = found[len(flags) :]
        if any(stops):
            self.stop = STOP_SIGNALS[stops.index(True)].name
            self._stop.taken_up()
        return found[: len(flags)]

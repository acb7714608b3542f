"""What one rank asks all ranks to do after a step: to stop, to save, to look at a save that has failed.

A signal may reach one rank only, and only rank 0's clock counts, but all must act after the same step. So the
requests travel with the flags that each step's guard reduces over all ranks anyway.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from minititan.signals import STOP_SIGNALS, StopSignals


def on_any_rank(flags: Tensor, requests: Sequence[bool] = ()) -> Tensor:
    """Return for each of the flags [n] and requests whether it is set on any rank of the run, as 0 or 1.

    Every rank must call it. On a GPU the host does not wait for it.
    """
    # Copied from pageable memory, it would wait.
    own = torch.tensor(requests, dtype=torch.bool, pin_memory=flags.is_cuda)
    found = torch.cat([flags, own.to(flags.device, non_blocking=True)]).to(torch.int32)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found


class StepRequests:
    """The requests of this rank, and what all ranks have agreed on since the last step began."""

    def __init__(
        self, stop: StopSignals, wants_save: Callable[[], bool], save_has_failed: Callable[[], bool]
    ) -> None:
        self._stop, self._wants_save, self._save_has_failed = stop, wants_save, save_has_failed
        self.stop: str | None = None  # the signal that the run stops of
        self.save = False
        self.save_has_failed = False

    @property
    def are_open(self) -> bool:
        """Whether there is something to be done."""
        return self.save or self.save_has_failed or self.stop is not None

    def begin_step(self) -> None:
        """Forget what was to be done after the last step."""
        self.save = self.save_has_failed = False

    def own(self) -> list[bool]:
        """Return what this rank asks for now, to be reduced over all ranks."""
        asked = [self._stop.first == number.name for number in STOP_SIGNALS]
        return [*asked, self._wants_save(), self._save_has_failed()]

    def agree(self, found: Sequence[bool]) -> None:
        """Take what ranks have asked for, as `own` lists it."""
        *stops, save, save_has_failed = found
        self.save, self.save_has_failed = self.save or save, self.save_has_failed or save_has_failed
        if any(stops) and self.stop is None:
            self.stop = STOP_SIGNALS[stops.index(True)].name
            self._stop.taken_up()

    def agree_now(self, device: torch.device) -> None:
        """Ask all ranks between steps; every rank must call it."""
        found = on_any_rank(torch.zeros(0, dtype=torch.bool, device=device), self.own())
        self.agree([flag > 0 for flag in found.tolist()])

"""One answer on all ranks: what fails on some of them is the same error on all.

Without it a rank that fails alone (its disk is full, say) leaves the others waiting in their next collective.
A `group` holds all ranks, like the default one: a save in the background has its own.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from minititan.config import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """What went wrong on one rank, in a form that can be sent: lines for a user, or a bug's traceback."""

    rank: int
    lines: tuple[str, ...]
    system: bool  # the operating system refused: the caller adds what was being done
    bug: bool

    @classmethod
    def of(cls, rank: int, error: BaseException) -> "Failure":
        if isinstance(error, ConfigError):
            return cls(rank, tuple(error.faults), system=False, bug=False)
        if isinstance(error, OSError):
            return cls(rank, (error.strerror or str(error),), system=True, bug=False)
        return cls(rank, ("".join(traceback.format_exception(error)),), system=False, bug=True)


class RanksFailedError(Exception):
    """Raised on all ranks alike."""

    def __init__(self, failures: list[Failure]):
        super().__init__("\n".join(line for failure in failures for line in failure.lines))
        self.failures = failures

    @classmethod
    def from_dcp(cls, error: CheckpointException) -> "RanksFailedError":
        return cls([Failure.of(rank, cause) for rank, (cause, _) in sorted(error.failures.items())])

    def explained(self, where: str, way_out: str) -> Exception:
        """The error to show: faults as they are, a refusal of the system as `where (cause); way_out`."""
        bugs = [failure for failure in self.failures if failure.bug]
        if bugs:
            return RuntimeError(f"{where} (rank {bugs[0].rank}):\n{bugs[0].lines[0]}")
        lines = dict.fromkeys(
            line for failure in self.failures if not failure.system for line in failure.lines
        )
        causes: dict[str, list[str]] = {}
        for failure in self.failures:
            if failure.system:
                causes.setdefault(failure.lines[0], []).append(str(failure.rank))
        for cause, ranks in causes.items():
            lines[f"{where} (rank {', '.join(ranks)}: {cause}); {way_out}"] = None
        return ConfigError(*lines)


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """The number of processes; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The values of all ranks, in rank order, on all ranks."""
    if not dist.is_initialized():
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


@contextmanager
def agreed(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """A block that all ranks run: when it raises on any of them, it raises RanksFailedError on all."""
    failure = None
    try:
        yield
    except Exception as error:
        failure = Failure.of(rank(), error)
    failures = [each for each in gather(failure, group) if each is not None]
    if failures:
        raise RanksFailedError(failures)


def first_rank(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Runs `work` on rank 0 alone and gives its result, or its error, to all ranks, which all must call."""
    results: list[Any] = [None]
    with agreed(group):
        if rank() == 0:
            results = [work()]
    if dist.is_initialized():
        dist.broadcast_object_list(results, src=0, group=group)
    return results[0]

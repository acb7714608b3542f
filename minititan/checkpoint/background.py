"""Saves beside training: the tensors are copied, and a thread saves the copies while training goes on.

The thread has a process group of its own, so its communication does not meet that of the training steps.
"""

import copy
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from minititan.checkpoint.checkpointer import Checkpointer
from minititan.distributed import local_part

# Of one rank for another that writes more slowly; a disk that hangs must not look like a failure.
GROUP_TIMEOUT = timedelta(hours=1)


class BackgroundSaves:
    """Saves of one checkpointer, one at a time; every rank must call `start` and `wait`.

    The memory of the copies is kept for the next save: to get new memory from the system takes longer than to
    copy. With `pinned` it is pinned where there is a GPU, which copies to it several times as fast.
    """

    def __init__(self, checkpointer: Checkpointer, *, pinned: bool) -> None:
        self._checkpointer = checkpointer
        self._pinned = pinned and torch.cuda.is_available()
        self._copies: dict[str, Tensor] = {}
        self._group: dist.ProcessGroup | None = None
        if dist.is_initialized():
            self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT))
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(
        self, step: int, tensors: Mapping[str, Tensor], on_saved: Callable[[float], None], **of: Any
    ) -> None:
        """Copy the tensors and save them as `Checkpointer.save` does; the save before must have been waited
        for. `on_saved` is called in the thread with the seconds that the save took.
        """
        assert self._thread is None
        staged, of = self._staged(tensors), copy.deepcopy(of)

        def save() -> None:
            begin = time.perf_counter()
            try:
                self._checkpointer.save(step, staged, **of, group=self._group)
                on_saved(time.perf_counter() - begin)
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=save, name=f"save-step-{step}")
        self._thread.start()

    def _staged(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies in the memory of the CPU, complete when this returns."""
        for key, tensor in tensors.items():
            if key not in self._copies:
                self._copies[key] = _cpu_like(tensor, self._pinned)
            local_part(self._copies[key]).copy_(local_part(tensor), non_blocking=self._pinned)
        if self._pinned:
            torch.cuda.synchronize()
        return {key: self._copies[key] for key in tensors}

    @property
    def in_flight(self) -> bool:
        """Whether this rank's thread is at work."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Whether this rank's save has failed: `wait` will raise, on all ranks."""
        return self._error is not None

    def wait(self) -> bool:
        """Wait for the save in flight; raises what it failed of. Return whether there was one."""
        if self._thread is None:
            return False
        self._thread.join()
        error, self._thread, self._error = self._error, None, None
        if error is not None:
            raise error
        return True


def _cpu_like(tensor: Tensor, pinned: bool) -> Tensor:
    """An empty tensor on the CPU; of a DTensor with the same shards, which is all that a save asks for."""
    return torch.empty_like(tensor, device="cpu", pin_memory=pinned, requires_grad=False)

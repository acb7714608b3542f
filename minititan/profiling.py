"""Traces of torch.profiler and snapshots of GPU memory, one file a rank, every `freq` steps.

Files are named as TorchTitan names them: `iteration_N/rankR_trace.json` (open in Perfetto) and
`iteration_N/rankR_memory_snapshot.pickle` (open in PyTorch's memory viewer), N the last step inside.
"""

import pickle
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from minititan.config import ConfigError
from minititan.sinks import explained

SNAPSHOT_ENTRIES = 100_000


class Profiler:
    """A context around the training loop, which calls `step()` after each step; every rank has its own.

    `traces` and `snapshots` are the folders to write to, None: none of that kind. A trace holds the last
    `active` of every `freq` steps, after `warmup` discarded ones; one cut short by the end is not written.
    `say` gets a line for each file.
    """

    def __init__(
        self,
        *,
        rank: int,
        device: torch.device,
        start_step: int,
        freq: int,
        warmup: int,
        active: int,
        traces: Path | None,
        snapshots: Path | None,
        say: Callable[[str], None],
    ) -> None:
        if traces is not None and warmup + active > freq:
            raise ConfigError(
                f"profiling.profile_freq = {freq}: must be at least profiler_warmup + profiler_active "
                f"({warmup + active}); raise it"
            )
        self.rank, self.device = rank, device
        self.freq, self.warmup, self.active = freq, warmup, active
        self._traces, self._snapshots, self._say = traces, snapshots, say
        self._step = start_step
        self._profile: profile | None = None

    def __enter__(self) -> "Profiler":
        if self._snapshots is not None:
            torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES)
        self._start_trace_if_due()
        return self

    def step(self) -> None:
        """Ends a step; may write files."""
        self._step += 1
        if self._profile is not None:
            self._profile.step()
            if self._step % self.freq == 0:
                # Given up before it is written: torch crashes when a profile that has ended is stopped again.
                recorded, self._profile = self._profile, None
                self._write_trace(recorded)
        if self._snapshots is not None and self._step % self.freq == 0:
            self._write_snapshot(f"iteration_{self._step}")
        self._start_trace_if_due()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._profile is not None:
            self._profile.stop()
        if self._snapshots is not None:
            if isinstance(error, torch.OutOfMemoryError):
                self._write_snapshot(f"iteration_{self._step + 1}_exit")
            torch.cuda.memory._record_memory_history(enabled=None)

    def _start_trace_if_due(self) -> None:
        """A profile of its own for each cycle: torch's repeating schedule would write a last, torn one."""
        if self._traces is None or self._step % self.freq != self.freq - self.warmup - self.active:
            return
        self._profile = profile(
            activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.device.type == "cuda"),
            schedule=schedule(wait=0, warmup=self.warmup, active=self.active, repeat=1),
            record_shapes=True,
        )
        self._profile.start()

    def _write_trace(self, recorded: profile) -> None:
        assert self._traces is not None
        begin = time.perf_counter()
        path = self._traces / f"iteration_{self._step}" / f"rank{self.rank}_trace.json"
        with explained(self._traces, "a trace"):
            path.parent.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(path))
        self._say(f"Trace of the steps to {self._step} in {path} ({time.perf_counter() - begin:.1f} s)")

    def _write_snapshot(self, name: str) -> None:
        assert self._snapshots is not None
        path = self._snapshots / name / f"rank{self.rank}_memory_snapshot.pickle"
        with explained(self._snapshots, "a memory snapshot"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(pickle.dumps(torch.cuda.memory._snapshot()))
        self._say(f"Memory snapshot at step {self._step} in {path}")

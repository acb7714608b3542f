"""A run as it looks from outside, the same for every program: when each step's line arrives, and the largest
resident sets of its processes, which the kernel keeps (`VmHWM`). Nothing of ours runs inside.

After each step the program is stopped (SIGSTOP) until its next turn. So programs can take turns step by
step, and a machine whose speed drifts, as shared ones do by half and more within minutes, drifts for all
alike.
"""

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

STEP = re.compile(r"step:?\s+(\d+)\b.*?\bloss(?: train)?:\s+([\d.]+|nan)")
PARAMETERS = re.compile(r"([\d,]+) total parameters|Total parameters: ([\d,]+)")
LINES = 25  # of a failed run's last words


class RunFailed(Exception):
    """What a program that did not do its steps said last."""


class Program:
    """A program that trains, started at once; it stands still but inside `step`."""

    def __init__(self, words: list[str], environment: dict[str, str], *, launched: bool) -> None:
        """`launched`: the words start a launcher, which goes on while its ranks are stopped."""
        self.words, self.launched = words, launched
        self.seconds: list[float] = []  # of each step; the first from the start of the process
        self.losses: list[float] = []
        self.peaks: dict[int, int] = {}  # bytes, by process; not of the launcher
        self.parameters: int | None = None
        self._tail = deque[str](maxlen=LINES)
        self._begin = time.perf_counter()
        self._process = subprocess.Popen(
            words,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._processes: list[int] = []

    def step(self, timeout_seconds: float) -> None:
        """Let it go on to the end of its next step; raises RunFailed where there is none."""
        begin = time.perf_counter() if self.seconds else self._begin
        self._signal(signal.SIGCONT)
        with self._ended_after(timeout_seconds):
            for line in self._process.stdout or ():
                at = time.perf_counter()
                self._tail.append(line.rstrip())
                if found := PARAMETERS.search(line):
                    self.parameters = int((found[1] or found[2]).replace(",", ""))
                # Of ranks that all write, the first line of a step counts.
                if (found := STEP.search(line)) and int(found[1]) == len(self.seconds) + 1:
                    self._signal(signal.SIGSTOP)
                    self.seconds.append(at - begin)
                    self.losses.append(float(found[2]))
                    self._look()
                    return
        raise self._failure(f"gave no step {len(self.seconds) + 1} within {timeout_seconds:.0f} s")

    def end(self) -> None:
        """End what is left of it."""
        for process in _with_descendants(self._process.pid) if self._process.poll() is None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _look(self) -> None:
        """Stop processes that are new, and read the peaks of all."""
        self._processes = _with_descendants(self._process.pid)[1 if self.launched else 0 :]
        self._signal(signal.SIGSTOP)
        for process in self._processes:
            self.peaks[process] = max(_peak_bytes(process), self.peaks.get(process, 0))

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    @contextlib.contextmanager
    def _ended_after(self, seconds: float) -> Iterator[None]:
        timer = threading.Timer(seconds, self.end)
        timer.start()
        yield
        timer.cancel()

    def _failure(self, what: str) -> RunFailed:
        self.end()
        said = "\n".join(self._tail)
        return RunFailed(
            f"`{' '.join(self.words)}` {what}; it ended with {self._process.returncode}:\n{said}"
        )


def _with_descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has ended
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for process in found:
        found.extend(children.get(process, []))
    return found


def _peak_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    line = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return 1024 * int(line[1]) if line else 0

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
        self._processes: dict[int, int] = {}  # when each was started, by its id

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
        if self._process.poll() is None:
            self._processes |= _with_descendants(self._process.pid)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _look(self) -> None:
        """Stop processes that are new, and read the peaks of all."""
        self._processes = _with_descendants(self._process.pid)
        if self.launched:
            del self._processes[self._process.pid]
        self._signal(signal.SIGSTOP)
        for process in self._processes:
            self.peaks[process] = max(_peak_bytes(process), self.peaks.get(process, 0))

    def _signal(self, number: signal.Signals) -> None:
        for process, started in self._processes.items():
            # An id may be another process's by now.
            if (found := _parent_and_start(process)) and found[1] == started:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)

    @contextlib.contextmanager
    def _ended_after(self, seconds: float) -> Iterator[None]:
        timer = threading.Timer(seconds, self.end)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _failure(self, what: str) -> RunFailed:
        self.end()
        said = "\n".join(self._tail)
        return RunFailed(
            f"`{' '.join(self.words)}` {what}; it ended with {self._process.returncode}:\n{said}"
        )


def _with_descendants(pid: int) -> dict[int, int]:
    """Return when each of these processes was started, by its id."""
    every = {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    known = {process: found for process in every if (found := _parent_and_start(process))}
    children: dict[int, list[int]] = {}
    for process, (parent, _) in known.items():
        children.setdefault(parent, []).append(process)
    family = [pid]
    for process in family:
        family.extend(children.get(process, []))
    return {process: known[process][1] for process in family if process in known}


def _parent_and_start(pid: int) -> tuple[int, int] | None:
    """Return a process's parent and when it was started; None: it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[1]), int(fields[19])


def _peak_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    line = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return 1024 * int(line[1]) if line else 0

"""A run as it looks from outside, the same for every program: when each step's line arrives, and the largest
resident sets of its processes, which the kernel keeps (`VmHWM`). Nothing of ours runs inside.
"""

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

STEP = re.compile(r"step:?\s+(\d+)\b.*?\bloss(?: train)?:\s+([\d.]+|nan)")
PARAMETERS = re.compile(r"([\d,]+) total parameters|Total parameters: ([\d,]+)")
LINES = 25  # of a failed run's last words


class RunFailed(Exception):
    """What a run that did not do its steps said last."""


@dataclass
class Watched:
    """Seconds from the process's start to the end of each step, losses, and peaks in bytes by process."""

    ends: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peaks: dict[int, int] = field(default_factory=dict)
    parameters: int | None = None


def watch(words: list[str], environment: dict[str, str], steps: int, timeout_seconds: float) -> Watched:
    """Run the command to its end; raises RunFailed where it did not do all steps."""
    seen, tail = Watched(), deque[str](maxlen=LINES)
    begin = time.perf_counter()
    process = subprocess.Popen(
        words,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    overdue = threading.Timer(timeout_seconds, _end, [process.pid])
    overdue.start()
    assert process.stdout is not None
    try:
        for line in process.stdout:
            at = time.perf_counter() - begin
            tail.append(line.rstrip())
            _take(line, at, seen, process.pid)
        process.wait()
    finally:
        late = not overdue.is_alive()
        overdue.cancel()
        _end(process.pid)  # what it left
    if len(seen.ends) != steps or process.returncode:
        why = f"took more than {timeout_seconds:.0f} s" if late else f"ended with {process.returncode}"
        said = "\n".join(tail)
        raise RunFailed(f"`{' '.join(words)}` {why} after {len(seen.ends)} of {steps} steps:\n{said}")
    return seen


def _take(line: str, at: float, seen: Watched, pid: int) -> None:
    if found := PARAMETERS.search(line):
        seen.parameters = int((found[1] or found[2]).replace(",", ""))
    # Of ranks that all write, the first line of each step counts.
    if (found := STEP.search(line)) and int(found[1]) == len(seen.ends) + 1:
        seen.ends.append(at)
        seen.losses.append(float(found[2]))
        for process in _with_descendants(pid):
            seen.peaks[process] = max(_peak_bytes(process), seen.peaks.get(process, 0))


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


def _end(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)

"""Injection points: places in the code where a test can make a run fail; they do nothing else.

The environment variable MINITITAN_FAULTS asks for faults, separated by spaces:

    POINT=ACTION            at every pass of the point, on every rank
    POINT#3@1=ACTION        at its third pass, on rank 1

ACTION is `kill` (SIGKILL to the own process), the name of an error number (`ENOSPC`, `EIO`, ...), raised as
OSError, or a number of seconds to sleep.
"""

import errno
import os
import re
import signal
import time
from collections import Counter

VARIABLE = "MINITITAN_FAULTS"
_FAULT = re.compile(r"(?P<point>[\w.]+)(#(?P<number>\d+))?(@(?P<rank>\d+))?=(?P<action>[\w.]+)")
_passes: Counter[str] = Counter()


def point(name: str) -> None:
    """A place called `name`, at which a fault happens when the environment asks for it."""
    if not (asked := os.environ.get(VARIABLE)):
        return
    _passes[name] += 1
    for text in asked.split():
        fault = _FAULT.fullmatch(text)
        if fault is None:
            raise ValueError(f"{VARIABLE}: {text}: must be POINT[#NUMBER][@RANK]=ACTION")
        here = fault["point"] == name and fault["rank"] in (None, os.environ.get("RANK", "0"))
        if here and fault["number"] in (None, str(_passes[name])):
            _act(fault["action"])


def _act(action: str) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif hasattr(errno, action):
        number = getattr(errno, action)
        raise OSError(number, os.strerror(number))
    else:
        time.sleep(float(action))

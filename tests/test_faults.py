"""Injection points do nothing until the environment asks, and then only what it asks."""

import errno
import signal
import subprocess
import sys
import time

import pytest

from minititan import faults


@pytest.fixture(autouse=True)
def _anew(monkeypatch):
    monkeypatch.setattr(faults, "_passes", faults.Counter())
    monkeypatch.setenv("RANK", "1")


@pytest.mark.parametrize("text", ["a", "a=", "a#x=EIO", "a@=EIO", "=EIO", "a=EIO;b=EIO"])
def test_what_cannot_be_understood_is_an_error(text, monkeypatch):
    monkeypatch.setenv(faults.VARIABLE, text)
    with pytest.raises(ValueError, match="must be POINT"):
        faults.point("b")


def test_nothing_happens_unasked_at_other_points_on_other_ranks_or_at_other_passes(monkeypatch):
    faults.point("a")
    monkeypatch.setenv(faults.VARIABLE, "b=EIO a@0=EIO a#2=ENOSPC aa=EIO")
    faults.point("a")
    with pytest.raises(OSError, match="No space left on device") as caught:
        faults.point("a")
    assert caught.value.errno == errno.ENOSPC
    faults.point("a")


def test_a_fault_without_a_number_happens_every_time(monkeypatch):
    monkeypatch.setenv(faults.VARIABLE, "a@1=EIO")
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output error"):
            faults.point("a")


def test_a_point_can_take_time(monkeypatch):
    monkeypatch.setenv(faults.VARIABLE, "a=0.05")
    begin = time.monotonic()
    faults.point("a")
    assert time.monotonic() - begin >= 0.05


def test_a_process_can_be_killed_at_a_point(monkeypatch):
    monkeypatch.setenv(faults.VARIABLE, "a=kill")
    code = "from minititan.faults import point; point('b'); print('there', flush=True); point('a')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "there\n")

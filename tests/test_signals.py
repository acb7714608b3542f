"""Signals that ask to stop, in processes of their own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

BEGIN = """
import hashlib, multiprocessing, os, signal, subprocess, sys, time
from minititan.signals import StopSignals, watched

def wait_for_a_signal(stop):
    while stop.first is None:
        time.sleep(0.01)
"""
ROOT = Path(__file__).parent.parent

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a program in a process group of its own, and returns when it has said `ready`."""
    started: list[subprocess.Popen[str]] = []

    def started_with(body: str, **environment: str) -> subprocess.Popen[str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
        process = subprocess.Popen(
            [sys.executable, "-c", BEGIN + body],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=env | environment,
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield started_with
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def result(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, err = process.communicate(timeout=20)
    assert err == ""
    return process.returncode, out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_second_signal_ends_a_process_that_is_busy_outside_of_python(start, number):
    process = start("""
stop = StopSignals(lambda name: print("second", name, flush=True))
with watched(stop):
    print("ready", flush=True)
    wait_for_a_signal(stop)
    print("first", stop.first, flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # minutes, without a look at signals
""")
    assert process.stdout is not None
    process.send_signal(number)
    assert process.stdout.readline() == f"first {number.name}\n"
    time.sleep(0.2)
    process.send_signal(number)
    begin = time.monotonic()
    assert result(process) == (128 + number, f"second {number.name}\n")
    assert time.monotonic() - begin < 5


def test_one_request_passed_on_by_a_launcher_is_no_second_signal(start):
    body = """
stop = StopSignals()
with watched(stop):
    print("ready", flush=True)
    wait_for_a_signal(stop)
    time.sleep(2.5)
"""
    process = start(body, TORCHELASTIC_RUN_ID="x")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGUSR1)  # another one: two equal signals may reach a process as one
    assert result(process) == (0, "")
    process = start(body, TORCHELASTIC_RUN_ID="x")
    process.send_signal(signal.SIGTERM)
    time.sleep(1.3)
    process.send_signal(signal.SIGTERM)
    assert result(process) == (128 + signal.SIGTERM, "")


def test_what_the_process_has_started_goes_on_and_does_not_keep_it_from_ending(start):
    process = start("""
def work(pipe):
    for number in iter(pipe.recv, None):
        pipe.send(number + 1)
    time.sleep(600)

stop = StopSignals()
with watched(stop):
    here, there = multiprocessing.get_context("fork").Pipe()
    worker = multiprocessing.get_context("fork").Process(target=work, args=(there,), daemon=True)
    worker.start()
    compiler = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1); print('compiled')"],
                                stdout=subprocess.PIPE, text=True)
    time.sleep(0.2)
    print("ready", flush=True)
    wait_for_a_signal(stop)
    here.send(1)
    print(here.recv(), compiler.communicate()[0], end="")
    here.send(None)
    sys.exit(75)
""")
    os.killpg(process.pid, signal.SIGTERM)
    assert result(process) == (75, "2 compiled\n")


def test_afterwards_all_is_as_it_was(start):
    process = start("""
before = signal.getsignal(signal.SIGTERM)
with watched(StopSignals()):
    pass
assert signal.getsignal(signal.SIGTERM) == before
assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
print("ready", flush=True)
time.sleep(60)
""")
    process.send_signal(signal.SIGTERM)
    assert result(process) == (-signal.SIGTERM, "")


@pytest.mark.parametrize("signals_before, taken_up, code", [(0, False, 143), (1, False, 143), (1, True, 0)])
def test_waiting_to_be_ended(start, signals_before, taken_up, code):
    process = start(f"""
stop = StopSignals()
with watched(stop):
    print("ready", flush=True)
    if {signals_before}:
        wait_for_a_signal(stop)
    if {taken_up}:
        stop.taken_up()
    print("waits", flush=True)
    stop.wait_to_be_ended(1.5 if {signals_before} else 60)
""")
    assert process.stdout is not None
    if signals_before:
        process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "waits\n"
    if not signals_before:
        process.send_signal(signal.SIGTERM)
    assert result(process) == (code, "")

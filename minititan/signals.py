"""Signals that ask a run to stop, SIGTERM and SIGUSR1: the first is a request, a second ends the process.

A thread waits for them, since Python's own handlers run between two instructions of the main thread, which
may be in a collective or a compiler for minutes. All other threads block them, and so do the processes that
they start (workers of a data loader, compilers): these have to go on until the run has saved.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# A batch system that signals every process of a job, and torchrun that passes its own on, ask only once.
SAME_REQUEST_SECONDS = 1.0
_ENDED = 128  # a shell's exit code for a process that a signal ended is this and the signal's number


class StopSignals:
    """The signals that have come. Without `watched` none ever does."""

    def __init__(self, on_second: Callable[[str], None] = lambda name: None) -> None:
        """`on_second` is called with the name of a second signal, just before the process ends."""
        self._on_second = on_second
        self._first: tuple[str, float] | None = None
        self._open = threading.Event()  # a signal has come that no one has taken up

    @property
    def first(self) -> str | None:
        """The name of the first signal; None while there was none."""
        return self._first[0] if self._first else None

    def note(self, number: int) -> None:
        """Take notice of a signal."""
        name, now = signal.Signals(number).name, time.monotonic()
        if self._first is None:
            self._first = (name, now)
            self._open.set()
        elif "TORCHELASTIC_RUN_ID" not in os.environ or now - self._first[1] > SAME_REQUEST_SECONDS:
            self._on_second(name)
            os._exit(_ENDED + number)

    def taken_up(self) -> None:
        """Say that the run is stopping because of the first signal."""
        self._open.clear()

    def wait_to_be_ended(self, seconds: float) -> None:
        """End this process when a signal comes within `seconds`, or has come and was not taken up."""
        came_before = self._open.is_set()
        if self._open.wait(seconds):
            if came_before:
                time.sleep(
                    SAME_REQUEST_SECONDS
                )  # whoever knows the cause prints it before we are seen to end
            os._exit(_ENDED + signal.SIGTERM)


@contextmanager
def watched(stop: StopSignals) -> Iterator[None]:
    """Give `stop` the signals that come; for the main thread of a process."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)

    def watch() -> None:
        while number := os.read(read_end, 1):
            if number[0] in STOP_SIGNALS:
                stop.note(number[0])

    before = {number: signal.signal(number, lambda *_: None) for number in STOP_SIGNALS}
    wakeup = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    thread = threading.Thread(target=watch, name="stop-signals", daemon=True)
    thread.start()  # before the signals are blocked: it inherits what is blocked here
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        _end_workers()
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(write_end)
        thread.join()
        os.close(read_end)


def _end_workers() -> None:
    """End what multiprocessing would try to end by a SIGTERM, and wait for: these processes block it."""
    # A data loader's handler takes the end of a worker for a failure.
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    workers = multiprocessing.active_children()
    for process in workers:
        process.kill()
    for process in workers:
        process.join()
    signal.signal(signal.SIGCHLD, handler)

"""Locks between processes: the operating system's (flock), which end with their holder, however that ends."""

import fcntl
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

QUIET_SECONDS = 1.0


@contextmanager
def locked(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Holds the lock; a wait of more than QUIET_SECONDS is told by `on_wait`."""
    with path.open("a") as file:
        told_at = time.monotonic() + QUIET_SECONDS
        while not _try(file.fileno()):
            if time.monotonic() >= told_at:
                on_wait()
                fcntl.flock(file, fcntl.LOCK_EX)
                break
            time.sleep(0.02)
        yield


def made_once(folder: Path, make: Callable[[Path], None], on_wait: Callable[[], None]) -> None:
    """Has `make` fill the folder unless it is there: by one process, aside, renamed when it is whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f"{folder.name}.lock"), on_wait):
        if not folder.is_dir():
            aside = folder.with_name(f"{folder.name}.tmp")
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            make(aside)
            aside.rename(folder)


@contextmanager
def locked_now(path: Path) -> Iterator[bool]:
    """Holds the lock where nobody does; says whether it has it."""
    with path.open("a") as file:
        yield _try(file.fileno())


def is_free(path: Path) -> bool:
    """Whether nobody holds the lock."""
    with suppress(FileNotFoundError), path.open("r+") as file:
        return _try(file.fileno())
    return True


def _try(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

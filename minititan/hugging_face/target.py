"""A folder that is written whole or not at all, and never over another one."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minititan.checkpoint.folder import sync_folder
from minititan.config import ConfigError


def check_new(path: Path) -> None:
    """Raises ConfigError unless the path is free, or an empty folder."""
    if path.is_symlink() or (os.path.lexists(path) and not path.is_dir()):
        raise ConfigError(f"{path}: is there and no folder; choose another path")
    if path.is_dir() and any(path.iterdir()):
        raise ConfigError(
            f"{path}: is not empty, and nothing is overwritten; choose another path or remove it"
        )


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to write into, which takes the place of `path` when the block ends without an error.

    Raises ConfigError where the system refuses to write, and where something is at `path`.
    """
    try:
        temporary = begin(path)
        try:
            yield temporary
            finish(temporary, path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except OSError as error:
        raise ConfigError(could_not_be_written(path, error)) from None


def begin(path: Path) -> Path:
    """Make the folder that is to take the place of `path`, beside it."""
    check_new(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{path.name}-{uuid.uuid4().hex[:8]}")
    temporary.mkdir()
    return temporary


def finish(temporary: Path, path: Path) -> None:
    """Give the folder its name; its files are on the disk already."""
    sync_folder(temporary)
    temporary.rename(path)  # over an empty folder too
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a text to the disk."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def could_not_be_written(path: Path, error: OSError) -> str:
    return f"{path}: could not be written ({error.strerror or error}); make room or choose another path"

"""The checkpoint folder: which steps it holds, and the only operations that rename or remove anything in it.

    step-N                a complete checkpoint
    .tmp-...              an unfinished save, or a checkpoint on its way out: cleaned at the next save
    abandoned-step-N-k    moved aside, by a run that went back to an earlier step; never touched again

Whatever else lies there is left alone, and links are never followed. One process (rank 0) changes the folder.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minititan import faults
from minititan.checkpoint import manifest
from minititan.checkpoint.manifest import COMMIT, TRAIN_STATE, File, Manifest
from minititan.checkpoint.retention import Keep, steps_to_remove
from minititan.config import ConfigError

_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
_LEFT_BEHIND = re.compile(r"\.tmp-(removed-)?step-[0-9]+-[0-9a-f]{8}")


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"step-{step}"


def is_committed(path: Path) -> bool:
    """Whether this folder has an undamaged `COMMIT.json`; the files that it lists are not looked at."""
    return path.is_dir() and not path.is_symlink() and manifest.is_valid(path)


def committed_steps(folder: Path) -> list[int]:
    """The steps of all committed checkpoints, ascending; none when there is no folder."""
    return [step for step in step_folders(folder) if is_committed(step_folder(folder, step))]


def step_folders(folder: Path) -> list[int]:
    """The numbers of all folders named `step-N`, whatever is in them, ascending; links are not among them."""
    paths = {step: step_folder(folder, step) for step in _named(folder)}
    return [step for step, path in paths.items() if path.is_dir() and not path.is_symlink()]


def step_links(folder: Path) -> list[int]:
    """The numbers of all links named `step-N`, ascending."""
    return [step for step in _named(folder) if step_folder(folder, step).is_symlink()]


def is_step_name(name: str) -> bool:
    """Whether a checkpoint could have this name."""
    return _STEP.fullmatch(name) is not None


def _named(folder: Path) -> list[int]:
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be listed ({error.strerror}); give this user access") from error
    return sorted(int(match[1]) for name in names if (match := _STEP.fullmatch(name)))


def check_writable(key: str, folder: Path, needed_bytes: int = 1) -> None:
    """Raises ConfigError, which names the key and the folder, when `needed_bytes` can't be written there.

    Creates nothing.
    """
    where = f"{key} = {json.dumps(str(folder), ensure_ascii=False)}"
    existing = folder.absolute()
    while not os.path.lexists(existing):
        existing = existing.parent
    if not existing.is_dir():
        raise ConfigError(f"{where}: {existing} must be a folder; choose another path")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{where}: {existing} must be writable; choose another path")
    if lack := _lack_of_room(existing, needed_bytes):
        raise ConfigError(f"{where}: the disk of {existing} {lack}; make room or choose another path")


def _lack_of_room(folder: Path, needed_bytes: int) -> str | None:
    disk = shutil.disk_usage(folder)
    if disk.free >= needed_bytes or disk.total == 0:  # a total of 0: this file system does not tell
        return None
    left = f"has {disk.free / 1e6:,.1f} MB left, of {needed_bytes / 1e6:,.1f} MB that are needed"
    return left if disk.free else "is full"


def check_step(folder: Path, step: int) -> None:
    """Raises ConfigError when the folder has no checkpoint of this step, or its `COMMIT.json` is damaged."""
    if step not in step_folders(folder):
        steps = committed_steps(folder)
        there = f"there: {', '.join(map(str, steps))}" if steps else "leave it out to start afresh"
        raise ConfigError(f"checkpoint.load_step = {step}: {folder} has no such step; {there}")
    manifest.read(step_folder(folder, step))


def check_checkpoint(path: Path, name: str | None = None) -> None:
    """Raises ConfigError, which calls it `name` or by its path, when this is no complete checkpoint."""
    if not any((path / file).is_file() for file in (COMMIT, TRAIN_STATE)):
        inside = committed_steps(path)
        way_out = f"; inside it: step-{inside[-1]}" if inside else ""
        raise ConfigError(f"{name or path}: must be a checkpoint, a folder with {COMMIT}{way_out}")
    manifest.read(path)


def begin(folder: Path, step: int, needed_bytes: int = 1) -> Path:
    """Makes the folder that a step is written to, after removing what torn saves have left.

    Raises OSError when the disk has no room for `needed_bytes` then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for entry in folder.iterdir():
        if _LEFT_BEHIND.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
    if lack := _lack_of_room(folder, needed_bytes):
        raise OSError(errno.ENOSPC, f"the disk {lack}")
    temporary = _temporary(folder, f"step-{step}")
    temporary.mkdir()
    faults.point("checkpoint.begin")
    return temporary


def commit(temporary: Path, folder: Path, tensors_only: Manifest, state: Mapping[str, Any]) -> None:
    """Adds the JSON state and `COMMIT.json`, syncs, and gives the folder its final name.

    `tensors_only` lists the files that are there so far. What has the name already is moved aside.
    """
    written = {TRAIN_STATE: _write_state(temporary / TRAIN_STATE, state)}
    faults.point("checkpoint.before_commit")
    manifest.write(temporary, tensors_only.model_copy(update={"files": tensors_only.files | written}))
    sync_folder(temporary)
    final = step_folder(folder, tensors_only.step)
    if os.path.lexists(final):
        move_aside(folder, tensors_only.step)
    faults.point("checkpoint.before_rename")
    temporary.rename(final)
    faults.point("checkpoint.after_rename")
    sync_folder(folder)


def _write_state(path: Path, state: Mapping[str, Any]) -> File:
    content = json.dumps(state, indent=1).encode()
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return File(size=len(content), sha256=hashlib.sha256(content).hexdigest())


def move_aside(folder: Path, step: int) -> str:
    """Renames a step to the first free `abandoned-step-N-k`, and returns that name."""
    number = 0
    while os.path.lexists(folder / f"abandoned-step-{step}-{number}"):
        number += 1
    aside = folder / f"abandoned-step-{step}-{number}"
    step_folder(folder, step).rename(aside)
    sync_folder(folder)
    return aside.name


def retain(folder: Path, keep: Keep, just_saved: int) -> None:
    """Removes the checkpoints that no rule of `keep` wants, never the one just saved."""
    for step in steps_to_remove(keep, validation_losses(folder), just_saved):
        remove_step(folder, step)


def remove_step(folder: Path, step: int) -> None:
    """Removes a checkpoint; renamed first: a half-removed folder must not look like one."""
    leaving = _temporary(folder, f"removed-step-{step}")
    step_folder(folder, step).rename(leaving)
    faults.point("checkpoint.retain")
    shutil.rmtree(leaving)


def validation_losses(folder: Path) -> dict[int, float | None]:
    """The validation loss of each checkpoint, None where the run did not validate at that step."""
    return {step: _validation_loss(step_folder(folder, step)) for step in committed_steps(folder)}


def _validation_loss(path: Path) -> float | None:
    """What the run saved as `train_state.validation_loss`; None where it has not."""
    try:
        loss = json.loads((path / TRAIN_STATE).read_text(encoding="utf-8"))["train_state"]["validation_loss"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return loss if isinstance(loss, (int, float)) else None


def _temporary(folder: Path, name: str) -> Path:
    return folder / f".tmp-{name}-{uuid.uuid4().hex[:8]}"


def sync_folder(path: Path) -> None:
    """Brings the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

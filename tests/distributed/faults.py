"""All that may befall a checkpoint of two ranks: how it comes, what they say, and what a restart does.

Each fault of `SAVING` comes while step 3 is saved beside the steps 1 and 2 (the newest two are kept); each of
`AT_REST` spoils the newest of the steps 1 to 3 while nothing runs.
"""

import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tests.checkpoints import flip, largest_file, seal_again

NOBODY = 65534
KILLED = "(killed)"
OTHER_BYTES = "damaged (its SHA-256 is not that of what was saved)"
SIZE = "N bytes, must be M"


class Outcome(NamedTuple):
    """What all ranks said, folders left out; the step that a restart takes, None: it stops."""

    said: str
    restart: int | None


@dataclass(frozen=True)
class Saving:
    """A fault during a save: `asked` of the injection points, or `around` it on rank `rank`."""

    name: str
    expected: Outcome
    asked: str = ""
    around: Callable[[Path], Any] = nullcontext
    rank: int = 0
    small_disk: bool = False  # the folder is a disk that has no room for another step's files


@dataclass(frozen=True)
class AtRest:
    """A fault of a checkpoint that lies there; `load_step` is asked for at the restart."""

    name: str
    spoil: Callable[[Path], object]
    expected: Outcome
    load_step: int | None = None


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """The folder turns read-only, for root too."""
    folder.chmod(0o555)
    try:
        with without_rights():
            yield
    finally:
        folder.chmod(0o755)


@contextmanager
def without_rights() -> Iterator[None]:
    """Root, for whom no folder is read-only, gives up its rights."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def _quota(folder: Path) -> Any:
    return largest_file(4000)


def _refused(cause: str, ranks: object = 1) -> Outcome:
    way_out = "make room or set another job.dump_folder; the newest checkpoint is step 2"
    where = 'checkpoint.folder = "...": step 3 could not be saved'
    return Outcome(f"{where} (rank {ranks}: {cause}); {way_out}", 2)


SAVING = (
    Saving("SIGKILL as a save begins", Outcome(KILLED, 2), "checkpoint.begin@0=kill"),
    Saving("SIGKILL to a rank that writes", Outcome(KILLED, 2), "checkpoint.write#3@1=kill"),
    Saving("SIGKILL before COMMIT.json", Outcome(KILLED, 2), "checkpoint.before_commit@0=kill"),
    Saving("SIGKILL before the folder has its name", Outcome(KILLED, 2), "checkpoint.before_rename@0=kill"),
    Saving("SIGKILL after the folder has its name", Outcome(KILLED, 3), "checkpoint.after_rename@0=kill"),
    Saving("SIGKILL while an old step is removed", Outcome(KILLED, 3), "checkpoint.retain@0=kill"),
    Saving("a disk full of files", _refused("No space left on device", "0, 1"), small_disk=True),
    Saving(
        "a full disk, for one rank only", _refused("No space left on device"), "checkpoint.write#2@1=ENOSPC"
    ),
    Saving("a limit on one rank's files", _refused("File too large"), around=_quota, rank=1),
    Saving("an I/O error in one writer", _refused("Input/output error"), "checkpoint.write#5@1=EIO"),
    Saving(
        "an I/O error before COMMIT.json", _refused("Input/output error", 0), "checkpoint.before_commit=EIO"
    ),
    Saving("the folder turns read-only", _refused("Permission denied", 0), around=read_only),
)


class Evil:
    """A pickle that makes a folder when it is read."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def _shard(folder: Path, step: int = 3, rank: int = 0) -> Path:
    return folder / f"step-{step}" / f"__{rank}_0.distcp"


def _zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _swap(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def _evil(folder: Path) -> None:
    (folder / "step-3" / ".metadata").write_bytes(pickle.dumps(Evil(folder / "evil")))


def _sealed_evil(folder: Path) -> None:
    _evil(folder)
    seal_again(folder / "step-3")


def _link(folder: Path) -> None:
    (folder / "step-3").rename(folder / "elsewhere")
    (folder / "step-3").symlink_to(folder / "elsewhere")


def _all_of_them(folder: Path) -> None:
    for step in (1, 2, 3):
        flip(_shard(folder, step))


def _taken(file: str, fault: str) -> Outcome:
    return Outcome(f"step-3/{file}: {fault}; step 2 is used", 2)


SHARD = "__0_0.distcp"
NOT_ITS_OWN = "damaged (its content does not have the SHA-256 in its last line)"
AT_REST = (
    AtRest("a flipped bit", lambda f: flip(_shard(f)), _taken(SHARD, OTHER_BYTES)),
    AtRest("a file cut short", lambda f: os.truncate(_shard(f), 5), _taken(SHARD, SIZE)),
    AtRest("a file of zeros", lambda f: _zero(_shard(f)), _taken(SHARD, OTHER_BYTES)),
    AtRest("a missing file", lambda f: _shard(f).unlink(), _taken(SHARD, "missing")),
    AtRest("an empty file", lambda f: os.truncate(_shard(f), 0), _taken(SHARD, SIZE)),
    AtRest(
        "two ranks' files swapped",
        lambda f: _swap(_shard(f), _shard(f, rank=1)),
        Outcome("; ".join(f"step-3/__{rank}_0.distcp: {SIZE}; step 2 is used" for rank in (0, 1)), 2),
    ),
    AtRest(
        "a file of another step",
        lambda f: shutil.copy(_shard(f, step=2), _shard(f)),
        _taken(SHARD, OTHER_BYTES),
    ),
    AtRest(
        "no train_state.json",
        lambda f: (f / "step-3" / "train_state.json").unlink(),
        _taken("train_state.json", "missing"),
    ),
    AtRest(
        "a COMMIT.json that is not JSON",
        lambda f: (f / "step-3" / "COMMIT.json").write_text("not JSON"),
        _taken("COMMIT.json", NOT_ITS_OWN),
    ),
    AtRest(
        "no COMMIT.json",
        lambda f: (f / "step-3" / "COMMIT.json").unlink(),
        _taken("COMMIT.json", "missing"),
    ),
    AtRest(
        "the COMMIT.json of another step",
        lambda f: shutil.copy(f / "step-2" / "COMMIT.json", f / "step-3" / "COMMIT.json"),
        _taken("COMMIT.json", "is of step 2"),
    ),
    AtRest("a .metadata that runs code", _evil, _taken(".metadata", SIZE)),
    AtRest(
        "the same, vouched for by a forged COMMIT.json",
        _sealed_evil,
        Outcome(
            "step-3/.metadata: damaged (posix.mkdir is not a record of tensors); use another checkpoint", None
        ),
    ),
    AtRest(
        "a link in the place of a step",
        _link,
        Outcome("step-3: a link, which is not followed; step 2 is used", 2),
    ),
    AtRest(
        "an empty folder step-4",
        lambda f: (f / "step-4").mkdir(),
        Outcome("step-4/COMMIT.json: missing; step 3 is used", 3),
    ),
    AtRest(
        "a flipped bit in every step",
        _all_of_them,
        Outcome(
            "; ".join(
                [f"step-{step}/{SHARD}: {OTHER_BYTES}" for step in (3, 2, 1)]
                + ["...: none of its checkpoints is whole; remove them to start afresh"]
            ),
            None,
        ),
    ),
    AtRest(
        "a flipped bit in the step of `load_step`",
        lambda f: flip(_shard(f)),
        Outcome(f"step-3/{SHARD}: {OTHER_BYTES}; use another checkpoint", None),
        load_step=3,
    ),
)

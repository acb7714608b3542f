"""Small checkpoints for the tests of them, and ways to spoil them."""

import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from minititan.checkpoint import manifest
from minititan.checkpoint.checkpointer import Checkpointer
from minititan.checkpoint.manifest import File


def tensors(value: float, size: int = 5) -> dict[str, Tensor]:
    return {
        "model.a": torch.full((size, 4), float(value)),
        "model.b": torch.tensor(float(value)),
        "optimizer.a.exp_avg": torch.full((size, 4), value + 0.5),
    }


def checkpointer(path: Path, keep_latest_k: int = 0, **options) -> Checkpointer:
    return Checkpointer(path, keep_latest_k=keep_latest_k, rank=0, **options)


def with_steps(path: Path, *steps: int, **options) -> Checkpointer:
    """One with these steps, all values the step's number."""
    there = checkpointer(path, **options)
    for step in steps:
        there.save(
            step, tensors(float(step)), {"dataloader": {"samples_consumed": 8 * step}, "tokens_seen": 3}
        )
    return there


def newest(there: Checkpointer) -> int:
    """The newest step that is whole."""
    found = there.newest()
    assert found is not None
    return found.manifest.step


def flip(path: Path) -> None:
    """Flips a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def found_flips(folder: Path, flips: int) -> int:
    """How many of so many flips of one bit, anywhere in the files of a checkpoint, are found."""
    with_steps(folder, 1)
    files, dice, found = sorted((folder / "step-1").iterdir()), random.Random(2), 0
    for flip in range(flips):
        file = files[flip % len(files)]
        data = bytearray(whole := file.read_bytes())
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        file.write_bytes(data)
        found += bool(manifest.verify(file.parent))
        file.write_bytes(whole)
    return found


def seal_again(path: Path) -> None:
    """Makes the manifest agree with the files as they are now, as one who means harm would."""
    old = manifest.read(path)
    files = {
        name: File(size=(path / name).stat().st_size, sha256=sha256((path / name).read_bytes()).hexdigest())
        for name in old.files
    }
    manifest.write(path, old.model_copy(update={"files": files}))


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The system refuses to write files beyond this size, as a full disk or a quota does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

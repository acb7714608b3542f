"""The tools of `minititan checkpoint` that read tensors, one at a time."""

import os
import uuid
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor

from minititan.checkpoint.folder import sync_folder
from minititan.checkpoint.tensors import StepTensors, verified
from minititan.commands import give_back_freed_memory
from minititan.commands.tables import print_table, size_text
from minititan.config import ConfigError
from minititan.hugging_face.target import could_not_be_written
from minititan.hugging_face.writing import Layout, Shard, write_shard

_PIECE = 2**22  # elements that are compared at a time, in float64


def diff(first: Path, second: Path, pattern: str) -> int:
    """Print how the tensors of two checkpoints differ; return 1 where they do."""
    ones, others = verified(first), verified(second)
    keys = [key for key in ones.tensors | others.tensors if fnmatchcase(key, pattern)]
    if not keys:
        raise ConfigError(
            f"{first}: no key of it or {second} matches {pattern}; minititan checkpoint show lists them"
        )
    readers = StepTensors(first, ones), StepTensors(second, others)
    rows: list[tuple[str, str, str, str]] = []
    for key in keys:
        one, other = ones.tensors.get(key), others.tensors.get(key)
        if one is None or other is None:
            rows.append((key, "", "", f"only in {first if other is None else second}"))
        elif one.shape != other.shape:
            rows.append((key, "", "", f"shape {list(one.shape)}, {list(other.shape)}"))
        else:
            types = "" if one.dtype == other.dtype else f"dtype {one.dtype}, {other.dtype}"
            largest, relative, equal = difference(readers[0].read(key), readers[1].read(key))
            if not equal or types:
                rows.append((key, f"{largest:.3g}", f"{relative:.3g}", types))
    if rows:
        print_table(("key", "largest", "relative", ""), rows, right=("largest", "relative"))
        print()
    print(f"{len(keys) - len(rows)} of {len(keys)} tensors are equal to the bit, {len(rows)} differ")
    if rows:
        print("largest: of all elements; relative: norm of the difference to the norm in the first")
    return 1 if rows else 0


def difference(one: Tensor, other: Tensor) -> tuple[float, float, bool]:
    """The largest difference of an element, its norm relative to the first's, and whether all bits agree."""
    largest, squared, norm, equal = 0.0, 0.0, 0.0, one.dtype == other.dtype
    pieces = zip(one.reshape(-1).split(_PIECE), other.reshape(-1).split(_PIECE), strict=True)
    for a, b in pieces:
        equal = equal and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        a, b = a.double(), b.double()
        apart = (a - b).abs()
        largest = max(largest, apart.max().item()) if not apart.isnan().any() else float("nan")
        squared += apart.square().sum().item()
        norm += a.square().sum().item()
    return largest, (squared / norm) ** 0.5 if norm else squared**0.5, equal


def convert(step: Path, file: Path, pattern: str) -> int:
    """Write the tensors of a checkpoint to one safetensors file."""
    if os.path.lexists(file):
        raise ConfigError(f"{file}: is there already, and nothing is overwritten; choose another name")
    if not file.parent.is_dir():
        raise ConfigError(f"{file.parent}: no such folder; make it first")
    give_back_freed_memory()
    saved = verified(step)
    tensors = tuple(
        Layout(key, info.shape, getattr(torch, info.dtype))
        for key, info in saved.tensors.items()
        if fnmatchcase(key, pattern)
    )
    if not tensors:
        raise ConfigError(f"{step}: no key matches {pattern}; minititan checkpoint show {step} lists them")
    temporary = file.with_name(f".tmp-{file.name}-{uuid.uuid4().hex[:8]}")
    try:
        try:
            write_shard(file.parent, Shard(temporary.name, tensors), StepTensors(step, saved).read)
            temporary.rename(file)
            sync_folder(file.parent)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(could_not_be_written(file, error)) from None
    print(f"Wrote {file}: {len(tensors)} tensors, {size_text(sum(tensor.nbytes for tensor in tensors))}")
    return 0

"""Safetensors written tensor by tensor, so that no more than one is in memory.

The library of that name writes a file from all of its tensors at once. The format is public: 8 bytes with the
length of a JSON header, the header (dtype, shape and place of each tensor), the bytes of the tensors.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from minititan.hugging_face.reading import DTYPES, INDEX, SINGLE
from minititan.hugging_face.target import write_text

_INTEGERS = {"I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool}
_CODES = {dtype: code for code, dtype in (DTYPES | _INTEGERS).items()}
_ALIGNMENT = 8


@dataclass(frozen=True)
class Layout:
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Shard:
    """A file to be written and its tensors."""

    name: str
    tensors: tuple[Layout, ...]


def shards_of(tensors: Sequence[Layout], shard_bytes: int) -> list[Shard]:
    """Files of at most `shard_bytes`, or one tensor, with the names that `transformers` gives them."""
    groups: list[list[Layout]] = []
    room = 0
    for tensor in tensors:
        if not groups or tensor.nbytes > room:
            groups.append([])
            room = shard_bytes
        groups[-1].append(tensor)
        room -= tensor.nbytes
    if len(groups) == 1:
        return [Shard(SINGLE, tuple(groups[0]))]
    names = (f"model-{i:05}-of-{len(groups):05}.safetensors" for i in range(1, len(groups) + 1))
    return [Shard(name, tuple(group)) for name, group in zip(names, groups, strict=True)]


def write_shard(folder: Path, shard: Shard, read: Callable[[str], Tensor]) -> None:
    """Write one file, flushed to the disk; `read` gives each tensor, which is cast to its dtype."""
    # Wide types first: every tensor then begins at a multiple of its item's size.
    tensors = sorted(shard.tensors, key=lambda tensor: -tensor.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    place = 0
    for tensor in tensors:
        offsets = [place, place + tensor.nbytes]
        header[tensor.name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        place = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with open(folder / shard.name, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            values = read(tensor.name)
            assert tuple(values.shape) == tensor.shape, tensor.name
            values = values.to("cpu", tensor.dtype).contiguous().reshape(-1)
            file.write(values.view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def write_index(folder: Path, shards: Sequence[Shard]) -> None:
    """Write which file has which tensor, where there are several."""
    if len(shards) == 1:
        return
    places = {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
    total = sum(tensor.nbytes for shard in shards for tensor in shard.tensors)
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write an object as `transformers` does, flushed to the disk."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

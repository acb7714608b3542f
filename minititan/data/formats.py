"""Token files of other programs, read in place: Megatron's .bin with .idx, and flat .npy files as OLMo's.

Neither is hashed whole at a start: the fingerprint is of the sizes, and of blocks at even distances.
"""

import struct
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np

from minititan.config import ConfigError
from minititan.data.fault import Fault, plain_fault
from minititan.data.tokens import Shard, Tokens, mapped, outside

MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_HEADER = struct.Struct("<9sQBQQ")  # magic, version, type, sequences, documents
MEGATRON_TYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
NPY_TYPES = ("uint8", "uint16", "uint32", "int32", "int64")
NPY_MAGIC = b"\x93NUMPY"
SAMPLED_BLOCKS = 16
SAMPLED_TOKENS = 2048
SUFFIXES = (".bin", ".idx", ".npy")


class MegatronStarts(NamedTuple):
    """The documents of an .idx file: sequences with the bytes at which they begin, documents of sequences."""

    path: Path
    sequences: int
    documents: int
    itemsize: int

    def opened(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        at = MEGATRON_HEADER.size + 4 * self.sequences
        pointers = mapped(self.path, "<i8", self.sequences, at)
        return pointers, mapped(self.path, "<i8", self.documents, at + 8 * self.sequences)

    def between(self, maps: tuple[np.ndarray, np.ndarray], low: int, high: int) -> np.ndarray:
        pointers, first = maps
        # bisect, since numpy would copy what is not aligned, all of it.
        within = [bisect_left(pointers, place * self.itemsize) for place in (low, high)]
        begin, end = (bisect_left(first, sequence) for sequence in within)
        return np.unique(pointers[first[begin:end]]) // self.itemsize

    def numbered(self, maps: tuple[np.ndarray, np.ndarray], low: int, high: int) -> np.ndarray:
        pointers, first = maps
        sequences = np.array(first[low : min(high, bisect_left(first, self.sequences))])
        return pointers[sequences] // self.itemsize


class StartsAfterEos(NamedTuple):
    """A document starts at the file's first token and after each `eos`; None: only there."""

    eos: int | None

    def opened(self, tokens: np.ndarray) -> np.ndarray:
        return tokens

    def between(self, maps: np.ndarray, low: int, high: int) -> np.ndarray:
        first = np.zeros(int(low <= 0 < high), dtype=np.int64)
        if self.eos is None:
            return first
        before = max(low, 1) - 1
        return np.append(first, np.flatnonzero(maps[before : high - 1] == self.eos) + before + 1)

    def numbered(self, maps: np.ndarray, low: int, high: int) -> np.ndarray:
        raise AssertionError("how many there are is not known")


def open_formats(
    files: Sequence[Path],
    *,
    label: str,
    vocab_size: int,
    eos_id: int | None = None,
    npy_dtype: str | None = None,
    fault: Fault = plain_fault,
) -> Tokens:
    """The tokens of .bin/.idx pairs and .npy files, in the order of `files`; raises ConfigError.

    A few blocks of each are looked at: an id of `vocab_size` or above in them is found here, others when they
    are read.
    """
    shards = []
    for path in files:
        try:
            shard = _npy(path, eos_id, npy_dtype, fault) if path.suffix == ".npy" else _megatron(path)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}); make it readable") from None
        if shard.tokens:
            shards.append(shard)
    if not shards:
        raise ConfigError(f"{label}: holds no tokens; give files with tokens in them")
    fingerprint = _fingerprint(shards, vocab_size)
    return Tokens(shards, label=label, fingerprint=fingerprint, vocab_size=vocab_size)


def _megatron(path: Path) -> Shard:
    index = path.with_suffix(".idx")
    if not index.is_file():
        raise ConfigError(f"{path}: has no {index.name} beside it; give both files of Megatron's format")
    with index.open("rb") as file:
        header = file.read(MEGATRON_HEADER.size)
    if not header.startswith(MEGATRON_MAGIC) or len(header) < MEGATRON_HEADER.size:
        raise ConfigError(
            f"{index}: no index of Megatron's (it must begin with MMIDIDX); give the pair's own"
        )
    _, version, code, sequences, documents = MEGATRON_HEADER.unpack(header)
    if version != 1 or code not in MEGATRON_TYPES:
        rule = f"version {version} with tokens of type {code} is not read"
        raise ConfigError(f"{index}: {rule}; version 1 is, with types {', '.join(map(str, MEGATRON_TYPES))}")
    itemsize = np.dtype(MEGATRON_TYPES[code]).itemsize
    arrays = MEGATRON_HEADER.size + 12 * sequences + 8 * documents
    if index.stat().st_size < arrays:
        size = index.stat().st_size
        raise ConfigError(f"{index}: holds {size} bytes, its header asks for {arrays}; replace it")
    tokens = 0
    if sequences:
        last = mapped(index, "<i4", sequences, MEGATRON_HEADER.size)[-1]
        pointer = mapped(index, "<i8", sequences, MEGATRON_HEADER.size + 4 * sequences)[-1]
        tokens = int(pointer) // itemsize + int(last)
    if path.stat().st_size != tokens * itemsize:
        rule = f"holds {path.stat().st_size} bytes, {index.name} says {tokens * itemsize}"
        raise ConfigError(f"{path}: {rule}; give the two files of one set, whole")
    starts = MegatronStarts(index, sequences, documents, itemsize)
    first = mapped(index, "<i8", documents, arrays - 8 * documents) if documents else np.empty(0)
    # Documents at the end that are empty have no sequence to begin with, and are left out.
    known = bisect_left(first, sequences)
    return Shard(path, MEGATRON_TYPES[code], tokens, starts, known)


def _npy(path: Path, eos_id: int | None, npy_dtype: str | None, fault: Fault) -> Shard:
    with path.open("rb") as file:
        if file.read(len(NPY_MAGIC)) == NPY_MAGIC:
            file.seek(0)
            dtype, tokens, offset = _npy_header(file, path)
        elif npy_dtype is None:
            rule = f"{path} has no header of numpy's that says what type its tokens are"
            raise ConfigError(fault("data.npy_dtype", rule, 'set it, as "uint16"'))
        else:
            dtype, offset = np.dtype(npy_dtype).newbyteorder("<"), 0
            tokens, left = divmod(path.stat().st_size, dtype.itemsize)
            if left:
                rule = f"{path} holds {path.stat().st_size} bytes, no whole number of {npy_dtype}"
                raise ConfigError(fault("data.npy_dtype", rule, "give the type the file was written in"))
    return Shard(path, dtype.str, tokens, StartsAfterEos(eos_id), None, offset)


def _npy_header(file, path: Path) -> tuple[np.dtype, int, int]:
    try:
        version = np.lib.format.read_magic(file)
        read = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
        shape, _, dtype = read[version[0]](file)
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{path}: damaged header ({error}); replace it") from None
    if len(shape) != 1 or dtype.kind not in "iu":
        raise ConfigError(f"{path}: holds {dtype} of shape {shape}; it must be one row of integers")
    size = path.stat().st_size - file.tell()
    if size != shape[0] * dtype.itemsize:
        raise ConfigError(
            f"{path}: holds {size} bytes, its header says {shape[0] * dtype.itemsize}; replace it"
        )
    return dtype, shape[0], file.tell()


def _fingerprint(shards: Sequence[Shard], vocab_size: int) -> str:
    total = sha256()
    for shard in shards:
        total.update(f"{shard.dtype} {shard.tokens} ".encode())
        for offset, block in _blocks(shard):
            if block.max() >= vocab_size:
                raise outside(shard.path, offset, block, vocab_size)
            total.update(block.tobytes())
        if isinstance(shard.starts, MegatronStarts):
            index = Shard(shard.starts.path, "|u1", shard.starts.path.stat().st_size, shard.starts, None)
            for _, block in _blocks(index):
                total.update(block.tobytes())
        else:
            total.update(str(shard.starts).encode())
    return total.hexdigest()


def _blocks(shard: Shard) -> Iterator[tuple[int, np.ndarray]]:
    """Blocks of SAMPLED_TOKENS at even distances, the first and the last among them, with their places."""
    dtype = np.dtype(shard.dtype.replace("i", "u"))
    last = max(shard.tokens - SAMPLED_TOKENS, 0)
    with shard.path.open("rb", buffering=0) as file:
        for place in sorted({last * k // (SAMPLED_BLOCKS - 1) for k in range(SAMPLED_BLOCKS)}):
            file.seek(shard.offset + place * dtype.itemsize)
            yield place, np.frombuffer(file.read(min(SAMPLED_TOKENS, shard.tokens) * dtype.itemsize), dtype)

"""Prepared data on disk: a folder of token shards with what describes them.

    NAME.bin           tokens, little-endian u16 or u32
    NAME.starts.npy    int64: offsets in the shard at which its documents start; a document lies in one shard
    tokens.json        written last: names the shards, their sizes and hashes, the tokenizer, the fingerprint

The fingerprint is a hash of the tokens and of the documents' boundaries alone, whatever the files, paths or
shards they came in. With h(d) the SHA-256 of a document's tokens as they are stored, a row of documents has
the hash H(d1 ... dn) = sum of h(di) * B^(n - i) modulo P. H of two rows, one after the other, follows from
theirs: so shards are hashed one by one, by anyone and in any order, and their hashes combined.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np

FORMAT_VERSION = 2
MANIFEST = "tokens.json"
P = 2**255 - 19
B = int.from_bytes(sha256(b"minititan documents").digest(), "big") % P
BLOCK_BYTES = 1 << 20
EDGE_BYTES = 4096

Entry = dict[str, Any]
"""What tokens.json says of a shard: name, tokens, documents, hash (H of its documents), starts_sha256, edges
(the SHA-256 of its first and last EDGE_BYTES: enough to tell shards apart when they are opened)."""


def write_shard(
    folder: Path, name: str, dtype: np.dtype, parts: Iterable[tuple[np.ndarray, np.ndarray]]
) -> Entry:
    """Writes tokens, given in parts with the offsets in each at which documents start; returns the entry.

    The files are durable when they get their names.
    """
    size, starts = 0, [np.empty(0, dtype=np.int64)]
    with replacing(folder / f"{name}.bin") as file:
        for tokens, offsets in parts:
            file.write(tokens.astype(dtype, copy=False).tobytes())
            starts.append(offsets + size)
            size += len(tokens)
    # A document that has no token starts where the next one does, or at the end.
    found = np.unique(np.concatenate(starts))
    with replacing(folder / f"{name}.starts.npy") as file:
        np.save(file, found[found < size].astype("<i8"))
    return describe(folder, name, dtype)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that gets the name `path` when it is whole and on the disk; an error leaves nothing behind."""
    aside = path.with_name(f".{path.name}.tmp")
    try:
        with aside.open("wb", buffering=BLOCK_BYTES) as file:
            yield file
            sync(file)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


def write_json(path: Path, value: Any) -> None:
    with replacing(path) as file:
        file.write(json.dumps(value, indent=1).encode())


def describe(folder: Path, name: str, dtype: np.dtype) -> Entry:
    """The entry of a shard, from its files; ValueError where the one does not go with the other."""
    path = folder / f"{name}.bin"
    size, left = divmod(path.stat().st_size, dtype.itemsize)
    starts = np.load(folder / f"{name}.starts.npy")
    if left or (len(starts) and starts[0] != 0) or (np.diff(starts, append=size) <= 0).any():
        raise ValueError(f"{name}.starts.npy does not go with {name}.bin")
    total = 0
    lengths = np.diff(starts, append=size) * dtype.itemsize
    with path.open("rb", buffering=BLOCK_BYTES) as file:
        for at in range(0, len(lengths), 1 << 16):
            for length in lengths[at : at + (1 << 16)].tolist():
                total = (total * B + _hash_of_next(file, length)) % P
    return {
        "name": name,
        "tokens": size,
        "documents": len(starts),
        "hash": f"{total:x}",
        "starts_sha256": sha256(starts.astype("<i8").tobytes()).hexdigest(),
        "edges": edges_of(path),
    }


def _hash_of_next(file: BinaryIO, size: int) -> int:
    digest = sha256()
    while size:
        digest.update(block := file.read(min(size, BLOCK_BYTES)))
        size -= len(block)
    return int.from_bytes(digest.digest(), "big")


def edges_of(path: Path) -> str:
    """The hash of the file's first and last EDGE_BYTES."""
    with path.open("rb", buffering=0) as file:
        first = file.read(EDGE_BYTES)
        file.seek(max(path.stat().st_size - EDGE_BYTES, 0))
        return sha256(first + file.read(EDGE_BYTES)).hexdigest()


def fingerprint_of(entries: Sequence[Entry], dtype: np.dtype) -> str:
    total = documents = 0
    for entry in entries:
        total = (total * pow(B, entry["documents"], P) + int(entry["hash"], 16)) % P
        documents += entry["documents"]
    return sha256(f"{dtype.str} {documents} {total:x}".encode()).hexdigest()


def write_manifest(
    folder: Path, entries: Sequence[Entry], dtype: np.dtype, vocab_size: int, tokenizer: str
) -> None:
    """Makes the shards of `entries`, in this order, a set that can be opened."""
    manifest = {
        "format_version": FORMAT_VERSION,
        "dtype": dtype.str,
        "vocab_size": vocab_size,
        "tokenizer": tokenizer,
        "fingerprint": fingerprint_of(entries, dtype),
        "shards": list(entries),
    }
    write_json(folder / MANIFEST, manifest)

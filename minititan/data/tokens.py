"""Tokens on disk as one long row: files mapped into memory when they are first read.

Opening looks at sizes alone, so a set of ten thousand shards opens at once, and memory holds a few numbers a
shard. What is only seen in reading (a shard in another's place, an id outside of the vocabulary) is a
ConfigError with the file and the position.
"""

import json
import os
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from minititan.config import ConfigError
from minititan.data.shards import FORMAT_VERSION, MANIFEST, edges_of

MAX_MAPS = 16_384
"""Files mapped at once; Linux allows 65,530 maps."""
NPY_HEADER_BYTES = 128


class DamagedTokens(Exception):
    """The folder holds no whole set of shards."""


class Starts(Protocol):
    """Where the documents of a shard start; `maps` is what `opened` gave."""

    def opened(self, tokens: np.ndarray) -> Any:
        """What the answers are looked up in; `tokens` are the shard's."""
        ...

    def between(self, maps: Any, low: int, high: int) -> np.ndarray:
        """The offsets in [low, high) at which documents start."""
        ...

    def numbered(self, maps: Any, low: int, high: int) -> np.ndarray:
        """Where the documents `low` to `high` - 1 start; asked only where their number is known."""
        ...


class StartsFile(NamedTuple):
    """Offsets in a .npy file."""

    path: Path
    documents: int

    def opened(self, tokens: np.ndarray) -> np.ndarray:
        return mapped(self.path, "<i8", self.documents, NPY_HEADER_BYTES)

    def between(self, maps: np.ndarray, low: int, high: int) -> np.ndarray:
        begin, end = np.searchsorted(maps, (low, high))
        return np.array(maps[begin:end])

    def numbered(self, maps: np.ndarray, low: int, high: int) -> np.ndarray:
        return np.array(maps[low:high])


class Shard(NamedTuple):
    """A file of tokens. `documents` is None where only reading would tell; `edges` is the hash that the file
    must show when it is opened, "" for none."""

    path: Path
    dtype: str
    tokens: int
    starts: Starts
    documents: int | None
    offset: int = 0
    edges: str = ""


def mapped(path: Path, dtype: str, size: int, offset: int = 0) -> np.ndarray:
    """`size` items of a file, from byte `offset` on, mapped into memory."""
    import torch  # late: `minititan prepare` does without it

    # numpy and mmap keep a file descriptor a map, so that a thousand shards were too many; torch does not.
    length = offset + size * np.dtype(dtype).itemsize
    content = torch.from_file(str(path), shared=False, size=length, dtype=torch.uint8).numpy()
    content.flags.writeable = False
    return content[offset:].view(dtype)


class TokenRow(Protocol):
    """What samples are cut from: tokens in a row, and where documents begin and end in it."""

    label: str
    fingerprint: str

    @property
    def num_documents(self) -> int: ...

    def num_samples(self, seq_len: int) -> int: ...

    def read(self, begin: int, end: int, out: np.ndarray) -> None: ...

    def documents(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]: ...

    def document_starts(self, begin: int, end: int) -> np.ndarray: ...


def enough_for_samples(label: str, num_tokens: int, seq_len: int) -> int:
    """How many windows of seq_len tokens and their labels there are; raises ConfigError for none."""
    if num_tokens <= seq_len:
        raise ConfigError(
            f"{label}: holds {num_tokens} tokens, fewer than one sample of sequence length"
            f" {seq_len} (which needs {seq_len + 1}); give more text or a smaller seq_len"
        )
    return (num_tokens - 1) // seq_len


class Tokens:
    """The tokens of a source; `label` names it in messages. Pickles without its maps."""

    def __init__(
        self,
        shards: Sequence[Shard],
        *,
        label: str,
        fingerprint: str,
        vocab_size: int,
    ) -> None:
        self.label, self.fingerprint, self.vocab_size = label, fingerprint, vocab_size
        self.shards = tuple(shards)
        self._ends = np.cumsum([shard.tokens for shard in shards], dtype=np.int64).tolist()
        self.num_tokens: int = self._ends[-1]
        self.lists_documents = all(shard.documents is not None for shard in shards)
        self._document_ends = np.cumsum([s.documents or 0 for s in shards], dtype=np.int64).tolist()
        self._maps: dict[int, np.ndarray] = {}
        self._starts: dict[int, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": {}, "_starts": {}}

    def num_samples(self, seq_len: int) -> int:
        return enough_for_samples(self.label, self.num_tokens, seq_len)

    def read(self, begin: int, end: int, out: np.ndarray) -> None:
        """Copies tokens [begin, end) to `out`, across shards."""
        index = bisect_right(self._ends, begin)
        at = 0
        while begin < end:
            shard = self._map(index)
            offset = begin - (self._ends[index] - len(shard))
            part = shard[offset : offset + end - begin]
            if part.max() >= self.vocab_size:
                raise self._outside(index, offset, part)
            out[at : at + len(part)] = part
            at, begin, index = at + len(part), begin + len(part), index + 1

    def window(self, k: int, seq_len: int) -> np.ndarray:
        """Sample k: the int64 tokens [T+1] from k * T on."""
        out = np.empty(seq_len + 1, dtype=np.int64)
        self.read(k * seq_len, k * seq_len + seq_len + 1, out)
        return out

    @property
    def num_documents(self) -> int:
        """ConfigError where only reading all tokens would tell."""
        if not self.lists_documents:
            rule = "has no list of its documents, which packing and padding need"
            raise ConfigError(f'{self.label}: {rule}; use data.samples = "window", or prepare the text')
        return self._document_ends[-1]

    def documents(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Where the documents `first`, `first` + 1, ... begin and end, [count] each; fewer at the last."""
        begins, ends = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        index = bisect_right(self._document_ends, first)
        while count > 0 and index < len(self.shards):
            shard, last = self.shards[index], self._document_ends[index]
            documents = shard.documents or 0
            low = first - (last - documents)
            high = min(low + count, documents)
            bounds = shard.starts.numbered(self._open_starts(index), low, high + 1)
            offset = self._ends[index] - shard.tokens
            begins.append(bounds[: high - low] + offset)
            ends.append(np.append(bounds[1:], shard.tokens)[: high - low] + offset)
            first, count, index = last, count - (high - low), index + 1
        return np.concatenate(begins), np.concatenate(ends)

    def document_starts(self, begin: int, end: int) -> np.ndarray:
        """The positions in [begin, end) at which documents start."""
        parts = [np.empty(0, dtype=np.int64)]
        index = bisect_right(self._ends, begin)
        while begin < end and index < len(self.shards):
            shard = self.shards[index]
            first = self._ends[index] - shard.tokens
            last = min(end - first, shard.tokens)
            starts = shard.starts.between(self._open_starts(index), begin - first, last)
            parts.append(starts + first)
            begin, index = self._ends[index], index + 1
        return np.concatenate(parts)

    def _open_starts(self, index: int) -> Any:
        if index not in self._starts:
            if len(self._starts) >= MAX_MAPS:
                self._starts.clear()
            self._starts[index] = self.shards[index].starts.opened(self._map(index))
        return self._starts[index]

    def _map(self, index: int) -> np.ndarray:
        found = self._maps.get(index)
        if found is None:
            shard = self.shards[index]
            try:
                if shard.edges and edges_of(shard.path) != shard.edges:
                    raise ConfigError(
                        f"{shard.path}: holds other tokens than {MANIFEST} says: damaged, or in the place "
                        "of another; `minititan data verify` shows which files are whole"
                    )
                found = mapped(shard.path, shard.dtype.replace("i", "u"), shard.tokens, shard.offset)
            except (OSError, RuntimeError) as error:  # torch has no class of its own for a file
                raise ConfigError(f"{shard.path}: cannot be read ({error}); is it still there?") from None
            if len(self._maps) >= MAX_MAPS:
                self._maps.clear()
            self._maps[index] = found
        return found

    def _outside(self, index: int, offset: int, part: np.ndarray) -> ConfigError:
        return outside(self.shards[index].path, offset, part, self.vocab_size)


def outside(path: Path, offset: int, part: np.ndarray, vocab_size: int) -> ConfigError:
    """The fault of tokens, from `offset` in a file on, one of which is outside of the vocabulary."""
    at = int(np.argmax(part >= vocab_size))
    return ConfigError(
        f"{path}: token {offset + at} has the id {part[at]}, outside of the vocabulary of {vocab_size}; "
        "set model.hf_assets_path to the tokenizer that the tokens were made with"
    )


def read_manifest(folder: Path) -> dict[str, Any]:
    """What tokens.json says; raises DamagedTokens."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if manifest["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format version {manifest['format_version']}, not {FORMAT_VERSION}")
        _ = [manifest[key] for key in ("dtype", "vocab_size", "tokenizer", "fingerprint", "shards")]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedTokens(f"{folder / MANIFEST}: {error}") from None
    return manifest


def open_prepared(folder: Path, label: str) -> Tokens:
    """The tokens of a prepared set, its files' sizes checked; raises DamagedTokens."""
    manifest = read_manifest(folder)
    itemsize = np.dtype(manifest["dtype"]).itemsize
    shards = []
    try:
        for entry in manifest["shards"]:
            path, starts = (f"{folder}/{entry['name']}{suffix}" for suffix in (".bin", ".starts.npy"))
            _check_size(path, entry["tokens"] * itemsize)
            _check_size(starts, NPY_HEADER_BYTES + 8 * entry["documents"])
            offsets = StartsFile(Path(starts), entry["documents"])
            about = (manifest["dtype"], entry["tokens"], offsets, entry["documents"], 0, entry["edges"])
            shards.append(Shard(Path(path), *about))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedTokens(str(error)) from None
    return Tokens(
        shards,
        label=label,
        fingerprint=manifest["fingerprint"],
        vocab_size=manifest["vocab_size"],
    )


def _check_size(path: str, size: int) -> None:
    try:
        found = os.stat(path).st_size
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    if found != size:
        raise ValueError(f"{path}: holds {found} bytes, not {size}")

"""Prepared data: a folder of token shards, written once and read through memory maps.

A shard is a flat little-endian array of u16 or u32 tokens (`00000.bin`) with the offsets at which its
documents start (`00000.starts.npy`); a document lies in one shard. `tokens.json`, written last, names the
shards with their sizes and checksums, the tokenizer and the data's fingerprint: a hash of the tokens and of
the documents' boundaries alone, whatever the files, the paths or the shards they came in.
"""

import json
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from minititan.config import ConfigError
from minititan.data.encode import token_dtype

FORMAT_VERSION = 1
MANIFEST = "tokens.json"
SHARD_TOKENS = 1 << 27


class _OpenShard:
    """The shard being written."""

    def __init__(self, folder: Path, name: str) -> None:
        self.size = 0
        self.file = (folder / f"{name}.bin").open("wb")
        self._folder, self._name = folder, name
        self._hash = sha256()
        self._starts: list[np.ndarray] = []

    def append(self, content: bytes, size: int, starts: np.ndarray) -> None:
        self.file.write(content)
        self._hash.update(content)
        self._starts.append(starts + self.size)
        self.size += size

    def close(self) -> dict[str, Any]:
        """Makes the shard durable; returns its entry in the manifest."""
        sync(self.file)
        self.file.close()
        starts = np.concatenate(self._starts).astype("<i8")
        with (self._folder / f"{self._name}.starts.npy").open("wb") as file:
            np.save(file, starts)
            sync(file)
        sizes = {"name": self._name, "tokens": self.size, "documents": len(starts)}
        return sizes | {"sha256": self._hash.hexdigest()}


class ShardWriter:
    """Writes a stream of tokens into `folder`; `finish` makes it readable."""

    def __init__(
        self, folder: Path, vocab_size: int, tokenizer_fingerprint: str, shard_tokens: int = SHARD_TOKENS
    ) -> None:
        self.num_tokens = 0
        self._folder, self._shard_tokens = folder, shard_tokens
        self._vocab_size, self._tokenizer_fingerprint = vocab_size, tokenizer_fingerprint
        self._dtype = token_dtype(vocab_size)
        self._entries: list[dict[str, Any]] = []
        self._all_tokens, self._all_starts = sha256(), sha256()
        self._shard: _OpenShard | None = None

    def write(self, tokens: np.ndarray, starts: np.ndarray) -> None:
        """Appends tokens; documents start at the offsets `starts` in them.

        A shard ends before the first document that starts at or past the limit.
        """
        begin = 0
        while begin < len(tokens):
            shard = self._shard = self._shard or _OpenShard(self._folder, f"{len(self._entries):05d}")
            past = starts[(starts >= begin) & (starts - begin + shard.size >= self._shard_tokens)]
            end = int(past[0]) if len(past) else len(tokens)
            self._append(shard, tokens[begin:end], starts[(starts >= begin) & (starts < end)] - begin)
            begin = end
            if len(past):
                self._close_shard()

    def finish(self) -> None:
        self._close_shard()
        content = f"{self._dtype.str} {self._all_tokens.hexdigest()} {self._all_starts.hexdigest()}"
        manifest = {
            "format_version": FORMAT_VERSION,
            "dtype": self._dtype.str,
            "vocab_size": self._vocab_size,
            "tokenizer": self._tokenizer_fingerprint,
            "fingerprint": sha256(content.encode()).hexdigest(),
            "shards": self._entries,
        }
        with (self._folder / MANIFEST).open("w") as file:
            json.dump(manifest, file, indent=1)
            sync(file)

    def abort(self) -> None:
        """Closes the open file, if any; without `finish`, what is written stays unreadable."""
        if self._shard is not None:
            self._shard.file.close()

    def _append(self, shard: _OpenShard, tokens: np.ndarray, starts: np.ndarray) -> None:
        content = tokens.astype(self._dtype, copy=False).tobytes()
        shard.append(content, len(tokens), starts)
        self._all_tokens.update(content)
        self._all_starts.update((starts + self.num_tokens).astype("<i8").tobytes())
        self.num_tokens += len(tokens)

    def _close_shard(self) -> None:
        if self._shard is not None:
            self._entries.append(self._shard.close())
            self._shard = None


def sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


class DamagedTokens(Exception):
    """The folder holds no whole set of shards."""


class Tokens:
    """The prepared tokens of one source, mapped into memory; `label` names the source in messages.

    Pickles as its folder, so that dataloader workers map the same files. Raises DamagedTokens.
    """

    def __init__(self, folder: Path, label: str) -> None:
        self.folder, self.label = folder, label
        try:
            manifest = json.loads((folder / MANIFEST).read_bytes())
            if manifest["format_version"] != FORMAT_VERSION:
                raise ValueError(f"format version {manifest['format_version']}, not {FORMAT_VERSION}")
            dtype = np.dtype(manifest["dtype"])
            self.fingerprint: str = manifest["fingerprint"]
            self.vocab_size: int = manifest["vocab_size"]
            self._shards = [_map_shard(folder, shard, dtype) for shard in manifest["shards"]]
            self._starts = [
                np.load(folder / f"{s['name']}.starts.npy", mmap_mode="r") for s in manifest["shards"]
            ]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedTokens(f"{folder}: {error}") from None
        self._ends = np.cumsum([len(shard) for shard in self._shards])
        self.num_tokens = int(self._ends[-1])
        self.num_documents = sum(map(len, self._starts))

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokens, (self.folder, self.label)

    def num_samples(self, seq_len: int) -> int:
        """How many windows of seq_len tokens and their labels there are; raises ConfigError for none."""
        if self.num_tokens <= seq_len:
            raise ConfigError(
                f"{self.label}: holds {self.num_tokens} tokens, fewer than one sample of sequence length"
                f" {seq_len} (which needs {seq_len + 1}); give more text or a smaller seq_len"
            )
        return (self.num_tokens - 1) // seq_len

    def read(self, begin: int, end: int, out: np.ndarray) -> None:
        """Copies tokens [begin, end) to `out`, across shards."""
        shard = int(np.searchsorted(self._ends, begin, side="right"))
        at = 0
        while begin < end:
            stop = min(end, int(self._ends[shard]))
            offset = int(self._ends[shard]) - len(self._shards[shard])
            out[at : at + stop - begin] = self._shards[shard][begin - offset : stop - offset]
            at, begin, shard = at + stop - begin, stop, shard + 1

    def window(self, k: int, seq_len: int) -> np.ndarray:
        """Sample k: the int64 tokens [T+1] from k * T on."""
        out = np.empty(seq_len + 1, dtype=np.int64)
        self.read(k * seq_len, k * seq_len + seq_len + 1, out)
        return out

    def documents(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Where the documents `first`, `first` + 1, ... begin and end, [count] each; fewer at the last."""
        begins, ends = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        number = 0  # of the shard's first document
        for starts, shard_end, shard in zip(self._starts, self._ends, self._shards, strict=True):
            low, high = max(first - number, 0), min(first + count - number, len(starts))
            if low < high:
                offset = int(shard_end) - len(shard)
                begins.append(starts[low:high] + offset)
                ends.append(np.append(starts[low + 1 : high + 1], len(shard))[: high - low] + offset)
            number += len(starts)
        return np.concatenate(begins), np.concatenate(ends)

    def document_starts(self, begin: int, end: int) -> np.ndarray:
        """The positions in [begin, end) at which documents start."""
        parts = [np.empty(0, dtype=np.int64)]
        offset = 0
        for shard, starts in zip(self._shards, self._starts, strict=True):
            if offset < end and begin < offset + len(shard):
                low, high = np.searchsorted(starts, (begin - offset, end - offset))
                parts.append(starts[low:high] + offset)
            offset += len(shard)
        return np.concatenate(parts)


def _map_shard(folder: Path, shard: dict[str, Any], dtype: np.dtype) -> np.ndarray:
    tokens = np.memmap(folder / f"{shard['name']}.bin", dtype=dtype, mode="r")
    if len(tokens) != shard["tokens"]:
        raise ValueError(f"{shard['name']}.bin holds {len(tokens)} tokens, not {shard['tokens']}")
    return np.asarray(tokens)

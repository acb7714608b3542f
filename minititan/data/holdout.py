"""A held-out share of a source's documents, and the rest: each like tokens of its own.

A document is held out by the hash of its tokens, so equal documents lie in the same part, wherever they stand
and whatever else the source holds. Runs of consecutive documents of one part are found once and kept in the
cache; reading maps a part's positions to those of the source.
"""

import json
from bisect import bisect_right
from collections.abc import Callable
from hashlib import blake2b, sha256
from pathlib import Path

import numpy as np

from minititan.config import ConfigError
from minititan.data.locks import made_once
from minititan.data.shards import sync
from minititan.data.tokens import Tokens, enough_for_samples

VERSION = 1
BLOCK_DOCUMENTS = 1 << 14
NAMES = ("training", "held-out")


class Part:
    """The documents of `tokens` that are held out, or those that are not."""

    def __init__(self, tokens: Tokens, folder: Path, held_out: bool) -> None:
        self._whole, self._folder, self._name = tokens, folder, NAMES[held_out]
        about = json.loads((folder / "parts.json").read_bytes())[self._name]
        self.label = f"{tokens.label} ({self._name} part)"
        self.fingerprint = sha256(f"{tokens.fingerprint} {folder.name} {self._name}".encode()).hexdigest()
        self.num_tokens, self.num_documents = about["tokens"], about["documents"]
        # Where a run of documents begins, here and in the whole, and the numbers of its first document.
        self._runs = np.memmap(folder / f"{self._name}.bin", "<i8", "r", shape=(4, about["runs"]))
        self._begins, self._whole_begins, self._firsts, self._whole_firsts = self._runs

    def __reduce__(self) -> tuple[type, tuple[Tokens, Path, bool]]:
        return Part, (self._whole, self._folder, self._name == NAMES[True])

    def num_samples(self, seq_len: int) -> int:
        return enough_for_samples(self.label, self.num_tokens, seq_len)

    def read(self, begin: int, end: int, out: np.ndarray) -> None:
        at = 0
        for first, last, shift in self._pieces(begin, end):
            self._whole.read(first + shift, last + shift, out[at : at + last - first])
            at += last - first

    def document_starts(self, begin: int, end: int) -> np.ndarray:
        pieces = self._pieces(begin, end)
        starts = [self._whole.document_starts(a + shift, b + shift) - shift for a, b, shift in pieces]
        return np.concatenate([np.empty(0, dtype=np.int64), *starts])

    def documents(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        begins, ends = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        last = min(first + count, self.num_documents)
        while first < last:
            run = bisect_right(self._firsts, first) - 1
            run_end = int(self._firsts[run + 1]) if run + 1 < len(self._firsts) else self.num_documents
            number = int(self._whole_firsts[run]) + first - int(self._firsts[run])
            own = self._whole.documents(number, min(last, run_end) - first)
            shift = int(self._begins[run] - self._whole_begins[run])
            begins.append(own[0] + shift)
            ends.append(own[1] + shift)
            first = min(last, run_end)
        return np.concatenate(begins), np.concatenate(ends)

    def _pieces(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        """The runs in [begin, end): where each begins and ends here, and what to add for the whole."""
        pieces = []
        while begin < end:
            run = bisect_right(self._begins, begin) - 1
            run_end = int(self._begins[run + 1]) if run + 1 < len(self._begins) else self.num_tokens
            pieces.append((begin, min(end, run_end), int(self._whole_begins[run] - self._begins[run])))
            begin = run_end
        return pieces


def open_part(tokens: Tokens, share: str, held_out: bool, cache: Path, say: Callable[[str], None]) -> Part:
    """The held-out documents of `tokens`, or the others; told apart first where `cache` does not say.

    Any number of processes may call it at once. Raises ConfigError where a part has no document.
    """
    folder = cache / "holdouts" / f"{tokens.fingerprint[:32]}-{share}-{VERSION}"
    waiting = f"waiting for the holdout of {tokens.label}"
    made_once(folder, lambda aside: _write_parts(tokens, float(share), aside), lambda: say(waiting))
    return Part(tokens, folder, held_out)


def is_held_out(document: np.ndarray, share: float) -> bool:
    """Whether a document of these tokens is: its hash lies in the lowest `share` of all hashes."""
    digest = blake2b(document.astype("<u4").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def _write_parts(tokens: Tokens, share: float, folder: Path) -> None:
    runs: tuple[list[tuple[int, int, int, int]], ...] = ([], [])
    counts = [{"tokens": 0, "documents": 0} for _ in NAMES]
    part = None
    for first in range(0, tokens.num_documents, BLOCK_DOCUMENTS):
        begins, ends = tokens.documents(first, BLOCK_DOCUMENTS)
        places = zip(begins.tolist(), ends.tolist(), strict=True)
        for number, (begin, end) in enumerate(places, start=first):
            document = np.empty(end - begin, dtype=np.int64)
            tokens.read(begin, end, document)
            before, part = part, is_held_out(document, share)
            count = counts[part]
            if part != before:
                runs[part].append((count["tokens"], begin, count["documents"], number))
            count["tokens"] += end - begin
            count["documents"] += 1
    for name, own in zip(NAMES, runs, strict=True):
        if not own:
            rule = f"validation.holdout = {share:g} leaves the {name} part without a document"
            raise ConfigError(f"{tokens.label}: {rule}; choose another share, or give more documents")
        with (folder / f"{name}.bin").open("wb") as file:
            file.write(np.array(own, dtype="<i8").T.tobytes())
            sync(file)
    about = {name: {**count, "runs": len(own)} for name, own, count in zip(NAMES, runs, counts, strict=True)}
    with (folder / "parts.json").open("w") as file:
        json.dump(about, file)
        sync(file)

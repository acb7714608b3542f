"""Packing: documents put into rows of T pairs of token and label, best fit, ahead of the run.

A document of L tokens has L - 1 pairs. It is cut into pieces of T pairs, each a row of its own, and a rest;
rests are put, longest first, into the fullest row that still has room (best-fit decreasing; Johnson 1974).
Documents are packed in blocks of consecutive ones, so that memory stays bounded and the result is the same on
every machine. No document loses a pair, none is cut where it would fit.
"""

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import numpy as np

from minititan.config import ConfigError
from minititan.data.locks import made_once
from minititan.data.shards import sync
from minititan.data.tokens import TokenRow

VERSION = 1
BLOCK_DOCUMENTS = 1 << 18
MANIFEST = "packing.json"


class Packing:
    """The rows of one set of tokens, mapped into memory from `folder`. Raises OSError or ValueError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        about = json.loads((folder / MANIFEST).read_bytes())
        self.pairs: int = about["pairs"]
        self._pieces = np.memmap(
            folder / "pieces.bin", "<i8", "r", shape=(about["pieces"], 2)
        )  # begin, pairs
        self._ends = np.memmap(folder / "ends.bin", "<i8", "r", shape=(about["rows"],))  # of pieces, a row

    def __len__(self) -> int:
        return len(self._ends)

    def __reduce__(self) -> tuple[type, tuple[Path]]:
        return Packing, (self.folder,)

    def pieces(self, row: int) -> list[tuple[int, int]]:
        """Where the pieces of a row begin in the tokens, and how many pairs each has."""
        first = int(self._ends[row - 1]) if row else 0
        return [(begin, pairs) for begin, pairs in self._pieces[first : self._ends[row]].tolist()]


def open_packing(tokens: TokenRow, seq_len: int, cache: Path, say: Callable[[str], None]) -> Packing:
    """The packing of `tokens` into rows of `seq_len`, made first if the cache does not have it.

    Any number of processes may call it at once: one makes it.
    """
    folder = cache / "packings" / f"{tokens.fingerprint[:32]}-{seq_len}-{VERSION}"

    def make(aside: Path) -> None:
        if not write_packing(tokens, seq_len, aside):
            rule = "no document has two tokens, which a token and its label are"
            raise ConfigError(f"{tokens.label}: {rule}; give longer documents")

    made_once(folder, make, lambda: say(f"waiting for the packing of {tokens.label}"))
    packing = Packing(folder)
    share = packing.pairs / (len(packing) * seq_len)
    say(f"{tokens.label}: packed into {len(packing)} rows of {seq_len}, {100 * share:.1f} % in use")
    return packing


def write_packing(tokens: TokenRow, seq_len: int, folder: Path) -> int:
    """Packs all documents; `folder` then holds the pieces of all rows, row by row, and where rows end.

    Returns how many rows these are.
    """
    counts = {"rows": 0, "pieces": 0, "pairs": 0}
    hashes = {"pieces": sha256(), "ends": sha256()}
    with (folder / "pieces.bin").open("wb") as pieces_file, (folder / "ends.bin").open("wb") as ends_file:
        for first in range(0, tokens.num_documents, BLOCK_DOCUMENTS):
            begins, ends = tokens.documents(first, BLOCK_DOCUMENTS)
            pieces, row_ends = pack(begins, ends, seq_len)
            for file, name, array in (
                (pieces_file, "pieces", pieces),
                (ends_file, "ends", row_ends + counts["pieces"]),
            ):
                content = array.astype("<i8").tobytes()
                file.write(content)
                hashes[name].update(content)
            counts["rows"] += len(row_ends)
            counts["pieces"] += len(pieces)
            counts["pairs"] += int(pieces[:, 1].sum())
        sync(pieces_file)
        sync(ends_file)
    about = {"version": VERSION, "seq_len": seq_len, "tokens": tokens.fingerprint, **counts}
    about["sha256"] = {name: digest.hexdigest() for name, digest in hashes.items()}
    with (folder / MANIFEST).open("w") as file:
        json.dump(about, file)
        sync(file)
    return counts["rows"]


def pack(begins: np.ndarray, ends: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack documents, tokens [begin, end) each, into rows of `seq_len` pairs.

    Returns the pieces [pieces, 2] (begin, pairs) row by row, and the number of pieces up to each row's end.
    """
    pairs = np.maximum(ends - begins - 1, 0)
    whole, rest = pairs // seq_len, pairs % seq_len
    within = np.arange(whole.sum()) - np.repeat(np.cumsum(whole) - whole, whole)
    full = np.repeat(begins, whole) + within * seq_len  # a row each
    order = np.argsort(-rest, kind="stable")[: np.count_nonzero(rest)]
    rows = best_fit(rest[order].tolist(), seq_len)
    by_row = np.argsort(rows, kind="stable")
    rest_begins = (begins + whole * seq_len)[order]
    pieces = np.concatenate(
        [
            np.stack([full, np.full(len(full), seq_len)], axis=1),
            np.stack([rest_begins, rest[order]], axis=1)[by_row],
        ]
    )
    sizes = np.concatenate([np.ones(len(full), dtype=np.int64), np.bincount(rows)])
    return pieces, np.cumsum(sizes)


def best_fit(lengths: list[int], capacity: int) -> np.ndarray:
    """The row of each length, in turn: the fullest that it fits into, else a new one."""
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # rows by what room they have
    rooms = 0  # bit r: a row has room r
    chosen = np.empty(len(lengths), dtype=np.int64)
    count = 0
    for i, length in enumerate(lengths):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, row, count = capacity, count, count + 1
        chosen[i] = row
        if left := room - length:
            with_room[left].append(row)
            rooms |= 1 << left
    return chosen

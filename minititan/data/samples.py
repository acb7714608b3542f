"""Samples: what a row of a batch is made of, by its number.

A row is T pairs of a token and its label, the token after it. Three ways of cutting documents into rows:
windows of the running text, whatever documents it crosses; one document a row; rows packed with whole
documents (`packing.py`). Number and content of a row depend on the tokens and T alone.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

from minititan.data.packing import Packing, open_packing
from minititan.data.tokens import TokenRow

IGNORED_LABEL = -100
NO_SAMPLE = -1

Batch = dict[str, torch.Tensor]


class Rows:
    """Arrays [B, T] that samples are read into; places that none fills have no label."""

    def __init__(self, count: int, seq_len: int, document_mask: bool) -> None:
        shape = (count, seq_len)
        self.tokens = np.zeros(shape, dtype=np.int64)
        self.labels = np.full(shape, IGNORED_LABEL, dtype=np.int64)
        self.documents = np.zeros(shape, dtype=np.int64) if document_mask else None
        self.positions = np.zeros(shape, dtype=np.int64) if document_mask else None
        self._places = np.arange(seq_len)

    def tell_apart(self, row: int, ends: Sequence[int]) -> None:
        """Number the pieces of documents in a row, which end at `ends`, and what follows the last; count the
        places inside each.
        """
        if self.documents is None or self.positions is None:
            return
        begin = 0
        for number, end in enumerate((*ends, len(self._places))):
            self.documents[row, begin:end] = number
            self.positions[row, begin:end] = self._places[: end - begin]
            begin = end


class Samples(Protocol):
    """The samples of one source at one sequence length."""

    tokens: TokenRow

    def __len__(self) -> int: ...

    def read(self, k: int, rows: Rows, row: int) -> None:
        """Write sample k into `row`."""
        ...


class Windows:
    """Sample k: the T + 1 tokens from k T on. Raises ConfigError for less than one.

    Documents are told apart with `boundaries` only; `skip_first_labels` takes labels away that are the first
    token of a document.
    """

    def __init__(self, tokens: TokenRow, seq_len: int, *, boundaries: bool, skip_first_labels: bool) -> None:
        self.tokens, self._seq_len = tokens, seq_len
        self._boundaries, self._skip_first_labels = boundaries or skip_first_labels, skip_first_labels
        self._count = tokens.num_samples(seq_len)

    def __len__(self) -> int:
        return self._count

    def read(self, k: int, rows: Rows, row: int) -> None:
        begin = k * self._seq_len
        _read_pairs(self.tokens, rows, row, 0, begin, self._seq_len)
        if not self._boundaries:
            return
        starts = self.tokens.document_starts(begin + 1, begin + self._seq_len + 1) - begin
        rows.tell_apart(row, starts[starts < self._seq_len].tolist())
        if self._skip_first_labels:
            rows.labels[row][starts - 1] = IGNORED_LABEL


class Documents:
    """Sample k: document k, cut after T + 1 tokens; what it does not fill is padding without labels."""

    def __init__(self, tokens: TokenRow, seq_len: int) -> None:
        self.tokens, self._seq_len = tokens, seq_len

    def __len__(self) -> int:
        return self.tokens.num_documents

    def read(self, k: int, rows: Rows, row: int) -> None:
        begins, ends = self.tokens.documents(k, 1)
        pairs = max(min(int(ends[0] - begins[0]) - 1, self._seq_len), 0)
        _read_pairs(self.tokens, rows, row, 0, int(begins[0]), pairs)
        rows.tell_apart(row, [pairs])


class Packed:
    """Sample k: the pieces of documents that `packing` put into row k, each with its own labels only."""

    def __init__(self, tokens: TokenRow, packing: Packing) -> None:
        self.tokens, self._packing = tokens, packing

    def __len__(self) -> int:
        return len(self._packing)

    def read(self, k: int, rows: Rows, row: int) -> None:
        ends = [0]
        for begin, pairs in self._packing.pieces(k):
            _read_pairs(self.tokens, rows, row, ends[-1], begin, pairs)
            ends.append(ends[-1] + pairs)
        rows.tell_apart(row, ends[1:])


def _read_pairs(tokens: TokenRow, rows: Rows, row: int, at: int, begin: int, pairs: int) -> None:
    """Writes `pairs` tokens from `begin` on, and their labels, to the row from `at` on."""
    if not pairs:
        return  # a document of one token, or of none, which may lie at the very end
    ids = np.empty(pairs + 1, dtype=np.int64)
    tokens.read(begin, begin + pairs + 1, ids)  # once: a read costs more than the copies
    rows.tokens[row, at : at + pairs] = ids[:-1]
    rows.labels[row, at : at + pairs] = ids[1:]


def build_samples(
    tokens: TokenRow,
    kind: str,
    seq_len: int,
    *,
    cache: Path,
    document_mask: bool,
    predict_first_token: bool,
    say: Callable[[str], None],
) -> Samples:
    """The samples of `tokens` by `kind`: "window", "pack" (packed first where `cache` has no packing), "pad".

    Raises ConfigError where there is none.
    """
    if kind == "window":
        return Windows(tokens, seq_len, boundaries=document_mask, skip_first_labels=not predict_first_token)
    if kind == "pad":
        return Documents(tokens, seq_len)
    return Packed(tokens, open_packing(tokens, seq_len, cache, say))


class SampleRows(Dataset[Batch]):
    """Micro-batches by samples' numbers, through all sources; NO_SAMPLE gives a row without labels.

    `tokens` and `labels` [B, T]; with `document_mask` also `document_ids` and `positions`, which let
    attention stay inside documents.
    """

    def __init__(self, sources: Sequence[Samples], seq_len: int, document_mask: bool) -> None:
        self._sources, self._seq_len, self._document_mask = sources, seq_len, document_mask
        self._ends = np.cumsum([len(samples) for samples in sources])

    def __getitems__(self, numbers: list[int]) -> Batch:
        rows = Rows(len(numbers), self._seq_len, self._document_mask)
        for row, number in enumerate(numbers):
            if number != NO_SAMPLE:
                source = int(np.searchsorted(self._ends, number, side="right"))
                samples = self._sources[source]
                samples.read(number - int(self._ends[source]) + len(samples), rows, row)
        batch = {"tokens": rows.tokens, "labels": rows.labels}
        if self._document_mask:
            batch |= {"document_ids": rows.documents, "positions": rows.positions}
        return {name: torch.from_numpy(array) for name, array in batch.items()}

"""Samples: windows, documents and packed rows hold each pair of token and label that they should, once."""

import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minititan.data import Tokens, build_samples
from minititan.data.packing import Packing, best_fit, pack, write_packing
from minititan.data.samples import IGNORED_LABEL, NO_SAMPLE, SampleRows, Samples
from minititan.models import decoder
from tests.token_sets import save_tokens

LENGTHS = [5, 1, 30, 2, 9, 17, 8, 1, 3, 40, 6, 7, 3, 4]
T = 8


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    """Documents of LENGTHS tokens, in small shards: 100 d + i is the i-th of document d."""
    folder = tmp_path_factory.mktemp("tokens")
    stream = np.concatenate([100 * d + np.arange(length) for d, length in enumerate(LENGTHS)])
    starts = np.cumsum([0, *LENGTHS[:-1]])
    return save_tokens(folder, stream, starts, 2000, tuple(starts[[4, 6, 9, 10]].tolist()), "numbers")


def samples_of(tokens: Tokens, kind: str, cache: Path, **options) -> Samples:
    options = {"document_mask": True, "predict_first_token": True} | options
    return build_samples(tokens, kind, T, cache=cache, say=lambda line: None, **options)


def rows_of(samples: Samples, document_mask: bool = True) -> dict[str, np.ndarray]:
    batch = SampleRows([samples], T, document_mask).__getitems__(list(range(len(samples))))
    return {name: tensor.numpy() for name, tensor in batch.items()}


def pairs_of(rows: dict[str, np.ndarray]) -> Counter:
    kept = rows["labels"] != IGNORED_LABEL
    return Counter(zip(rows["tokens"][kept].tolist(), rows["labels"][kept].tolist(), strict=True))


def all_pairs() -> Counter:
    return Counter(
        (100 * d + i, 100 * d + i + 1) for d, length in enumerate(LENGTHS) for i in range(length - 1)
    )


def check_documents(rows: dict[str, np.ndarray]) -> None:
    """Numbers change, and positions restart, where and only where another document's token stands."""
    for tokens, labels, ids, positions in zip(
        *(rows[n] for n in ("tokens", "labels", "document_ids", "positions")), strict=True
    ):
        for i in range(T):
            begins = i == 0 or ids[i] != ids[i - 1]
            assert positions[i] == (0 if begins else positions[i - 1] + 1)
            if i and labels[i] != IGNORED_LABEL and labels[i - 1] != IGNORED_LABEL:
                assert begins == (tokens[i] != tokens[i - 1] + 1)


def test_packed_rows_have_each_pair_of_each_document_once(tokens: Tokens, tmp_path: Path):
    samples = samples_of(tokens, "pack", tmp_path)
    rows = rows_of(samples)
    assert pairs_of(rows) == all_pairs()
    check_documents(rows)
    again = samples_of(tokens, "pack", tmp_path)
    assert np.array_equal(rows_of(pickle.loads(pickle.dumps(again)))["tokens"], rows["tokens"])


def test_a_document_a_row_is_cut_or_padded(tokens: Tokens, tmp_path: Path):
    rows = rows_of(samples_of(tokens, "pad", tmp_path))
    assert len(rows["tokens"]) == len(LENGTHS)
    for d, length in enumerate(LENGTHS):
        pairs = min(length - 1, T)
        assert rows["tokens"][d, :pairs].tolist() == [100 * d + i for i in range(pairs)]
        assert rows["labels"][d].tolist() == [100 * d + i + 1 for i in range(pairs)] + [IGNORED_LABEL] * (
            T - pairs
        )
    check_documents(rows)


def test_windows_tell_documents_apart(tokens: Tokens, tmp_path: Path):
    stream = np.concatenate([100 * d + np.arange(length) for d, length in enumerate(LENGTHS)])
    rows = rows_of(samples_of(tokens, "window", tmp_path))
    assert rows["tokens"].ravel().tolist() == stream[: rows["tokens"].size].tolist()
    check_documents(rows)
    skipped = rows_of(samples_of(tokens, "window", tmp_path, predict_first_token=False))
    first = skipped["labels"] == IGNORED_LABEL
    assert np.array_equal(first, rows["labels"] % 100 == 0)
    assert np.array_equal(skipped["labels"][~first], rows["labels"][~first])
    bare = rows_of(samples_of(tokens, "window", tmp_path, document_mask=False), document_mask=False)
    assert set(bare) == {"tokens", "labels"} and np.array_equal(bare["labels"], rows["labels"])


def test_numbers_run_through_all_sources(tokens: Tokens, tmp_path: Path):
    parts = [samples_of(tokens, kind, tmp_path) for kind in ("pad", "window", "pack")]
    whole = SampleRows(parts, T, False)
    expected = np.concatenate([rows_of(part)["labels"] for part in parts])
    numbers = list(range(len(expected)))
    assert np.array_equal(whole.__getitems__(numbers)["labels"].numpy(), expected)
    assert (whole.__getitems__([NO_SAMPLE])["labels"] == IGNORED_LABEL).all()


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 70), min_size=1, max_size=60), st.integers(1, 20))
def test_packing_loses_nothing_and_cuts_nothing_that_fits(lengths: list[int], seq_len: int):
    ends = np.cumsum(lengths)
    begins = ends - lengths
    pieces, row_ends = pack(begins, ends, seq_len)
    rows = [pieces[a:b].tolist() for a, b in zip([0, *row_ends][:-1], row_ends, strict=True)]
    assert all(0 < sum(pairs for _, pairs in row) <= seq_len for row in rows)
    found: dict[int, list[list[int]]] = {}
    for begin, pairs in sorted(piece for row in rows for piece in row):
        found.setdefault(int(np.searchsorted(ends, begin, side="right")), []).append([begin, pairs])
    for d, length in enumerate(lengths):
        expected = [[int(begins[d]) + i, min(seq_len, length - 1 - i)] for i in range(0, length - 1, seq_len)]
        assert found.get(d, []) == expected


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 30), max_size=80), st.integers(0, 20))
def test_best_fit_is_that_of_a_plain_search(lengths: list[int], more: int):
    lengths = sorted(lengths, reverse=True)
    capacity = max(lengths, default=1) + more
    rooms: list[int] = []
    for length, row in zip(lengths, best_fit(lengths, capacity).tolist(), strict=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            assert rooms[row] == min(fitting)
        else:
            assert row == len(rooms)
            rooms.append(capacity)
        rooms[row] -= length


def test_packing_in_blocks_keeps_every_pair(tokens: Tokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("minititan.data.packing.BLOCK_DOCUMENTS", 5)
    write_packing(tokens, T, tmp_path)
    packing = Packing(tmp_path)
    pieces = sorted(piece for row in range(len(packing)) for piece in packing.pieces(row))
    ends = np.cumsum(LENGTHS)
    expected = [
        (int(end - length) + i, min(T, length - 1 - i))
        for end, length in zip(ends, LENGTHS, strict=True)
        for i in range(0, length - 1, T)
    ]
    assert pieces == sorted(expected) and packing.pairs == sum(length - 1 for length in LENGTHS)


def test_another_document_changes_no_bit_of_a_documents_logits(tokens: Tokens, tmp_path: Path):
    """Neither its content nor where it stands in the row: attention and positions stay inside documents."""
    torch.manual_seed(0)
    args = decoder.DecoderArgs(64, 2, 8, 4, intermediate_size=96, vocab_size=2000)
    model = decoder.Decoder(args)
    rows = rows_of(samples_of(tokens, "pack", tmp_path))
    mixed = next(i for i, ids in enumerate(rows["document_ids"]) if ids.max() >= 2)
    inputs = {
        name: torch.from_numpy(rows[name][mixed : mixed + 1])
        for name in ("tokens", "positions", "document_ids")
    }
    middle = inputs["document_ids"] == 1
    before = model.lm_head(model(**inputs))
    inputs["tokens"] = torch.where(middle, (inputs["tokens"] + 7) % 2000, inputs["tokens"])
    after = model.lm_head(model(**inputs))
    assert torch.equal(before[~middle], after[~middle]) and not torch.equal(before[middle], after[middle])
    alone = {"tokens": inputs["tokens"][middle][None], "positions": inputs["positions"][middle][None]}
    assert torch.allclose(model.lm_head(model(**alone))[0], after[middle], atol=1e-5)

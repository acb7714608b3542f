"""A held-out part and the rest: every document in one of them, whole and in order, by its content alone."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from minititan.config import ConfigError
from minititan.data import Tokens, build_samples, open_part
from minititan.data.holdout import Part, is_held_out
from minititan.data.samples import SampleRows
from tests.token_sets import save_tokens

T = 16


def documents() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    own = [rng.integers(0, 1000, rng.integers(1, 60)) for _ in range(400)]
    return [*own, *own[:20]]  # the same again, far away


def saved(folder: Path, own: list[np.ndarray], every: int) -> Tokens:
    """The documents in shards of `every`."""
    starts = np.cumsum([0, *map(len, own[:-1])])
    return save_tokens(
        folder, np.concatenate(own), starts, 1000, tuple(starts[every::every].tolist()), "numbers"
    )


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    return saved(tmp_path_factory.mktemp("tokens"), documents(), 23)


def part_of(tokens: Tokens, cache: Path, held_out: bool, share: str = "0.2") -> Part:
    return open_part(tokens, share, held_out, cache, print)


def rows(part: Part, kind: str, cache: Path, seq_len: int = T) -> np.ndarray:
    samples = build_samples(
        part, kind, seq_len, cache=cache, document_mask=True, predict_first_token=True, say=lambda line: None
    )
    batch = SampleRows([samples], seq_len, True).__getitems__(list(range(len(samples))))
    return np.stack([batch[name].numpy() for name in ("tokens", "labels", "document_ids")])


@pytest.mark.parametrize("held_out", [False, True])
def test_a_part_is_like_a_source_of_its_own_documents(tokens: Tokens, held_out: bool, tmp_path: Path):
    own = [document for document in documents() if is_held_out(document, 0.2) == held_out]
    assert (50 < len(own) < 120) == held_out
    alone = saved(tmp_path / "alone", own, 17)
    part = pickle.loads(pickle.dumps(part_of(tokens, tmp_path, held_out)))
    assert (part.num_tokens, part.num_documents) == (alone.num_tokens, alone.num_documents)
    for kind in ("window", "pack", "pad"):
        assert np.array_equal(rows(part, kind, tmp_path), rows(alone, kind, tmp_path))
    for first, count in ((0, 3), (17, 40), (len(own) - 2, 10)):
        for found, expected in zip(part.documents(first, count), alone.documents(first, count), strict=True):
            assert found.tolist() == expected.tolist()
    for begin, end in ((0, 1), (5, 900), (part.num_tokens - 70, part.num_tokens)):
        expected = alone.document_starts(begin, end).tolist()
        assert part.document_starts(begin, end).tolist() == expected


def test_the_parts_are_the_whole_and_equal_documents_lie_together(tokens: Tokens, tmp_path: Path):
    parts = [part_of(tokens, tmp_path, held_out) for held_out in (False, True)]
    assert sum(part.num_documents for part in parts) == 420
    assert sum(part.num_tokens for part in parts) == tokens.num_tokens
    assert len({tokens.fingerprint, *(part.fingerprint for part in parts)}) == 3
    assert part_of(tokens, tmp_path, True, "0.3").fingerprint != parts[1].fingerprint
    contents = []
    for part in parts:
        begins, ends = part.documents(0, part.num_documents)
        row = np.empty(part.num_tokens, dtype=np.int64)
        part.read(0, part.num_tokens, row)
        contents.append({tuple(row[a:b]) for a, b in zip(begins, ends, strict=True)})
    assert not contents[0] & contents[1]
    # A larger share holds out what a smaller one does.
    held = [{tuple(d) for d in documents() if is_held_out(d, share)} for share in (0.2, 0.3)]
    assert held[0] < held[1]


@pytest.mark.parametrize("share, name", [("1e-9", "held-out"), ("0.999999999", "training")])
def test_a_part_without_a_document_is_refused(tokens: Tokens, share: str, name: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=f"numbers: validation.holdout = .* leaves the {name} part without"):
        part_of(tokens, tmp_path, True, share)

"""Loaders: no layout, restart, batch size or worker changes which samples a step takes."""

import pickle
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minititan.config import ConfigError, RankFault
from minititan.config.batches import BatchSizes
from minititan.data import DataState, Tokens, TrainLoader, build_train_loader, build_validation_loader
from minititan.data.loader import ValidationLoader
from minititan.data.samples import Windows
from tests.test_data_order import reference_sample
from tests.token_sets import save_tokens

T = 8
SAMPLES = 45


@pytest.fixture(scope="module")
def stream() -> np.ndarray:
    """Tokens that are all different, so that a sample is known by its first."""
    return np.random.default_rng(0).permutation(T * SAMPLES + 5)


@pytest.fixture(scope="module")
def tokens(stream: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    folder = tmp_path_factory.mktemp("tokens")
    part = len(stream) // 5
    starts = np.concatenate([np.arange(0, part, 11) + i * part for i in range(5)])
    cuts = tuple(starts[[5, 10, 14, 28]].tolist())
    return save_tokens(folder, stream, starts, len(stream), cuts, 'training.dataset = "numbers"')


def train_loader(
    tokens: Tokens, batch: int, micro: int, rank: int = 0, degree: int = 1, **more
) -> TrainLoader:
    options = {"kind": "window", "seq_len": T, "seed": 5, "micro_batch_size": micro} | more
    state, steps_done = options.pop("state", None), options.pop("steps_done", 0)
    samples = Windows(tokens, options["seq_len"], boundaries=False, skip_first_labels=False)
    sizes = BatchSizes(((1, batch),))
    loader = build_train_loader({"": samples}, batch_sizes=sizes, dp_rank=rank, dp_degree=degree, **options)
    if state is not None:
        loader.resume(state, steps_done)
    return loader


def validation_loader(tokens: Tokens, seq_len: int = T, **more: Any) -> ValidationLoader:
    samples = Windows(tokens, seq_len, boundaries=False, skip_first_labels=False)
    return build_validation_loader([samples], seq_len=seq_len, **more)


def take_steps(loaders: list[TrainLoader], steps: int, micro_batches: int) -> list[torch.Tensor]:
    """The rows [global batch, T+1] of each step, rank after rank."""
    iterators = [iter(loader) for loader in loaders]
    taken = []
    for _ in range(steps):
        batches = [batch for it in iterators for batch in islice(it, micro_batches)]
        taken.append(torch.cat([torch.cat((b["tokens"][:, :1], b["labels"]), 1) for b in batches]))
    return taken


def expected_rows(stream: np.ndarray, begin: int, count: int) -> torch.Tensor:
    samples = [reference_sample(g, SAMPLES, 5) for g in range(begin, begin + count)]
    return torch.tensor(np.array([stream[k * T : k * T + T + 1] for k in samples]), dtype=torch.int64)


def test_less_text_than_one_sample_is_refused(tokens: Tokens):
    message = r'^training\.dataset = "numbers": holds 365 tokens, .* 365 '
    with pytest.raises(ConfigError, match=message):
        train_loader(tokens, 1, 1, seq_len=365)
    with pytest.raises(ConfigError, match=message):
        validation_loader(tokens, 365, batch_size=1, dp_rank=0, dp_degree=1)
    assert tokens.num_samples(364) == 1


@pytest.mark.parametrize(
    "change, words",
    [
        (
            {"seed": 6},
            "debug.seed: the run to be resumed has 5; set debug.seed = 5, or set checkpoint.exclude",
        ),
        ({"seq_len": 4}, "training.seq_len: the run to be resumed has 8; set training.seq_len = 8"),
    ],
)
def test_another_stream_is_refused(tokens: Tokens, change: dict[str, Any], words: str):
    state = train_loader(tokens, 4, 2).state()
    with pytest.raises(ConfigError) as error:
        train_loader(tokens, 4, 2, state=state, **change)
    assert len(error.value.faults) == 1 and error.value.faults[0].startswith(words)


def test_other_tokens_and_orders_are_refused(tokens: Tokens):
    state = replace(train_loader(tokens, 4, 2).state(), sources=(("", "0" * 64),), order_version=2)
    with pytest.raises(ConfigError) as error:
        train_loader(tokens, 4, 2, state=state)
    assert len(error.value.faults) == 2
    assert "order version 2; this release gives version 1" in error.value.faults[0]
    assert 'dataset = "numbers": gives other tokens' in error.value.faults[1]


def test_batch_that_follows_the_layout_is_refused_on_another_layout(tokens: Tokens):
    auto: dict[str, Any] = {"auto_global_batch_size": True}
    state = train_loader(tokens, 4, 2, degree=2, **auto).state()
    with pytest.raises(ConfigError, match=r"4 samples a step on 2 data-parallel ranks.* set it to 4$"):
        train_loader(tokens, 8, 2, degree=4, state=state, **auto)
    assert train_loader(tokens, 4, 1, degree=4, state=state).state().global_batch_size == 4
    # On as many ranks the user's own change of the local batch is no surprise.
    assert train_loader(tokens, 2, 1, degree=2, state=state, **auto).state().global_batch_size == 2


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"order_version":1,"samples_consumed":0}'])
def test_broken_state_is_refused(text: str):
    with pytest.raises(ConfigError, match=r"^data state: "):
        DataState.from_json(text)


def test_state_survives_json(tokens: Tokens):
    state = train_loader(tokens, 4, 2, degree=2, auto_global_batch_size=True).state()
    assert DataState.from_json(state.to_json()) == state
    assert " " not in state.to_json() and state.to_json().startswith('{"auto_dp_degree":2,')


@settings(deadline=None, max_examples=20)
@given(st.data())
def test_any_layouts_in_turn_take_the_same_stream(stream: np.ndarray, tokens: Tokens, data: st.DataObject):
    """Legs on other numbers of ranks, micro-batches and batch sizes, over more than one epoch."""
    state, begin = None, 0
    for _ in range(data.draw(st.integers(1, 4))):
        degree = data.draw(st.sampled_from([1, 2, 3, 4]))
        micro = data.draw(st.integers(1, 3))
        accumulation = data.draw(st.integers(1, 3))
        steps = data.draw(st.integers(1, 4))
        batch = degree * micro * accumulation
        loaders = [train_loader(tokens, batch, micro, rank, degree, state=state) for rank in range(degree)]
        for rows in take_steps(loaders, steps, accumulation):
            assert torch.equal(rows, expected_rows(stream, begin, batch))
            begin += batch
        states = {loader.state() for loader in loaders}
        assert len(states) == 1
        state = states.pop()
        assert state.samples_consumed == begin


def test_batches_larger_than_the_set_and_blocks_of_numbers(stream: np.ndarray, tokens: Tokens):
    """A step may hold several epochs, and the stream outlasts the numbers that are computed at once."""
    for batch, micro, degree, steps in ((120, 20, 2, 2), (3, 3, 1, 360), (1500, 500, 3, 2)):
        loaders = [train_loader(tokens, batch, micro, rank, degree) for rank in range(degree)]
        for step, rows in enumerate(take_steps(loaders, steps, batch // degree // micro)):
            assert torch.equal(rows, expected_rows(stream, step * batch, batch))


def test_the_state_counts_whole_steps_that_were_taken(stream: np.ndarray, tokens: Tokens):
    loader = train_loader(tokens, 6, 2)
    iterator = iter(loader)
    counts = []
    for _ in range(7):
        next(iterator)
        counts.append(loader.state().samples_consumed)
    assert counts == [0, 0, 6, 6, 6, 12, 12]
    # Iterating again neither starts over nor loses the step that was begun.
    (rows,) = take_steps([loader], 1, 3)
    assert torch.equal(rows, expected_rows(stream, 12, 6))


def test_workers_change_nothing(stream: np.ndarray, tokens: Tokens):
    loader = train_loader(tokens, 4, 2, num_workers=2, prefetch_factor=3, persistent_workers=True)
    first = take_steps([loader], 3, 2)
    assert loader.state().samples_consumed == 12
    resumed = train_loader(tokens, 4, 2, state=loader.state(), num_workers=1)
    for step, rows in enumerate(first + take_steps([resumed], 2, 2)):
        assert torch.equal(rows, expected_rows(stream, step * 4, 4))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["train", "validation"])
def test_a_fault_in_a_worker_reaches_the_user_as_its_line_alone(tmp_path: Path, kind: str, workers: int):
    ids = np.arange(T * 4 + 1)
    tokens = save_tokens(tmp_path, ids, np.zeros(1, dtype=np.int64), len(ids))
    tokens.vocab_size = 20
    build = {"train": partial(train_loader, tokens, 2, 2), "validation": partial(_validation_of, tokens)}[
        kind
    ]
    with pytest.raises(RankFault, match=r"\A/\S*00000-000\.bin: token 20 has the id 20, [^\n]*\Z"):
        list(islice(build(num_workers=workers), 5))


def _validation_of(tokens: Tokens, **more: Any) -> ValidationLoader:
    return validation_loader(tokens, batch_size=2, dp_rank=0, dp_degree=1, **more)


def test_micro_batches_are_what_a_model_takes(tokens: Tokens):
    batch = next(iter(train_loader(tokens, 6, 3, num_workers=0, pin_memory=True)))
    assert set(batch) == {"tokens", "labels"}
    for value in batch.values():
        assert value.shape == (3, T) and value.dtype == torch.int64 and value.is_contiguous()
    assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5), st.integers(1, 7), st.integers(-1, SAMPLES + 3))
def test_validation_takes_each_sample_once(
    stream: np.ndarray, tokens: Tokens, degree: int, batch_size: int, asked: int
):
    n = SAMPLES if asked < 0 else min(asked, SAMPLES)
    loaders = [
        validation_loader(tokens, batch_size=batch_size, num_samples=asked, dp_rank=rank, dp_degree=degree)
        for rank in range(degree)
    ]
    batches = [list(loader) for loader in loaders]
    assert len({len(own) for own in batches}) == 1 and len(batches[0]) == len(loaders[0])
    rows = [row for own in batches for b in own for row in zip(b["tokens"], b["labels"], strict=True)]
    full = {int(tokens_row[0]): labels_row for tokens_row, labels_row in rows if (labels_row >= 0).all()}
    empty = [labels_row for _, labels_row in rows if (labels_row == -100).all()]
    assert len(full) == n and len(full) + len(empty) == len(rows)
    for k in range(n):
        assert full[int(stream[k * T])].tolist() == stream[k * T + 1 : k * T + T + 1].tolist()


def test_validation_can_be_repeated_with_workers(tokens: Tokens):
    loader = validation_loader(
        tokens, batch_size=16, dp_rank=0, dp_degree=1, num_workers=1, persistent_workers=True
    )
    first, second = list(loader), list(loader)
    assert len(first) == 3
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one["labels"], other["labels"])


def test_windows_cross_shards_and_survive_pickling(stream: np.ndarray, tokens: Tokens):
    assert len(tokens.shards) == 5
    copy = pickle.loads(pickle.dumps(tokens))
    assert len(pickle.dumps(tokens)) < 2000
    for k in range(SAMPLES):
        window = copy.window(k, T)
        assert window.dtype == np.int64 and window.tolist() == stream[k * T : k * T + T + 1].tolist()
    out = np.empty(len(stream), dtype=np.int64)
    copy.read(0, len(stream), out)
    assert np.array_equal(out, stream)


def test_document_starts(stream: np.ndarray, tokens: Tokens):
    part = len(stream) // 5
    starts = np.concatenate([np.arange(0, part, 11) + i * part for i in range(5)])
    assert tokens.document_starts(0, len(stream)).tolist() == starts.tolist()
    for begin, end in ((0, 1), (1, 11), (11, 12), (40, 160), (73, 74), (300, 365)):
        expected = starts[(starts >= begin) & (starts < end)].tolist()
        assert tokens.document_starts(begin, end).tolist() == expected

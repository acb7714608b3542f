"""Elastic data: no layout, accumulation, restart, worker or change of batch size moves a sample.

Runs are drawn at random, in legs: each goes on from the state that the one before left, in JSON. The
reference is the stream of one process, which knows of none of this.
"""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from minititan.config import ConfigError
from minititan.config.batches import BatchSizes
from minititan.data import DataState, TrainLoader, build_train_loader
from minititan.data.mixture import Mixture, Stage
from minititan.data.samples import Samples, Windows
from tests.token_sets import save_tokens

T = 4


class Numbers:
    """Stands in for the samples of a source: a row is the sample's number, again and again."""

    class tokens:
        fingerprint, label = "numbers", "numbers"

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def read(self, k: int, rows, row: int) -> None:
        rows.tokens[row] = k


@dataclass(frozen=True)
class Leg:
    dp: int
    micro: int
    steps: int
    workers: int = 0


@dataclass(frozen=True)
class Case:
    """A run over sources with weights from steps on, whose batch size changes at steps, in legs."""

    sizes: tuple[int, ...]
    stages: tuple[tuple[int, tuple[str, ...]], ...]
    batches: tuple[tuple[int, int], ...]
    legs: tuple[Leg, ...]
    seed: int

    def place(self, steps: int) -> int:
        """Samples before the end of so many steps, counted step by step."""
        return sum(
            next(size for first, size in reversed(self.batches) if first <= step)
            for step in range(1, steps + 1)
        )

    def stream(self) -> list[np.ndarray]:
        """The samples of each step."""
        steps = sum(leg.steps for leg in self.legs)
        stages = [Stage(self.place(first - 1), weights) for first, weights in self.stages]
        samples = Mixture(self.sizes, stages, self.seed).samples_at(np.arange(self.place(steps)))
        return [samples[self.place(step) : self.place(step + 1)] for step in range(steps)]


def random_case(rng: random.Random, sizes: tuple[int, ...], workers: bool = False) -> Case:
    degrees = [1, 2, 3, 4, 6]
    unit = 12  # every degree x micro-batch divides it
    legs = []
    for _ in range(rng.randint(1, 4)):
        dp = rng.choice(degrees)
        micro = rng.choice([m for m in (1, 2, 3, 4, 6, 12) if unit % (dp * m) == 0])
        legs.append(Leg(dp, micro, rng.randint(1, 5), rng.randint(0, 2) if workers else 0))
    changes = sorted(rng.sample(range(2, 16), rng.randint(0, 3)))
    batches = ((1, unit * rng.randint(1, 4)), *((step, unit * rng.randint(1, 6)) for step in changes))
    starts = [1, *sorted(rng.sample(range(2, 16), rng.randint(0, 2) if len(sizes) > 1 else 0))]
    weights = [tuple(rng.choice(["1", "0.5", "3", "0.02"]) for _ in sizes) for _ in starts]
    return Case(sizes, tuple(zip(starts, weights, strict=True)), batches, tuple(legs), rng.randrange(100))


def loaders_of(case: Case, leg: Leg, samples: Mapping[str, Any]) -> list[TrainLoader]:
    return [
        build_train_loader(
            samples,
            kind="window",
            seq_len=T,
            seed=case.seed,
            batch_sizes=BatchSizes(case.batches),
            micro_batch_size=leg.micro,
            dp_rank=rank,
            dp_degree=leg.dp,
            stages=case.stages,
            num_workers=leg.workers,
        )
        for rank in range(leg.dp)
    ]


def check(case: Case, samples: Mapping[str, Any], rows_of) -> None:
    """Take every leg's steps and compare each global batch, rank after rank, with the stream."""
    expected, step, text = case.stream(), 0, None
    for leg in case.legs:
        loaders = loaders_of(case, leg, samples)
        if text is not None:
            for loader in loaders:
                loader.resume(DataState.from_json(text), step)
        iterators = [iter(loader) for loader in loaders]
        for _ in range(leg.steps):
            count = len(expected[step]) // leg.dp // leg.micro
            taken = [torch.cat([next(it)["tokens"] for _ in range(count)]) for it in iterators]
            assert torch.equal(torch.cat(taken), rows_of(expected[step])), (case, step)
            step += 1
        texts = {loader.state().to_json() for loader in loaders}
        assert len(texts) == 1
        (text,) = texts
        assert DataState.from_json(text).samples_consumed == case.place(step)


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_runs_take_the_stream_of_one_process(count: int, monkeypatch: pytest.MonkeyPatch):
    """The index stream, in the process: epochs, mixtures, stages, legs, growing and shrinking batches."""
    monkeypatch.setattr("minititan.data.loader.SAMPLES_AHEAD", 100)
    rng = random.Random(1)
    for _ in range(count):
        sizes = tuple(rng.choice([30, 40, 100, 10**6]) for _ in range(rng.randint(1, 3)))
        firsts = np.cumsum((0, *sizes))

        def rows_of(numbers: np.ndarray, firsts: np.ndarray = firsts) -> torch.Tensor:
            own = numbers - firsts[np.searchsorted(firsts, numbers, side="right") - 1]
            return torch.from_numpy(own)[:, None].expand(-1, T)

        sources = {f"s{i}": Numbers(size) for i, size in enumerate(sizes)}
        check(random_case(rng, sizes), sources, rows_of)


@pytest.fixture(scope="module")
def streams() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 60000, size) for size in (T * 45 + 3, T * 300 + 1)]


@pytest.fixture(scope="module")
def sources(streams, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Samples]:
    found = {}
    for number, stream in enumerate(streams):
        folder = tmp_path_factory.mktemp("tokens")
        starts = np.arange(0, len(stream), 11)
        tokens = save_tokens(folder, stream, starts, 60000, tuple(starts[4::4].tolist()), "numbers")
        found[f"s{number}"] = Windows(tokens, T, boundaries=False, skip_first_labels=False)
    return found


def test_twenty_runs_with_workers_and_files(streams, sources):
    rows = np.concatenate([stream[: (len(stream) - 1) // T * T].reshape(-1, T) for stream in streams])
    rng = random.Random(2)
    for _ in range(20):
        case = random_case(rng, tuple(map(len, sources.values())), workers=True)
        check(case, sources, lambda numbers: torch.from_numpy(rows[numbers].astype(np.int64)))


def loader_of(sources: dict[str, Samples], *stages: tuple[int, tuple[str, ...]], **more) -> TrainLoader:
    options = {"kind": "window", "seq_len": T, "seed": 5, "batch_sizes": BatchSizes(((1, 4),))} | more
    weights = stages or ((1, ("1",) * len(sources)),)
    return build_train_loader(sources, micro_batch_size=4, dp_rank=0, dp_degree=1, stages=weights, **options)


def taken(loader: TrainLoader, steps: int) -> DataState:
    iterator = iter(loader)
    for _ in range(steps):
        next(iterator)
    return loader.state()


AFRESH = r'or set checkpoint\.exclude_from_loading = \["dataloader"\]'


def test_other_sources_weights_and_ways_of_cutting_are_refused(sources):
    saved = taken(loader_of(sources, (1, ("1", "2")), (4, ("1", "1"))), 5)
    assert saved.stages == ((0, ("1", "2")), (12, ("1", "1")))
    one = {"s1": sources["s1"]}
    swapped = {"s0": sources["s1"], "s1": sources["s0"]}
    for loader, message in (
        (
            loader_of(sources, (1, ("1", "3")), (4, ("1", "1"))),
            "data.sources: the weights up to step 5 are not",
        ),
        (loader_of(sources, (1, ("1", "2"))), "the weights up to step 5 are not those of"),
        (
            loader_of(sources, (1, ("1", "2")), (4, ("1", "1")), (5, ("2", "1"))),
            r"data.stages: step 5 has been taken with other weights; set it to 6 or more",
        ),
        (
            loader_of(one),
            "data.sources: the run to be resumed has the sources s0, s1; give these in this order",
        ),
        (loader_of(swapped, (1, ("1", "2")), (4, ("1", "1"))), r"numbers: gives other tokens \(fingerprint"),
        (
            loader_of(sources, (1, ("1", "2")), (4, ("1", "1")), kind="pack"),
            'data.samples: the run to be resumed has "window"; set data.samples = "window",',
        ),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            loader.resume(saved, 5)
        assert all(re.search(AFRESH, fault) for fault in error.value.faults)


def test_weights_may_change_from_the_next_step_on(sources):
    saved = taken(loader_of(sources, (1, ("1", "2"))), 5)
    loader = loader_of(sources, (1, ("1", "2")), (6, ("0", "1")))
    loader.resume(saved, 5)
    assert {name: count for name, (count, _) in loader.consumed().items()}["s0"] > 0
    before = loader.consumed()
    after = taken(loader, 3)
    assert after.stages == ((0, ("1", "2")), (20, ("0", "1")))
    assert loader.consumed()["s0"] == before["s0"] and loader.consumed()["s1"][0] == before["s1"][0] + 12


def test_the_end_is_where_the_first_source_is_used_up(sources):
    loader = loader_of(sources, (1, ("1", "1")))
    steps = loader.steps_left()
    assert sum(count for count, _ in loader.consumed().values()) == 0
    taken(loader, steps)
    assert max(epochs for _, epochs in loader.consumed().values()) <= 1
    taken(loader, 1)
    assert max(epochs for _, epochs in loader.consumed().values()) > 1
    assert loader_of(sources, batch_sizes=BatchSizes(((1, 4), (3, 1000)))).steps_left() == 2

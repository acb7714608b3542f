"""Elastic data: no layout, accumulation, restart, worker or change of batch size moves a sample.

Runs are drawn at random, in legs: each goes on from the state that the one before left, in JSON. The
reference is the stream of one process, which knows of none of this.
"""

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from minititan.config.batches import BatchSizes
from minititan.data import DataState, Tokens, TrainLoader, build_train_loader
from minititan.data.mixture import Mixture, Stage
from minititan.data.samples import Samples, Windows
from minititan.data.shards import ShardWriter

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


def loaders_of(case: Case, leg: Leg, samples: dict[str, Samples]) -> list[TrainLoader]:
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


def check(case: Case, samples: dict[str, Samples], rows_of) -> None:
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


def test_a_thousand_runs_take_the_stream_of_one_process(monkeypatch: pytest.MonkeyPatch):
    """The index stream, in the process: epochs, mixtures, stages, legs, growing and shrinking batches."""
    monkeypatch.setattr("minititan.data.loader.SAMPLES_AHEAD", 100)
    rng = random.Random(1)
    for _ in range(1000):
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
        writer = ShardWriter(folder, 60000, "tokenizer", shard_tokens=50)
        for part in np.array_split(stream, 7):
            writer.write(part, np.arange(0, len(part), 11))
        writer.finish()
        tokens = Tokens(folder, "numbers")
        found[f"s{number}"] = Windows(tokens, T, boundaries=False, skip_first_labels=False)
    return found


def test_twenty_runs_with_workers_and_files(streams, sources):
    rows = np.concatenate([stream[: (len(stream) - 1) // T * T].reshape(-1, T) for stream in streams])
    rng = random.Random(2)
    for _ in range(20):
        case = random_case(rng, tuple(map(len, sources.values())), workers=True)
        check(case, sources, lambda numbers: torch.from_numpy(rows[numbers].astype(np.int64)))

"""A run that is killed twice and goes on with another layout each time, against one that nothing kills.

pp 2 x dp 2 x tp 2, then dp 2 x cp 2 x tp 2, then one process. A kill comes some steps after a save: the steps
between are taken and logged again by the next layout, with the same numbers.
"""

import os
import signal
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest

from tests.distributed.harness import RankError, run_ranks
from tests.distributed.layouts import Overrides, Row
from tests.distributed.runs import lines, train_in_rank

KEYS: Overrides = {
    "training.dataset": "stdlib",
    "training.seq_len": "32",
    "training.local_batch_size": "4",
    "training.global_batch_size": "8",
    "checkpoint.enable": "true",
}
ONE = Row("one process", 1)


def layout(pp: int = 1, dp: int = 1, cp: int = 1, tp: int = 1) -> Row:
    degrees = {
        "pipeline_parallel": pp,
        "data_parallel_shard": dp,
        "context_parallel": cp,
        "tensor_parallel": tp,
    }
    keys = {f"parallelism.{name}_degree": str(degree) for name, degree in degrees.items()}
    return Row(f"pp{pp}-dp{dp}-cp{cp}-tp{tp}", pp * dp * cp * tp, keys)


class Legs(NamedTuple):
    """How many steps there are, after which of them a rank is killed, how often the run is saved, and over
    how many ranks the data is spread.
    """

    steps: int
    killed: tuple[int, int]
    interval: int
    dp: int

    @property
    def keys(self) -> Overrides:
        steps = {"training.steps": str(self.steps), "checkpoint.interval": str(self.interval)}
        return KEYS | steps


def killed_in_rank(rank: int, world: int, row: Row, folder: str, cache: str, step: int) -> None:
    """Run the training; the last rank kills itself after `step`, before anything is saved."""
    from minititan import train

    plain = train.Trainer.after_step

    def after_step(trainer: train.Trainer) -> None:
        if trainer.steps_done == step and rank == world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        plain(trainer)

    with mock.patch.object(train.Trainer, "after_step", after_step):
        train_in_rank(rank, world, row, folder, cache)


def leg(row: Row, legs: Legs, folder: Path, cache: Path, killed: int | None = None) -> None:
    """Run until the end, or until a rank is killed after that step."""
    row, timeout = row.with_("leg", legs.keys), 60 + 5.0 * legs.steps
    if killed is None:
        run_ranks(train_in_rank, row.ranks, row, str(folder), str(cache), timeout=timeout)
        return
    with pytest.raises(RankError, match="died with exit code -9"):
        run_ranks(killed_in_rank, row.ranks, row, str(folder), str(cache), killed, timeout=timeout)


@pytest.mark.parametrize(
    "legs",
    [Legs(6, (3, 5), 2, dp=1), pytest.param(Legs(200, (90, 150), 20, dp=2), marks=pytest.mark.slow)],
    ids=lambda legs: f"{legs.steps} steps",
)
def test_layouts_take_over_from_each_other(legs: Legs, tmp_path: Path, token_cache: Path) -> None:
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    leg(ONE, legs, straight, token_cache)
    leg(layout(pp=2, dp=legs.dp, tp=2), legs, stopped, token_cache, killed=legs.killed[0])
    leg(layout(dp=legs.dp, cp=2, tp=2), legs, stopped, token_cache, killed=legs.killed[1])
    leg(ONE, legs, stopped, token_cache)
    expected = {line["step"]: line for line in lines(straight) if "loss" in line}
    found = [line for line in lines(stopped) if "loss" in line]
    first, second = legs.killed
    again = [first // legs.interval * legs.interval, second // legs.interval * legs.interval]
    steps = [*range(first), *range(again[0], second), *range(again[1], legs.steps)]
    assert [line["step"] for line in found] == [step + 1 for step in steps]
    for line in found:
        other = expected[line["step"]]
        for key in ("batch_sha256", "tokens_seen", "samples_consumed", "lr"):
            assert line[key] == other[key], (key, line["step"])
        for key in ("loss", "grad_norm"):
            assert line[key] == pytest.approx(other[key], rel=1e-9), (key, line["step"])
    largest = max(abs(line["loss"] / expected[line["step"]]["loss"] - 1) for line in found)
    print(f"losses differ by at most {largest:.1e}")

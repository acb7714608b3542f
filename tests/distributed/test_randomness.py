"""What a model draws is a function of (seed, step, dp rank): over ranks, twice, and over a resume."""

import contextlib
import io
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.harness import run_ranks
from tests.distributed.layouts import Overrides
from tests.distributed.runs import lines
from tests.distributed.small import EVERY_STEP, FLOAT64, build, degrees

DROPOUT: Overrides = EVERY_STEP | {
    "experimental.custom_import": "tests.distributed.dropout_model",
    "model.name": "dropout",
    "model.flavor": "small",
    "training.steps": "4",
    "lr_scheduler.total_steps": "4",
    "training.global_batch_size": "4",
}
WHOLE = {"parallelism.disable_sequence_parallel": "true"}  # each tp rank has all of the residual stream


def train(rank: int, world: int, folder: Path, cache: Path, keys: Overrides) -> tuple[list[float], list]:
    """Train; return what the model drew, in order, and this rank's parameters."""
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = build(rank, world, folder, cache, DROPOUT | keys)
        from tests.distributed.dropout_model import draws

        trainer.run()
    own = [getattr(p, "to_local", lambda p=p: p)().detach() for p in trainer.parameters.values()]
    return draws, [tensor.numpy().copy() for tensor in own]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in lines(folder)]


def test_tp_ranks_draw_the_same_and_dp_ranks_and_steps_do_not(tmp_path, token_cache):
    drawn = [draws for draws, _ in run_ranks(train, 4, tmp_path, token_cache, degrees(2, 2))]
    assert drawn[0] == drawn[1] and drawn[2] == drawn[3]
    assert len({*drawn[0], *drawn[2]}) == 2 * 4  # one micro-batch a step
    # Another layout with the same dp ranks draws the same from step 3 on.
    back = degrees(2) | {"checkpoint.load_step": "2"}
    legs = [draws for draws, _ in run_ranks(train, 2, tmp_path, token_cache, back)]
    assert legs == [drawn[0][2:], drawn[2][2:]]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_dropout_under_tp_is_that_of_one_process(recompute, tmp_path, token_cache):
    keys = FLOAT64 | WHOLE | {"activation_checkpoint.mode": recompute, "checkpoint.enable": "false"}
    run_ranks(train, 1, tmp_path / "one", token_cache, keys)
    run_ranks(train, 2, tmp_path / "tp2", token_cache, keys | degrees(tp=2))
    assert losses(tmp_path / "tp2") == pytest.approx(losses(tmp_path / "one"), rel=1e-9)


def test_dropout_goes_on_after_a_resume_as_without_it(tmp_path, token_cache):
    _, whole = run_ranks(train, 1, tmp_path / "whole", token_cache, {})[0]
    run_ranks(train, 1, tmp_path / "legs", token_cache, {"training.steps": "2"})
    _, legs = run_ranks(train, 1, tmp_path / "legs", token_cache, {})[0]
    assert losses(tmp_path / "legs") == losses(tmp_path / "whole")
    assert all(np.array_equal(a, b) for a, b in zip(legs, whole, strict=True))


def test_deterministic_runs_are_bitwise_equal(tmp_path, token_cache):
    keys = degrees(2, 2) | {"debug.deterministic": "true", "checkpoint.enable": "false"}
    first = run_ranks(train, 4, tmp_path / "first", token_cache, keys)
    second = run_ranks(train, 4, tmp_path / "second", token_cache, keys)
    assert losses(tmp_path / "first") == losses(tmp_path / "second")
    for (_, here), (_, there) in zip(first, second, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(here, there, strict=True))

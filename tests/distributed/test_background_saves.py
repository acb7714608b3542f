"""Saves beside training: the same bytes as without, and failures and deaths while they are under way."""

import contextlib
import io
import os
from pathlib import Path

import pytest

from minititan import faults
from minititan.checkpoint import manifest
from minititan.run_status import read_status
from tests.distributed.harness import RankError, run_ranks
from tests.distributed.layouts import Overrides
from tests.distributed.runs import arguments
from tests.distributed.small import EVERY_STEP, SMALL, degrees

MODES = ("disabled", "async", "async_with_pinned_mem")
DP2, DP2_TP2 = degrees(2), degrees(2, 2)
# A save takes longer than a step.
SLOW = "checkpoint.before_commit=0.2"


def main_in_rank(
    rank: int, world: int, folder: Path, cache: Path, keys: Overrides, asked: str = ""
) -> tuple[int, str, str]:
    """A run with the faults that are asked for: its exit code, and what it printed."""
    from minititan.train import main

    os.environ[faults.VARIABLE] = asked
    faults._passes.clear()
    words = arguments(SMALL | EVERY_STEP | {"data.cache_folder": str(cache)} | keys, folder)
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            code = main(words)
        except SystemExit as ended:
            code = int(str(ended.code))
    return code, out.getvalue(), err.getvalue()


def run_in_modes(rank: int, world: int, folder: Path, cache: Path, layout: Overrides) -> list[str]:
    said = []
    for mode in MODES:
        keys = layout | {"checkpoint.async_mode": mode, "training.steps": "3"}
        code, out, err = main_in_rank(rank, world, folder / mode, cache, keys, SLOW)
        assert (code, err) == (0, "")
        said.append(out)
    return said


@pytest.mark.parametrize("layout, world", [pytest.param({}, 1, marks=pytest.mark.slow), (DP2_TP2, 4)])
def test_what_is_saved_beside_training_is_what_is_saved_without(layout, world, tmp_path, token_cache):
    """To the byte, though the next step is trained before the file is written."""
    plain, *background = run_ranks(run_in_modes, world, tmp_path, token_cache, layout)[0]
    assert "in the background" not in plain
    for mode, said in zip(MODES[1:], background, strict=True):
        # The second save comes due before the first one is done, after another step: training went on.
        assert "Step 2: its save waits for that of step 1" in said
        for step in (1, 2, 3):
            path = Path("out", "checkpoint", f"step-{step}")
            assert manifest.verify(tmp_path / mode / path) == []
            expected, found = (manifest.read(tmp_path / name / path) for name in ("disabled", mode))
            shards = {name: file for name, file in expected.files.items() if name.endswith(".distcp")}
            assert len(shards) == world
            assert {name: found.files[name] for name in shards} == shards
            assert (found.tensors, found.layout) == (expected.tensors, expected.layout)
            state = [
                (tmp_path / name / path / "train_state.json").read_bytes() for name in ("disabled", mode)
            ]
            assert state[0] == state[1]


def committed(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "out" / "checkpoint").glob("step-*"))


ASYNC = {"checkpoint.async_mode": "async"}


def in_turn(
    rank: int, world: int, folder: Path, cache: Path, calls: list[tuple[Overrides, str]]
) -> list[tuple[int, str, str]]:
    """Runs one after the other, each in a folder of its own number."""
    return [
        main_in_rank(rank, world, folder / str(n), cache, DP2 | ASYNC | keys, asked)
        for n, (keys, asked) in enumerate(calls)
    ]


def test_a_failure_in_the_background_ends_all_ranks_alike_or_is_allowed(tmp_path, token_cache):
    steps = {"training.steps": "400", "checkpoint.interval": "2"}
    one = "checkpoint.write#1@1=ENOSPC"
    calls = [(steps, one), ({"checkpoint.save_failures_allowed": "1"}, one)]
    ranks = run_ranks(without_waiting, 2, tmp_path, token_cache, calls)
    (failed, allowed), (other, _) = ranks
    where = (
        f'default: checkpoint.folder = "{tmp_path}/0/out/checkpoint": step 2 could not be saved (rank 1: No'
    )
    for code, _, err in (failed, other):
        assert code == 2
        assert err.startswith(where)
    assert committed(tmp_path / "0") == []
    status = read_status(tmp_path / "0" / "out")
    assert status["state"] == "failed" and status["reason"].startswith(where)
    assert status["step"] < 50  # not the next save was needed to find it
    code, said, err = allowed
    assert (code, err) == (0, "")
    assert "step 1 could not be saved (rank 1: No space left on device)" in said
    assert "  the run goes on: 1 of 1 failures in a row" in said
    assert committed(tmp_path / "1") == ["step-2", "step-3", "step-4", "step-5"]
    assert read_status(tmp_path / "1" / "out")["state"] == "finished"


def without_waiting(rank: int, world: int, folder: Path, cache: Path, calls: list) -> list:
    """Nobody ends rank 1 here, as torchrun would."""
    from minititan.signals import StopSignals

    setattr(StopSignals, "wait_to_be_ended", lambda self, seconds: None)  # noqa: B010
    return in_turn(rank, world, folder, cache, calls)


@pytest.mark.parametrize(
    "point", ["checkpoint.write#5@1", pytest.param("checkpoint.before_rename@0", marks=pytest.mark.slow)]
)
def test_a_kill_during_a_save_in_the_background_leaves_the_one_before(point, tmp_path, token_cache):
    keys = {"checkpoint.interval": "2", "lr_scheduler.total_steps": "6"}
    ends = [{"training.steps": steps} for steps in ("2", "6")]
    assert run_ranks(in_turn, 2, tmp_path, token_cache, [(keys | ends[0], "")])[0][0][0] == 0
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(in_turn, 2, tmp_path, token_cache, [(keys | ends[1], f"{point}=kill")])
    assert committed(tmp_path / "0") == ["step-2"]
    assert manifest.verify(tmp_path / "0" / "out" / "checkpoint" / "step-2") == []
    ((code, said, _),) = run_ranks(in_turn, 2, tmp_path, token_cache, [(keys | ends[1], "")])[0]
    assert code == 0 and "Resumed from step 2, " in said
    assert committed(tmp_path / "0") == ["step-2", "step-4", "step-6"]

"""A run that is stopped and goes on with other ranks and another layout, against one that is not.

60 steps on one process; 20 on dp 2 x tp 2, then 20 on dp 2, then 20 on one process, through checkpoints; or
the first 20 on an interleaved pp 2 x dp 2, the second on cp 2 x tp 2. The same tokens at every step, to the
bit, and the same losses.
"""

import json
from pathlib import Path

import pytest

from tests.distributed.harness import run_ranks
from tests.distributed.layouts import FLOAT32, Degrees, Overrides, Row, row_of
from tests.distributed.runs import train_in_rank

ONE, DP2, DP2_TP2 = (row_of({"layout": name}) for name in ("one", "dp2", "dp2-tp2"))
INTERLEAVED: Overrides = {"parallelism.pipeline_parallel_schedule": "Interleaved1F1B"}
PP2_DP2 = Row("pp2-dp2", 4, Degrees(pp=2, shard=2).overrides() | INTERLEAVED, ONE.same)
CP2_TP2 = Row("cp2-tp2", 4, Degrees(cp=2, tp=2).overrides(), ONE.same)
LEGS: Overrides = {
    **FLOAT32,
    "training.local_batch_size": "2",
    "training.global_batch_size": "8",
    "training.seq_len": "32",
    "lr_scheduler.total_steps": "60",
    "checkpoint.enable": "true",
    "checkpoint.interval": "20",
    "metrics.enable_tensorboard": "true",
    "validation.enable": "true",
    "validation.dataset": "stdlib",
    "validation.seq_len": "32",
    "validation.local_batch_size": "3",
    "validation.freq": "20",
    "validation.steps": "5",
}


def leg(layout: Row, steps: int, folder: Path, token_cache: Path, **more: str) -> None:
    overrides = LEGS | {"training.steps": str(steps)} | {k.replace("__", "."): v for k, v in more.items()}
    train_in_rank_args = (layout.with_("leg", overrides), str(folder), str(token_cache))
    run_ranks(train_in_rank, layout.ranks, *train_in_rank_args, timeout=300)


def lines(folder: Path, key: str) -> dict[int, dict]:
    """The lines of `metrics.jsonl` that have `key`, by step; no step may be logged twice."""
    records = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    records = [record for record in records if key in record]
    assert len({record["step"] for record in records}) == len(records)
    return {record["step"]: record for record in records}


@pytest.fixture(scope="module")
def straight(tmp_path_factory, token_cache) -> Path:
    """60 steps on one process."""
    folder = tmp_path_factory.mktemp("straight")
    leg(ONE, 60, folder, token_cache)
    return folder


def assert_same_run(folder: Path, straight: Path) -> None:
    found, expected = lines(folder, "loss"), lines(straight, "loss")
    assert list(found) == list(expected) == list(range(1, 61))
    for step, record in expected.items():
        for key in ("batch_sha256", "tokens_seen", "samples_consumed", "lr"):
            assert found[step][key] == record[key], (key, step)
        assert found[step]["loss"] == pytest.approx(record["loss"], rel=1e-4), step
    found, expected = lines(folder, "validation_loss"), lines(straight, "validation_loss")
    assert list(found) == list(expected) == [20, 40, 60]
    for step, record in expected.items():
        assert found[step]["validation_loss"] == pytest.approx(record["validation_loss"], rel=1e-4), step
        assert found[step]["validation_tokens"] == record["validation_tokens"] == 5 * 3 * 32


@pytest.mark.parametrize("layouts", [(DP2_TP2, DP2, ONE), (PP2_DP2, CP2_TP2, ONE)], ids=["dp-tp", "pp-cp"])
def test_three_legs(layouts, straight, tmp_path, token_cache):
    for layout, steps in zip(layouts, (20, 40, 60), strict=True):
        leg(layout, steps, tmp_path, token_cache)
    assert_same_run(tmp_path, straight)
    assert sorted(path.name for path in (tmp_path / "out" / "checkpoint").glob("step-*")) == [
        "step-20",
        "step-40",
        "step-60",
    ]


def test_a_complete_run_changes_nothing(straight, token_cache):
    def snapshot() -> dict[str, tuple[int, int]]:
        files = sorted(path for path in (straight / "out").rglob("*"))
        return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in files}

    before = snapshot()
    leg(ONE, 60, straight, token_cache)
    assert snapshot() == before


def test_counting_anew_sets_the_old_steps_aside(straight, tmp_path, token_cache):
    """Without its step count a loaded run begins at 0: what it saves must not hide behind the old step 20."""
    leg(ONE, 20, tmp_path, token_cache)
    anew = {"checkpoint__exclude_from_loading": "train_state", "checkpoint__interval": "5"}
    leg(ONE, 10, tmp_path, token_cache, **anew)
    folder = tmp_path / "out" / "checkpoint"
    assert {path.name for path in folder.iterdir()} == {
        *("abandoned-step-20-0", "step-5", "step-10", "run.lock")
    }
    steps = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["samples_consumed"] for line in steps if "loss" in line] == list(range(168, 241, 8))


def test_other_batch_sizes_and_workers_after_a_restart(straight, tmp_path, token_cache):
    """The stream of samples goes on without a gap or a repeat when the batch grows and workers load it."""
    leg(ONE, 20, tmp_path, token_cache)
    more = {"training__global_batch_size": "16", "training__dataloader__num_workers": "1"}
    leg(DP2, 40, tmp_path, token_cache, **more)
    found, expected = lines(tmp_path, "loss"), lines(straight, "loss")
    assert found[20]["batch_sha256"] == expected[20]["batch_sha256"]
    assert [found[step]["samples_consumed"] for step in (20, 21, 40)] == [160, 176, 480]

"""The last lines of a run promise only what holds."""

from pathlib import Path

import pytest

from minititan.checkpoint import manifest
from minititan.checkpoint.manifest import File, Manifest
from minititan.config import load
from minititan.report import closing_lines
from minititan.resume import completed_step
from minititan.run import Run, check

DEBUG = Path(__file__).parent.parent / "train_configs" / "debug.toml"


def checked(folder: Path, *overrides: str) -> Run:
    where = f"--job.dump_folder={folder}"
    return check(load([f"--job.config_file={DEBUG}", where, *overrides]), 1)


def test_a_run_has_the_folder_that_it_saves_to_wherever_that_is(tmp_path: Path):
    one, own = checked(tmp_path / "one"), tmp_path / "one" / "checkpoint"
    assert one.locked_folders == {"job.dump_folder": tmp_path / "one", "checkpoint.folder": own}
    other = [f"--checkpoint.folder={own}"]
    assert checked(tmp_path / "two", *other).locked_folders["checkpoint.folder"] == own
    for nothing in ("--checkpoint.load_only", "--checkpoint.no_enable", "--checkpoint.folder=."):
        assert list(checked(tmp_path / "three", *other, nothing).locked_folders) == ["job.dump_folder"]


def save_nothing_as(folder: Path, step: int) -> None:
    path = folder / "checkpoint" / f"step-{step}"
    path.mkdir(parents=True)
    manifest.write(path, Manifest(step=step, files={}, tensors={}, model={}, layout={}, versions={}))


def test_a_checkpoint_past_the_last_step_is_named_and_gone_on_from(tmp_path: Path):
    save_nothing_as(tmp_path, 200)
    run = checked(tmp_path, "--training.steps=5", "--lr_scheduler.warmup_steps=1")
    assert completed_step(run) == 200
    lines = closing_lines(run, 200, None)
    assert "step 200 is past training.steps = 5; nothing was done" in lines
    assert lines.endswith("--training.steps 300")


def test_a_last_step_that_is_not_whole_is_not_the_end(tmp_path: Path):
    save_nothing_as(tmp_path, 3)
    path = tmp_path / "checkpoint" / "step-5"
    path.mkdir()
    short = ("--training.steps=3", "--lr_scheduler.warmup_steps=1")
    assert completed_step(checked(tmp_path, *short)) is None  # it has no manifest
    lost = File(size=1, sha256="")
    manifest.write(path, Manifest(step=5, files={"lost": lost}, tensors={}, model={}, layout={}, versions={}))
    assert completed_step(checked(tmp_path, *short)) is None
    path.rename(tmp_path / "elsewhere")
    assert completed_step(checked(tmp_path, *short)) == 3


def test_a_load_step_at_the_end_leaves_nothing_to_do(tmp_path: Path):
    save_nothing_as(tmp_path, 5)
    save_nothing_as(tmp_path, 3)
    short = ("--training.steps=5", "--lr_scheduler.warmup_steps=1")
    assert completed_step(checked(tmp_path, *short, "--checkpoint.load_step=5")) == 5
    assert completed_step(checked(tmp_path, *short, "--checkpoint.load_step=3")) is None
    assert completed_step(checked(tmp_path, *short, "--checkpoint.no_enable")) is None


def test_going_on_from_one_step_asks_for_more_than_one(tmp_path: Path):
    run = checked(tmp_path, "--training.steps=1", "--lr_scheduler.warmup_steps=1")
    assert closing_lines(run, 1, 0.0).endswith("--training.steps 2")


@pytest.mark.parametrize("key", ["load_only", "last_save_model_only", "no_enable"])
def test_a_run_that_cannot_be_continued_does_not_say_how(tmp_path: Path, key: str):
    assert "To go on" in closing_lines(checked(tmp_path), 200, 1.0)
    assert "To go on" not in closing_lines(checked(tmp_path, f"--checkpoint.{key}"), 200, 1.0)

"""Which checkpoint a restart takes when some are spoiled, and what is loaded when not everything matches."""

import os
from pathlib import Path

import pytest
import torch

from minititan.checkpoint.checkpointer import Checkpointer
from minititan.config import ConfigError
from tests.checkpoints import checkpointer, flip, newest, tensors, with_steps

DAMAGED = "damaged (its SHA-256 is not that of what was saved)"


class Said(list[str]):
    def __call__(self, line: str) -> None:
        self.append(line)


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
def three(tmp_path: Path, said: Said) -> Checkpointer:
    return with_steps(tmp_path / "checkpoint", 1, 2, 3, say=said)


def test_a_spoiled_step_is_named_and_the_one_before_is_taken(three: Checkpointer, said: Said):
    flip(three.folder / "step-3" / "__0_0.distcp")
    (three.folder / "step-2" / "COMMIT.json").write_text("{}")
    (three.folder / "step-4").mkdir()
    assert newest(three) == 1
    assert said == [
        f"{three.folder}/step-4/COMMIT.json: missing; step 1 is used",
        f"{three.folder}/step-3/__0_0.distcp: {DAMAGED}; step 1 is used",
        f"{three.folder}/step-2/COMMIT.json: damaged (its content does not have the SHA-256 in its last "
        "line); step 1 is used",
    ]
    assert sorted(os.listdir(three.folder)) == ["step-1", "step-2", "step-3", "step-4"]  # looked at only


def test_without_hashes_only_sizes_count(three: Checkpointer, said: Said):
    flip(three.folder / "step-3" / "__0_0.distcp")
    (three.folder / "step-2" / "__0_0.distcp").write_bytes(b"")
    quick = checkpointer(three.folder, hashes=False, say=said)
    assert newest(quick) == 3
    (three.folder / "step-3" / ".metadata").unlink()
    assert newest(quick) == 1


def test_a_step_under_the_name_of_another_is_not_taken(three: Checkpointer, said: Said):
    (three.folder / "step-2").rename(three.folder / "step-7")
    assert newest(three) == 3
    assert said == [f"{three.folder}/step-7/COMMIT.json: is of step 2; step 3 is used"]
    with pytest.raises(ConfigError, match=r"step-7/COMMIT\.json: is of step 2; use another checkpoint"):
        three.load(7, tensors(0))
    three.load(three.folder / "step-7", tensors(0))  # by its path it is what it is


def test_a_run_does_not_start_afresh_beside_spoiled_checkpoints(tmp_path: Path, said: Said):
    there = with_steps(tmp_path, 1, 2, say=said)
    for step in (1, 2):
        (tmp_path / f"step-{step}" / "COMMIT.json").unlink()
    (tmp_path / "step-1" / "train_state.json").write_text('{"format_version": 1}')
    with pytest.raises(ConfigError) as caught:
        there.newest()
    assert caught.value.faults == (
        f"{tmp_path}/step-2/COMMIT.json: missing",
        f"{tmp_path}/step-1/COMMIT.json: missing (format 1, of an earlier minititan, is not read)",
        f"{tmp_path}: none of its checkpoints is whole; remove them to start afresh",
    )
    assert not said


def test_a_spoiled_step_that_was_asked_for_is_an_error(three: Checkpointer, said: Said):
    file = three.folder / "step-2" / "__0_0.distcp"
    flip(file)
    for source in (2, three.folder / "step-2"):
        with pytest.raises(ConfigError) as caught:
            three.load(source, tensors(0))
        assert str(caught.value) == f"{file}: {DAMAGED}; use another checkpoint"
    assert not said


def test_a_link_is_no_step(three: Checkpointer, tmp_path: Path, said: Said):
    (three.folder / "step-3").rename(tmp_path / "elsewhere")
    (three.folder / "step-3").symlink_to(tmp_path / "elsewhere")
    assert newest(three) == 2
    assert said == [f"{three.folder}/step-3: a link, which is not followed; step 2 is used"]
    with pytest.raises(ConfigError, match="has no such step; there: 1, 2"):
        three.load(3, tensors(0))
    keeper = checkpointer(three.folder, keep_latest_k=1)
    assert keeper.set_newer_aside(2) == []
    keeper.save(4, tensors(4), {})
    assert sorted(os.listdir(three.folder)) == ["step-3", "step-4"]
    assert (tmp_path / "elsewhere" / "COMMIT.json").exists()


def test_a_run_does_not_start_afresh_beside_links(tmp_path: Path):
    (tmp_path / "step-7").symlink_to(tmp_path / "another disk" / "step-7")
    with pytest.raises(ConfigError) as caught:
        newest(checkpointer(tmp_path))
    assert caught.value.faults == (
        f"{tmp_path}/step-7: a link, which is not followed",
        f"{tmp_path}: none of its checkpoints is whole; remove them to start afresh",
    )


def test_spoiled_newer_steps_are_moved_aside_with_the_others(three: Checkpointer):
    (three.folder / "step-3" / "COMMIT.json").unlink()
    (three.folder / "step-3x").mkdir()
    assert three.set_newer_aside(1) == ["abandoned-step-2-0", "abandoned-step-3-0"]


def test_retention_counts_whole_steps_only(tmp_path: Path):
    there = with_steps(tmp_path, 1, 2, 3, keep_latest_k=0)
    (tmp_path / "step-2" / "COMMIT.json").write_text("{}")
    (tmp_path / ".tmp-mine").mkdir()
    checkpointer(there.folder, keep_latest_k=2).save(4, tensors(4), {})
    assert sorted(os.listdir(tmp_path)) == [".tmp-mine", "step-2", "step-3", "step-4"]


# Loading what matches


def load_what_matches(there: Checkpointer, target: dict[str, torch.Tensor], said: Said) -> list[str]:
    """The lines said, without the folder and the reason."""
    there.load(3, target, strict=False)
    end = ": skipped, as checkpoint.load_strict = false"
    assert all(line.startswith(f"{there.folder}/step-3: ") and line.endswith(end) for line in said)
    return [line.removeprefix(f"{there.folder}/step-3: ").removesuffix(end) for line in said]


def test_what_matches_is_loaded_and_the_rest_is_told(three: Checkpointer, said: Said):
    target = {
        "model.a": torch.zeros(5, 3),
        "model.b": torch.zeros(()),
        "model.c": torch.zeros(2),
        "optimizer.a.exp_avg": torch.zeros(5, 4, dtype=torch.float64),
        **{f"optimizer.c.more{i}": torch.zeros(2) for i in range(6)},
    }
    before = {key: tensor.clone() for key, tensor in target.items()}
    assert load_what_matches(three, target, said) == [
        "lacks model.c; optimizer.c.more0; optimizer.c.more1; optimizer.c.more2; optimizer.c.more3; "
        "and 2 more",
        "other shapes: model.a [5, 4], here [5, 3]",
        "other dtypes: optimizer.a.exp_avg float32, here float64",
    ]
    assert target.pop("model.b").item() == 3
    assert all(torch.equal(target[key], before[key]) for key in target)


def test_more_than_was_asked_for_is_told(three: Checkpointer, said: Said):
    target = {"model.a": torch.zeros(5, 4)}
    assert load_what_matches(three, target, said) == ["has more than this run: model.b"]
    assert target["model.a"].unique().item() == 3


def test_a_parameters_state_is_taken_whole_or_not_at_all(tmp_path: Path, said: Said):
    """Moments of other values, or a step count without its moments, would be a wrong update."""

    def state(size: int, value: float) -> dict[str, torch.Tensor]:
        moments = {f"optimizer.a.w.{kind}": torch.full((size,), value) for kind in ("exp_avg", "exp_avg_sq")}
        return {"model.a.w": torch.full((size,), value), "optimizer.a.w.step": torch.tensor(value)} | moments

    there = checkpointer(tmp_path, say=said)
    there.save(3, state(4, 3.0) | {"model.b": torch.tensor(3.0)}, {})
    target = state(5, 0.0) | {"model.b": torch.zeros(())}
    there.load(3, target, strict=False)
    assert target.pop("model.b").item() == 3
    assert all(not tensor.any() for tensor in target.values())
    assert "belongs to what differs: optimizer.a.w.step: skipped" in said[-1]
    lacking = state(4, 0.0) | {
        "model.b": torch.zeros(()),
        "optimizer.a.w.exp_avg_sq": torch.zeros(4, dtype=torch.float64),
    }
    there.load(3, lacking, strict=False)
    assert lacking.pop("model.a.w").unique().item() == lacking.pop("model.b").item() == 3
    assert all(not tensor.any() for tensor in lacking.values())
    assert "belongs to what differs: optimizer.a.w.exp_avg; optimizer.a.w.step: skipped" in said[-1]
    assert len(said) == 4


def test_a_checkpoint_of_another_run_altogether_is_refused_all_the_same(three: Checkpointer):
    with pytest.raises(ConfigError, match="has nothing that this run asks for"):
        three.load(3, {"model.other": torch.zeros(1)}, strict=False)

"""Which checkpoints go: the rules by a table, and in a folder."""

import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from minititan.checkpoint import folder
from minititan.checkpoint.checkpointer import Checkpointer
from minititan.checkpoint.retention import Keep, steps_to_remove
from minititan.config import ConfigError

NAN, INF = float("nan"), float("inf")

# rules; steps (with losses); the step just saved; those that go
TABLE = [
    (Keep(), [1, 2, 3], 3, []),  # all stay
    (Keep(latest_k=0, every_n_steps=2, best_k=1), [1, 2, 3], 3, []),
    (Keep(latest_k=1), [1, 2, 3], 3, [1, 2]),
    (Keep(latest_k=2), [1, 2, 3], 3, [1]),
    (Keep(latest_k=9), [1, 2, 3], 3, []),
    (Keep(latest_k=2), [10, 9, 100], 9, [10]),  # newest by number, and the one just saved
    (Keep(latest_k=1), [10, 9, 100], 9, [10, 100]),
    (Keep(latest_k=2), {}, 3, []),
    (Keep(latest_k=1, every_n_steps=10), [10, 15, 20, 25, 30, 35], 35, [15, 25]),
    (Keep(latest_k=2, every_n_steps=10), [10, 15, 20, 25, 30, 35], 35, [15, 25]),
    (Keep(latest_k=1, every_n_steps=1), [1, 2, 3], 3, []),
    (Keep(latest_k=1, every_n_steps=7), [0, 3, 7, 8], 8, [3]),  # imported weights lie at step 0
    (Keep(latest_k=1, best_k=1), {1: 3.0, 2: 1.0, 3: 2.0}, 3, [1]),
    (Keep(latest_k=1, best_k=2), {1: 3.0, 2: 1.0, 3: 2.0, 4: 5.0}, 4, [1]),
    (Keep(latest_k=1, best_k=1), {1: 1.0, 2: 1.0, 3: 2.0}, 3, [1]),  # of equal ones the later
    (Keep(latest_k=1, best_k=1), {1: 3.0, 2: None, 3: None, 4: None}, 4, [2, 3]),  # not validated
    (Keep(latest_k=1, best_k=1), {1: NAN, 2: 4.0, 3: INF, 4: NAN}, 4, [1, 3]),
    (Keep(latest_k=1, best_k=1), {1: 2.0, 2: 3.0, 3: 1.0}, 3, [1, 2]),  # the best is the newest too
    (Keep(latest_k=1, best_k=9), {1: 2.0, 2: 3.0, 3: None, 4: None}, 4, [3]),
    (Keep(latest_k=1, every_n_steps=4, best_k=1), {1: 9.0, 2: 1.0, 4: 8.0, 5: 7.0, 6: 7.5}, 6, [1, 5]),
]


@pytest.mark.parametrize("keep, steps, just_saved, gone", TABLE)
def test_what_goes(keep, steps, just_saved, gone):
    losses = steps if isinstance(steps, dict) else dict.fromkeys(steps)
    assert steps_to_remove(keep, losses, just_saved) == gone


def save(path: Path, step: int, loss: float | None, **rules: Any) -> list[int]:
    """A save by a run of its own, which knows of the others only what lies in the folder."""
    there = Checkpointer(path, rank=0, **{"keep_latest_k": 1, **rules})
    state = {"train_state": {"tokens_seen": 1, "validation_loss": loss}}
    there.save(step, {"model.a": torch.ones(1000)}, state)
    return there.steps()


def test_the_rules_hold_over_restarts(tmp_path):
    losses = {1: 3.0, 2: 1.0, 3: None, 4: 2.0, 5: 4.0, 6: None, 7: 0.5}
    rules = {"keep_every_n_steps": 5, "keep_best_k": 2}
    left = [save(tmp_path, step, loss, **rules) for step, loss in losses.items()]
    assert left == [[1], [1, 2], [1, 2, 3], [2, 4], [2, 4, 5], [2, 4, 5, 6], [2, 5, 7]]
    assert save(tmp_path, 8, None) == [8]


def test_a_checkpoint_that_does_not_say_its_loss_is_no_candidate(tmp_path):
    save(tmp_path, 1, 1.0, keep_latest_k=0)
    for content in ("[", "[]", '{"train_state": {"validation_loss": "good"}}'):
        (tmp_path / "step-1" / "train_state.json").write_text(content)
        shutil.rmtree(tmp_path / "step-2", ignore_errors=True)
        save(tmp_path, 2, 3.0, keep_latest_k=0)
        keep = Keep(latest_k=1, best_k=1)
        shutil.copytree(tmp_path, copy := tmp_path.parent / f"copy-{len(content)}")
        (copy / "step-2").rename(copy / "step-9")
        folder.retain(copy, keep, 9)
        assert folder.step_folders(copy) == [9]


def test_a_disk_without_room_is_found_before_anything_is_written(tmp_path, monkeypatch):
    save(tmp_path, 1, None, keep_latest_k=0)
    usage = namedtuple("usage", "total used free")
    for free, fits in ((4000, False), (4000 + 2048, True)):  # 1000 numbers, and what describes them
        monkeypatch.setattr(folder.shutil, "disk_usage", lambda path, free=free: usage(10**9, 0, free))
        if fits:
            assert save(tmp_path, 2, None, keep_latest_k=0) == [1, 2]
        else:
            rule = r"\(rank 0: the disk has 0\.0 MB left, of 0\.0 MB that are needed\); make room"
            with pytest.raises(ConfigError, match=rule):
                save(tmp_path, 2, None, keep_latest_k=0)
            assert [path.name for path in tmp_path.iterdir()] == ["step-1"]

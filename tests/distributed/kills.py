"""A save loop that is killed at random moments, and what a restart finds after each kill."""

import multiprocessing
import os
import random
import time
from pathlib import Path
from typing import NamedTuple

import torch

from tests.checkpoints import checkpointer
from tests.distributed import harness  # has the fork server load torch

SIZE = 300
LOG = "saved-steps.txt"


class Killed(NamedTuple):
    """How many kills there were, how many of them left a torn save, and the last step that was saved."""

    kills: int
    torn: int
    step: int


def values(step: int) -> dict[str, torch.Tensor]:
    """The tensors of a step: no element is the same in two steps, or twice in one."""
    numbers = torch.arange(SIZE * SIZE, dtype=torch.float64).reshape(SIZE, SIZE) / SIZE**2
    state = {"optimizer.a.exp_avg": -1 - numbers - step, "optimizer.a.step": torch.tensor(float(step))}
    return {"model.a": numbers + step, **state}


def save_for_ever(folder: Path, step: int) -> None:
    """Saves step after step from the one after `step`, and logs each once it is saved."""
    there = checkpointer(folder, keep_latest_k=2)
    log = os.open(folder.parent / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    while True:
        step += 1
        there.save(step, values(step), {"step": step})
        os.write(log, f"{step}\n".encode())


def last_logged(folder: Path) -> int:
    log = folder.parent / LOG
    steps = log.read_text().split() if log.exists() else []
    return int(steps[-1]) if steps else 0


def kill_saves(folder: Path, kills: int, seed: int = 0) -> Killed:
    """Kills the loop `kills` times; fails unless each restart takes a whole step, and none is lost."""
    dice, step, torn = random.Random(seed), 0, 0
    context = multiprocessing.get_context("forkserver")
    assert harness
    for kill in range(kills):
        process = context.Process(target=save_for_ever, args=(folder, step))
        process.start()
        while last_logged(folder) <= step:
            assert process.exitcode is None
            time.sleep(0.001)
        time.sleep(dice.uniform(0, 0.1))
        process.kill()
        process.join()
        logged, said = last_logged(folder), []
        there = checkpointer(folder, say=said.append)
        found = there.newest()
        assert found is not None and said == [], (kill, said)
        step, target = found.manifest.step, {key: torch.zeros_like(value) for key, value in values(0).items()}
        # A kill may come between the end of a save and its line in the log.
        assert step - logged in (0, 1), (kill, step, logged)
        assert there.load(found, target) == {"step": step}
        assert all(torch.equal(target[key], value) for key, value in values(step).items()), kill
        torn += any(name.startswith(".tmp-") for name in os.listdir(folder))
    return Killed(kills, torn, step)

"""A run does not grow: Python objects from step to step, with logs, validation and saves.

`benchmarks/growth.py steps` is the long form, of 2,000 steps and of the resident set too.
"""

import contextlib
import gc
import io
from pathlib import Path

import pytest

from tests.distributed.harness import run_ranks
from tests.distributed.layouts import Overrides
from tests.distributed.small import build

KEYS: Overrides = {
    "training.steps": "150",
    "training.global_batch_size": "2",
    "model.args.hidden_size": "32",
    "model.args.num_hidden_layers": "1",
    "metrics.enable_tensorboard": "true",
    "validation.enable": "true",
    "validation.dataset": "stdlib",
    "validation.seq_len": "32",
    "validation.local_batch_size": "2",
    "validation.freq": "10",
    "validation.steps": "1",
    "checkpoint.enable": "true",
    "checkpoint.interval": "10",
    "checkpoint.keep_latest_k": "2",
}
FROM, TO, EVERY, ALLOWED = 50, 140, 10, 9  # one object in ten steps


def objects_over_steps(
    rank: int, world: int, folder: Path, cache: Path, late: bool, leak: bool
) -> dict[int, int]:
    """Train; return how many objects there are after some of the steps."""
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = build(rank, world, folder, cache, KEYS)
        trainer.guard.late = late
        counts, after_step, leaked = {}, trainer.after_step, []

        def counted() -> None:
            after_step()
            if leak:
                leaked.append([])
            if trainer.steps_done % EVERY == 0:
                gc.collect(1)  # as the run does itself, so that what only a full collection finds counts
                counts[trainer.steps_done] = len(gc.get_objects())

        trainer.after_step = counted
        trainer.run()
    return counts


def growth(counts: dict[int, int]) -> int:
    return counts[TO] - counts[FROM]


@pytest.mark.parametrize("late", [False, True])
def test_objects_do_not_grow(late, tmp_path, token_cache):
    counts = run_ranks(objects_over_steps, 1, tmp_path, token_cache, late, False)[0]
    assert growth(counts) <= ALLOWED, counts


def test_one_object_a_step_would_be_seen(tmp_path, token_cache):
    counts = run_ranks(objects_over_steps, 1, tmp_path, token_cache, False, True)[0]
    assert growth(counts) > ALLOWED, counts

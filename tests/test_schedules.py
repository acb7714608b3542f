"""The orders of pipelines that the guide draws, against what is known of them."""

from pathlib import Path

import pytest
import torch

from benchmarks.schedules import (
    FORWARD,
    INPUT,
    Action,
    bubble,
    bubble_by_formula,
    drawings,
    in_flight,
    plan_of,
    replay,
)
from minititan.config.stages import SCHEDULES

SIZES = [(2, 8), (4, 8), (4, 16)]


@pytest.mark.parametrize("ranks, micro_batches", SIZES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_bubble_of_the_order_is_that_of_the_formula(name: str, ranks: int, micro_batches: int) -> None:
    plan = plan_of(name, ranks, micro_batches)
    assert bubble(replay(plan)) == pytest.approx(bubble_by_formula(plan), abs=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_stage_sees_every_micro_batch_once(name: str) -> None:
    plan = plan_of(name, 4, 8)
    actions = [action for rank in plan.of_rank for action in rank]
    assert len(set(actions)) == len(actions)
    forward = {Action(FORWARD, stage, n) for stage in range(plan.stages) for n in range(8)}
    assert forward <= set(actions)
    back = {(action.stage, action.micro_batch) for action in actions if action.kind in ("B", INPUT)}
    assert back == {(stage, n) for _, stage, n in forward}


def test_1f1b_keeps_as_many_micro_batches_as_stages_come_after() -> None:
    assert [in_flight(rank) for rank in plan_of("1F1B", 4, 8).of_rank] == [{0: 4}, {1: 3}, {2: 2}, {3: 1}]
    assert [in_flight(rank) for rank in plan_of("GPipe", 4, 8).of_rank] == [{n: 8} for n in range(4)]


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="other versions order otherwise")
def test_the_guide_has_the_drawings_that_the_command_makes() -> None:
    page = Path(__file__).parents[1] / "docs" / "parallelism.md"
    assert drawings() in page.read_text(encoding="utf-8"), (
        "run: python benchmarks/scaling.py schedules --page"
    )

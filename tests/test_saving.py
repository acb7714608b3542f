"""When a run saves and what failures cost, with a clock and a checkpointer that the tests control."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from minititan.config import Config, ConfigError
from minititan.config.checkpointing import Checkpoint
from minititan.resume import Progress
from minititan.saving import Saves


class World:
    """A run's saves; `outcomes` has a text for each save that is to fail, None for the others."""

    def __init__(self, rank: int = 0, **keys: Any) -> None:
        self.now = 1000.0
        self.said: list[str] = []
        self.saved: list[int] = []
        self.outcomes: list[str | None] = []
        self.gate = threading.Event()
        self.gate.set()
        checkpoints: Any = SimpleNamespace(
            section=Checkpoint(enable=True, **keys),
            run=SimpleNamespace(config=Config()),
            checkpointer=SimpleNamespace(save=self.save_now),
            to_save=lambda progress, **_: ({}, {"train_state": {}}),
        )
        self.saves = Saves(checkpoints, rank=rank, say=self.said.append, clock=lambda: self.now)

    def save_now(self, step: int, tensors: Any, **of: Any) -> None:
        self.gate.wait(10)
        if self.outcomes and (text := self.outcomes.pop(0)):
            raise ConfigError(text)
        self.saved.append(step)

    def save(self, step: int, **how: Any) -> None:
        self.saves.save(Progress(step), **({"last": False, "stopping": False} | how))

    def save_and_finish(self, step: int) -> None:
        self.save(step)
        self.saves.finish()


def test_due():
    saves = World(interval=4, enable_first_step_checkpoint=True).saves
    assert [step for step in range(1, 11) if saves.due(step, 10, asked=False)] == [1, 4, 8, 10]
    assert saves.due(3, 10, asked=True)
    saves = World(load_only=True).saves
    assert not any(saves.due(step, 10, asked=True) for step in range(1, 11))


def test_minutes_count_from_the_last_save_and_on_rank_0_only():
    first, other = World(interval_minutes=1.5), World(rank=1, interval_minutes=1.5)
    for seconds, wanted in ((0, False), (89, False), (1, True), (500, True)):
        first.now += seconds
        other.now += seconds
        assert first.saves.wanted_by_clock() == wanted
        assert not other.saves.wanted_by_clock()
    first.save(7)
    assert not first.saves.wanted_by_clock()
    first.now += 90
    assert first.saves.wanted_by_clock()
    never = World()
    never.now += 1e9
    assert not never.saves.wanted_by_clock()


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_failure_ends_the_run_unless_it_is_allowed(mode):
    world = World(async_mode=mode)
    world.outcomes = ["the disk is full"]
    with pytest.raises(ConfigError, match="the disk is full"):
        world.save_and_finish(1)


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_failures_are_counted_in_a_row(mode):
    world = World(async_mode=mode, save_failures_allowed=2)
    world.outcomes = ["one", "two", None, "three", "four", "five"]
    for step in range(1, 6):
        world.save_and_finish(step)
    assert world.saved == [3]
    warnings = [line for line in world.said if "failures in a row" in line]
    assert warnings == [
        f"{text}\n  the run goes on: {count} of 2 failures in a row"
        for text, count in (("one", 1), ("two", 2), ("three", 1), ("four", 2))
    ]
    with pytest.raises(ConfigError) as caught:
        world.save_and_finish(6)
    assert str(caught.value) == (
        "five\ndefault: checkpoint.save_failures_allowed = 0: 3 saves in a row have failed"
    )


@pytest.mark.parametrize("how", [{"last": True}, {"stopping": True}])
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_the_last_save_must_succeed_and_is_there_when_it_returns(mode, how):
    world = World(async_mode=mode, save_failures_allowed=5)
    world.save(1, **how)
    assert world.saved == [1]
    world.outcomes = ["full"]
    with pytest.raises(ConfigError, match="full"):
        world.save(2, **how)


def test_one_save_at_a_time():
    world = World(async_mode="async")
    world.gate.clear()
    world.save(1)
    assert world.saved == [] and not world.saves.have_failed()
    threading.Timer(0.2, world.gate.set).start()
    world.save(2)
    assert world.saved[0] == 1
    world.save(3, last=True)
    assert world.saved == [1, 2, 3]
    assert "Step 2: its save waits for that of step 1" in world.said


def test_a_failure_in_the_background_is_known_before_it_is_asked_for():
    world = World(async_mode="async")
    world.outcomes = ["full"]
    world.save(1)
    deadline = time.monotonic() + 10
    while not world.saves.have_failed() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert world.saves.have_failed()
    with pytest.raises(ConfigError, match="full"):
        world.saves.finish()
    assert not world.saves.have_failed()


def test_a_bug_is_never_a_failure_that_is_allowed():
    world = World(save_failures_allowed=9)

    def broken(*args: Any, **of: Any) -> None:
        raise RuntimeError("a bug")

    world.saves._checkpoints.checkpointer.save = broken
    with pytest.raises(RuntimeError, match="a bug"):
        world.save(1)

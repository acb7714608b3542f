"""A save loop killed at random moments never costs a saved step."""

import pytest

from tests.distributed.kills import kill_saves


def test_kills_at_random_moments(tmp_path):
    killed = kill_saves(tmp_path / "checkpoint", 10)
    assert killed.kills == 10 and killed.step >= 10  # each got on by a step at least


@pytest.mark.slow
def test_300_kills_at_random_moments(tmp_path):
    killed = kill_saves(tmp_path / "checkpoint", 300, seed=1)
    assert killed.torn > 30  # most moments are inside of a save

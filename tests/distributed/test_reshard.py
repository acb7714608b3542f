"""From each of six layouts to each of the six, a run takes over everything to the bit."""

import pytest

from tests.distributed.reshard import SIX, reshard_all


@pytest.mark.slow
def test_every_layout_takes_up_what_every_other_saved(tmp_path, token_cache):
    found = reshard_all(tmp_path, token_cache)
    assert len(found) == len(SIX) ** 2
    assert {pair: wrong for pair, wrong in found.items() if wrong} == {}


def test_two_layouts_take_up_what_the_other_saved(tmp_path, token_cache):
    found = reshard_all(tmp_path, token_cache, ("dp2-tp2", "ddp2"))
    assert len(found) == 4 and not any(found.values())

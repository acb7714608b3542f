"""From each of six layouts to each of the six, a run takes over everything to the bit, with experts too."""

import pytest

from tests.distributed.reshard import CONTEXT, EXPERTS, PIPELINE, SIX, reshard_all


@pytest.mark.slow
@pytest.mark.parametrize(
    "rows", [SIX, EXPERTS, CONTEXT, PIPELINE], ids=["dense", "experts", "context", "pipeline"]
)
def test_every_layout_takes_up_what_every_other_saved(rows, tmp_path, token_cache):
    found = reshard_all(tmp_path, token_cache, rows)
    assert len(found) == len(rows) ** 2
    assert {pair: wrong for pair, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize(
    "rows, names",
    [
        (SIX, "dp2-tp2 ddp2"),
        (EXPERTS, "dp4-ep2 dp2-tp2-ep2-etp2"),
        (CONTEXT, "cp2-tp2 dp4"),
        (PIPELINE, "pp2-dp2 dp2-tp2"),
    ],
    ids=["dense", "experts", "context", "pipeline"],
)
def test_two_layouts_take_up_what_the_other_saved(rows, names, tmp_path, token_cache):
    two = tuple(row for row in rows if row.name.split()[0] in names.split())
    found = reshard_all(tmp_path, token_cache, two)
    assert len(found) == 4 and not any(found.values())

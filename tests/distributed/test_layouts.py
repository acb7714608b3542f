"""One run, any layout: rows of the matrix against one process. `make parity` runs all of them."""

from functools import cache
from pathlib import Path

import pytest

from tests.distributed.layouts import (
    SAME,
    Row,
    all_pairs,
    choices,
    every_row,
    go_together,
    pairs_of,
)
from tests.distributed.runs import Numbers, differences, record, too_large

# One row or two of each kind, and each layout of up to 4 ranks with and without checkpointing.
QUICK = (
    "dp2 ac-op never mha",
    "dp3",
    "ddp2 ac-2 never acc2 for-loop no-clip",
    "hsdp2x2 ac-full foreach tied mha no-clip",
    "hsdp2x2 float32",
    "ddp2 float32",
    "dp2 float32",
    "tp2 float32",
    "dp2-tp2 float32",
    "tp2 ac-op no-sp no-ep no-lp acc4 for-loop mha",
    "tp2 vocabulary-265",
    "dp4-tp2 vocabulary-265 tied",
    "dp2-tp2 ac-full acc2 foreach tied mha no-clip",
    "dp2-tp2 layers-3 ac-2",
    "ddp2-tp2 ac-op no-ep never acc2 foreach mha",
    "hsdp2x2-tp2 ac-full never acc2 tied",
    "dp2 offload",
    "dp2 ac-full aot-eager always acc4 for-loop mha no-clip",
    "tp2 budget-0",
    "one inductor float32",
    "dp2 inductor float32",
    "tp2 inductor float32",
)
ROWS = {row.name: row for row in every_row()}


@pytest.fixture(scope="module")
def reference(tmp_path_factory, token_cache):
    """One process's numbers with some keys set, each computed once."""

    @cache
    def numbers(same: tuple[tuple[str, str], ...]) -> Numbers:
        return record(
            Row("one process", 1, {}, dict(same)), tmp_path_factory.mktemp("reference"), token_cache
        )

    return lambda row: numbers(tuple(sorted(row.same.items())))


@pytest.mark.parametrize("name", QUICK)
def test_a_row_of_the_matrix(name: str, reference, tmp_path: Path, token_cache: Path) -> None:
    found = differences(record(ROWS[name], tmp_path, token_cache), reference(ROWS[name]))
    assert not too_large(ROWS[name], found), found


def test_every_two_values_that_go_together_meet_in_a_row() -> None:
    met = set().union(*map(pairs_of, choices()))
    assert met == {frozenset(pair.items()) for pair in all_pairs()}
    assert all(map(go_together, choices()))


def test_rows_have_names_of_their_own_and_more_than_one_rank() -> None:
    assert len(ROWS) == len(every_row()) >= 60
    assert {row.ranks for row in ROWS.values()} == {1, 2, 3, 4, 5, 6, 7, 8}


def test_another_run_is_seen(reference) -> None:
    """The comparison can fail: without clipping, all but loss and gradients of the first step are others."""
    row = ROWS["one offload"]
    found = differences(reference(row.with_("", same=SAME["clipping"]["no-clip"])), reference(row))
    assert set(too_large(row, found)) == {"loss", "grad_norm", "parameters", "exp_avg", "exp_avg_sq"}

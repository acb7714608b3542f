"""One run, any layout: rows of the matrix against one process. `make parity` runs all of them."""

from functools import cache
from pathlib import Path

import pytest

from tests.distributed.context_layouts import CONTEXT, QUICK_CONTEXT
from tests.distributed.expert_layouts import EXPERTS, QUICK_EXPERTS
from tests.distributed.layouts import (
    DOCUMENTS,
    SAME,
    Row,
    all_pairs,
    choices,
    every_row,
    go_together,
    pairs_of,
    quick_rows,
    row_of,
)
from tests.distributed.pipeline_layouts import PIPELINES, QUICK_PIPELINES
from tests.distributed.runs import Numbers, differences, record, too_large


@pytest.fixture(scope="module")
def reference(tmp_path_factory, token_cache):
    """One process's numbers with some keys set, each computed once."""

    @cache
    def numbers(same: tuple[tuple[str, str], ...]) -> Numbers:
        return record(
            Row("one process", 1, {}, dict(same)), tmp_path_factory.mktemp("reference"), token_cache
        )

    return lambda row: numbers(tuple(sorted(row.same.items())))


@pytest.mark.parametrize("row", [*quick_rows(), *QUICK_EXPERTS, *QUICK_CONTEXT, *QUICK_PIPELINES], ids=str)
def test_a_row_of_the_matrix(row: Row, reference, tmp_path: Path, token_cache: Path) -> None:
    found = differences(record(row, tmp_path, token_cache), reference(row))
    assert not too_large(row, found), found


def test_every_two_values_that_go_together_meet_in_a_row() -> None:
    met = set().union(*map(pairs_of, choices()))
    assert met == {frozenset(pair.items()) for pair in all_pairs()}
    assert all(map(go_together, choices()))


def test_rows_have_names_of_their_own() -> None:
    rows = (*every_row(), *EXPERTS, *CONTEXT, *PIPELINES)
    assert len({row.name for row in rows}) == len(rows) >= 60
    assert {row.ranks for row in rows} == {1, 2, 3, 4, 5, 6, 7, 8}


def test_another_run_is_seen(reference) -> None:
    """The comparison can fail: without clipping, all but loss and gradients of the first step are others."""
    row = row_of({"layout": "one"})
    found = differences(reference(row.with_("", same=SAME["clipping"]["no-clip"])), reference(row))
    assert set(too_large(row, found)) == {"loss", "grad_norm", "parameters", "exp_avg", "exp_avg_sq"}


def test_rows_with_document_masks_have_documents_that_end_within_a_window(reference) -> None:
    row = row_of({"layout": "one"})
    masked, plain = (
        reference(row.with_("", same=DOCUMENTS | more)) for more in ({}, {"data.document_mask": "false"})
    )
    assert abs(masked.steps[-1]["loss"] - plain.steps[-1]["loss"]) > 1e-3

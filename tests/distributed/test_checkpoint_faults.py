"""Every fault of `tests/distributed/faults.py` has the outcome that it must have."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.checkpoint_tables import PAGE, fault_table
from tests.distributed.fault_runs import run_faults
from tests.distributed.faults import AT_REST, SAVING, Outcome


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[str, Outcome]]:
    with tempfile.TemporaryDirectory(prefix="faults-") as root:  # pytest's own folders are closed to others
        os.chmod(root, 0o755)
        yield run_faults(Path(root))


@pytest.mark.parametrize("fault", [*SAVING, *AT_REST], ids=lambda fault: fault.name)
def test_a_fault_costs_no_more_than_what_it_spoils(outcomes: dict[str, Outcome], fault) -> None:
    if fault.name not in outcomes:
        pytest.skip("this user has no right to make it happen")
    assert outcomes[fault.name] == fault.expected


def test_the_page_has_every_fault_as_it_must_be() -> None:
    assert fault_table({fault.name: fault.expected for fault in (*SAVING, *AT_REST)}) in PAGE.read_text()

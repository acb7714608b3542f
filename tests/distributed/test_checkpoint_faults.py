"""Every fault of `tests/distributed/faults.py` has the outcome that it must have."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.faults import AT_REST, SAVING, Outcome, run_faults


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[str, Outcome]]:
    with tempfile.TemporaryDirectory(prefix="faults-") as root:  # pytest's own folders are closed to others
        os.chmod(root, 0o755)
        yield run_faults(Path(root))


@pytest.mark.parametrize("fault", [*SAVING, *AT_REST], ids=lambda fault: fault.name)
def test_a_fault_costs_no_more_than_what_it_spoils(outcomes: dict[str, Outcome], fault) -> None:
    if fault.name not in outcomes:
        pytest.skip("only root can make a small disk")
    assert outcomes[fault.name] == fault.expected

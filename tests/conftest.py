"""What many tests share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def token_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache of prepared tokens for the whole session."""
    return tmp_path_factory.mktemp("tokens")

"""What a user gets for a wrong value: one line a fault, `WHERE: KEY = VALUE: RULE; WAY OUT`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import Any


class ConfigError(ValueError):
    """One or more faults that the user can mend; the program ends with exit code 2, without traceback."""

    def __init__(self, *faults: str) -> None:
        super().__init__(*faults)

    def __str__(self) -> str:
        return "\n".join(self.faults)

    @property
    def faults(self) -> tuple[str, ...]:
        """One line for each fault."""
        return self.args


class RankFault(ConfigError):
    """What one rank has met while the others go on: they will not report it."""


def literal(value: Any) -> str:
    """`value` on one line as a TOML file would have it; None is "unset"."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(literal(item) for item in value) + "]"
    if hasattr(value, "model_dump"):  # a table of a list of tables
        value = value.model_dump(exclude_none=True)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {literal(item)}" for key, item in value.items()) + "}"
    return str(value)


def fault_line(where: str, key: str, value: Any, rule: str, way_out: str = "") -> str:
    """The one line of a fault."""
    return f"{where}: {key} = {literal(value)}: {rule}" + (f"; {way_out}" if way_out else "")


def closest(word: str, words: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The one of `words` most like `word`, whatever the case; None where none is like it."""
    by_lower = {candidate.lower(): candidate for candidate in words}
    found = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[found[0]] if found else None

"""How the data code words its errors.

Every function that can refuse a configured value takes a `Fault`, normally `config.fault`, which knows where
the value was set and what it is; `plain_fault` is for callers without a config.
"""

from collections.abc import Callable

Fault = Callable[[str, str, str], str]
"""(key, rule, way out) -> one line of a ConfigError."""


def plain_fault(key: str, rule: str, way_out: str) -> str:
    return f"{key}: {rule}; {way_out}" if way_out else f"{key}: {rule}"

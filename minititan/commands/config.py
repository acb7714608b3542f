"""`minititan config`: the resolved TOML of a run, or the JSON schema of the file."""

import json
from collections.abc import Sequence

from minititan.config import load
from minititan.config.schema import Config


def config_command(argv: Sequence[str]) -> int:
    """Prints the resolved TOML of a run, or with `--schema` the JSON schema of the file."""
    if list(argv) == ["--schema"]:
        print(json.dumps(Config.model_json_schema(), indent=2))
    else:
        print(load(argv).to_toml(), end="")
    return 0

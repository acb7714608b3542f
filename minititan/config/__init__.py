"""The config of a run: `load` makes it from TOML and command line, `validate` fits it to the processes."""

from minititan.config.error import ConfigError, RankFault
from minititan.config.load import load
from minititan.config.schema import Config
from minititan.config.validate import Layout, validate

__all__ = ["Config", "ConfigError", "Layout", "RankFault", "load", "validate"]

"""Subcommands of `minititan` that are more than a call, and what they share."""

import argparse
from typing import NoReturn

from minititan.config import ConfigError


class Parser(argparse.ArgumentParser):
    """Reports a fault as one line, like every other one."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"command line: {message}; {self.prog} --help tells more")


def parser_of(prog: str, description: str) -> Parser:
    """A parser of whole option names, whose help keeps the lines of its description."""
    return Parser(
        prog=prog,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

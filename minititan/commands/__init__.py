"""Subcommands of `minititan` that are more than a call, and what they share."""

import argparse
import ctypes
import sys
from typing import NoReturn

from minititan.config import ConfigError


class Parser(argparse.ArgumentParser):
    """Reports a fault as one line, like every other one."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"command line: {message}; {self.prog} --help tells more")


def give_back_freed_memory() -> None:
    """Make glibc return a large block to the system when it is freed.

    By itself it keeps blocks of a size that was freed before in its heap, where tensors of several sizes
    leave holes: importing took 0.2 GB more in every second run.
    """
    threshold_of_mmap = -3  # M_MMAP_THRESHOLD of malloc.h; setting it stops its growth
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(threshold_of_mmap, 1 << 20)


def parser_of(prog: str, description: str) -> Parser:
    """A parser of whole option names, whose help keeps the lines of its description."""
    return Parser(
        prog=prog,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_custom_import(parser: argparse.ArgumentParser) -> None:
    """Add the key of a run's TOML that names the module of a family of the user's own."""
    key = "--experimental.custom_import"
    parser.add_argument(key, dest="custom_import", metavar="MODULE", default="", help="your own family")

"""`minititan models`: the families and flavors that a run can name, and their sizes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from minititan import registry
from minititan.commands import add_custom_import, parser_of
from minititan.commands.tables import print_table
from minititan.config import ConfigError
from minititan.config.command_line import WHERE
from minititan.config.error import closest, fault_line
from minititan.data import build_tokenizer

_HELP = """\
Lists the model families and their flavors: parameters, those that a token goes through (of a mixture of
experts), floating-point operations of forward and backward for a token. docs/models.md has the formula."""


def models_command(argv: Sequence[str]) -> int:
    """Prints the registry."""
    parser = parser_of("minititan models", _HELP)
    parser.add_argument("family", metavar="FAMILY", nargs="?", help="only this one")
    parser.add_argument(
        "--seq_len",
        "--seq-len",
        metavar="TOKENS",
        type=int,
        default=4096,
        help="length of a sequence that operations are counted for; default: 4096",
    )
    add_custom_import(parser)
    given = parser.parse_args(argv)
    if given.seq_len < 1:
        raise ConfigError(f"command line: --seq_len {given.seq_len}: must be at least 1")
    registry.load_user_models(
        given.custom_import,
        lambda key, rule, way_out: fault_line(WHERE, key, given.custom_import, rule, way_out),
    )
    families = registry.families()
    if given.family is not None and given.family not in families:
        near = f"nearest: {found}; " if (found := closest(given.family, families)) else ""
        raise ConfigError(f"{WHERE}: {given.family}: no such family; {near}there are: {', '.join(families)}")
    ids = build_tokenizer("").vocab_size
    rows = [
        _row(name, flavor, spec, _with_vocabulary(args, ids), given.seq_len)
        for name, spec in families.items()
        if given.family in (None, name)
        for flavor, args in spec.flavors.items()
    ]
    numbers = ("parameters", "active", "GFLOPs a token")
    print_table(("family", "flavor", *numbers), rows, right=numbers)
    print(
        f"\nOperations at {given.seq_len} tokens; a flavor without a vocabulary of its own with {ids} bytes"
    )
    return 0


def _with_vocabulary(args: Any, ids: int) -> Any:
    return replace(args, vocab_size=ids) if getattr(args, "vocab_size", 0) is None else args


def _row(name: str, flavor: str, spec: registry.ModelSpec, args: Any, seq_len: int) -> tuple[str, ...]:
    total, active = spec.parameters_of(args)
    flops = "n/a" if spec.flops_per_token is None else f"{spec.flops_per_token(args, seq_len) / 1e9:.3g}"
    return name, flavor, f"{total:,}", f"{active:,}", flops

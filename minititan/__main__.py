"""The `minititan` command and its subcommands; `python -m minititan` is the same.

A subcommand is a function of the words after its name that returns the exit code. What it needs is imported
inside it, so that `minititan config` answers without loading torch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence

from minititan.config import ConfigError, load
from minititan.config.command_line import USAGE, asks_for_help
from minititan.config.error import closest
from minititan.config.schema import Config


def config_command(argv: Sequence[str]) -> int:
    """Prints the resolved TOML of a run, or with `--schema` the JSON schema of the file."""
    if list(argv) == ["--schema"]:
        print(json.dumps(Config.model_json_schema(), indent=2))
    else:
        print(load(argv).to_toml(), end="")
    return 0


def train_command(argv: Sequence[str]) -> int:
    """Trains in this one process; with torchrun, start `torchrun -m minititan.train` instead."""
    from minititan.train import main as train

    return train(argv)


def prepare_command(argv: Sequence[str]) -> int:
    """Makes text into tokens."""
    from minititan.prepare import prepare_command as prepare

    return prepare(argv)


def data_command(argv: Sequence[str]) -> int:
    """Shows or checks prepared data."""
    from minititan.inspect_data import data_command as data

    return data(argv)


def import_command(argv: Sequence[str]) -> int:
    """Makes a run from weights in Hugging Face's form."""
    from minititan.commands.hugging_face import import_command

    return import_command(argv)


def export_command(argv: Sequence[str]) -> int:
    """Writes a checkpoint in Hugging Face's form."""
    from minititan.commands.hugging_face import export_command

    return export_command(argv)


def generate_command(argv: Sequence[str]) -> int:
    """Writes text with a model."""
    from minititan.generate import main as generate

    return generate(argv)


def checkpoint_command(argv: Sequence[str]) -> int:
    """Looks at checkpoints, and thins them out."""
    from minititan.commands.checkpoint import checkpoint_command

    return checkpoint_command(argv)


def models_command(argv: Sequence[str]) -> int:
    """Lists the model families and their sizes."""
    from minititan.commands.models import models_command

    return models_command(argv)


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "config": (config_command, "print the resolved TOML of a run; --schema: the JSON schema for editors"),
    "models": (models_command, "list the model families, their flavors and sizes"),
    "prepare": (prepare_command, "make text into tokens for training, once"),
    "data": (data_command, "ls, verify, head: what prepared data holds, whether it is whole, how it reads"),
    "train": (train_command, "train in one process (several: torchrun -m minititan.train)"),
    "generate": (generate_command, "continue a text (on several processes: torchrun -m minititan.generate)"),
    "import": (import_command, "make a run that trains on from weights in Hugging Face's form"),
    "export": (export_command, "write a checkpoint in Hugging Face's form"),
    "checkpoint": (checkpoint_command, "ls, show, verify, diff, prune, convert checkpoints"),
}
OWN_HELP = ("models", "prepare", "data", "generate", "import", "export", "checkpoint")
"""Commands that take no keys of the file, and have a help of their own."""


def help_text() -> str:
    """What `minititan --help` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {line}" for name, (_, line) in COMMANDS.items()]
    head = "usage: minititan COMMAND --job.config_file FILE.toml [--section.key VALUE]..."
    tail = "Every key of the file is described in docs/config.md."
    own = f"With words of their own, see --help: {', '.join(OWN_HELP)}."
    return "\n".join([head, "", "commands:", *lines, "", tail, own])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns the exit code, 2 for what the user can mend."""
    name, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if name not in COMMANDS:
        near = f"nearest: {found}; " if (found := closest(name, COMMANDS)) else ""
        print(
            f"command line: {name}: no such command; {near}commands: {', '.join(COMMANDS)}", file=sys.stderr
        )
        return 2
    if asks_for_help(rest) and name not in OWN_HELP:
        print(f"minititan {name}: {COMMANDS[name][1]}\n{USAGE}")
        return 0
    try:
        code = COMMANDS[name][0](rest)
        sys.stdout.flush()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except SystemExit as ended:  # of argparse, after its help
        return int(ended.code or 0)
    except BrokenPipeError:  # whoever read our output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return code


if __name__ == "__main__":
    sys.exit(main())

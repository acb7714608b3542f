"""The `minititan` command and its subcommands; `python -m minititan` is the same.

A subcommand is a function of the words after its name that returns the exit code. Its module is imported when
it is called, so that the help answers at once and `minititan config` without loading torch.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

COMMANDS = {
    "config": (
        "commands.config:config_command",
        "print the resolved TOML of a run; --schema: the JSON schema for editors",
    ),
    "models": ("commands.models:models_command", "list the model families, their flavors and sizes"),
    "prepare": ("prepare:prepare_command", "make text into tokens for training, once"),
    "data": (
        "inspect_data:data_command",
        "ls, verify, head: what prepared data holds, whether it is whole, how it reads",
    ),
    "train": ("train:main", "train in one process (several: torchrun -m minititan.train)"),
    "generate": ("generate:main", "continue a text (on several processes: torchrun -m minititan.generate)"),
    "import": (
        "commands.hugging_face:import_command",
        "make a run that trains on from weights in Hugging Face's form",
    ),
    "export": ("commands.hugging_face:export_command", "write a checkpoint in Hugging Face's form"),
    "checkpoint": (
        "commands.checkpoint:checkpoint_command",
        "ls, show, verify, diff, prune, convert checkpoints",
    ),
}
OWN_HELP = ("models", "prepare", "data", "generate", "import", "export", "checkpoint")
"""Commands that take no keys of the file, and have a help of their own."""


def command(name: str) -> Callable[[Sequence[str]], int]:
    """Import a subcommand, without looking for garbage in what is imported: there is none."""
    module, function = COMMANDS[name][0].split(":")
    gc.disable()
    try:
        return getattr(import_module(f"minititan.{module}"), function)
    finally:
        gc.enable()


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
    from minititan.config import ConfigError
    from minititan.config.command_line import USAGE, asks_for_help
    from minititan.config.error import closest

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
        called = command(name)
        if argv is None:  # as a program, not by one, whose objects are not ours
            gc.freeze()  # nor is any of it garbage at the end: half a second
        code = called(rest)
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

"""`minititan prepare`: text to a folder of token shards that `training.dataset_path` names."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from minititan.config import ConfigError
from minititan.config.error import fault_line
from minititan.data.access import check_special_tokens
from minititan.data.prepare import REJECTS, Card, Recipe, prepare
from minititan.data.progress import shown
from minititan.data.records import Form
from minititan.data.shards import MANIFEST
from minititan.data.sources import source_at
from minititan.data.tokenizer import build_tokenizer

WHERE = "command line"
# What the config calls its options.
OPTIONS = {
    "data.add_bos": "--add_bos",
    "data.add_eos": "--add_eos",
    "data.text_key": "--text_key",
    "model.hf_assets_path": "--tokenizer",
}
DESCRIPTION = """\
Makes text into tokens, once, so that any number of runs can train on them:

  minititan prepare ~/text --output ~/tokens --tokenizer ~/tokenizer.json
  torchrun ... --training.dataset_path ~/tokens --model.hf_assets_path ~/tokenizer.json

Read are .txt, .jsonl and .json (an object a line), each also with .gz, .zst or .bz2, and .parquet. Start it
again after an interruption and it goes on with the shards that are finished."""
EPILOG = """\
in parts, on several machines or in an array job (the last one to end makes the set whole):
  minititan prepare ~/text --output ~/tokens --part $SLURM_ARRAY_TASK_ID/16      # --array=1-16

What the folder holds is shown by `minititan data ls FOLDER`; docs/data.md describes it."""


class Parser(argparse.ArgumentParser):
    """Its errors are ours: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{WHERE}: {message}; see {self.prog} --help")


def with_underscores(argv: Sequence[str]) -> list[str]:
    """The words, with dashes in the names of options made underscores, as in the config's."""
    words = []
    for word in argv:
        name, equals, value = word.partition("=")
        dashed = name.startswith("--") and len(name) > 2
        words.append(f"--{name[2:].replace('-', '_')}{equals}{value}" if dashed else word)
    return words


def parser() -> Parser:
    made = Parser(
        prog="minititan prepare",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = made.add_argument
    add(
        "input",
        nargs="+",
        help="files, folders (searched whole), patterns in quotes, or one hf:NAME[:SUBSET[:SPLIT]]",
    )
    add(
        "--output",
        required=True,
        metavar="FOLDER",
        help="where the set is made: a new folder, or one to go on with",
    )
    add("--tokenizer", default="", metavar="PATH", help="a tokenizer.json or its folder (default: bytes)")
    add("--text_key", default="text", metavar="KEY", help='key or column of the text (default: "text")')
    add(
        "--txt_lines",
        action="store_true",
        help="each line of a .txt file is a document (default: each file is)",
    )
    for name, default in (("bos", "no"), ("eos", "yes")):
        begin = "begin" if name == "bos" else "end"
        kept: dict[str, Any] = {"dest": f"add_{name}", "default": default == "yes"}
        add(
            f"--add_{name}",
            action="store_true",
            help=f"{begin} documents with the {name} token ({default})",
            **kept,
        )
        add(f"--no_add_{name}", action="store_false", help=f"do not {begin} them with it", **kept)
    add(
        "--on_bad_record",
        choices=("error", "skip"),
        default="error",
        help=f"skip: leave out what cannot be read, count it and list it in {REJECTS} (default: error)",
    )
    add("--part", default="1/1", metavar="I/N", help="prepare only the I-th of N parts of the input")
    return made


def part_of(text: str) -> tuple[int, int]:
    """I and N of "I/N"; raises ConfigError."""
    number, _, parts = text.partition("/")
    if number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts) <= 100_000:
        return int(number), int(parts)
    raise ConfigError(fault_line(WHERE, "part", text, "must be I/N with I from 1 to N", "as 1/16 to 16/16"))


def fault(key: str, rule: str, way_out: str) -> str:
    """The fault of an option, in the words of the command line."""
    return f"{WHERE}: {OPTIONS.get(key, key)}: {rule}" + (f"; {way_out}" if way_out else "")


def prepare_command(argv: Sequence[str]) -> int:
    """Prepares a set, or a part of one, and says what came of it."""
    options = parser().parse_args(with_underscores(argv))
    try:
        return prepare_set(options)
    except ConfigError as error:
        raise ConfigError(*map(_in_own_words, error.faults)) from None


def _in_own_words(line: str) -> str:
    """The line with options by their own names, which it has from the library by those of the config."""
    for key, option in OPTIONS.items():
        line = line.replace(key, option)
    return line


def prepare_set(options: Any) -> int:
    """The same for options that are read."""
    part = part_of(options.part)
    tokenizer = build_tokenizer(options.tokenizer, fault)
    check_special_tokens(tokenizer, options.add_bos, options.add_eos, fault)
    label = f"input = {json.dumps(options.input[0] if len(options.input) == 1 else options.input)}"

    def input_fault(key: str, rule: str, way_out: str) -> str:
        return fault(label if len(options.input) == 1 else key, rule, way_out)

    source = source_at(options.input, "input", label, input_fault)
    form = Form(options.text_key, options.txt_lines)
    skip = options.on_bad_record == "skip"
    recipe = Recipe(source, tokenizer, form, options.add_bos, options.add_eos, skip)
    folder, begun = Path(options.output).expanduser().absolute(), time.monotonic()
    was_whole = (folder / MANIFEST).is_file()
    try:
        with shown(lambda line: print(line, file=sys.stderr, flush=True)) as progress:
            done = prepare(folder, recipe, progress, part)
    except OSError as error:
        rule = f"cannot write {error.filename or folder}: {error.strerror or error}"
        raise ConfigError(fault("--output", rule, "free space there, or name another folder")) from None
    except KeyboardInterrupt:
        print("Interrupted; the same command goes on with the shards that are finished", file=sys.stderr)
        return 130
    if isinstance(done, dict):
        how = "was whole already" if was_whole else f"whole, in {time.monotonic() - begun:.1f} s"
        print("\n".join(summary(folder, done, how)))
    else:
        print(f"Part {options.part} is done. Still to come: {', '.join(map(str, done))} of {part[1]}")
    return 0


def summary(folder: Path, card: Card, how: str) -> list[str]:
    """What a set is, for its reader."""
    return [
        f"{folder}: {how}",
        f"  documents        {card['documents']:,} ({card['empty']:,} empty ones left out)",
        f"  tokens           {card['tokens']:,} in {card['shards']:,} shards",
        f"  bytes per token  {card['bytes_per_token']}",
        f"  rejected         {card['rejected']:,}" + (f", listed in {REJECTS}" if card["rejected"] else ""),
        f"  tokenizer        {card['tokenizer'] or 'bytes'} ({card['vocab_size']:,} ids)",
        f"  fingerprint      {card['fingerprint']}",
    ]

"""Overrides on the command line: `--section.key value`, `--section.key=value`, `--section.flag`,
`--section.no_flag`.

A value is read by the type of its key: a string as it stands, a list by commas, `true` and `false`. Dashes
and underscores in names are the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, get_args, get_origin

import tomli

from minititan.config.error import fault_line
from minititan.config.fields import alternatives
from minititan.config.old_names import DROPPED, present_name
from minititan.config.schema import all_keys

WHERE = "command line"
USAGE = (
    "usage: torchrun -m minititan.train --job.config_file FILE.toml "
    "[--section.key VALUE | --section.key=VALUE | --section.flag | --section.no_flag]..."
)


def parse(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The overrides by dotted key, as yet unchecked, and the faults of the words themselves."""
    entries: dict[str, Any] = {}
    faults: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, text = word[2:].partition("=")
        if not word.startswith("--") or not name:
            faults.append(_no_option(word))
            continue
        key = name.replace("-", "_")
        value = text if equals else None
        if value is None and words and not words[0].startswith("--"):
            value = words.pop(0)
        key, parsed, fault = _read(key, value)
        if key == "job.config_file" and key in entries:
            fault = fault_line(WHERE, key, parsed, f"a second file, after {entries[key]}", "give one")
        if fault:
            faults.append(fault)
        else:
            entries[key] = parsed
    return entries, faults


def _no_option(word: str) -> str:
    way_out = f"write --job.config_file {word}" if word.endswith(".toml") else "write --section.key VALUE"
    return f"{WHERE}: {word}: an option begins with -- and a name; {way_out}"


def annotation_of(key: str) -> Any:
    """The type of a key, old names included; None where there is no such key."""
    if key in DROPPED:
        return DROPPED[key].annotation
    field = all_keys().get(present_name(key))
    return field.annotation if field else None


def asks_for_help(argv: Sequence[str]) -> bool:
    """Whether one of the words is -h or --help."""
    return not {"-h", "--help"}.isdisjoint(argv)


def _read(key: str, text: str | None) -> tuple[str, Any, str]:
    """Key, value and fault ("" for none) of one option; `text` is None where no value followed."""
    annotation = annotation_of(key)
    table, _, leaf = key.rpartition(".")
    if annotation is None and leaf.startswith("no_"):
        positive = f"{table}.{leaf[3:]}"
        if annotation_of(positive) is bool:
            fault = fault_line(WHERE, key, text, "takes no value", "leave it out") if text is not None else ""
            return positive, False, fault
    if key.startswith("model.args."):
        annotation = dict
    if text is not None:
        return key, text if annotation is None else read_value(text, annotation), ""
    if annotation is bool:
        return key, True, ""
    if annotation is None:
        return key, None, ""
    return key, None, f"{WHERE}: {key}: needs a value; write --{key} VALUE"


def read_value(text: str, annotation: Any) -> Any:
    """`text` as a value of the type; the text itself where it is none, for the type check to name it."""
    members = alternatives(annotation)
    if bool in members:
        return {"true": True, "false": False}.get(text.lower(), text)
    if int in members or float in members:
        if text.lower() == "none" and members != (annotation,):
            return None
        return _number(text, int if int in members else float)
    lists = [member for member in members if get_origin(member) is tuple]
    if lists and not text.startswith("[") and get_args(lists[0])[0] is str:
        return tuple(item.strip() for item in text.split(",") if item.strip())
    if lists or dict in (members[0], get_origin(members[0])):
        return _toml_literal(text)
    return text


def _number(text: str, kind: type[int] | type[float]) -> int | float | str:
    if kind is int:
        return int(text) if re.fullmatch(r"[+-]?\d+(_\d+)*", text) else text
    try:
        return float(text)
    except ValueError:
        return text


def _toml_literal(text: str) -> Any:
    try:
        return tomli.loads(f"value = {text}")["value"]
    except tomli.TOMLDecodeError:
        return text

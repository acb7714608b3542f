"""From a TOML file and the command line to a frozen `Config`; command line before file before default.

All faults are gathered before any is reported. Nothing is repaired and no key is ignored.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

import tomli
from pydantic import ValidationError

from minititan.config import command_line
from minititan.config.contexts import context_notes
from minititan.config.error import ConfigError, closest, fault_line, literal
from minititan.config.fields import Section, alternatives, describe, sections
from minititan.config.old_names import translate
from minititan.config.rules import key_faults, relation_faults, schedule_notes
from minititan.config.schema import Config, all_keys

log = logging.getLogger("minititan")


def load(argv: Sequence[str], *, quiet: bool = False) -> Config:
    """The config of a run from the words after the program's name; every fault in one `ConfigError`.

    Warnings (old names, a clamped schedule) are logged by rank 0, unless `quiet`.
    """
    overrides, faults = command_line.parse(argv)
    path = overrides.get("job.config_file")
    if not path or not isinstance(path, str):
        missing = f"{command_line.WHERE}: no config file is given; {command_line.USAGE}"
        raise ConfigError(*(faults or [missing]))
    file = Path(path)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    notes: list[str] = []
    try:
        table = read_toml(file)
    except ConfigError as error:
        raise ConfigError(*error.faults, *faults) from None
    for where, entries in ((file.name, dict(_flatten(table))), (command_line.WHERE, overrides)):
        translated, met, old_faults = translate(entries, where)
        faults += old_faults + _merge(translated, where, values, origins)
        if met:
            notes.append(f"{where}: old names of TorchTitan are understood: {', '.join(met)}")
    config, type_faults = _build(values, origins)
    faults += type_faults + key_faults(config)
    if not faults:
        faults += relation_faults(config)
    if faults:
        raise ConfigError(*faults)
    if not quiet and os.environ.get("RANK", "0") == "0":
        for note in notes + schedule_notes(config) + context_notes(config):
            log.warning(note)
    return config


def read_toml(file: Path) -> dict[str, Any]:
    """The tables of a TOML file; `ConfigError` where it is missing, unreadable or no TOML."""
    try:
        return tomli.loads(file.read_text(encoding="utf-8-sig"))
    except tomli.TOMLDecodeError as error:
        raise ConfigError(f"{file.name}: line {error.lineno}, column {error.colno}: {error.msg}") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{file.name}: line {line}: not UTF-8 text; save the file as UTF-8") from None
    except OSError as error:
        reasons = {FileNotFoundError: "no such file", IsADirectoryError: "must be a file, not a folder"}
        reason = reasons.get(type(error), f"cannot be read ({error.strerror})")
        raise ConfigError(fault_line(command_line.WHERE, "job.config_file", str(file), reason)) from None


def _flatten(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values; a table in the place of a plain key stays a value."""
    for name, value in table.items():
        key = prefix + name
        if isinstance(value, dict) and value and (key not in all_keys() or key == "model.args"):
            yield from _flatten(value, f"{key}.")
        else:
            yield key, value


def _merge(entries: dict[str, Any], where: str, values: dict[str, Any], origins: dict[str, str]) -> list[str]:
    """Adds the known keys of a source, over those that are there; returns the faults of the others."""
    known_sections = dict(sections(Config))
    faults: list[str] = []
    unknown_sections: dict[str, list[str]] = {}
    for key, value in entries.items():
        if key in all_keys() or key.startswith("model.args."):
            for other in [old for old in values if old.startswith(f"{key}.") or key.startswith(f"{old}.")]:
                del values[other], origins[other]
            values[key], origins[key] = value, where
        elif key in known_sections:
            if value != {}:
                faults.append(fault_line(where, key, value, "must be a table", f"write [{key}]"))
        elif (table := key.rpartition(".")[0]) in known_sections:
            faults.append(fault_line(where, key, value, "unknown key", nearest_key(key)))
        else:
            unknown_sections.setdefault(table or key, []).append(key)
    for table, keys in unknown_sections.items():
        faults.append(f"{where}: {table}: unknown section; {nearest_section(table, keys)}")
    return faults


def nearest_key(key: str) -> str:
    """A way out for an unknown key: the nearest in its section, or that name elsewhere."""
    table, _, leaf = key.rpartition(".")
    siblings = [name.rpartition(".")[2] for name in all_keys() if name.rpartition(".")[0] == table]
    if close := closest(leaf, siblings):
        return f"nearest: {table}.{close}"
    elsewhere = [name for name in all_keys() if name.rpartition(".")[2] == leaf]
    if elsewhere:
        return f"nearest: {' or '.join(elsewhere)}"
    if not siblings:
        return "it holds tables only"
    contained = [name for name in siblings if leaf in name or name in leaf]
    close = contained[0] if contained else closest(leaf, siblings, cutoff=0.0)
    return f"nearest: {table}.{close}; keys of [{table}]: {', '.join(siblings)}"


def nearest_section(table: str, keys: Iterable[str]) -> str:
    """A way out for an unknown section: the nearest one, or where its keys belong."""
    names = list(dict(sections(Config)))
    if close := closest(table, names):
        return f"nearest: [{close}]"
    leaves = {key.rpartition(".")[2] for key in keys}
    homes = [name for name in all_keys() if name.rpartition(".")[2] in leaves]
    if homes:
        return f"nearest: {' or '.join(homes)}"
    return "sections: " + ", ".join(names)


def _build(values: dict[str, Any], origins: dict[str, str]) -> tuple[Config, list[str]]:
    """The config, and the faults of the keys of a wrong type, which the config has at their defaults."""
    faults: list[str] = []
    try:
        config = Config.model_validate(nested(values))
    except ValidationError as error:
        bad: dict[str, Any] = {}
        for details in error.errors():
            bad.setdefault(_key_at(details["loc"]), details)
        for key, details in bad.items():
            where = origins.get(key, "default")
            in_table = _table_fault(where, key, values[key], details)
            faults.append(in_table or _type_fault(where, key, values[key]))
        config = Config.model_validate(
            nested({key: value for key, value in values.items() if key not in bad})
        )
    config._origins.update(origins)
    return config, faults


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of dotted keys."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *parents, name = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree


def _key_at(location: tuple[int | str, ...]) -> str:
    """The key that a place inside a value belongs to."""
    for length in range(1, len(location) + 1):
        key = ".".join(str(part) for part in location[:length])
        if key in all_keys():
            return key
    raise AssertionError(f"no key at {location}")


def _type_fault(where: str, key: str, value: Any) -> str:
    annotation = all_keys()[key].annotation
    way_out = ""
    if isinstance(value, str) and str not in alternatives(annotation):
        unquoted = command_line.read_value(value, annotation)
        if where != command_line.WHERE and not isinstance(unquoted, (str, tuple, type(None))):
            way_out = f"write {literal(unquoted)} without quotes"
    choices = [str(choice) for choice in _choices(annotation)]
    if isinstance(value, str) and (close := closest(value, choices)):
        way_out = f"nearest: {literal(close)}"
    return fault_line(where, key, value, f"must be {describe(annotation)}", way_out)


def _table_fault(where: str, key: str, value: Any, details: Any) -> str:
    """The fault of a key inside one table of a list of tables; "" where that is not what is wrong."""
    kind = get_args(all_keys()[key].annotation)
    item, inside = (kind[0] if kind else None), details["loc"][len(key.split(".")) :]
    if get_origin(item) is not None or not isinstance(item, type) or not issubclass(item, Section):
        return ""
    if len(inside) < 2:
        return ""
    name = str(inside[1])
    if details["type"] == "missing":
        return fault_line(where, key, value, f"each table needs {name}")
    if name not in item.model_fields:
        return fault_line(where, key, value, f"{name}: unknown key", f"keys: {', '.join(item.model_fields)}")
    return fault_line(where, key, value, f"{name} must be {describe(item.model_fields[name].annotation)}")


def _choices(annotation: Any) -> Iterator[Any]:
    for member in alternatives(annotation):
        yield from getattr(member, "__args__", ())

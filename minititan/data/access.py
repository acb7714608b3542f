"""From what `dataset` and `dataset_path` name to tokens.

A prepared set and the token files of other programs are read in place; text goes through the cache.
"""

import glob
import json
from pathlib import Path
from typing import Any

from minititan.config import ConfigError
from minititan.data.cache import Say, open_cached
from minititan.data.fault import Fault, plain_fault
from minititan.data.formats import SUFFIXES, open_formats
from minititan.data.prepare import CARD, PLAN, Recipe
from minititan.data.records import Form
from minititan.data.shards import MANIFEST
from minititan.data.sources import HUB_PREFIX, READABLE, files_at, path_key, resolve_source
from minititan.data.tokenizer import Tokenizer
from minititan.data.tokens import DamagedTokens, Tokens, open_prepared, read_manifest


def open_tokens(
    dataset: str,
    dataset_path: str | None,
    split: str,
    tokenizer: Tokenizer,
    *,
    cache_folder: str | None = None,
    text_key: str = "text",
    txt_lines: bool = False,
    add_bos: bool = False,
    add_eos: bool = True,
    on_bad_record: str = "error",
    npy_dtype: str | None = None,
    vocab_size: int | None = None,
    section: str = "training",
    fault: Fault = plain_fault,
    say: Say = print,
    say_waiting: Say | None = None,
) -> Tokens:
    """The tokens of a source, prepared first if they are not and the cache does not have them.

    Any number of processes may call it at once, no process group is used: one prepares, the others wait and
    get the same tokens or the same ConfigError. `say` gets the lines of the one, `say_waiting` (unset: `say`)
    of the others. `section` is the config's section that names the source; `vocab_size` (unset: the
    tokenizer's) is what ids in token files of other programs must be below.
    """
    key = path_key(section)
    label = f"{key} = {json.dumps(dataset_path)}"
    if dataset_path and is_prepared(dataset_path, key, fault):
        return _open_in_place(Path(dataset_path).expanduser(), label, tokenizer, add_bos, add_eos, key, fault)
    if dataset_path and (files := token_files(dataset_path, key, fault)):
        limit = vocab_size or tokenizer.vocab_size
        eos = tokenizer.eos_id
        return open_formats(
            files, label=label, vocab_size=limit, eos_id=eos, npy_dtype=npy_dtype, fault=fault
        )
    check_special_tokens(tokenizer, add_bos, add_eos, fault)
    source = resolve_source(dataset, dataset_path, split, section=section, fault=fault)
    recipe = Recipe(source, tokenizer, Form(text_key, txt_lines), add_bos, add_eos, on_bad_record == "skip")
    return open_cached(recipe, cache_folder, fault, say, say_waiting or say)


def check_special_tokens(tokenizer: Tokenizer, add_bos: bool, add_eos: bool, fault: Fault) -> None:
    for add, kind, token in ((add_bos, "bos", tokenizer.bos_id), (add_eos, "eos", tokenizer.eos_id)):
        if add and token is None:
            way_out = (
                "set it to false, or put a tokenizer_config.json that names it beside the tokenizer.json"
            )
            raise ConfigError(fault(f"data.add_{kind}", f"the tokenizer names no {kind} token", way_out))


def check_source(
    dataset: str, dataset_path: str | None, *, section: str = "training", fault: Fault = plain_fault
) -> None:
    """Raises the ConfigError that `open_tokens` would raise for a wrong name or path."""
    key = path_key(section)
    if dataset_path and (is_prepared(dataset_path, key, fault) or token_files(dataset_path, key, fault)):
        return
    resolve_source(dataset, dataset_path, "train", section=section, fault=fault)


def is_prepared(dataset_path: str, key: str, fault: Fault = plain_fault) -> bool:
    """Whether the path is a prepared set's folder; ConfigError for one that is not finished."""
    folder = Path(dataset_path).expanduser()
    if (folder / MANIFEST).is_file():
        return True
    if (folder / PLAN).is_file() and any(folder.glob(".part-*.lock")):
        rule = f"the set is not whole: {MANIFEST} is not there"
        raise ConfigError(fault(key, rule, "start the same `minititan prepare` again: it goes on"))
    return False


def token_files(dataset_path: str, key: str, fault: Fault = plain_fault) -> tuple[Path, ...]:
    """The .bin and .npy files that the path names; empty where it names something else.

    A Megatron pair may be named by one of its files or, as Megatron has it, without the ending.
    """
    if dataset_path.startswith(HUB_PREFIX):
        return ()
    given = Path(dataset_path).expanduser()
    if not given.exists() and not glob.has_magic(dataset_path):
        pair = Path(f"{given}.bin")
        return (pair.absolute(),) if pair.is_file() else ()
    found = files_at(dataset_path, key, fault)
    names = sorted(path for path in found if path.suffix in SUFFIXES)
    if names and any(path.name.endswith(tuple(READABLE)) for path in found):
        rule = f"holds token files ({names[0].name}) beside files of text"
        raise ConfigError(fault(key, rule, "name the ones to train on by a pattern"))
    files = {path.with_suffix(".bin") if path.suffix == ".idx" else path for path in names}
    return tuple(sorted(files, key=str))


def _open_in_place(
    folder: Path, label: str, tokenizer: Tokenizer, add_bos: bool, add_eos: bool, key: str, fault: Fault
) -> Tokens:
    try:
        manifest = read_manifest(folder)
        card: dict[str, Any] = json.loads((folder / CARD).read_bytes())
        tokens = open_prepared(folder, label)
    except (DamagedTokens, OSError, ValueError) as error:
        way_out = "`minititan data verify` shows which files are whole; copy or prepare the set again"
        raise ConfigError(fault(key, f"damaged: {error}", way_out)) from None
    if manifest["tokenizer"] != tokenizer.fingerprint:
        theirs = card["tokenizer"] or "bytes"
        rule = f"was prepared with another tokenizer ({theirs}, {card['vocab_size']} ids)"
        raise ConfigError(fault(key, rule, "set model.hf_assets_path to that one, or prepare the text again"))
    faults = [
        fault(f"data.{name}", f"{folder} was prepared with {json.dumps(card['options'][name])}", "set it so")
        for name, value in (("add_bos", add_bos), ("add_eos", add_eos))
        if card["options"][name] != value
    ]
    if faults:
        raise ConfigError(*faults)
    return tokens

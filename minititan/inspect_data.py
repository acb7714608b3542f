"""`minititan data ls|verify|head`: what is in prepared data, whether it is whole, and how it reads."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from minititan.config import ConfigError
from minititan.data.access import is_prepared, token_files
from minititan.data.cache import SOURCES
from minititan.data.formats import NPY_TYPES, open_formats
from minititan.data.prepare import CARD
from minititan.data.shards import MANIFEST, Entry, describe, fingerprint_of
from minititan.data.tokenizer import build_tokenizer
from minititan.data.tokens import DamagedTokens, Tokens, open_prepared, read_manifest
from minititan.prepare import Parser, fault, summary, with_underscores

SHOWN_TOKENS = 1 << 16
SHOWN_CHARACTERS = 500
ANY_ID = 1 << 63
DESCRIPTION = """\
Looks at prepared data:

  minititan data ls PATH        what a set, a cache of sets, or token files (.bin, .npy) hold
  minititan data verify PATH    compare all of it with its hashes; damaged files are named, exit code 2
  minititan data head PATH      the first documents, as text"""


def data_command(argv: Sequence[str]) -> int:
    """Shows or checks prepared data."""
    parser = Parser(
        prog="minititan data",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("action", choices=("ls", "verify", "head"))
    add("path", help="folder of a set or of the cache; for ls and head also token files")
    add("--documents", type=int, default=5, metavar="N", help="head: how many (default: 5)")
    add(
        "--tokenizer",
        metavar="PATH",
        help="head: the tokenizer to read with (default: the one that made the set)",
    )
    add("--npy_dtype", choices=NPY_TYPES, help="type of the tokens in .npy files without a header")
    options = parser.parse_args(with_underscores(argv))
    if options.action == "ls":
        lines = _listed(options.path, options.npy_dtype)
    elif options.action == "verify":
        lines = [line for folder in _sets(options.path) for line in _verified(folder)]
    else:
        lines = _head(options.path, options.documents, options.tokenizer, options.npy_dtype)
    print("\n".join(lines))
    return 0


def _sets(path: str) -> list[Path]:
    """The prepared sets at a path: itself, or those of a cache."""
    folder = Path(path).expanduser()
    if is_prepared(path, "path", fault):
        return [folder]
    if (folder / SOURCES).is_dir():
        return sorted(card.parent for card in folder.glob(f"*/{CARD}"))
    raise _no(path, "no cache of sets")


def _no(path: str, what: str) -> ConfigError:
    there = Path(path).expanduser().exists()
    rule = f"{path} is no prepared set and {what}" if there else f"{path}: no such file or folder"
    return ConfigError(fault("path", rule, "name what `minititan prepare` made"))


def _listed(path: str, npy_dtype: str | None) -> list[str]:
    if not (Path(path).expanduser() / SOURCES).is_dir() and not is_prepared(path, "path", fault):
        tokens = _open(path, npy_dtype)
        documents = f" in {tokens.num_documents:,} documents" if tokens.lists_documents else ""
        files = [f"  {s.path.name}  {s.tokens:,} x {np.dtype(s.dtype).name}" for s in tokens.shards]
        return [f"{path}: {tokens.num_tokens:,} tokens{documents}", *files]
    lines = []
    for folder in _sets(path):
        card = _card(folder)
        lines += [*summary(folder, card, "a set"), f"  made from        {card['source']}"]
    return lines or [f"{path}: a cache without sets"]


def _card(folder: Path) -> dict:
    try:
        return json.loads((folder / CARD).read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / CARD}: cannot be read ({error})") from None


def _open(path: str, npy_dtype: str | None) -> Tokens:
    if is_prepared(path, "path", fault):
        try:
            return open_prepared(Path(path).expanduser(), path)
        except DamagedTokens as error:
            raise ConfigError(fault("path", f"damaged: {error}", "see `minititan data verify`")) from None
    files = token_files(path, "path", fault)
    if not files:
        raise _no(path, "holds no token files")
    return open_formats(files, label=path, vocab_size=ANY_ID, npy_dtype=npy_dtype, fault=fault)


def _verified(folder: Path) -> list[str]:
    """A line on a set that is whole; ConfigError names every file that is not."""
    try:
        manifest = read_manifest(folder)
        dtype = np.dtype(manifest["dtype"])
        faults = [fault for entry in manifest["shards"] if (fault := _shard_fault(folder, entry, dtype))]
        if not faults and manifest["fingerprint"] != fingerprint_of(manifest["shards"], dtype):
            faults.append(f"{folder / MANIFEST}: its fingerprint is not that of the shards")
    except (DamagedTokens, KeyError, TypeError) as error:
        raise ConfigError(f"{error}; copy or prepare the set again") from None
    if faults:
        raise ConfigError(*(f"{line}; copy or prepare the set again" for line in faults))
    return [f"{folder}: whole, {len(manifest['shards']):,} shards read"]


def _shard_fault(folder: Path, entry: Entry, dtype: np.dtype) -> str:
    """What is wrong with a shard's files, "" for nothing."""
    stem = folder / entry["name"]
    try:
        found = describe(folder, entry["name"], dtype)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    except ValueError as error:
        return f"{stem}.bin: {error}"
    if found["starts_sha256"] != entry["starts_sha256"]:
        return f"{stem}.starts.npy: its content is not what {MANIFEST} says"
    return "" if found == entry else f"{stem}.bin: its content is not what {MANIFEST} says"


def _head(path: str, documents: int, tokenizer_path: str | None, npy_dtype: str | None) -> list[str]:
    if documents < 1:
        raise ConfigError(fault("--documents", f"{documents} must be at least 1", ""))
    tokens = _open(path, npy_dtype)
    if tokenizer_path is None:
        tokenizer_path = (
            _card(Path(path).expanduser())["tokenizer"] if is_prepared(path, "path", fault) else ""
        )
    tokenizer = build_tokenizer(tokenizer_path, fault)
    starts = tokens.document_starts(0, min(tokens.num_tokens, SHOWN_TOKENS * documents))[
        : documents + 1
    ].tolist()
    ends = [*starts[1:], tokens.num_tokens][: len(starts)]
    lines = []
    for number, (begin, end) in enumerate(list(zip(starts, ends, strict=True))[:documents], start=1):
        ids = np.empty(min(end - begin, SHOWN_TOKENS), dtype=np.int64)
        tokens.read(begin, begin + len(ids), ids)
        text = tokenizer.decode(ids.tolist())
        more = " ..." if len(text) > SHOWN_CHARACTERS or end - begin > len(ids) else ""
        lines += [f"--- document {number}: {end - begin:,} tokens", text[:SHOWN_CHARACTERS] + more]
    return lines

"""Text to prepared tokens: the one way, for `minititan prepare` and for the cache of training on raw files.

The input is cut into units, and each unit is prepared, from its begin on, into shards that end where
SHARD_BYTES of it are read. A shard counts when its entry (NAME.json, written last) is there, which says where
in the input the next one begins: whoever comes after a kill goes on there. When all units have all their
shards, the entries become tokens.json, and dataset.json says what the set is.

    FOLDER/plan.json            the options of the set that is being made, and in how many parts
    FOLDER/NAME.json            a finished shard's entry; beside it NAME.rejects.jsonl
    FOLDER/.lock, .part-N.lock  held while the folder's state is looked at, and by who prepares the part
"""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from minititan.config import ConfigError
from minititan.data.encode import Encoded, encode, token_dtype
from minititan.data.locks import is_free, locked, locked_now
from minititan.data.progress import Progress
from minititan.data.records import BadRecord, Form
from minititan.data.shards import (
    FORMAT_VERSION,
    MANIFEST,
    Entry,
    fingerprint_of,
    replacing,
    write_json,
    write_manifest,
    write_shard,
)
from minititan.data.sources import Source
from minititan.data.tokenizer import Tokenizer
from minititan.data.tokens import read_manifest
from minititan.data.units import Place, Unit, parts_of, units_of

SHARD_BYTES = 1 << 28
CARD = "dataset.json"
PLAN = "plan.json"
REJECTS = "rejects.jsonl"
MADE = re.compile(r"(?P<shard>\d{5,}-\d{3,})(?P<suffix>\..+)|plan\.json|\.lock|\.part-\d+\.lock|\..+\.tmp")
"""Names that a preparation gives; nothing else is ever removed."""

Card = dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """All that decides the tokens of one source."""

    source: Source
    tokenizer: Tokenizer
    form: Form
    add_bos: bool = False
    add_eos: bool = True
    skip_bad_records: bool = False

    def options(self) -> dict[str, Any]:
        """What is the same for all shards of a set."""
        about = {"format_version": FORMAT_VERSION, "tokenizer": self.tokenizer.fingerprint}
        return about | asdict(self.form) | {"add_bos": self.add_bos, "add_eos": self.add_eos}

    def key(self, about: Any) -> str:
        """A name for `about` prepared in this way."""
        options = [self.options(), self.skip_bad_records]
        return sha256(json.dumps([about, options], sort_keys=True).encode()).hexdigest()[:32]


def prepare(
    folder: Path, recipe: Recipe, progress: Progress, part: tuple[int, int] = (1, 1)
) -> Card | tuple[int, ...]:
    """Prepares part i of n, the i-th of n rows of units of about the same size; may make the set whole.

    Returns the set's card, or the numbers of the parts that are still to come. Goes on with what is in
    `folder`, and does nothing where the set is whole. Raises ConfigError; finished shards stay.
    """
    done = card_of(folder, recipe) or _prepare(folder, recipe, progress, part)
    if isinstance(done, dict):
        _tidy(folder)
    return done


def _prepare(
    folder: Path, recipe: Recipe, progress: Progress, part: tuple[int, int]
) -> Card | tuple[int, ...]:
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        _claim(folder, recipe, part, held)
        if card := card_of(folder, recipe):
            return card
        inputs = recipe.source.identity()
        units = units_of(recipe.source.spans(recipe.form))
        places = parts_of(units, part[1])
        mine = [index for index, place in enumerate(places) if place == part[0]]
        makers = [_UnitMaker(folder, index, units[index], recipe) for index in mine]
        progress.begin(sum(maker.left() for maker in makers))
        for maker in makers:
            maker.make(progress)
        if recipe.source.identity() != inputs:
            raise ConfigError(f"{recipe.source.label}: changed while it was being prepared; start again")
    with locked(folder / ".lock"):
        return card_of(folder, recipe) or _finish(folder, recipe, units, places)


def card_of(folder: Path, recipe: Recipe) -> Card | None:
    """The card of the set in `folder`, if it is whole; ConfigError where it is another than the recipe's."""
    if not (folder / MANIFEST).is_file():
        return None
    try:
        card = json.loads((folder / CARD).read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / CARD}: cannot be read ({error}); prepare into another folder") from None
    _check_options(folder, card["options"], recipe)
    if card["inputs"] != inputs_hash(recipe):
        rule = "holds a set of other files, or of files as they were before they changed"
        raise ConfigError(f"{folder}: {rule}; prepare into another folder, or remove this one")
    return card


def inputs_hash(recipe: Recipe) -> str:
    return sha256(json.dumps(recipe.source.identity()).encode()).hexdigest()


def _check_options(folder: Path, theirs: dict[str, Any], recipe: Recipe) -> None:
    mine = recipe.options()
    differs = [
        f"{key} {theirs.get(key)}, not {value}" for key, value in mine.items() if theirs.get(key) != value
    ]
    if differs:
        way_out = "prepare into another folder, or remove this one"
        raise ConfigError(f"{folder}: holds a set with {'; '.join(differs)}; {way_out}")


def _claim(folder: Path, recipe: Recipe, part: tuple[int, int], held: ExitStack) -> None:
    """Holds the part's lock until `held` ends; ConfigError where another process works on it, or on the same
    set in another number of parts."""
    with locked(folder / ".lock"):
        plan = _read_json(folder / PLAN)
        others = plan is None and any(not path.name.startswith(".") for path in folder.iterdir())
        if others and not (folder / MANIFEST).is_file():
            rule = "holds other files, and no set that could be gone on with"
            raise ConfigError(f"{folder}: {rule}; name a folder that is new or empty")
        if plan is not None:
            _check_options(folder, plan["options"], recipe)
            if plan["parts"] != part[1]:
                for number in range(1, plan["parts"] + 1):
                    if not is_free(_part_lock(folder, number)):
                        rule = f"is being prepared in {plan['parts']} parts, of which {number} is at work"
                        way_out = f"use --part I/{plan['parts']}, or wait"
                        raise ConfigError(f"{folder}: {rule}; {way_out}")
        if not held.enter_context(locked_now(_part_lock(folder, part[0]))):
            name = "this set" if part[1] == 1 else f"part {part[0]}/{part[1]}"
            raise ConfigError(f"{folder}: another process is preparing {name}; wait for it, or end it")
        if plan is None or plan["parts"] != part[1]:
            write_json(folder / PLAN, {"options": recipe.options(), "parts": part[1]})


def _part_lock(folder: Path, number: int) -> Path:
    return folder / f".part-{number}.lock"


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


class _UnitMaker:
    """The shards of one unit."""

    def __init__(self, folder: Path, index: int, unit: Unit, recipe: Recipe) -> None:
        self._folder, self._index, self._unit, self._recipe = folder, index, unit, recipe
        self._key = unit.key(recipe.options())
        self._dtype = token_dtype(recipe.tokenizer.vocab_size)

    def finished(self) -> Iterator[Entry]:
        """The entries of the shards that are there, in order."""
        place, number = Place(), 0
        while place is not None:
            entry = self._entry(f"{self._index:05d}-{number:03d}", place)
            if entry is None:
                return
            yield entry
            place, number = entry["next"], number + 1

    def _entry(self, name: str, place: Any) -> Entry | None:
        entry = _read_json(self._folder / f"{name}.json")
        if entry is None or entry["unit"] != self._key or entry["begin"] != list(place):
            return None
        sizes = {".bin": entry["tokens"] * self._dtype.itemsize, ".starts.npy": None}
        for suffix, size in sizes.items():
            path = self._folder / f"{name}{suffix}"
            if not path.is_file() or size not in (None, path.stat().st_size):
                return None
        return entry

    def left(self) -> int:
        """Bytes of the input that are to be read."""
        entries = list(self.finished())
        return self._unit.size - (entries[-1]["read"] if entries else 0)

    def make(self, progress: Progress) -> None:
        """Writes the shards that are not there."""
        entries = list(self.finished())
        place, read, number = Place(), 0, len(entries)
        if entries:
            place, read = entries[-1]["next"], entries[-1]["read"]
        while place is not None:
            entry = self._write(f"{self._index:05d}-{number:03d}", Place(*place), read, progress)
            place, read, number = entry["next"], entry["read"], number + 1

    def _write(self, name: str, place: Place, read: int, progress: Progress) -> Entry:
        recipe = self._recipe
        # An entry of the file as it was would be believed again if it came back.
        (self._folder / f"{name}.json").unlink(missing_ok=True)
        with replacing(self._folder / f"{name}.{REJECTS}") as rejects:
            documents = _Documents(self._unit, place, read, recipe, rejects)
            encoded = encode(documents, recipe.tokenizer, add_bos=recipe.add_bos, add_eos=recipe.add_eos)
            counts = {"documents_read": 0, "text_bytes": 0}
            parts = _counted(encoded, counts, documents, progress)
            entry = write_shard(self._folder, name, self._dtype, parts)
        if not documents.rejected:
            (self._folder / f"{name}.{REJECTS}").unlink()
        end = self._unit.size if documents.next is None else documents.read
        progress.advance(end - documents.told, 0)
        entry |= {"unit": self._key, "begin": place, "next": documents.next, "read": end}
        entry |= counts | {"rejected": documents.rejected}
        write_json(self._folder / f"{name}.json", entry)
        return entry


class _Documents:
    """The documents of a unit from a place on, until SHARD_BYTES are read; bad ones go to `rejects`."""

    def __init__(self, unit: Unit, place: Place, read: int, recipe: Recipe, rejects: Any) -> None:
        self.next: Place | None = None
        self.rejected = 0
        self.read = self.told = read
        self._records = unit.records(recipe.form, place)
        self._skip, self._rejects = recipe.skip_bad_records, rejects

    def __iter__(self) -> Iterator[Iterable[str]]:
        size = 0
        for place, read, record in self._records:
            if size >= SHARD_BYTES:
                self.next = place
                return
            size += record.size
            self.read = read
            if not isinstance(record, BadRecord):
                yield record.blocks
            elif self._skip:
                self.rejected += 1
                self._rejects.write(f"{json.dumps(record.rejected())}\n".encode())
            else:
                raise record.error()


def _counted(
    encoded: Iterable[Encoded], counts: dict[str, int], documents: _Documents, progress: Progress
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for batch in encoded:
        counts["documents_read"] += batch.documents
        counts["text_bytes"] += batch.text_bytes
        progress.advance(documents.read - documents.told, len(batch.tokens))
        documents.told = documents.read
        yield batch.tokens, batch.starts


def _why_empty(folder: Path, entries: list[Entry]) -> str:
    rejected = [entry for entry in entries if entry["rejected"]]
    if not rejected:
        return "holds no text; give files with text in them"
    with (folder / f"{rejected[0]['name']}.{REJECTS}").open("rb") as file:
        first = json.loads(file.readline())
    place = ":".join(str(first[key]) for key in ("file", "line", "row") if key in first)
    count = sum(entry["rejected"] for entry in rejected)
    return f"holds no text that can be used, bad records: {count}; the first: {place}: {first['reason']}"


def _finish(folder: Path, recipe: Recipe, units: list[Unit], places: list[int]) -> Card | tuple[int, ...]:
    """Makes the set whole if all its shards are there; else returns the parts that are not."""
    entries: list[Entry] = []
    missing: set[int] = set()
    for index, unit in enumerate(units):
        found = list(_UnitMaker(folder, index, unit, recipe).finished())
        if not found or found[-1]["next"] is not None:
            missing.add(places[index])
        entries += found
    if missing:
        return tuple(sorted(missing))
    shards = [entry for entry in entries if entry["tokens"]]
    if not shards:
        raise ConfigError(f"{recipe.source.label}: {_why_empty(folder, entries)}")
    card = _card(recipe, units, entries)
    if card["rejected"]:
        with replacing(folder / REJECTS) as file:
            for entry in entries:
                if entry["rejected"]:
                    file.write((folder / f"{entry['name']}.{REJECTS}").read_bytes())
    write_json(folder / CARD, card)
    kept = ("name", "tokens", "documents", "hash", "starts_sha256", "edges")
    dtype = token_dtype(recipe.tokenizer.vocab_size)
    manifest = [{key: entry[key] for key in kept} for entry in shards]
    write_manifest(folder, manifest, dtype, recipe.tokenizer.vocab_size, recipe.tokenizer.fingerprint)
    return card


def _card(recipe: Recipe, units: list[Unit], entries: list[Entry]) -> Card:
    names = ("tokens", "documents", "documents_read", "text_bytes", "rejected")
    sums = {name: sum(entry[name] for entry in entries) for name in names}
    shards = [entry for entry in entries if entry["tokens"]]
    tokenizer = recipe.tokenizer
    return {
        "source": recipe.source.label,
        "files": len({span.path for unit in units for span in unit.spans}),
        "input_bytes": sum(unit.size for unit in units),
        "inputs": inputs_hash(recipe),
        "tokenizer": tokenizer.path,
        "vocab_size": tokenizer.vocab_size,
        "options": recipe.options(),
        "documents": sums["documents"],
        "tokens": sums["tokens"],
        "text_bytes": sums["text_bytes"],
        "bytes_per_token": round(sums["text_bytes"] / sums["tokens"], 3),
        "empty": sums["documents_read"] - sums["documents"],
        "rejected": sums["rejected"],
        "shards": len(shards),
        "fingerprint": fingerprint_of(shards, token_dtype(tokenizer.vocab_size)),
    }


def _tidy(folder: Path) -> None:
    """Removes what only the making of a whole set needed, shards of files that changed meanwhile among it."""
    shards = {entry["name"] for entry in read_manifest(folder)["shards"]}
    for path in folder.iterdir():
        made = MADE.fullmatch(path.name)
        data = made and made["suffix"] in (".bin", ".starts.npy")
        if made and not (data and made["shard"] in shards):
            path.unlink(missing_ok=True)

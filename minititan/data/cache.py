"""The cache of prepared tokens: files of text are tokenised once, by one process, and then only mapped.

    CACHE/<content key>/           a prepared set, renamed into place when it is whole
    CACHE/sources/<source key>     which content key this source has; beside it .lock and .fault
    CACHE/.tmp-<source key>/       in the making, by the process that holds the lock

The source key is cheap (paths, sizes, times, options); the content key hashes the text itself, so that a
copy of the same text elsewhere is found again. Who is killed leaves finished shards, and the next holder of
the lock goes on with them. Nodes of one run must share the folder.
"""

import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minititan.config import ConfigError
from minititan.data.fault import Fault
from minititan.data.locks import is_free, locked
from minititan.data.prepare import Recipe, prepare
from minititan.data.progress import Lines
from minititan.data.tokens import DamagedTokens, Tokens, open_prepared

Say = Callable[[str], None]
LEFTOVER_SECONDS = 7 * 24 * 3600
SOURCES = "sources"


@dataclass(frozen=True)
class _Job:
    """What is prepared, and where it lies."""

    cache: Path
    recipe: Recipe

    @property
    def label(self) -> str:
        return self.recipe.source.label

    def source_key(self) -> str:
        return self.recipe.key(self.recipe.source.identity())

    def content_key(self) -> str:
        return self.recipe.key(self.recipe.source.content_hash())


def open_cached(recipe: Recipe, cache_folder: str | None, fault: Fault, say: Say, say_waiting: Say) -> Tokens:
    """The tokens of a source, prepared first if the cache does not have them.

    Any number of processes may call it at once: one prepares, the others wait and get the same tokens or the
    same ConfigError. `say` gets the lines of the one, `say_waiting` of the others.
    """
    job = _Job(resolve_cache(cache_folder, fault), recipe)
    with _cache_faults(job.cache, fault):
        return _find(job, job.source_key()) or _wait_or_prepare(job, fault, say, say_waiting)


@contextmanager
def _cache_faults(cache: Path, fault: Fault) -> Iterator[None]:
    """Makes what goes wrong in writing the cache a ConfigError that names it."""
    try:
        yield
    except OSError as error:
        rule = f"cannot write {error.filename or cache}: {error.strerror or error}"
        way_out = "free space there, or name a folder that can be written"
        raise ConfigError(fault("data.cache_folder", rule, way_out)) from None


def resolve_cache(given: str | None, fault: Fault) -> Path:
    if given:
        return Path(given).expanduser().absolute()
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "minititan"
    except RuntimeError:
        raise ConfigError(
            fault("data.cache_folder", "this user has no home folder", "name a folder")
        ) from None


def _find(job: _Job, source_key: str) -> Tokens | None:
    """The tokens, if they are prepared and whole."""
    try:
        content_key = (job.cache / SOURCES / source_key).read_text()
        return open_prepared(job.cache / content_key, job.label)
    except (FileNotFoundError, NotADirectoryError, DamagedTokens):
        return None


def _wait_or_prepare(job: _Job, fault: Fault, say: Say, say_waiting: Say) -> Tokens:
    source_key = job.source_key()
    (job.cache / SOURCES).mkdir(parents=True, exist_ok=True)
    place = job.cache / SOURCES / source_key
    marker = place.with_suffix(".fault")
    known_fault = _read_marker(marker)
    waiting = f"waiting for the process that prepares {job.label}"
    with locked(place.with_suffix(".lock"), lambda: say_waiting(waiting)):
        tokens = _find(job, source_key)
        if tokens is not None:
            return tokens
        # A marker that appeared while this process waited is about its own run; an older one is about a past
        # run, whose cause may be gone.
        found_fault = _read_marker(marker)
        if found_fault is not None and found_fault != known_fault:
            raise ConfigError(*found_fault["faults"])
        try:
            with _cache_faults(job.cache, fault):
                content_key = _prepare(job, source_key, say)
        except ConfigError as error:
            with suppress(OSError):  # where even this cannot be written, each process finds the fault itself
                _write_aside(marker, json.dumps({"id": uuid.uuid4().hex, "faults": error.faults}))
            raise
        marker.unlink(missing_ok=True)
        _write_aside(place, content_key)
    return open_prepared(job.cache / content_key, job.label)


def _read_marker(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None


def _prepare(job: _Job, source_key: str, say: Say) -> str:
    """Tokenises the source into the cache unless its content is there; returns the content key."""
    folder = job.cache / f".tmp-{source_key}"
    _remove_leftovers(job.cache)
    content_key = job.content_key()
    final = job.cache / content_key
    if _is_whole(final):
        return content_key
    say(f"preparing {job.label} in {job.cache}")
    begun = time.monotonic()
    try:
        card = prepare(folder, job.recipe, Lines(say))
        assert isinstance(card, dict), "one part is the whole set"
        _publish(folder, final, job, say)
    except Exception:  # not of an interrupt: the next run goes on with the shards that are finished
        shutil.rmtree(folder, ignore_errors=True)
        raise
    rejected = (
        f", {card['rejected']} bad records left out: {final / 'rejects.jsonl'}" if card["rejected"] else ""
    )
    say(f"prepared {card['tokens']} tokens in {time.monotonic() - begun:.1f} s{rejected}")
    return content_key


def _is_whole(folder: Path) -> bool:
    try:
        open_prepared(folder, "")
    except DamagedTokens:
        return False
    return True


def _publish(folder: Path, final: Path, job: _Job, say: Say) -> None:
    """Renames a whole folder into place, unless the same text was prepared from another place meanwhile."""
    with locked(job.cache / SOURCES / "publish.lock"):
        if _is_whole(final):
            shutil.rmtree(folder)
            return
        if final.exists():
            say(f"{final} was damaged and is replaced")
            shutil.rmtree(final)
        folder.rename(final)


def _remove_leftovers(cache: Path) -> None:
    """Removes what killed processes left long ago and nobody went on with."""
    for folder in cache.glob(".tmp-*"):
        lock = cache / SOURCES / f"{folder.name.removeprefix('.tmp-')}.lock"
        with suppress(FileNotFoundError):
            if time.time() - folder.stat().st_mtime > LEFTOVER_SECONDS and is_free(lock):
                shutil.rmtree(folder, ignore_errors=True)


def _write_aside(path: Path, content: str) -> None:
    aside = path.with_name(f"{path.name}.tmp")
    try:
        aside.write_text(content)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise

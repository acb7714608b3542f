"""The cache of prepared tokens: a source is tokenised once, by one process, and then only mapped.

    CACHE/<content key>/           a folder of shards, renamed into place when it is whole
    CACHE/sources/<source key>     which content key this source has; beside it .lock and .fault
    CACHE/.tmp-<source key>/       in the making, by the process that holds the lock

The source key is cheap (paths, sizes, times, options); the content key hashes the text itself, so that a
copy of the same text elsewhere is found again. The lock is the operating system's (flock) and ends with its
holder, however that ends; the next holder removes what was left. Nodes of one run must share the folder.
"""

import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TextIO

from minititan.config import ConfigError
from minititan.data.encode import encode
from minititan.data.fault import Fault, plain_fault
from minititan.data.shards import FORMAT_VERSION, DamagedTokens, ShardWriter, Tokens
from minititan.data.sources import Source, resolve_source
from minititan.data.tokenizer import Tokenizer

Say = Callable[[str], None]
PROGRESS_SECONDS = 10.0
QUIET_SECONDS = 1.0


@dataclass(frozen=True)
class _Job:
    """All that decides the tokens of one source, and where they lie."""

    cache: Path
    source: Source
    tokenizer: Tokenizer
    text_key: str
    add_bos: bool
    add_eos: bool

    def _key(self, about: Any) -> str:
        options = [FORMAT_VERSION, self.tokenizer.fingerprint, self.text_key, self.add_bos, self.add_eos]
        return sha256(json.dumps([about, options]).encode()).hexdigest()[:32]

    def source_key(self) -> str:
        return self._key(self.source.identity())

    def content_key(self) -> str:
        return self._key(self.source.content_hash())


def open_tokens(
    dataset: str,
    dataset_path: str | None,
    split: str,
    tokenizer: Tokenizer,
    *,
    cache_folder: str | None = None,
    text_key: str = "text",
    add_bos: bool = False,
    add_eos: bool = True,
    section: str = "training",
    fault: Fault = plain_fault,
    say: Say = print,
    say_waiting: Say | None = None,
) -> Tokens:
    """The tokens of a source, prepared first if the cache does not have them.

    Any number of processes may call it at once, no process group is used: one prepares, the others wait and
    get the same tokens or the same ConfigError. `say` gets the lines of the one, `say_waiting` (unset: `say`)
    of the others. `section` is the config's section that names the source.
    """
    for add, kind, token in ((add_bos, "bos", tokenizer.bos_id), (add_eos, "eos", tokenizer.eos_id)):
        if add and token is None:
            way_out = (
                "set it to false, or put a tokenizer_config.json that names it beside the tokenizer.json"
            )
            raise ConfigError(fault(f"data.add_{kind}", f"the tokenizer names no {kind} token", way_out))
    source = resolve_source(dataset, dataset_path, split, section=section, fault=fault)
    job = _Job(resolve_cache(cache_folder, fault), source, tokenizer, text_key, add_bos, add_eos)
    with _cache_faults(job.cache, fault):
        return _find(job, job.source_key()) or _wait_or_prepare(job, fault, say, say_waiting or say)


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
        content_key = (job.cache / "sources" / source_key).read_text()
        return Tokens(job.cache / content_key, job.source.label)
    except (FileNotFoundError, NotADirectoryError, DamagedTokens):
        return None


def _wait_or_prepare(job: _Job, fault: Fault, say: Say, say_waiting: Say) -> Tokens:
    source_key = job.source_key()
    (job.cache / "sources").mkdir(parents=True, exist_ok=True)
    place = job.cache / "sources" / source_key
    marker = place.with_suffix(".fault")
    known_fault = _read_marker(marker)
    waiting = f"waiting for the process that prepares {job.source.label}"
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
    return Tokens(job.cache / content_key, job.source.label)


def _read_marker(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None


@contextmanager
def locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Holds the lock; a wait of more than QUIET_SECONDS is told by `on_wait`."""
    with path.open("a") as file:
        told_at = time.monotonic() + QUIET_SECONDS
        while not _try_lock(file):
            if time.monotonic() >= told_at:
                on_wait()
                fcntl.flock(file, fcntl.LOCK_EX)
                break
            time.sleep(0.02)
        yield


def _try_lock(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _prepare(job: _Job, source_key: str, say: Say) -> str:
    """Tokenises the source into the cache unless its content is there; returns the content key."""
    folder = job.cache / f".tmp-{source_key}"
    _remove_leftovers(job.cache, folder)
    content_key = job.content_key()
    final = job.cache / content_key
    if _is_whole(final):
        return content_key
    say(f"preparing {job.source.label} in {job.cache}")
    begun = time.monotonic()
    folder.mkdir()
    try:
        num_tokens = _write_shards(job, folder, say)
        if job.source_key() != source_key:
            raise ConfigError(f"{job.source.label}: changed while it was being prepared; start again")
        _publish(folder, final, job, say)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    say(f"prepared {num_tokens} tokens in {time.monotonic() - begun:.1f} s")
    return content_key


def _is_whole(folder: Path) -> bool:
    try:
        Tokens(folder, "")
    except DamagedTokens:
        return False
    return True


def _publish(folder: Path, final: Path, job: _Job, say: Say) -> None:
    """Renames a whole folder into place, unless the same text was prepared from another place meanwhile."""
    with locked(job.cache / "sources" / "publish.lock", lambda: None):
        if _is_whole(final):
            shutil.rmtree(folder)
            return
        if final.exists():
            say(f"{final} was damaged and is replaced")
            shutil.rmtree(final)
        folder.rename(final)


def _write_shards(job: _Job, folder: Path, say: Say) -> int:
    writer = ShardWriter(folder, job.tokenizer.vocab_size, job.tokenizer.fingerprint)
    documents = job.source.documents(job.text_key)
    told = time.monotonic()
    try:
        for tokens, starts in encode(documents, job.tokenizer, add_bos=job.add_bos, add_eos=job.add_eos):
            writer.write(tokens, starts)
            if time.monotonic() - told > PROGRESS_SECONDS:
                told = time.monotonic()
                say(f"prepared {writer.num_tokens} tokens so far")
        if not writer.num_tokens:
            raise ConfigError(f"{job.source.label}: holds no text; give files with text in them")
        writer.finish()
    finally:
        writer.abort()
    return writer.num_tokens


def _remove_leftovers(cache: Path, own: Path) -> None:
    """Removes what killed processes left: our own folder, and any whose lock nobody holds."""
    shutil.rmtree(own, ignore_errors=True)
    for folder in cache.glob(".tmp-*"):
        lock = cache / "sources" / f"{folder.name.removeprefix('.tmp-')}.lock"
        with suppress(FileNotFoundError), lock.open("r+") as file:
            if _try_lock(file):
                shutil.rmtree(folder, ignore_errors=True)


def _write_aside(path: Path, content: str) -> None:
    aside = path.with_name(f"{path.name}.tmp")
    try:
        aside.write_text(content)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise

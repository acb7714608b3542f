"""The token cache: faults leave nothing behind and reach every process; text is prepared once."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from minititan.config import ConfigError
from minititan.data import Tokens, build_tokenizer, open_tokens, units
from minititan.data.records import Form
from minititan.data.tokens import DamagedTokens, open_prepared
from tests.distributed.harness import run_ranks
from tests.test_data_tokenizer import save_tokenizer
from tests.token_sets import save_tokens

BYTES = build_tokenizer("")


class Place:
    """A cache and a folder of text in a temporary folder, and what was said."""

    def __init__(self, folder: Path) -> None:
        self.cache, self.text = folder / "cache", folder / "text"
        self.text.mkdir()
        self.said: list[str] = []

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.text / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def open(self, path: Path | None = None, **options) -> Tokens:
        options = {"cache_folder": str(self.cache), "say": self.said.append} | options
        return open_tokens("mine", str(path or self.text), "train", BYTES, **options)

    def prepared(self) -> int:
        """How often text was tokenised."""
        return sum(line.startswith("preparing") for line in self.said)

    def folders(self) -> list[str]:
        return sorted(path.name for path in self.cache.iterdir() if path.name != "sources")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def all_tokens(tokens: Tokens) -> list[int]:
    out = np.empty(tokens.num_tokens, dtype=np.int64)
    tokens.read(0, tokens.num_tokens, out)
    return out.tolist()


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("b.txt", b"\xff", "b.txt:1: invalid UTF-8"),
        ("b.jsonl", b'{"text": "a"}\n{"text": 1}', "b.jsonl:2: 'text' is a JSON number"),
        ("b.jsonl", b'{"body": "a"}\n', "b.jsonl:1: no key 'text'"),
    ],
)
def test_bad_text_leaves_nothing_behind(place: Place, name: str, content: bytes, words: str):
    place.write("a.txt", "good text\n" * 1000)
    bad = place.write(name, content)
    with pytest.raises(ConfigError) as error:
        place.open()
    assert words in str(error.value) and place.folders() == []
    # The fault is no longer believed once its cause is gone.
    bad.write_bytes(b'{"text": "mended"}')
    assert place.open().num_documents == 2


@pytest.mark.parametrize("name, content", [("a.txt", ""), ("a.jsonl", '\n\n{"text": ""}\n')])
def test_no_text_is_refused(place: Place, name: str, content: str):
    place.write(name, content)
    with pytest.raises(ConfigError, match=r'^training\.dataset_path = ".*text": holds no text; '):
        place.open()
    assert place.folders() == []


def test_missing_special_token_is_refused(tmp_path: Path):
    tokenizer = build_tokenizer(str(save_tokenizer(tmp_path / "tokenizer")))
    cache = str(tmp_path / "cache")
    for kind in ("bos", "eos"):
        with pytest.raises(ConfigError, match=rf"^data.add_{kind}: the tokenizer names no {kind} token"):
            open_tokens(
                "stdlib",
                None,
                "train",
                tokenizer,
                cache_folder=cache,
                add_bos=kind == "bos",
                add_eos=kind == "eos",
            )
    assert not (tmp_path / "cache").exists()


def test_cache_that_cannot_be_a_folder_is_named(place: Place):
    place.write("a.txt", "text")
    place.cache.write_text("a file")
    with pytest.raises(
        ConfigError, match=rf"^data.cache_folder: cannot write {place.cache}.*; free space there"
    ):
        place.open()


def test_full_disk_is_named_and_leaves_nothing_behind(place: Place, monkeypatch: pytest.MonkeyPatch):
    place.write("a.txt", "text " * 100_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limits[1]))
    try:
        with pytest.raises(
            ConfigError, match=r"^data.cache_folder: cannot write .*: File too large; free space"
        ):
            place.open()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert place.folders() == []

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ConfigError, match=r"^data.cache_folder: .*: No space left on device; free space"):
            place.open()
    assert place.folders() == []
    assert place.open().num_tokens == 500_001


def test_text_that_changes_meanwhile_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch):
    path = place.write("a.txt", "before")
    records = units.Unit.records

    def changing(self: units.Unit, form: Form, at: units.Place) -> Iterator:
        yield from records(self, form, at)
        path.write_text("after this")

    with monkeypatch.context() as patch:
        patch.setattr(units.Unit, "records", changing)
        with pytest.raises(ConfigError, match=r"changed while it was being prepared; start again"):
            place.open()
    assert place.folders() == []
    assert BYTES.decode(all_tokens(place.open())) == "after this"


def test_tokens_are_those_of_the_text(place: Place):
    place.write("a.txt", "größe\n")
    place.write("b.jsonl", '{"text": "one"}\n{"text": "two"}\n')
    expected = [*"größe\n".encode(), 257, *b"one", 257, *b"two", 257]
    tokens = place.open()
    assert all_tokens(tokens) == expected
    assert tokens.document_starts(0, len(expected)).tolist() == [0, 9, 13]
    with_bos = place.open(add_bos=True, add_eos=False)
    assert all_tokens(with_bos) == [256, *"größe\n".encode(), 256, *b"one", 256, *b"two"]
    assert tokens.fingerprint != with_bos.fingerprint


def test_second_start_prepares_nothing(place: Place):
    path = place.write("a.txt", "some text")
    first = place.open()
    said = list(place.said)
    assert place.open().fingerprint == first.fingerprint and place.said == said
    os.utime(path, ns=(1, 1))
    assert place.open().fingerprint == first.fingerprint
    moved = place.text.parent / "elsewhere"
    place.text.rename(moved)
    assert place.open(moved).fingerprint == first.fingerprint
    assert place.prepared() == 1 and len(place.folders()) == 1
    (moved / "a.txt").write_text("other txt")
    assert place.open(moved).fingerprint != first.fingerprint and place.prepared() == 2


def test_prepared_cache_may_be_read_only(place: Place, monkeypatch: pytest.MonkeyPatch):
    place.write("a.txt", "some text")
    place.open()

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("writes to the cache")

    for name in ("mkdir", "rename", "replace", "write_text"):
        monkeypatch.setattr(Path, name, refuse)
    assert place.open().num_tokens == 10


@pytest.mark.parametrize("file", ["00000-000.bin", "00000-000.starts.npy", "tokens.json"])
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 3)])
def test_damaged_cache_is_prepared_again(place: Place, file: str, damage):
    place.write("a.txt", "some text")
    first = place.open()
    expected = all_tokens(first)
    folder = first.shards[0].path.parent
    damage(folder / file)
    with pytest.raises(DamagedTokens):
        open_prepared(folder, "")
    second = place.open()
    assert all_tokens(second) == expected and second.fingerprint == first.fingerprint
    assert any("was damaged and is replaced" in line for line in place.said)


def test_fingerprint_does_not_follow_shards(tmp_path: Path):
    tokens, starts = np.arange(1000), np.arange(0, 1000, 10)
    fingerprints = set()
    for cuts in ((), (10,), (10, 500, 990)):
        read = save_tokens(tmp_path / str(cuts), tokens, starts, 1000, cuts)
        assert all_tokens(read) == tokens.tolist()
        assert read.document_starts(0, 1000).tolist() == starts.tolist()
        fingerprints.add(read.fingerprint)
    assert len(fingerprints) == 1
    others = {
        save_tokens(tmp_path / "one document less", tokens, starts[:-1], 1000).fingerprint,
        save_tokens(tmp_path / "other bounds", tokens, np.append(starts[:-1], 991), 1000).fingerprint,
        save_tokens(
            tmp_path / "two exchanged", np.append(tokens[10:], tokens[:10]), starts, 1000
        ).fingerprint,
        save_tokens(tmp_path / "another type", tokens, starts, 1 << 17).fingerprint,
    }
    assert len(others | fingerprints) == 5


def test_fingerprint_is_as_documented(tmp_path: Path):
    """Written out plainly: the hash of each document, then a polynomial in B of degree n - 1 modulo P."""
    tokens, starts = np.array([5, 6, 7, 8, 9]), np.array([0, 2, 3])
    found = save_tokens(tmp_path, tokens, starts, 1000, (2,)).fingerprint
    p, b = 2**255 - 19, int(sha256(b"minititan documents").hexdigest(), 16) % (2**255 - 19)
    hashes = [int(sha256(np.array(d, "<u2").tobytes()).hexdigest(), 16) for d in ([5, 6], [7], [8, 9])]
    total = (hashes[0] * b**2 + hashes[1] * b + hashes[2]) % p
    assert found == sha256(f"<u2 3 {total:x}".encode()).hexdigest()


@pytest.mark.parametrize("vocab_size, dtype", [(1 << 16, "<u2"), ((1 << 16) + 1, "<u4")])
def test_largest_id_is_stored(tmp_path: Path, vocab_size: int, dtype: str):
    read = save_tokens(tmp_path, np.array([0, vocab_size - 1]), np.array([0]), vocab_size)
    manifest = json.loads((tmp_path / "tokens.json").read_text())
    assert manifest["dtype"] == dtype and manifest["vocab_size"] == vocab_size
    assert all_tokens(read) == [0, vocab_size - 1]


@pytest.mark.parametrize("good", [True, False])
def test_waiting_processes_get_the_preparer_s_result(
    place: Place, monkeypatch: pytest.MonkeyPatch, good: bool
):
    """The lock belongs to an open file, so threads stand for processes here."""
    place.write("a.jsonl", '{"text": "some text"}' if good else "{")
    waiting = threading.Semaphore(0)
    calls: list[int] = []
    records = units.Unit.records

    def slow(self: units.Unit, form: Form, at: units.Place) -> Iterator:
        calls.append(1)
        for _ in range(3):
            assert waiting.acquire(timeout=30)
        yield from records(self, form, at)

    def say(line: str) -> None:
        if line.startswith("waiting for the process that prepares training.dataset_path"):
            waiting.release()

    def start(_: int) -> tuple[str, ...]:
        try:
            return (place.open(say=say).fingerprint,)
        except ConfigError as error:
            return error.faults

    monkeypatch.setattr(units.Unit, "records", slow)
    monkeypatch.setattr("minititan.data.locks.QUIET_SECONDS", 0.0)
    with ThreadPoolExecutor(4) as pool:
        results = set(pool.map(start, range(4)))
    assert len(results) == 1 and len(calls) == 1
    assert ("not valid JSON" in str(results)) == (not good)


def open_on_rank(rank: int, world: int, text: str, cache: str) -> tuple[str, bool]:
    """The fingerprint or the fault, and whether this rank prepared."""
    said: list[str] = []
    try:
        result = open_tokens("x", text, "train", BYTES, cache_folder=cache, say=said.append).fingerprint
    except ConfigError as error:
        result = str(error)
    return result, any(line.startswith("preparing") for line in said)


def test_ranks_prepare_once_and_share_a_fault(place: Place):
    place.write("a.txt", "text\n" * 400_000)
    good = run_ranks(open_on_rank, 4, str(place.text), str(place.cache))
    assert len({result for result, _ in good}) == 1 and sum(prepared for _, prepared in good) == 1
    bad_file = place.write("b.jsonl", '{"text": "a"}\n{')
    bad = run_ranks(open_on_rank, 4, str(place.text), str(place.cache))
    assert {result.split(":")[0] for result, _ in bad} == {str(bad_file)} and len({r for r, _ in bad}) == 1
    assert len(place.folders()) == 1


KILLED = """
import os, signal, sys
from minititan.data import build_tokenizer, open_tokens, prepare
prepare.SHARD_BYTES = 1
write, calls = prepare.write_json, []
def killing(path, value):
    calls.append(path)
    if len(calls) == 4:  # the plan and two shards before
        os.kill(os.getpid(), signal.SIGKILL)
    write(path, value)
prepare.write_json = killing
open_tokens("x", sys.argv[1], "train", build_tokenizer(""), cache_folder=sys.argv[2])
"""


def test_killed_preparer_blocks_nobody(place: Place, monkeypatch: pytest.MonkeyPatch):
    """The next goes on with the shards that it left, which other text does not disturb."""
    monkeypatch.setattr("minititan.data.prepare.SHARD_BYTES", 1)
    for name in "abcd":
        place.write(f"{name}.txt", name)
    kill = [sys.executable, "-c", KILLED, str(place.text), str(place.cache)]
    assert subprocess.run(kill, capture_output=True).returncode == -signal.SIGKILL
    (left,) = place.folders()
    assert left.startswith(".tmp-")
    place.open(place.write("other", "other").rename(place.text.parent / "other.txt"))
    assert left in place.folders()
    read: list[int] = []
    records = units.Unit.records

    def counting(self: units.Unit, form: Form, at: units.Place) -> Iterator:
        for found in records(self, form, at):
            read.append(found[2].begin)
            yield found

    monkeypatch.setattr(units.Unit, "records", counting)
    assert BYTES.decode(all_tokens(place.open())) == "abcd"
    assert len(read) == 2 + 1  # c, d where c's shard ends, d
    assert left not in place.folders()


def test_old_leftovers_are_removed(place: Place):
    place.write("a.txt", "a")
    place.open()
    left = place.cache / ".tmp-old"
    left.mkdir()
    place.open(place.write("b.txt", "b"))
    assert left.exists()
    os.utime(left, (1, 1))
    place.open(place.write("c.txt", "c"))
    assert not left.exists()


def test_standard_library_is_prepared_quickly(tmp_path: Path):
    begun = time.perf_counter()
    tokens = open_tokens("stdlib", None, "train", BYTES, cache_folder=str(tmp_path), say=lambda line: None)
    # Under half a second on two cores; the limit is for a busy machine.
    assert time.perf_counter() - begun < 10
    assert tokens.num_tokens > 5_000_000

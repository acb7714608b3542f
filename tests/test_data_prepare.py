"""Preparing: nothing is silently left out or half-written, and no kill, part or core changes a byte."""

import bz2
import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from minititan.__main__ import main
from minititan.config import ConfigError
from minititan.data import build_tokenizer, sources, text
from minititan.data.locks import locked_now
from minititan.data.prepare import Recipe, prepare
from minititan.data.progress import Lines
from minititan.data.records import BadRecord, Form
from minititan.data.sources import source_at
from minititan.data.tokens import open_prepared
from tests.test_data_tokenizer import save_tokenizer

BYTES = build_tokenizer("")


def make(folder: Path, *inputs: Path, part: tuple[int, int] = (1, 1), **options) -> Any:
    form = Form(options.pop("text_key", "text"), options.pop("txt_lines", False))
    recipe = Recipe(source_at([str(path) for path in inputs], "input", "input"), BYTES, form, **options)
    return prepare(folder, recipe, Lines(lambda line: None), part)


def documents_in(folder: Path) -> list[str]:
    """The documents of a set, each of which must end with eos."""
    tokens = open_prepared(folder, "")
    out = np.empty(tokens.num_tokens, dtype=np.int64)
    tokens.read(0, tokens.num_tokens, out)
    starts = tokens.document_starts(0, tokens.num_tokens)
    parts = np.split(out, starts[1:])
    assert all(part[-1] == 257 for part in parts)
    return [bytes(part[:-1].tolist()).decode() for part in parts]


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def lines_of(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units and shards of a few bytes; they need not outlive the machine."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr("minititan.data.sources.SPAN_BYTES", 100)
    monkeypatch.setattr("minititan.data.units.UNIT_BYTES", 100)
    monkeypatch.setattr("minititan.data.prepare.SHARD_BYTES", 60)


def corpus(folder: Path) -> list[str]:
    """Files of every form in a folder; returns their documents in order."""
    folder.mkdir()
    texts = [[f"{name} {number} größe\n" for number in range(9)] for name in "abcdefgh"]
    (folder / "a.jsonl").write_bytes(lines_of(*texts[0]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines_of(*texts[1])))
    (folder / "c.json.bz2").write_bytes(bz2.compress(lines_of(*texts[2])))
    frames = [zstandard.compress(part) for part in (lines_of(*texts[3][:4]), lines_of(*texts[3][4:]))]
    (folder / "d.jsonl.zst").write_bytes(b"".join(frames))
    table = pyarrow.table({"id": list(range(9)), "text": texts[4]})
    pyarrow.parquet.write_table(table, folder / "e.parquet", row_group_size=4)
    (folder / "f.txt").write_text("".join(texts[5]))
    (folder / "g.txt.zst").write_bytes(zstandard.compress("".join(texts[6]).encode()))
    (folder / "h.json").write_bytes(b"\xef\xbb\xbf" + lines_of(*texts[7]).replace(b"\n", b"\r\n"))
    return [*(text for file in texts[:5] for text in file), "".join(texts[5]), "".join(texts[6]), *texts[7]]


# ---- What is refused.

RECORDS: dict[str, tuple[bytes, str]] = {
    "broken JSON": (b'{"text": "a', "not valid JSON (Invalid control character at character 12"),
    "half a line at the end": (
        b'{"text": "a"}\n{"te',
        "in a last line without an end: was the file cut off?",
    ),
    "no key": (b'{"body": "a"}', "no key 'text' (keys here: 'body'); set data.text_key"),
    "no string": (b'{"text": ["a"]}', "'text' is a JSON array; it must be a string"),
    "no object": (b'"a"', "a JSON string; each line must be one JSON object"),
    "invalid UTF-8": (b'{"text": "\xe4"}', "invalid UTF-8 (byte 0xe4: "),
    "NUL bytes": (b"\0" * 20, "not valid JSON (Expecting value at character 1"),
    "a raw NUL in a string": (b'{"text": "a\0b"}', "not valid JSON (Invalid control character at"),
    "half a surrogate pair": (b'{"text": "\\ud800"}', "'text' holds half a surrogate pair; repair the text"),
    "a line too long": (b'{"text": "' + b"a" * 5000 + b'"}', "is longer than 0 MiB; split the document"),
}


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.zst"])
def test_bad_record_is_an_error_or_counted(
    tmp_path: Path, name: str, suffix: str, monkeypatch: pytest.MonkeyPatch, small: None
):
    monkeypatch.setattr(text, "MAX_LINE_BYTES", 4096)
    bad, words = RECORDS[name]
    file = tmp_path / f"a.{suffix}"
    end = b"" if name.startswith("half a line") else b"\n" + lines_of("last")
    content = lines_of(*("good" * 9 for _ in range(7))) + b"\n \r\n" + bad + end
    file.write_bytes(zstandard.compress(content) if suffix.endswith("zst") else content)
    line = 10 + bad.count(b"\n")
    with pytest.raises(ConfigError) as error:
        make(tmp_path / "set", file)
    assert str(error.value).startswith(f"{file}:{line}: ") and words in str(error.value)
    # What is before it is kept, and with another choice the work goes on.
    kept = sorted((tmp_path / "set").glob("*.bin"))
    written = [path.stat().st_mtime_ns for path in kept]
    assert kept
    card = make(tmp_path / "set", file, skip_bad_records=True)
    assert [path.stat().st_mtime_ns for path in kept] == written
    good = 7 + 1
    assert (card["documents"], card["rejected"], card["empty"]) == (good, 1, 0)
    (reject,) = [json.loads(line) for line in (tmp_path / "set" / "rejects.jsonl").read_text().splitlines()]
    assert (reject["file"], reject["line"]) == (str(file), line)
    assert reject["reason"].split("(")[0] in str(error.value)
    assert len(documents_in(tmp_path / "set")) == good


def test_bad_rows_and_columns_of_parquet(tmp_path: Path):
    file = tmp_path / "a.parquet"
    bad = pyarrow.Array.from_buffers(
        pyarrow.string(),
        2,
        [None, pyarrow.py_buffer(np.array([0, 1, 2], dtype=np.int32).tobytes()), pyarrow.py_buffer(b"a\xff")],
    )
    for column, words in (
        (pyarrow.array(["a", None]), ":row 1: 'text' is null; it must be a string"),
        (bad, ":row 1: invalid UTF-8 (byte 0xff: invalid start byte); convert it to UTF-8"),
        (pyarrow.array([1, 2]), ": the column 'text' holds int64, not strings; set data.text_key"),
    ):
        pyarrow.parquet.write_table(pyarrow.table({"text": column}), file)
        with pytest.raises(ConfigError) as error:
            make(tmp_path / "set", file)
        assert str(error.value) == f"{file}{words}"
    with pytest.raises(ConfigError, match=r"a.parquet: no column 'body' \(columns here: 'text'\); set data"):
        make(tmp_path / "other", file, text_key="body")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None, "b"]}), file)
    card = make(tmp_path / "skipped", file, skip_bad_records=True)
    assert (card["documents"], card["rejected"]) == (2, 1)
    assert json.loads((tmp_path / "skipped" / "rejects.jsonl").read_text())["row"] == 1


@pytest.mark.parametrize("name", ["b.jsonl.gz", "c.json.bz2", "d.jsonl.zst", "e.parquet", "g.txt.zst"])
@pytest.mark.parametrize(
    "damage", [lambda b: b[: len(b) * 2 // 3], lambda b: b"?" * 250 + b[250:], lambda b: b[:-1]]
)
def test_damaged_file_is_never_a_shorter_one(tmp_path: Path, name: str, damage):
    corpus(tmp_path / "in")
    file = tmp_path / "in" / name
    file.write_bytes(damage(file.read_bytes()))
    for skip in (False, True):
        with pytest.raises(ConfigError) as error:
            make(tmp_path / "set", file, skip_bad_records=skip)
        assert str(error.value).startswith(f"{file}: damaged ")


def test_text_with_invalid_utf8_is_left_out_whole(tmp_path: Path):
    """Also where the first of many blocks is valid."""
    file = tmp_path / "a.txt"
    file.write_bytes(b"line\n" * (1 << 20) + b"\xff")
    (tmp_path / "b.txt").write_text("good")
    with pytest.raises(ConfigError, match=r"a.txt:1048577: invalid UTF-8 \(byte 0xff"):
        make(tmp_path / "set", file)
    card = make(tmp_path / "skipped", file, tmp_path / "b.txt", skip_bad_records=True)
    assert (card["documents"], card["rejected"]) == (1, 1)
    assert documents_in(tmp_path / "skipped") == ["good"]


def test_other_folders_and_other_sets_are_left_alone(tmp_path: Path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match=r"mine: holds other files, and no set that could be gone on with"):
        make(tmp_path / "mine", tmp_path / "a.txt")
    make(tmp_path / "set", tmp_path / "a.txt")
    before = files_in(tmp_path / "set")
    with pytest.raises(
        ConfigError, match=r"set: holds a set with add_eos True, not False; prepare into another"
    ):
        make(tmp_path / "set", tmp_path / "a.txt", add_eos=False)
    with pytest.raises(
        ConfigError, match=r"set: holds a set of other files, or of files as they were before"
    ):
        make(tmp_path / "set", tmp_path / "b.txt")
    assert files_in(tmp_path / "set") == before


@pytest.mark.usefixtures("small")
def test_part_of_another_process_is_refused(tmp_path: Path):
    corpus(tmp_path / "in")
    folder = tmp_path / "set"
    make(folder, tmp_path / "in", part=(1, 3))
    with locked_now(folder / ".part-2.lock") as held:
        assert held
        with pytest.raises(
            ConfigError, match=r"another process is preparing part 2/3; wait for it, or end it"
        ):
            make(folder, tmp_path / "in", part=(2, 3))
        for part in ((1, 1), (1, 4)):
            with pytest.raises(
                ConfigError, match=r"prepared in 3 parts, of which 2 is at work; use --part I/3"
            ):
                make(folder, tmp_path / "in", part=part)
    assert make(folder, tmp_path / "in", part=(2, 3)) == (3,)


# ---- What it makes.


def test_documents_of_every_form_are_those_of_the_files(tmp_path: Path):
    expected = corpus(tmp_path / "in")
    card = make(tmp_path / "set", tmp_path / "in")
    assert documents_in(tmp_path / "set") == expected
    text_bytes = sum(len(text.encode()) for text in expected)
    assert (card["documents"], card["text_bytes"]) == (len(expected), text_bytes)
    assert card["tokens"] == text_bytes + len(expected) and card["files"] == 8
    assert sorted(files_in(tmp_path / "set")) == [
        "00000-000.bin",
        "00000-000.starts.npy",
        "dataset.json",
        "tokens.json",
    ]


def test_lines_of_text_files(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\n two \nhalf a last line")
    card = make(tmp_path / "set", tmp_path / "a.txt", txt_lines=True)
    assert documents_in(tmp_path / "set") == ["one", " two ", "half a last line"]
    assert (card["documents"], card["empty"]) == (3, 1)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.text(st.sampled_from('aß\n"\\ 你'), max_size=30), max_size=12),
    st.integers(1, 90),
    st.booleans(),
    st.integers(0, 12),
)
def test_spans_of_any_size_have_each_line_once(tmp_path_factory, texts, size: int, end: bool, bad: int):
    """And name the right line, counted from the begin of the file."""
    file = tmp_path_factory.mktemp("spans") / "a.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    lines.insert(bad, "{")
    file.write_text("\n".join(lines) + "\n" * end)
    whole = sources.SPAN_BYTES
    sources.SPAN_BYTES = size
    try:
        spans = list(source_at([str(file)], "input", "").spans(Form()))
    finally:
        sources.SPAN_BYTES = whole
    assert len(spans) == -(-file.stat().st_size // size)
    records = [record for span in spans for record in span.read(span, Form())]
    found = [None if isinstance(record, BadRecord) else "".join(record.blocks) for record in records]
    assert [text for text in found if text is not None] == texts
    (wrong,) = [record for record in records if isinstance(record, BadRecord)]
    assert wrong.number == min(bad, len(texts)) + 1
    assert [record.begin for record in records] == sorted({record.begin for record in records})


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2)])
def test_parts_in_any_order_make_the_same_set(tmp_path: Path, order: Sequence[int]):
    expected = corpus(tmp_path / "in")
    make(tmp_path / "whole", tmp_path / "in")
    assert documents_in(tmp_path / "whole") == expected
    assert len(files_in(tmp_path / "whole")) > 20
    missing = {1, 2, 3}
    for number in order[:2]:
        missing.discard(number)
        assert make(tmp_path / "parts", tmp_path / "in", part=(number, 3)) == tuple(sorted(missing))
    assert make(tmp_path / "parts", tmp_path / "in", part=(order[2], 3))["documents"] == len(expected)
    assert files_in(tmp_path / "parts") == files_in(tmp_path / "whole")
    # One run without parts takes what is left of them.
    make(tmp_path / "mixed", tmp_path / "in", part=(2, 3))
    make(tmp_path / "mixed", tmp_path / "in")
    assert files_in(tmp_path / "mixed") == files_in(tmp_path / "whole")


@pytest.mark.usefixtures("small")
def test_fingerprint_follows_neither_files_nor_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    expected = corpus(tmp_path / "in")
    (tmp_path / "one.jsonl").write_bytes(lines_of(*expected))
    cards = [
        make(tmp_path / "small", tmp_path / "in"),
        make(tmp_path / "other files", tmp_path / "one.jsonl"),
    ]
    monkeypatch.undo()
    cards.append(make(tmp_path / "large", tmp_path / "in"))
    assert len({card["fingerprint"] for card in cards}) == 1 and len({card["shards"] for card in cards}) == 3


@pytest.mark.usefixtures("small")
def test_changed_file_costs_its_own_shards_only(tmp_path: Path):
    corpus(tmp_path / "in")
    bad = tmp_path / "in" / "h.json"
    good = bad.read_bytes()
    bad.write_bytes(b"{" + good[1:])
    with pytest.raises(ConfigError):
        make(tmp_path / "set", tmp_path / "in")
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "set").glob("*.bin")}
    bad.write_bytes(good)
    make(tmp_path / "set", tmp_path / "in")
    assert len(times) > 8
    assert all((tmp_path / "set" / name).stat().st_mtime_ns == time for name, time in times.items())
    make(tmp_path / "whole", tmp_path / "in")
    assert files_in(tmp_path / "set").keys() == files_in(tmp_path / "whole").keys()


@pytest.mark.usefixtures("small")
def test_file_that_changed_between_two_starts_is_prepared_again(tmp_path: Path):
    """Though its size is the same and its shards were finished."""
    expected = corpus(tmp_path / "in")
    assert make(tmp_path / "set", tmp_path / "in", part=(1, 2)) == (2,)
    file = tmp_path / "in" / "a.jsonl"
    file.write_bytes(file.read_bytes().replace(b"a 3", b"a X"))
    make(tmp_path / "set", tmp_path / "in")
    assert documents_in(tmp_path / "set") == [text.replace("a 3", "a X") for text in expected]


KILLED = """
import os, signal, sys
from pathlib import Path
from typing import Any
from minititan.data import prepare, shards, sources, units
from minititan.__main__ import main
sources.SPAN_BYTES = units.UNIT_BYTES = 100
prepare.SHARD_BYTES = 60
os.fsync = lambda descriptor: None  # the machine itself goes on
point, left = sys.argv[1], int(sys.argv[2])
def killing(module, name):
    plain = getattr(module, name)
    def counted(*args, **options):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*args, **options)
    setattr(module, name, counted)
killing(*{
    "before a file is on the disk": (os, "fsync"),
    "before it has its name": (Path, "replace"),
    "before an entry": (prepare, "write_json"),
    "while it is tidied": (Path, "unlink"),
}[point])
sys.exit(main(sys.argv[3:]))
"""


def test_killed_at_any_moment_and_gone_on_with(tmp_path: Path):
    """One set, killed again and again at other places, then finished: as if nothing had happened."""
    corpus(tmp_path / "in")
    words = ["prepare", str(tmp_path / "in"), "--output"]

    def run(folder: str, point: str, left: int) -> int:
        command = [sys.executable, "-c", KILLED, point, str(left), *words, str(tmp_path / folder)]
        return subprocess.run(command, capture_output=True, timeout=60).returncode

    assert run("whole", "before an entry", 10_000) == 0
    shards = []
    for point, left in [
        ("before a file is on the disk", 1),
        ("before a file is on the disk", 4),
        ("before it has its name", 3),
        ("before an entry", 3),
        ("before it has its name", 40),
        ("before an entry", 1),
        ("while it is tidied", 24),
    ]:
        assert run("set", point, left) == -signal.SIGKILL, point
        shards.append(len(list((tmp_path / "set").glob("*.starts.npy"))))
        for entry in (tmp_path / "set").glob("0*.json"):
            name, tokens = entry.stem, json.loads(entry.read_text())["tokens"]
            if not (tmp_path / "set" / "tokens.json").exists():
                assert (tmp_path / "set" / f"{name}.bin").stat().st_size == 2 * tokens
    assert shards == sorted(shards) and shards[-1] > shards[3] > 0
    assert run("set", "before an entry", 10_000) == 0
    found, expected = files_in(tmp_path / "set"), files_in(tmp_path / "whole")
    left = {name for name in found if name not in expected}
    assert {name: found[name] for name in expected} == expected and not left


@pytest.mark.parametrize("encoders, batch", [(1, 1), (4, 7)])
def test_threads_and_batches_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoders: int, batch: int
):
    corpus(tmp_path / "in")
    make(tmp_path / "plain", tmp_path / "in")
    monkeypatch.setattr("minititan.data.encode.ENCODERS", encoders)
    monkeypatch.setattr("minititan.data.encode.BATCH_PIECES", batch)
    make(tmp_path / "other", tmp_path / "in")
    assert files_in(tmp_path / "other") == files_in(tmp_path / "plain")


# ---- The command.


def test_words_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a.txt").write_text("a")
    file, output = str(tmp_path / "a.txt"), str(tmp_path / "set")
    keyless = str(tmp_path / "keyless.jsonl")
    Path(keyless).write_text('{"a": 1}\n')
    for words, begin in (
        (
            [],
            "command line: the following arguments are required: input, --output; see minititan prepare --h",
        ),
        ([file], "command line: the following arguments are required: --output"),
        (
            [file, "--output", output, "--part", "0/3"],
            'command line: part = "0/3": must be I/N with I from 1',
        ),
        ([file, "--output", output, "--add"], "command line: unrecognized arguments: --add"),
        (
            [str(tmp_path / "no"), "--output", output],
            f'command line: input = "{tmp_path}/no": no such file or folder; give a',
        ),
        ([file, "no", "--output", output], "command line: input: no: no such file or folder; give a"),
        (
            [keyless, "--output", f"{tmp_path}/other"],
            f"{keyless}:1: no key 'text' (keys here: 'a'); set --text_key",
        ),
        (
            [file, "--output", output, "--tokenizer", "no"],
            "command line: --tokenizer: no such file or folder",
        ),
        ([file, "--output", f"{file}/x"], f"command line: --output: cannot write {file}/x"),
        (
            [file, "--output", output, "--on-bad-record", "x"],
            "command line: argument --on_bad_record: invalid",
        ),
    ):
        assert main(["prepare", *words]) == 2
        assert capsys.readouterr().err.startswith(begin)
    assert not (tmp_path / "set").exists()


def test_command_says_what_it_made_and_does_it_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tokenizer = save_tokenizer(tmp_path / "t", special_tokens_map={"eos_token": "</s>"})
    (tmp_path / "a.jsonl").write_bytes(lines_of("things and texts", "", "small") + b"{\n")
    words = ["prepare", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "set"), "--on_bad_record=skip"]
    words += ["--tokenizer", str(tokenizer)]
    assert main([*words, "--part", "1/2"]) == 0
    assert capsys.readouterr().out == "Part 1/2 is done. Still to come: 2 of 2\n"
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "documents        2 (1 empty ones left out)" in out and "rejected         1, listed in rej" in out
    before = files_in(tmp_path / "set")
    assert main(words) == 0
    assert "was whole already" in capsys.readouterr().out and files_in(tmp_path / "set") == before
    card = json.loads(before["dataset.json"])
    assert card["tokenizer"] == str(tokenizer / "tokenizer.json") and card["bytes_per_token"] > 1
    assert main(["prepare", "--help"]) == 0
    assert "usage: minititan prepare" in capsys.readouterr().out


def test_progress_in_lines(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("minititan.data.progress.LINE_SECONDS", -1.0)
    said: list[str] = []
    lines = Lines(said.append)
    lines.begin(100)
    lines.advance(0, 0)
    lines.advance(20, 1000)
    lines.advance(5, 500)
    assert said[0].startswith("prepared 0 tokens so far, ") and "left" not in said[0]
    assert "prepared 1,500 tokens so far, " in said[2] and ", 25% of the input, about 0 s left" in said[2]


def test_output_into_a_pipe_that_ends_early(tmp_path: Path):
    reader, writer = os.pipe()
    os.close(reader)
    with contextlib.closing(os.fdopen(writer, "wb")) as pipe:
        words = [sys.executable, "-m", "minititan", "config", "--schema"]
        ended = subprocess.run(words, stdout=pipe, stderr=subprocess.PIPE, timeout=60)
    assert ended.stderr == b"" and ended.returncode == 128 + signal.SIGPIPE


def test_where_all_is_rejected_the_first_reason_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a.jsonl").write_text('{"content": "a"}\n{"content": "b"}\n')
    words = ["prepare", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "set"), "--on_bad_record=skip"]
    assert main(words) == 2
    assert f"bad records: 2; the first: {tmp_path}/a.jsonl:1: no key 'text'" in capsys.readouterr().err

"""Sources of text: every fault names its file and line, and text is taken as it stands."""

import gzip
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minititan.config import ConfigError
from minititan.data import check_source
from minititan.data.encode import Piece, encode, pieces_of
from minititan.data.records import BadRecord, Form, Record
from minititan.data.sources import FileSource, Source, resolve_source
from minititan.data.tokenizer import ByteTokenizer


def source(path: Path | str) -> Source:
    return resolve_source("mine", str(path), "train")


def texts(path: Path | str, text_key: str = "text", txt_lines: bool = False) -> list[str]:
    """The documents; raises the ConfigError of a bad one."""
    return documents_of(source(path), Form(text_key, txt_lines))


def documents_of(found: Source, form: Form) -> list[str]:
    documents = []
    for span in found.spans(form):
        for record in span.read(span, form):
            if isinstance(record, BadRecord):
                raise record.error()
            documents.append("".join(record.blocks))
    return documents


@pytest.mark.parametrize(
    "dataset, path, words",
    [
        (
            "c4_tst",
            None,
            "validation.dataset: unknown data set; did you mean 'c4_test'? known: c4, c4_test, c4_val",
        ),
        ("stdlib", "absent.txt", "validation.dataset_path: no such file or folder"),
        ("stdlib", "absent/*.txt", "validation.dataset_path: the pattern matches nothing"),
        (
            "stdlib",
            "*.md",
            "validation.dataset_path: the pattern matches no file that is read; files that are",
        ),
        (
            "stdlib",
            "notes.md",
            "validation.dataset_path: not a form of data that is read; files that are read: .j",
        ),
        ("stdlib", "empty", "validation.dataset_path: the folder holds no file that is read"),
        ("stdlib", "mixed", "b.csv is a form of data that is not read"),
        ("c4_test", None, "validation.dataset: is read from local files"),
    ],
)
def test_wrong_names_and_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dataset: str, path: str | None, words: str
):
    monkeypatch.chdir(tmp_path)
    Path("notes.md").write_text("notes")
    Path("empty/.hidden").mkdir(parents=True)
    Path("empty/.hidden/a.txt").write_text("a")
    Path("mixed").mkdir()
    Path("mixed/a.txt").write_text("a")
    Path("mixed/b.csv").write_text("a,b")
    with pytest.raises(ConfigError) as error:
        check_source(dataset, path, section="validation")
    assert words in str(error.value)


def test_set_that_must_be_downloaded_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"'datasets' package.*pip install 'minititan\[hf\]', or set a dataset_path"
    ):
        check_source("c4", None)


def test_downloaded_set(monkeypatch: pytest.MonkeyPatch):
    """With stand-ins for the libraries of the extra: rows become documents, faults name the set."""

    def load_dataset(repository: str, **options: object) -> Iterator[dict[str, object]]:
        assert repository == "allenai/c4"
        assert options == {"name": "en", "split": "validation", "streaming": True}
        yield {"text": "one"}
        yield {"text": "two"}
        raise ConnectionError("no route")

    def dataset_info(repository: str) -> SimpleNamespace:
        return SimpleNamespace(sha=revisions.pop())

    revisions = ["a", "b"]
    hub = SimpleNamespace(HfApi=lambda: SimpleNamespace(dataset_info=dataset_info))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    c4 = resolve_source("c4_validation", None, "validation", section="validation")
    found = []
    (span,) = c4.spans(Form())
    with pytest.raises(ConfigError, match=r'validation.dataset = "c4_validation": cannot be .* \(no route\)'):
        found.extend("".join(r.blocks) for r in span.read(span, Form()) if isinstance(r, Record))
    assert found == ["one", "two"]
    with pytest.raises(ConfigError, match=r"^hf:allenai/c4:row 0: no text under 'body'; set data.text_key"):
        documents_of(c4, Form("body"))
    assert c4.content_hash() != c4.content_hash()


@pytest.mark.parametrize(
    "line, words",
    [
        (b"{", "not valid JSON (Expecting property name"),
        (b'{"text": "a"} {}', "not valid JSON (Extra data"),
        (b"[" * 100_000, "not valid JSON ("),
        (b'["a"]', "a JSON array; each line must be one JSON object"),
        (b'{"id": 1, "content": "a"}', "no key 'text' (keys here: 'id', 'content'); set data.text_key"),
        (b'{"text": 3.5}', "'text' is a JSON number; it must be a string"),
        (b'{"text": null}', "'text' is a JSON null; it must be a string"),
        (b'{"text": "\xff"}', "invalid UTF-8 (byte 0xff: invalid start byte); convert it to UTF-8"),
        (b'{"text": "\\ud800"}', "'text' holds half a surrogate pair"),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".json.gz"])
def test_bad_record_names_file_and_line(tmp_path: Path, line: bytes, words: str, suffix: str):
    file = tmp_path / f"a{suffix}"
    content = b'{"text": "good"}\n\n' + line + b'\n{"text": "good"}\n'
    file.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    with pytest.raises(ConfigError) as error:
        texts(file)
    assert str(error.value).startswith(f"{file}:3: {words}")


@pytest.mark.parametrize("before", [1, 3 * (1 << 20) // 8 + 1])
def test_invalid_text_names_file_and_line(tmp_path: Path, before: int):
    """Also beyond the first block, and where a block ends inside a character."""
    file = tmp_path / "a.txt"
    file.write_bytes("größer\n".encode() * before + b"bad \xc3\x28\n")
    with pytest.raises(ConfigError) as error:
        texts(file)
    assert str(error.value).startswith(f"{file}:{before + 1}: invalid UTF-8 (byte 0xc3: ")
    file.write_bytes(b"ends inside \xe4\xbd")
    with pytest.raises(ConfigError, match=r"a.txt:1: invalid UTF-8 \(byte 0xe4: unexpected end of data\)"):
        texts(file)


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-10], lambda b: b"no gzip", lambda b: b[:20] + b"?" + b[21:]]
)
def test_damaged_gzip_is_named(tmp_path: Path, damage):
    file = tmp_path / "a.txt.gz"
    file.write_bytes(damage(gzip.compress(os.urandom(100).hex().encode())))
    with pytest.raises(ConfigError) as error:
        texts(file)
    assert str(error.value).startswith(f"{file}: damaged gzip file before byte ")


def test_file_that_vanished_is_named(tmp_path: Path):
    file = tmp_path / "a.txt"
    file.write_text("a")
    gone = source(file)
    file.unlink()
    for call in (gone.identity, gone.content_hash, lambda: documents_of(gone, Form())):
        with pytest.raises(ConfigError) as error:
            call()
        assert str(error.value).startswith(f"{file}: cannot be read (No such file or directory)")


def test_text_is_taken_as_it_stands(tmp_path: Path):
    text = "a\r\nb\rc\n\n  größe\u2028\x00 你好"
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "d.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps({"text": text}).encode())
    assert texts(tmp_path) == [text] * 4


def test_folders_and_globs_are_sorted_and_searched_whole(tmp_path: Path):
    for name in ("b/z.txt", "b/a.jsonl", "a.txt", "b/.git/c.txt", "b/README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"body": name}))
    in_text = json.dumps({"body": "b/z.txt"})
    assert texts(tmp_path, "body") == [json.dumps({"body": "a.txt"}), "b/a.jsonl", in_text]
    assert texts(tmp_path / "**" / "z.*") == [in_text]
    assert texts(tmp_path / "b" / "[az].*", "body") == ["b/a.jsonl", in_text]


def test_content_hash_is_of_the_content_alone(tmp_path: Path):
    hashes = {}
    for folder in ("a", "moved"):
        (tmp_path / folder).mkdir()
        for name in ("1.txt", "2.txt"):
            (tmp_path / folder / name).write_text(name)
        hashes[folder] = source(tmp_path / folder).content_hash()
    before = source(tmp_path / "a").identity()
    os.utime(tmp_path / "a" / "1.txt", ns=(1, 1))
    assert source(tmp_path / "a").identity() != before
    assert hashes["a"] == hashes["moved"] == source(tmp_path / "a").content_hash()
    (tmp_path / "a" / "1.txt").write_text("3.txt")
    (tmp_path / "moved" / "2.txt").rename(tmp_path / "moved" / "2.jsonl")
    changed = {source(tmp_path / folder).content_hash() for folder in ("a", "moved")}
    assert len(changed | {hashes["a"]}) == 3


def test_stdlib_splits_share_no_file_and_hold_no_packages():
    names: list[set[str]] = []
    sizes: list[int] = []
    for split in ("train", "validation"):
        stdlib = resolve_source("stdlib", None, split)
        assert isinstance(stdlib, FileSource)
        root = Path(sysconfig.get_paths()["stdlib"])
        names.append({path.relative_to(root).as_posix() for path, _ in stdlib.files})
        sizes.append(sum(map(len, documents_of(stdlib, Form()))))
    train, held_out = names
    assert sizes[0] > 5_000_000 and 0.01 < sizes[1] / sizes[0] < 0.2
    assert train and held_out and not train & held_out
    assert {"json/decoder.py", "os.py"} <= train | held_out
    folders = {folder for name in train | held_out for folder in name.split("/")[:-1]}
    assert not folders & {"site-packages", "test", "tests", "__pycache__"}


@settings(deadline=None)
@given(st.lists(st.text(st.sampled_from("ab \n\t"), max_size=40)), st.integers(2, 30))
def test_pieces_are_the_text_cut_alike_in_any_blocks(blocks: list[str], limit: int):
    text = "".join(blocks)
    pieces = list(pieces_of(blocks, limit))
    assert "".join(piece.text for piece in pieces) == text
    assert pieces == list(pieces_of([text], limit))
    assert all(0 < len(piece.text) <= limit for piece in pieces)
    assert [piece.first for piece in pieces] == [i == 0 for i in range(len(pieces))]
    assert [piece.last for piece in pieces] == [i == len(pieces) - 1 for i in range(len(pieces))]


def test_pieces_are_cut_at_lines_then_words():
    def cut(text: str) -> list[str]:
        return [piece.text for piece in pieces_of([text], 10)]

    assert cut("one\n\n two\nthree four") == ["one\n\n two\n", "three four"]
    assert cut("one\n  two three") == ["one\n  two", " three"]
    assert cut("one two three") == ["one two", " three"]
    assert cut("onetwothreefour") == ["onetwothre", "efour"]
    assert list(pieces_of([], 10)) == [] == list(pieces_of(["", ""], 10))
    assert list(pieces_of(["a"], 10)) == [Piece("a", True, True)]


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("add_eos", [False, True])
def test_documents_are_framed_and_empty_ones_left_out(
    monkeypatch: pytest.MonkeyPatch, add_bos: bool, add_eos: bool
):
    """Batches and pieces far smaller than the documents change nothing."""
    documents = ["first one\n" * 5, "", "second", "third " * 7]
    expected: list[int] = []
    starts: list[int] = []
    for text in filter(None, documents):
        starts.append(len(expected))
        expected += [256] * add_bos + list(text.encode()) + [257] * add_eos
    monkeypatch.setattr("minititan.data.encode.BATCH_CHARACTERS", 16)
    monkeypatch.setattr("minititan.data.encode.PIECE_CHARACTERS", 7)
    found: list[int] = []
    found_starts: list[int] = []
    read = text_bytes = 0
    for batch in encode(([d] for d in documents), ByteTokenizer(), add_bos=add_bos, add_eos=add_eos):
        assert batch.tokens.dtype == "<u2"
        found_starts += [len(found) + int(offset) for offset in batch.starts]
        found += batch.tokens.tolist()
        read, text_bytes = read + batch.documents, text_bytes + batch.text_bytes
    assert found == expected and found_starts == starts
    assert (read, text_bytes) == (4, sum(len(d.encode()) for d in documents))


def test_a_source_of_a_mixture_is_called_by_the_key_that_it_has(tmp_path: Path):
    (tmp_path / "a.txt").write_text("a")
    source = resolve_source("", str(tmp_path), "train", section="data.sources.web")
    assert source.label == f'data.sources.web.path = "{tmp_path}"'

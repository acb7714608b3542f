"""`minititan data`: damage is found and named; sets read in place are those of the run."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from minititan.__main__ import main
from minititan.config import ConfigError
from minititan.data import build_tokenizer, check_source, open_tokens, tokens
from minititan.data.tokens import Tokens, open_prepared
from tests.test_data_tokenizer import save_tokenizer

BYTES = build_tokenizer("")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A set of six shards, two of them of one size."""
    monkeypatch.setattr("minititan.data.prepare.SHARD_BYTES", 1)
    (tmp_path / "in").mkdir()
    for number, text in enumerate(("one", "two", "three", "four", "five!", "größe")):
        (tmp_path / "in" / f"{number}.txt").write_text(text)
    assert main(["prepare", str(tmp_path / "in"), "--output", str(tmp_path / "set")]) == 0
    return tmp_path / "set"


def exchange(folder: Path) -> None:
    a, b, aside = folder / "00000-000.bin", folder / "00000-001.bin", folder / "aside"
    a.rename(aside)
    b.rename(a)
    aside.rename(b)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def forge(folder: Path) -> None:
    content = json.loads((folder / "tokens.json").read_text())
    (folder / "tokens.json").write_text(json.dumps(content | {"fingerprint": "0" * 64}))


DAMAGES = {
    "a flipped bit": (lambda folder: flip(folder / "00000-002.bin", 3), ["00000-002.bin"]),
    "another boundary": (lambda folder: flip(folder / "00000-002.starts.npy", 128), ["00000-002.bin"]),
    "a shard cut short": (lambda folder: (folder / "00000-001.bin").write_bytes(b"\0\0"), ["00000-001.bin"]),
    "a missing shard": (lambda folder: (folder / "00000-003.bin").unlink(), ["00000-003.bin"]),
    "a missing sidecar": (lambda f: (f / "00000-003.starts.npy").unlink(), ["00000-003.starts.npy"]),
    "two exchanged": (exchange, ["00000-000.bin", "00000-001.bin"]),
    "another fingerprint": (forge, ["tokens.json"]),
    "no manifest": (lambda folder: (folder / "tokens.json").write_text("{"), ["tokens.json"]),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_verify_names_each_damaged_file(folder: Path, name: str, capsys: pytest.CaptureFixture[str]):
    assert main(["data", "verify", str(folder)]) == 0
    assert capsys.readouterr().out.endswith("set: whole, 6 shards read\n")
    damage, files = DAMAGES[name]
    damage(folder)
    assert main(["data", "verify", str(folder)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == len(files)
    for line, file in zip(err.splitlines(), files, strict=True):
        assert line.startswith(f"{folder / file}: ") and line.endswith("; copy or prepare the set again")


def opened(folder: Path, **options) -> Tokens:
    return open_tokens("mine", str(folder), "train", BYTES, cache_folder="/nowhere", **options)


def read(found: Tokens) -> list[int]:
    out = np.empty(found.num_tokens, dtype=np.int64)
    found.read(0, found.num_tokens, out)
    return out.tolist()


@pytest.mark.parametrize(
    "name, words",
    [
        (
            "a shard cut short",
            "training.dataset_path: damaged: {folder}/00000-001.bin: holds 2 bytes, not 8; ",
        ),
        ("a missing shard", "training.dataset_path: damaged: {folder}/00000-003.bin: No such file"),
        ("a missing sidecar", "training.dataset_path: damaged: {folder}/00000-003.starts.npy: No such file"),
        ("no manifest", "training.dataset_path: damaged: {folder}/tokens.json: Expecting"),
        ("two exchanged", "{folder}/00000-000.bin: holds other tokens than tokens.json says"),
        ("a flipped bit", "{folder}/00000-002.bin: holds other tokens than tokens.json says"),
    ],
)
def test_damage_never_trains(folder: Path, name: str, words: str):
    expected = read(opened(folder))
    assert BYTES.decode(expected) == "onetwothreefourfive!größe"
    DAMAGES[name][0](folder)
    with pytest.raises(ConfigError) as error:
        read(opened(folder))
    assert str(error.value).startswith(words.replace("{folder}", str(folder)))


def test_set_of_another_tokenizer_or_option_is_refused(folder: Path, tmp_path: Path):
    other = build_tokenizer(str(save_tokenizer(tmp_path / "t", special_tokens_map={"eos_token": "</s>"})))
    with pytest.raises(
        ConfigError, match=r"^training.dataset_path: was prepared with another tokenizer \(bytes"
    ):
        open_tokens("mine", str(folder), "train", other)
    with pytest.raises(ConfigError, match=r"^data.add_eos: .*set was prepared with true; set it so"):
        opened(folder, add_eos=False)


def test_unfinished_set_is_refused(folder: Path):
    (folder / "tokens.json").unlink()
    (folder / "plan.json").write_text("{}")
    (folder / ".part-1.lock").touch()
    with pytest.raises(
        ConfigError, match=r"^training.dataset_path: the set is not whole: tokens.json is not th"
    ):
        check_source("mine", str(folder))


def test_opening_reads_no_shard(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokens, "mapped", lambda *args: pytest.fail("maps a file"))
    monkeypatch.setattr(tokens, "edges_of", lambda *args: pytest.fail("reads a file"))
    assert open_prepared(folder, "").num_documents == 6


def test_files_are_mapped_without_descriptors(folder: Path):
    before = len(list(Path("/proc/self/fd").iterdir()))
    found = opened(folder)
    read(found)
    found.document_starts(0, found.num_tokens)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_head_and_ls(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["data", "head", str(folder), "--documents", "2"]) == 0
    expected = "--- document 1: 4 tokens\none\n--- document 2: 4 tokens\ntwo\n"
    assert capsys.readouterr().out.endswith(expected)
    assert main(["data", "ls", str(folder)]) == 0
    out = capsys.readouterr().out
    assert (
        "tokens           33 in 6 shards" in out and f"fingerprint      {opened(folder).fingerprint}" in out
    )
    cache = tmp_path / "cache"
    for name in ("0.txt", "1.txt"):
        open_tokens(
            "x",
            str(folder.parent / "in" / name),
            "train",
            BYTES,
            cache_folder=str(cache),
            say=lambda line: None,
        )
    assert main(["data", "ls", str(cache)]) == 0
    assert capsys.readouterr().out.count("made from        training.dataset_path = ") == 2
    assert main(["data", "verify", str(cache)]) == 0
    assert capsys.readouterr().out.count(": whole, 1 shards read") == 2
    np.save(tmp_path / "a.npy", np.array([65, 66, 257, 67], dtype="<u2"))
    assert main(["data", "ls", str(tmp_path / "a.npy")]) == 0
    assert "a.npy  4 x uint16" in capsys.readouterr().out
    assert main(["data", "head", str(tmp_path / "a.npy")]) == 0
    assert capsys.readouterr().out == "--- document 1: 4 tokens\nABC\n"


def test_paths_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a.txt").write_text("a")
    for words, begin in (
        (["ls", str(tmp_path / "no")], f"command line: path: {tmp_path}/no: no such file or folder"),
        (
            ["ls", str(tmp_path)],
            f"command line: path: {tmp_path} is no prepared set and holds no token files",
        ),
        (
            ["verify", str(tmp_path)],
            f"command line: path: {tmp_path} is no prepared set and no cache of sets",
        ),
        (["look", str(tmp_path)], "command line: argument action: invalid choice: 'look'"),
        (["head", str(tmp_path), "--documents", "0"], "command line: --documents: 0 must be at least 1"),
    ):
        assert main(["data", *words]) == 2
        assert capsys.readouterr().err.startswith(begin)


def test_a_copied_set_is_the_same(folder: Path, tmp_path: Path):
    shutil.copytree(folder, tmp_path / "copy")
    assert opened(tmp_path / "copy").fingerprint == opened(folder).fingerprint

"""`COMMIT.json` vouches for itself and for every file; whatever is wrong is one line that names the file."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from minititan.checkpoint import manifest
from minititan.checkpoint.manifest import COMMIT, File, Manifest, TensorInfo
from minititan.config import ConfigError
from tests.checkpoints import found_flips

USE_ANOTHER = "; use another checkpoint"
OTHER_BYTES = "damaged (its SHA-256 is not that of what was saved)"
NOT_ITS_OWN = "damaged (its content does not have the SHA-256 in its last line)"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two files."""
    (tmp_path / "a").write_bytes(b"aaa")
    (tmp_path / "b").write_bytes(b"bbb")
    manifest.write(tmp_path, content(files={name: file_of(tmp_path / name) for name in "ab"}))
    return tmp_path


def content(**changes) -> Manifest:
    tensors = {"model.a": TensorInfo(shape=(2, 3), dtype="float32")}
    values = {
        "step": 2,
        "files": {},
        "tensors": tensors,
        "model": {"name": "x"},
        "layout": {},
        "versions": {},
    }
    return Manifest.model_validate(values | changes)


def file_of(path: Path) -> File:
    data = path.read_bytes()
    return File(size=len(data), sha256=hashlib.sha256(data).hexdigest())


def sealed(text: str) -> bytes:
    """The text as a manifest with a SHA-256 that is right."""
    body = text.removesuffix("}").rstrip("\n").encode()
    return body + b',\n "sha256": "%s"\n}\n' % hashlib.sha256(body).hexdigest().encode()


@pytest.mark.parametrize(
    "data, fault",
    [
        (None, "missing"),
        (b"", NOT_ITS_OWN),
        (b"not JSON", NOT_ITS_OWN),
        (bytes(300), NOT_ITS_OWN),
        (b"{}", NOT_ITS_OWN),
        (sealed('{"format_version": 2, nonsense}'), "no manifest of a checkpoint (Expecting property name"),
        (sealed("[1}"), "no manifest of a checkpoint (Expecting ',' delimiter"),
        (sealed('{"format_version": 2}'), "no manifest of a checkpoint (step: Field required)"),
        (
            sealed('{"format_version": 3}'),
            "format_version = 3: must be 2; use the version of minititan that saved",
        ),
        (sealed('{"step": 2}'), "format_version = None: must be 2; use the version"),
    ],
)
def test_what_is_no_manifest_is_named(folder: Path, data: bytes | None, fault: str):
    (folder / COMMIT).unlink()
    if data is not None:
        (folder / COMMIT).write_bytes(data)
    (line,) = manifest.verify(folder)
    assert line.startswith(f"{folder / COMMIT}: {fault}")
    with pytest.raises(ConfigError) as caught:
        manifest.read(folder)
    assert str(caught.value) == line + USE_ANOTHER
    assert not manifest.is_valid(folder)


def test_a_checkpoint_of_format_1_is_said_to_be_one(tmp_path: Path):
    (tmp_path / "train_state.json").write_text('{"format_version": 1}')
    old = "missing (format 1, of an earlier minititan, is not read)"
    assert manifest.verify(tmp_path) == [f"{tmp_path / COMMIT}: {old}"]


@pytest.mark.parametrize("name", ["../b", "/etc/passwd", "sub/file", "", ".", "..", COMMIT])
def test_a_manifest_names_files_of_its_folder_only(folder: Path, name: str):
    text = manifest.read(folder).model_dump_json(indent=1).replace('"b"', json.dumps(name))
    (folder / COMMIT).write_bytes(sealed(text))
    (line,) = manifest.verify(folder)
    assert "must be the name of a file in the folder" in line


SPOILED = {
    "missing": (lambda path: path.unlink(), "missing"),
    "empty": (lambda path: path.write_bytes(b""), "0 bytes, must be 3"),
    "cut short": (lambda path: path.write_bytes(b"bb"), "2 bytes, must be 3"),
    "longer": (lambda path: path.write_bytes(b"bbbb"), "4 bytes, must be 3"),
    "zeroed": (
        lambda path: path.write_bytes(bytes(3)),
        OTHER_BYTES,
    ),
    "swapped": (
        lambda path: shutil.copy(path.parent / "a", path),
        OTHER_BYTES,
    ),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "must be a file"),
    "a link": (lambda path: (path.rename(path.parent / "c"), path.symlink_to("c")), "must be a file"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_file_is_named(folder: Path, name: str):
    spoil, fault = SPOILED[name]
    assert manifest.verify(folder) == []
    spoil(folder / "b")
    assert manifest.verify(folder) == [f"{folder / 'b'}: {fault}"]
    # By sizes alone, what changes bytes and no size goes unseen.
    assert bool(manifest.verify(folder, hashes=False)) == ("SHA-256" not in fault)


def test_a_file_that_cannot_be_read_is_named(folder: Path, monkeypatch):
    def refuse(path: Path, *args, **options):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("builtins.open", refuse)
    assert manifest.file_faults(folder, content(files={"b": file_of_bytes(b"bbb")}), ["b"], True) == [
        f"{folder / 'b'}: cannot be read (Input/output error)"
    ]


def file_of_bytes(data: bytes) -> File:
    return File(size=len(data), sha256=hashlib.sha256(data).hexdigest())


def test_every_file_is_named_at_once(folder: Path):
    (folder / "a").unlink()
    (folder / "b").write_bytes(b"")
    assert [line.partition(": ")[0] for line in manifest.verify(folder)] == [
        f"{folder / 'a'}",
        f"{folder / 'b'}",
    ]


def test_60_of_60_bit_flips_in_a_real_checkpoint_are_found(tmp_path: Path):
    assert found_flips(tmp_path, 60) == 60


def test_what_was_written_is_read(folder: Path):
    expected = content(files={name: file_of(folder / name) for name in "ab"})
    assert manifest.read(folder) == expected
    assert json.loads((folder / COMMIT).read_text())["tensors"] == {
        "model.a": {"shape": [2, 3], "dtype": "float32"}
    }


def test_checking_needs_no_torch(folder: Path):
    code = (
        "import sys; from pathlib import Path; from minititan.checkpoint import folder, manifest; "
        "print(manifest.verify(Path(sys.argv[1])), 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ)
    assert ended.stdout == "[] False\n", ended.stderr

"""`COMMIT.json`, which makes a folder a checkpoint: what must lie in it, to the byte, and what it is of.

Its last field is the SHA-256 of all bytes before, so it vouches for itself, and with its hashes for the other
files. Nothing here needs torch.
"""

import hashlib
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from minititan.config import ConfigError

FORMAT_VERSION = 2
COMMIT = "COMMIT.json"
TRAIN_STATE = "train_state.json"
WAY_OUT = "use another checkpoint"
_SEAL = ',\n "sha256": "{}"\n}}\n'
_SEAL_BYTES = len(_SEAL.format("0" * 64))
_CHUNK_BYTES = 1 << 20


def _plain_name(name: str) -> str:
    if name in ("", ".", "..", COMMIT) or "/" in name or "\0" in name:
        raise ValueError("must be the name of a file in the folder")
    return name


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class File(_Record):
    """A file as it was written."""

    size: int = Field(ge=0)
    sha256: str


class TensorInfo(_Record):
    """A tensor's global shape, and its type as torch calls it ("float32")."""

    shape: tuple[int, ...]
    dtype: str


class Manifest(_Record):
    """The content of a `COMMIT.json`."""

    format_version: int = FORMAT_VERSION
    step: int = Field(ge=0)
    files: dict[Annotated[str, AfterValidator(_plain_name)], File]  # all but COMMIT.json itself
    tensors: dict[str, TensorInfo]  # by key
    model: dict[str, Any]  # name, flavor, args
    layout: dict[str, Any]  # world_size and the degrees of the run that saved it
    versions: dict[str, str]


def write(folder: Path, manifest: Manifest) -> None:
    """Writes `COMMIT.json` to the disk, into a folder in which all other files are."""
    content = manifest.model_dump_json(indent=1).removesuffix("\n}").encode()
    with open(folder / COMMIT, "wb") as file:
        file.write(content + _SEAL.format(hashlib.sha256(content).hexdigest()).encode())
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path) -> Manifest:
    """The manifest in this folder. Raises ConfigError when there is none, or it is damaged."""
    manifest = _read(folder)
    if isinstance(manifest, str):
        raise ConfigError(f"{manifest}; {WAY_OUT}")
    return manifest


def is_valid(folder: Path) -> bool:
    """Whether there is an undamaged manifest; looks at no other file."""
    return isinstance(_read(folder), Manifest)


def _read(folder: Path) -> Manifest | str:
    """The manifest, or what is wrong with it in a line that names the file."""
    path = folder / COMMIT
    try:
        data = path.read_bytes()
    except OSError as error:
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            return f"{path}: cannot be read ({error.strerror})"
        old = " (format 1, of an earlier minititan, is not read)" if _is_format_1(folder) else ""
        return f"{path}: missing{old}"
    content, seal = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    if seal != _SEAL.format(hashlib.sha256(content).hexdigest()).encode():
        return f"{path}: damaged (its content does not have the SHA-256 in its last line)"
    try:
        values = json.loads(content + b"\n}")
        version = values.get("format_version")
        if version != FORMAT_VERSION:
            rule = f"must be {FORMAT_VERSION}; use the version of minititan that saved it"
            return f"{path}: format_version = {version}: {rule}"
        return Manifest.model_validate_json(content + b"\n}")
    except (ValueError, AttributeError, RecursionError) as error:
        return f"{path}: no manifest of a checkpoint ({_first_fault(error)})"


def _is_format_1(folder: Path) -> bool:
    try:
        return json.loads((folder / TRAIN_STATE).read_bytes())["format_version"] == 1
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _first_fault(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def verify(folder: Path, hashes: bool = True) -> list[str]:
    """What is wrong with the checkpoint in this folder, one line a file; empty: it is whole.

    Without `hashes` only the sizes of the files are compared.
    """
    manifest = _read(folder)
    return [manifest] if isinstance(manifest, str) else file_faults(folder, manifest, manifest.files, hashes)


def file_faults(folder: Path, manifest: Manifest, names: Iterable[str], hashes: bool) -> list[str]:
    """A line for each of these files that is not what the manifest says."""
    faults = ((folder / name, _file_fault(folder / name, manifest.files[name], hashes)) for name in names)
    return [f"{path}: {fault}" for path, fault in faults if fault]


def _file_fault(path: Path, expected: File, hashes: bool) -> str | None:
    try:
        info = path.lstat()
        if not stat.S_ISREG(info.st_mode):
            return "must be a file"
        if info.st_size != expected.size:
            return f"{info.st_size} bytes, must be {expected.size}"
        if hashes and _sha256(path) != expected.sha256:
            return "damaged (its SHA-256 is not that of what was saved)"
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None


def _sha256(path: Path) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()

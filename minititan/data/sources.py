"""Sources of text: what `dataset` and `dataset_path` name, and its documents as a stream.

A source gives its `identity` (cheap: every process asks for it at each start), a `content_hash` (reads
everything once) and its `documents`. A document is an iterable of blocks of text, so that a file larger than
the memory is still one document. Sources know nothing of tokens.
"""

import difflib
import glob
import importlib
import importlib.util
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from minititan.config import ConfigError
from minititan.data.fault import Fault, plain_fault
from minititan.data.text import read_json_lines, read_text, reading

Document = Iterable[str]

READABLE = {
    ".txt": read_text,
    ".jsonl": read_json_lines,
    ".json": read_json_lines,
    ".txt.gz": read_text,
    ".jsonl.gz": read_json_lines,
    ".json.gz": read_json_lines,
}
UNREADABLE_DATA = (".parquet", ".arrow", ".zst")
"""Forms of data that are not read yet: refused where they stand beside readable ones, not passed over."""

STDLIB_SKIPPED = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "__pycache__",
    "lib-dynload",
}
STDLIB_HELD_OUT = 20
"""One file in so many belongs to the validation split of `stdlib`."""


class Source(Protocol):
    """`label` names the source in messages: `KEY = VALUE`."""

    @property
    def label(self) -> str: ...

    def identity(self) -> Any:
        """A JSON value that changes when the source does, found without reading it."""
        ...

    def content_hash(self) -> str: ...

    def documents(self, text_key: str) -> Iterator[Document]: ...


@dataclass(frozen=True)
class FileSource:
    """Files in a fixed order: a .txt file is one document, a JSON-lines file has one a line."""

    label: str
    files: tuple[Path, ...]

    def identity(self) -> Any:
        return [[str(path), *_size_and_mtime(path)] for path in self.files]

    def content_hash(self) -> str:
        return _hash_of_files((path, _kind(path)) for path in self.files)

    def documents(self, text_key: str) -> Iterator[Document]:
        for path in self.files:
            yield from READABLE[_kind(path)](path, text_key)


def _size_and_mtime(path: Path) -> tuple[int, int]:
    with reading(path):
        stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _hash_of_files(files: Iterable[tuple[Path, str]]) -> str:
    """The hash of the files' contents and kinds in order, wherever they lie."""
    total = sha256()
    for path, kind in files:
        content = sha256()
        with reading(path), path.open("rb") as file:
            while block := file.read(1 << 20):
                content.update(block)
        total.update(kind.encode() + content.digest())
    return total.hexdigest()


def _kind(path: Path) -> str:
    """The suffix that says how to read the file, "" for none."""
    return max((suffix for suffix in READABLE if path.name.endswith(suffix)), key=len, default="")


@dataclass(frozen=True)
class StdlibSource:
    """The source files of the running Python's standard library, less packages, tests and generated files.

    One file in STDLIB_HELD_OUT, by the hash of its relative path, is held out for validation.
    """

    label: str
    root: Path
    names: tuple[str, ...]

    def identity(self) -> Any:
        return [[str(self.root / name), *_size_and_mtime(self.root / name)] for name in self.names]

    def content_hash(self) -> str:
        return _hash_of_files((self.root / name, ".txt") for name in self.names)

    def documents(self, text_key: str) -> Iterator[Document]:
        for name in self.names:
            yield from read_text(self.root / name, text_key)


def _stdlib_names(root: Path, split: str) -> tuple[str, ...]:
    names: list[str] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [
            name for name in folders if name not in STDLIB_SKIPPED and not name.startswith("config-")
        ]
        for file in files:
            name = Path(folder, file).relative_to(root).as_posix()
            held_out = int.from_bytes(sha256(name.encode()).digest()[:4], "big") % STDLIB_HELD_OUT == 0
            generated = file.startswith("_sysconfigdata")
            if file.endswith(".py") and not generated and held_out == (split == "validation"):
                names.append(name)
    return tuple(sorted(names))


@dataclass(frozen=True)
class HubSource:
    """A data set of the Hugging Face hub, streamed with the `datasets` library (extra `hf`)."""

    label: str
    repository: str
    subset: str
    split: str

    def identity(self) -> Any:
        return ["hub", self.repository, self.subset, self.split]

    def content_hash(self) -> str:
        with self._downloading():
            revision = importlib.import_module("huggingface_hub").HfApi().dataset_info(self.repository).sha
        return sha256(f"{self.identity()} {revision}".encode()).hexdigest()

    def documents(self, text_key: str) -> Iterator[Document]:
        with self._downloading():
            load = importlib.import_module("datasets").load_dataset
            rows = load(self.repository, name=self.subset, split=self.split, streaming=True)
            for number, row in enumerate(rows):
                text = row.get(text_key)
                if not isinstance(text, str):
                    raise ConfigError(
                        f"{self.label}: row {number} has no text under {text_key!r}; set data.text_key"
                    )
                yield (text,)

    @contextmanager
    def _downloading(self) -> Iterator[None]:
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:  # of many libraries' classes
            way_out = "check the network, or set dataset_path to local files"
            raise ConfigError(f"{self.label}: cannot be downloaded ({error}); {way_out}") from None


HUB = {
    "c4": ("allenai/c4", "en", "train"),
    "c4_validation": ("allenai/c4", "en", "validation"),
}
LOCAL_ONLY = {"c4_test": "TorchTitan's repository has its files in tests/assets/c4_test"}


def resolve_source(
    dataset: str,
    dataset_path: str | None,
    split: str,
    *,
    section: str = "training",
    fault: Fault = plain_fault,
) -> Source:
    """The source that `dataset` and `dataset_path` of a section name; `dataset_path` wins where both are set.

    `split`, "train" or "validation", matters to `stdlib` only: a path or a hub set is taken whole. Looks at
    names and the file system alone. Raises ConfigError.
    """
    if dataset_path:
        key = f"{section}.dataset_path"
        return FileSource(f"{key} = {json.dumps(dataset_path)}", _resolve_files(dataset_path, key, fault))
    key = f"{section}.dataset"
    label = f"{key} = {json.dumps(dataset)}"
    if dataset == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        names = _stdlib_names(root, split)
        if not names:
            rule = f"this Python has no source files of its standard library in {root}"
            raise ConfigError(fault(key, rule, f"set {section}.dataset_path to files of your own"))
        return StdlibSource(label, root, names)
    if dataset in HUB:
        if importlib.util.find_spec("datasets") is None:
            way_out = f"pip install 'minititan[hf]', or set {section}.dataset_path to local files"
            raise ConfigError(
                fault(key, "is downloaded by the 'datasets' package, which is missing", way_out)
            )
        return HubSource(label, *HUB[dataset])
    if dataset in LOCAL_ONLY:
        rule = f"is read from local files ({LOCAL_ONLY[dataset]})"
        raise ConfigError(fault(key, rule, f"set {section}.dataset_path"))
    known = sorted(("stdlib", *HUB, *LOCAL_ONLY))
    nearest = difflib.get_close_matches(dataset, known, 1)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    way_out = f"{hint}known: {', '.join(known)}; or set {section}.dataset_path to files of your own"
    raise ConfigError(fault(key, "unknown data set", way_out))


def check_source(
    dataset: str, dataset_path: str | None, *, section: str = "training", fault: Fault = plain_fault
) -> None:
    """Raises the ConfigError that `open_tokens` would raise for a wrong name or path."""
    resolve_source(dataset, dataset_path, "train", section=section, fault=fault)


def _resolve_files(dataset_path: str, key: str, fault: Fault) -> tuple[Path, ...]:
    """The readable files of a file, a folder (searched whole, hidden names left out) or a glob, sorted."""
    given = Path(dataset_path).expanduser()
    read = f"files that are read: {', '.join(sorted(READABLE))}"
    if given.is_dir():
        found = [path for path in given.rglob("*") if not _hidden(path.relative_to(given))]
        rule = "the folder holds no file that is read"
    elif given.exists():
        found, rule = [given], "not a form of data that is read"
    elif glob.has_magic(dataset_path):
        found = [Path(name) for name in glob.glob(str(given), recursive=True)]
        rule = "the pattern matches no file that is read" if found else "the pattern matches nothing"
    else:
        raise ConfigError(fault(key, "no such file or folder", "give a file, a folder or a glob pattern"))
    files = sorted((path.absolute() for path in found if path.is_file()), key=str)
    readable = tuple(path for path in files if _kind(path))
    unreadable = [path for path in files if path.name.endswith(UNREADABLE_DATA)]
    if unreadable:
        raise ConfigError(fault(key, f"{unreadable[0]} is a form of data that is not read", read))
    if not readable:
        raise ConfigError(fault(key, rule, read))
    return readable


def _hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)

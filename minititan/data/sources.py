"""Sources of text: what `dataset` and `dataset_path` name, as spans of files that readers go through.

A source gives its `identity` (cheap: every process asks for it at each start), a `content_hash` (reads
everything once) and its `spans`, in order. Sources know nothing of tokens.
"""

import difflib
import glob
import importlib
import importlib.util
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from minititan.config import ConfigError
from minititan.data.fault import Fault, plain_fault
from minititan.data.parquet import read_parquet
from minititan.data.records import COMPRESSIONS, BadRecord, Form, Reader, Record, Span, reading
from minititan.data.text import read_json_lines, read_text

SPAN_BYTES = 1 << 28
"""A larger file of lines is cut into spans of this size."""

_LINES: dict[str, Reader] = {".txt": read_text, ".jsonl": read_json_lines, ".json": read_json_lines}
READABLE: dict[str, Reader] = {
    **{kind + packed: read for kind, read in _LINES.items() for packed in ("", *COMPRESSIONS)},
    ".parquet": read_parquet,
}
UNREADABLE_DATA = (".arrow", ".feather", ".csv", ".tsv", ".xz", ".zip", ".zst", ".gz", ".bz2")
"""Forms of data that are not read: refused where they stand beside readable ones, not passed over."""

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

    def spans(self, form: Form) -> Iterator[Span]: ...


@dataclass(frozen=True)
class FileSource:
    """Files in a fixed order, each with the kind that says how it is read."""

    label: str
    files: tuple[tuple[Path, str], ...]

    def identity(self) -> Any:
        return [[str(path), kind, *_size_and_mtime(path)] for path, kind in self.files]

    def content_hash(self) -> str:
        """The hash of the files' contents and kinds in order, wherever they lie."""
        total = sha256()
        for path, kind in self.files:
            content = sha256()
            with reading(path), path.open("rb") as file:
                while block := file.read(1 << 20):
                    content.update(block)
            total.update(kind.encode() + content.digest())
        return total.hexdigest()

    def spans(self, form: Form) -> Iterator[Span]:
        for path, kind in self.files:
            size, mtime = _size_and_mtime(path)
            whole = Span(path, READABLE[kind], size, mtime)
            if (kind == ".txt" and not form.txt_lines) or kind not in _LINES:
                yield whole
            else:
                for begin in range(0, max(size, 1), SPAN_BYTES):
                    yield whole._replace(begin=begin, end=min(begin + SPAN_BYTES, size))


def _size_and_mtime(path: Path) -> tuple[int, int]:
    with reading(path):
        stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _kind(path: Path) -> str:
    """The suffix that says how to read the file, "" for none."""
    return max((suffix for suffix in READABLE if path.name.endswith(suffix)), key=len, default="")


def _stdlib_files(root: Path, split: str) -> tuple[tuple[Path, str], ...]:
    """The source files of the running Python's standard library, less packages, tests and generated files.

    One file in STDLIB_HELD_OUT, by the hash of its relative path, is held out for validation.
    """
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
    return tuple((root / name, ".txt") for name in sorted(names))


@dataclass(frozen=True)
class HubSource:
    """A data set of the Hugging Face hub, streamed with the `datasets` library (extra `hf`)."""

    label: str
    repository: str
    subset: str | None
    split: str

    def identity(self) -> Any:
        return ["hub", self.repository, self.subset, self.split]

    def content_hash(self) -> str:
        with self._downloading():
            revision = importlib.import_module("huggingface_hub").HfApi().dataset_info(self.repository).sha
        return sha256(f"{self.identity()} {revision}".encode()).hexdigest()

    def spans(self, form: Form) -> Iterator[Span]:
        yield Span(Path(f"hf:{self.repository}"), self._rows, 0)

    def _rows(self, span: Span, form: Form) -> Iterator[Record | BadRecord]:
        with self._downloading():
            load = importlib.import_module("datasets").load_dataset
            rows = load(self.repository, name=self.subset, split=self.split, streaming=True)
            for number, row in enumerate(rows.skip(span.begin) if span.begin else rows, span.begin):
                text = row.get(form.text_key)
                if isinstance(text, str):
                    yield Record(number, len(text), 0, (text,))
                else:
                    reason = f"no text under {form.text_key!r}"
                    yield BadRecord(number, 1, 0, span.path, number, reason, "set data.text_key", "row")

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
HUB_PREFIX = "hf:"
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
        key = path_key(section)
        return source_at((dataset_path,), key, f"{key} = {json.dumps(dataset_path)}", fault)
    key = f"{section}.dataset"
    label = f"{key} = {json.dumps(dataset)}"
    if dataset == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        files = _stdlib_files(root, split)
        if not files:
            rule = f"this Python has no source files of its standard library in {root}"
            raise ConfigError(fault(key, rule, f"set {path_key(section)} to files of your own"))
        return FileSource(label, files)
    if dataset in HUB:
        return _hub_source(label, key, HUB[dataset], fault)
    if dataset in LOCAL_ONLY:
        rule = f"is read from local files ({LOCAL_ONLY[dataset]})"
        raise ConfigError(fault(key, rule, f"set {path_key(section)}"))
    known = sorted(("stdlib", *HUB, *LOCAL_ONLY))
    nearest = difflib.get_close_matches(dataset, known, 1)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    way_out = f"{hint}known: {', '.join(known)}; or set {path_key(section)} to files of your own"
    raise ConfigError(fault(key, "unknown data set", way_out))


def path_key(section: str) -> str:
    """The key of a section (or `data.sources.NAME`) that names a path."""
    return f"{section}.path" if section.startswith("data.sources.") else f"{section}.dataset_path"


def source_at(paths: Sequence[str], key: str, label: str, fault: Fault = plain_fault) -> Source:
    """The source that paths name: files, folders (searched whole), glob patterns, or one `hf:` name."""
    if paths[0].startswith(HUB_PREFIX) and len(paths) == 1:
        repository, *more = paths[0].removeprefix(HUB_PREFIX).split(":")
        if not repository or len(more) > 2:
            raise ConfigError(fault(key, "must be hf:REPOSITORY[:SUBSET[:SPLIT]]", ""))
        subset, split = [*more, "", ""][:2]
        return _hub_source(label, key, (repository, subset or None, split or "train"), fault)
    files: set[Path] = set()
    for given in paths:
        several = f"{given}: " if len(paths) > 1 else ""
        files |= files_at(given, key, lambda key, rule, out, s=several: fault(key, s + rule, out))
    unreadable = sorted(path for path in files if not _kind(path) and path.name.endswith(UNREADABLE_DATA))
    read = f"files that are read: {', '.join(sorted(READABLE))}"
    if unreadable:
        raise ConfigError(fault(key, f"{unreadable[0]} is a form of data that is not read", read))
    readable = sorted((path for path in files if _kind(path)), key=str)
    if not readable:
        given = Path(paths[0]).expanduser()
        rules = ("the folder holds no file that is read", "not a form of data that is read")
        rule = rules[given.is_file()] if given.exists() else "the pattern matches no file that is read"
        raise ConfigError(fault(key, rule, read))
    return FileSource(label, tuple((path, _kind(path)) for path in readable))


def _hub_source(label: str, key: str, names: tuple[str, str | None, str], fault: Fault) -> HubSource:
    if importlib.util.find_spec("datasets") is None:
        way_out = "pip install 'minititan[hf]', or set a dataset_path of local files"
        raise ConfigError(fault(key, "is downloaded by the 'datasets' package, which is missing", way_out))
    return HubSource(label, *names)


def files_at(given: str, key: str, fault: Fault) -> set[Path]:
    """The files that a path names: a file, a folder (searched whole, hidden names left out) or a glob."""
    path = Path(given).expanduser()
    if path.is_dir():
        found: Iterable[Path] = (f for f in path.rglob("*") if not _hidden(f.relative_to(path)))
    elif path.exists():
        found = [path]
    elif glob.has_magic(given):
        found = [Path(name) for name in glob.glob(str(path), recursive=True)]
        if not found:
            raise ConfigError(fault(key, "the pattern matches nothing", "give a file, a folder or a pattern"))
    else:
        raise ConfigError(fault(key, "no such file or folder", "give a file, a folder or a glob pattern"))
    return {file.absolute() for file in found if file.is_file()}


def _hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)

"""Records of input files: what readers give, and files opened whatever their compression.

A reader goes through one span of a file and yields a `Record` for each document and a `BadRecord` for one
that cannot be read; whoever asked decides whether that ends the work. Each carries the position from which
reading can begin again: a byte of the text (of what a compressed file holds), or a row. What is wrong with a
file as a whole is a ConfigError.
"""

import bz2
import gzip
import importlib
import importlib.util
import io
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple, cast

from minititan.config import ConfigError

BLOCK_BYTES = 1 << 20
COMPRESSIONS = (".gz", ".zst", ".bz2")


@dataclass(frozen=True)
class Form:
    """How documents are found in files, as `[data]` has it."""

    text_key: str = "text"
    txt_lines: bool = False


class Record(NamedTuple):
    """A document: its text in blocks, so that one larger than the memory can be read."""

    begin: int
    size: int
    """Bytes that it takes in the input."""
    done: int
    """Bytes of the file on disk that are read with it."""
    blocks: Iterable[str]


class BadRecord(NamedTuple):
    """A document that cannot be read; `number` is that of its line, or of its row where `what` is "row"."""

    begin: int
    size: int
    done: int
    path: Path
    number: int
    reason: str
    way_out: str
    what: str = "line"

    def error(self) -> ConfigError:
        place = self.number if self.what == "line" else f"{self.what} {self.number}"
        return ConfigError(f"{self.path}:{place}: {self.reason}; {self.way_out}")

    def rejected(self) -> dict[str, Any]:
        """The line of a rejects file."""
        return {"file": str(self.path), self.what: self.number, "reason": self.reason}


class Span(NamedTuple):
    """A part of an input file: from the first record that begins at or past `begin` to `end` (None: all)."""

    path: Path
    read: "Reader"
    size: int
    """Bytes on disk."""
    stamp: int = 0
    """When the file was changed last."""
    begin: int = 0
    end: int | None = None


Reader = Callable[[Span, Form], Iterator[Record | BadRecord]]


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Makes what goes wrong in reading `path` a ConfigError that names it."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error}); make it readable") from None


@contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The content of a file, decompressed, and the file on disk under it."""
    with reading(path), path.open("rb", buffering=BLOCK_BYTES) as raw:
        if path.suffix not in COMPRESSIONS:
            yield raw, raw
            return
        openers = {".gz": lambda: gzip.GzipFile(fileobj=raw), ".bz2": lambda: bz2.BZ2File(raw)}
        unpacked = openers.get(path.suffix, lambda: _ZstdFile(raw, path))()
        try:
            with io.BufferedReader(cast(io.RawIOBase, unpacked), BLOCK_BYTES) as file:
                yield cast(BinaryIO, file), raw
        except (OSError, EOFError, zlib.error) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            kind = {".gz": "gzip", ".zst": "zstd", ".bz2": "bzip2"}[path.suffix]
            place = f"before byte {raw.tell()}"
            raise ConfigError(f"{path}: damaged {kind} file {place} ({error}); replace it") from None


def optional(module: str, extra: str, what: str) -> ModuleType:
    """A module of an extra; ConfigError where it is not installed. `what` needs it."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        package = {"pyarrow": "pyarrow", "zstandard": "zstandard"}[module.partition(".")[0]]
        raise ConfigError(f"{what}: needs the package {package}; pip install 'minititan[{extra}]'")
    return importlib.import_module(module)


class _ZstdFile(io.RawIOBase):
    """What zstd frames hold, one after the other. zstandard's own reader ends a cut file without a word."""

    READ_BYTES = 1 << 14  # small, since a block can unfold to a thousand times its size

    def __init__(self, raw: BinaryIO, path: Path) -> None:
        self._zstandard = optional("zstandard", "zstd", str(path))
        self._raw, self._frame, self._left = raw, None, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left and self._decompress():
            pass
        size = min(len(self._left), len(buffer))
        buffer[:size] = self._left[:size]
        self._left = self._left[size:]
        return size

    def _decompress(self) -> bool:
        """Fills `_left` from the next bytes of the file; false at its end."""
        packed = self._frame.unused_data if self._frame is not None and self._frame.eof else b""
        if not packed and not (packed := self._raw.read(self.READ_BYTES)):
            if self._frame is not None and not self._frame.eof:
                raise EOFError("it ends inside a frame")
            return False
        if self._frame is None or self._frame.eof:
            self._frame = self._zstandard.ZstdDecompressor().decompressobj()
        try:
            self._left = memoryview(self._frame.decompress(packed))
        except self._zstandard.ZstdError as error:
            raise EOFError(str(error)) from None
        return True

"""Text files as documents: plain text and JSON lines, also compressed by gzip.

Reads with bounded memory, and refuses what is wrong with the file and, where there is one, the line. Text is
taken as it stands: no newline is translated; a byte order mark at the start of a file is no part of its text.
"""

import codecs
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from minititan.config import ConfigError

BLOCK_BYTES = 1 << 20


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Makes what goes wrong in reading `path` a ConfigError that names it."""
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: damaged gzip file ({error}); replace it") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error}); make it readable") from None


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    with reading(path), cast(BinaryIO, gzip.open(path) if path.suffix == ".gz" else path.open("rb")) as file:
        yield file


def read_text(path: Path, text_key: str) -> Iterator[Iterable[str]]:
    """The whole file as one document; `text_key` plays no part."""
    yield _text_blocks(path)


def _text_blocks(path: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    line = 1
    with _opened(path) as file:
        while True:
            block = file.read(BLOCK_BYTES)
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                line += error.object[: error.start].count(b"\n")
                raise _not_utf8(path, line, error) from None
            line += text.count("\n")
            yield text
            if not block:
                return


def read_json_lines(path: Path, text_key: str) -> Iterator[Iterable[str]]:
    """The strings under `text_key`, one a line; blank lines are passed over."""
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.isspace():
                yield (_text_of_record(line, path, number, text_key),)


def _text_of_record(line: bytes, path: Path, number: int, text_key: str) -> str:
    where = f"{path}:{number}"
    try:
        record: Any = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise _not_utf8(path, number, error) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON ({error}); each line must be one JSON object") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: a JSON {_json_type(record)}; each line must be one JSON object")
    if text_key not in record:
        keys = ", ".join(map(repr, list(record)[:8])) or "none"
        raise ConfigError(f"{where}: no key {text_key!r} (keys here: {keys}); set data.text_key")
    text = record[text_key]
    if not isinstance(text, str):
        raise ConfigError(f"{where}: {text_key!r} is a JSON {_json_type(text)}; it must be a string")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{where}: {text_key!r} holds half a surrogate pair; repair the text") from None
    return text


def _not_utf8(path: Path, line: int, error: UnicodeDecodeError) -> ConfigError:
    byte = error.object[error.start]
    return ConfigError(
        f"{path}:{line}: invalid UTF-8 (byte 0x{byte:02x}: {error.reason}); convert it to UTF-8"
    )


def _json_type(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")

"""Text files as documents: plain text, one document a file or a line, and JSON lines.

Reads with bounded memory, and names what is wrong with the line. Text is taken as it stands: no newline is
translated; a byte order mark at the start of a file is no part of its text.
"""

import codecs
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from minititan.config import ConfigError
from minititan.data.records import (
    BLOCK_BYTES,
    COMPRESSIONS,
    BadRecord,
    Form,
    Record,
    Span,
    opened,
    reading,
)

MAX_LINE_BYTES = 1 << 28
FEW_BLOCKS = 4


class _Bad(Exception):
    """What is wrong with a line, and the way out."""


def read_text(span: Span, form: Form) -> Iterator[Record | BadRecord]:
    """The whole file as one document, or its lines. Invalid text is found before any of it is given."""
    if form.txt_lines:
        yield from _records(span, _text_of_line)
        return
    try:
        blocks = _checked(span.path)
    except _Bad as bad:
        line, reason, way_out = bad.args
        yield BadRecord(0, span.size, span.size, span.path, line, reason, way_out)
    else:
        yield Record(0, span.size, span.size, blocks or _blocks(span.path))


def _checked(path: Path) -> list[str]:
    """Goes through a text; returns its blocks where they are few, else nothing."""
    blocks: list[str] = []
    few = True
    for text, _ in _decoded(path):
        blocks.append(text)
        few = few and len(blocks) <= FEW_BLOCKS
        if not few:
            blocks.clear()
    return blocks


def _blocks(path: Path) -> Iterator[str]:
    try:
        yield from (text for text, _ in _decoded(path))
    except _Bad:
        raise ConfigError(f"{path}: changed while it was being read; start again") from None


def _decoded(path: Path) -> Iterator[tuple[str, int]]:
    """The file's text in blocks, each with the number of its first line."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    line = 1
    with opened(path) as (file, _):
        while True:
            block = file.read(BLOCK_BYTES)
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                line += error.object[: error.start].count(b"\n")
                raise _Bad(line, *_not_utf8(error)) from None
            yield text, line
            line += text.count("\n")
            if not block:
                return


def read_json_lines(span: Span, form: Form) -> Iterator[Record | BadRecord]:
    """The strings under `form.text_key`, one a line; blank lines are passed over."""
    yield from _records(span, lambda line: _text_of_record(line, form.text_key))


class _Line(NamedTuple):
    """A line with its end; cut off where it is longer than MAX_LINE_BYTES, which `size` counts whole."""

    begin: int
    size: int
    done: int
    content: bytes


def _records(span: Span, text_of: Callable[[bytes], str | None]) -> Iterator[Record | BadRecord]:
    """A record for each line of the span; None from `text_of` passes a line over, _Bad is what is wrong."""
    with opened(span.path) as (file, raw):
        position, first_line = _begin(file, span)
        for index, line in enumerate(_lines(file, raw, span, position)):
            content = line.content.removeprefix(codecs.BOM_UTF8) if line.begin == 0 else line.content
            try:
                if line.size > len(line.content):
                    limit = f"is longer than {MAX_LINE_BYTES >> 20} MiB"
                    raise _Bad(limit, "split the document over several lines")
                text = text_of(content)
            except _Bad as bad:
                reason, way_out = bad.args
                yield BadRecord(*line[:3], span.path, first_line() + index, reason, way_out)
            else:
                if text is not None:
                    yield Record(*line[:3], (text,))


def _lines(file: BinaryIO, raw: BinaryIO, span: Span, position: int) -> Iterator[_Line]:
    while span.end is None or position < span.end:
        content = file.readline(MAX_LINE_BYTES)
        if not content:
            return
        cut = len(content) == MAX_LINE_BYTES and not content.endswith(b"\n")
        size = len(content) + (_skip_line(file) if cut else 0)
        position += size
        yield _Line(position - size, size, position if raw is file else raw.tell(), content)


def _begin(file: BinaryIO, span: Span) -> tuple[int, Callable[[], int]]:
    """Goes to the first line that begins at or past `span.begin`; returns where that is, and its number."""
    if not span.begin:
        return 0, lambda: 1
    if span.path.suffix not in COMPRESSIONS:
        file.seek(span.begin - 1)
        position = span.begin - 1 + _skip_line(file)
        return position, lambda: line_at(span.path, position)
    left, lines = span.begin, 1
    while left and (block := file.read(min(left, BLOCK_BYTES))):
        left, lines = left - len(block), lines + block.count(b"\n")
    return span.begin, lambda: lines


def _skip_line(file: BinaryIO) -> int:
    """Reads to the end of the line; returns how much that was."""
    size = 0
    while block := file.readline(BLOCK_BYTES):
        size += len(block)
        if block.endswith(b"\n"):
            break
    return size


_known_lines: dict[Path, tuple[int, int]] = {}


def line_at(path: Path, position: int) -> int:
    """The number of the line that begins at `position`. Counts on from the last place asked for in the file,
    so that the bad lines of a file, in order, cost one more pass over it at most."""
    at, line = _known_lines.get(path, (0, 1))
    if at > position:
        at, line = 0, 1
    with reading(path), path.open("rb") as file:
        file.seek(at)
        while at < position and (block := file.read(min(BLOCK_BYTES, position - at))):
            at, line = at + len(block), line + block.count(b"\n")
    _known_lines[path] = at, line
    return line


def _text_of_line(line: bytes) -> str:
    line = line.removesuffix(b"\n").removesuffix(b"\r")
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise _Bad(*_not_utf8(error)) from None


def _text_of_record(line: bytes, text_key: str) -> str | None:
    if not line.strip():
        return None
    try:
        record: Any = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise _Bad(*_not_utf8(error)) from None
    except (ValueError, RecursionError) as error:
        place: object = error
        if isinstance(error, json.JSONDecodeError):
            place = f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
        cut = "" if line.endswith(b"\n") else ", in a last line without an end: was the file cut off?"
        raise _Bad(f"not valid JSON ({place}{cut})", "each line must be one JSON object") from None
    if not isinstance(record, dict):
        raise _Bad(f"a JSON {_json_type(record)}", "each line must be one JSON object")
    if text_key not in record:
        keys = ", ".join(map(repr, list(record)[:8])) or "none"
        raise _Bad(f"no key {text_key!r} (keys here: {keys})", "set data.text_key")
    text = record[text_key]
    if not isinstance(text, str):
        raise _Bad(f"{text_key!r} is a JSON {_json_type(text)}", "it must be a string")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise _Bad(f"{text_key!r} holds half a surrogate pair", "repair the text") from None
    return text


def _not_utf8(error: UnicodeDecodeError) -> tuple[str, str]:
    byte = error.object[error.start]
    return f"invalid UTF-8 (byte 0x{byte:02x}: {error.reason})", "convert it to UTF-8"


def _json_type(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")

"""Parquet files as documents: the strings of one column, a row a document, read a batch at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minititan.config import ConfigError
from minititan.data.records import BadRecord, Form, Record, Span, optional, reading

BATCH_ROWS = 256


def read_parquet(span: Span, form: Form) -> Iterator[Record | BadRecord]:
    """The strings of the column `form.text_key`; positions are rows."""
    parquet = optional("pyarrow.parquet", "parquet", str(span.path))
    with _faults(span.path), parquet.ParquetFile(span.path, page_checksum_verification=True) as file:
        _check_column(file, span.path, form.text_key)
        first, total = 0, max(file.metadata.num_rows, 1)
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if first + rows > span.begin:
                row = first
                for batch in file.iter_batches(BATCH_ROWS, row_groups=[group], columns=[form.text_key]):
                    for index in range(max(span.begin - row, 0), len(batch)):
                        done = span.size * (row + index + 1) // total
                        yield _record(batch.column(0)[index], row + index, done, span.path, form.text_key)
                    row += len(batch)
            first += rows


def _record(value: Any, row: int, done: int, path: Path, key: str) -> Record | BadRecord:
    try:
        text = value.as_py()
    except UnicodeDecodeError as error:
        reason = f"invalid UTF-8 (byte 0x{error.object[error.start]:02x}: {error.reason})"
        return BadRecord(row, 1, done, path, row, reason, "convert it to UTF-8", "row")
    if text is None:
        return BadRecord(row, 1, done, path, row, f"{key!r} is null", "it must be a string", "row")
    return Record(row, len(text), done, (text,))


def _check_column(file: Any, path: Path, key: str) -> None:
    schema = file.schema_arrow
    if key not in schema.names:
        keys = ", ".join(map(repr, schema.names[:8])) or "none"
        raise ConfigError(f"{path}: no column {key!r} (columns here: {keys}); set data.text_key")
    kind = str(schema.field(key).type)
    if "string" not in kind:
        raise ConfigError(f"{path}: the column {key!r} holds {kind}, not strings; set data.text_key")


@contextmanager
def _faults(path: Path) -> Iterator[None]:
    """Makes what goes wrong in reading `path` a ConfigError that names it."""
    arrow = optional("pyarrow", "parquet", str(path))
    with reading(path):
        try:
            yield
        except (arrow.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            reason = str(error).splitlines()[0]
            raise ConfigError(f"{path}: damaged parquet file ({reason}); replace it") from None

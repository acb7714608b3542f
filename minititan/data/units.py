"""The input in units: parts of it that are prepared one after the other, by anyone, into shards of their own.

Units follow from the files' names and sizes and a few options alone, never from who prepares, on how many
cores or in how many parts: so a set is the same whatever its making was.
"""

import json
from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import NamedTuple

from minititan.data.records import BadRecord, Form, Record, Span

UNIT_BYTES = 1 << 28


class Place(NamedTuple):
    """Where to go on in a unit: at which of its spans, from which position in the file."""

    span: int = 0
    begin: int = 0


class Unit(NamedTuple):
    """Spans of consecutive files, UNIT_BYTES on disk at most where no one file is larger."""

    spans: tuple[Span, ...]

    @property
    def size(self) -> int:
        return sum(size_of(span) for span in self.spans)

    def key(self, options: object) -> str:
        """Names what its tokens depend on: options, files, their sizes and times."""
        spans = [[str(span.path), span.size, span.stamp, span.begin, span.end] for span in self.spans]
        return sha256(json.dumps([options, spans]).encode()).hexdigest()[:32]

    def records(self, form: Form, at: Place) -> Iterator[tuple[Place, int, Record | BadRecord]]:
        """The records from a place on, each with its place and how much of the unit is read with it."""
        before = sum(size_of(span) for span in self.spans[: at.span])
        for index, span in enumerate(self.spans[at.span :], at.span):
            begin = max(at.begin, span.begin) if index == at.span else span.begin
            for record in span.read(span._replace(begin=begin), form):
                done = min(max(record.done - span.begin, 0), size_of(span))
                yield Place(index, record.begin), before + done, record
            before += size_of(span)


def size_of(span: Span) -> int:
    """Bytes on disk."""
    return (span.size if span.end is None else span.end) - span.begin


def units_of(spans: Iterable[Span]) -> list[Unit]:
    units: list[Unit] = []
    group: list[Span] = []
    size = 0
    for span in spans:
        if group and size + size_of(span) > UNIT_BYTES:
            units.append(Unit(tuple(group)))
            group, size = [], 0
        group.append(span)
        size += size_of(span)
    return [*units, Unit(tuple(group))] if group else units


def parts_of(units: list[Unit], parts: int) -> list[int]:
    """For each unit the part, from 1 to `parts`, that it belongs to: rows of units of about the same size."""
    total, before, found = max(sum(unit.size for unit in units), 1), 0, []
    for unit in units:
        found.append(min((2 * before + unit.size) * parts // (2 * total), parts - 1) + 1)
        before += unit.size
    return found

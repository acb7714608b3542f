"""The vocabulary of the schema: the base of every section, and the marks that fields carry.

Types are pydantic's business and always checked. Ranges and choices are marks (`Range`, `Choices`) that are
checked afterwards, key by key, because a feature that is switched off has only its types checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidationError,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema

INT64_MAX = 2**63 - 1


class Section(BaseModel):
    """A table of the TOML file: frozen, strict, no unknown keys, no NaN or infinity."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


@dataclass(frozen=True)
class Range:
    """The numbers a key may take: `low` to `high`, more than `above`, less than `below`, or `special`."""

    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    special: int | None = None

    def allows(self, value: float) -> bool:
        """Whether `value` is one of these numbers."""
        if self.special is not None and value == self.special:
            return True
        return not (
            (self.low is not None and value < self.low)
            or (self.above is not None and value <= self.above)
            or (self.high is not None and value > self.high)
            or (self.below is not None and value >= self.below)
            or (isinstance(value, int) and abs(value) > INT64_MAX)
            or not math.isfinite(value)
        )

    def rule(self) -> str:
        """The range in words: "must be at least 1, or -1"."""
        parts = []
        if self.low is not None:
            parts.append(f"at least {self.low:g}")
        if self.above is not None:
            parts.append(f"above {self.above:g}")
        if self.high is not None:
            parts.append("at most 2^63 - 1" if self.high == INT64_MAX else f"at most {self.high:.15g}")
        if self.below is not None:
            parts.append(f"below {self.below:g}")
        special = "" if self.special is None else f", or {self.special}"
        return "must be " + (" and ".join(parts) or "a 64-bit number") + special

    def __get_pydantic_json_schema__(
        self, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        bounds = {
            "minimum": self.low,
            "maximum": self.high,
            "exclusiveMinimum": self.above,
            "exclusiveMaximum": self.below,
        }
        bounds = {name: bound for name, bound in bounds.items() if bound is not None}
        schema = handler(core_schema)
        if self.special is None:
            return schema | bounds
        return schema | {"anyOf": [bounds, {"const": self.special}]}


@dataclass(frozen=True)
class Choices:
    """The words a key, or each item of a list, may take."""

    words: tuple[str, ...]

    def allows(self, value: str | tuple[str, ...]) -> bool:
        """Whether `value` holds only these words."""
        return all(word in self.words for word in ((value,) if isinstance(value, str) else value))

    def rule(self) -> str:
        """The choices in words."""
        return "must be one of " + ", ".join(f'"{word}"' for word in self.words)


@dataclass(frozen=True)
class NotEmpty:
    """A text that has to say something."""

    def allows(self, value: str) -> bool:
        """Whether `value` has at least one character that is not white space."""
        return bool(value.strip())

    def rule(self) -> str:
        """The rule in words."""
        return "must be non-empty"


Mark = Range | Choices | NotEmpty


def tuples(value: Any) -> Any:
    """`value` with every list in it, at any depth, made a tuple."""
    if isinstance(value, (list, tuple)):
        return tuple(tuples(item) for item in value)
    if isinstance(value, dict):
        return {key: tuples(item) for key, item in value.items()}
    return value


def _empty_is_unset(value: Any) -> Any:
    return None if value == "" else value


Positive = Annotated[int, Range(low=1)]
Natural = Annotated[int, Range(low=0)]
Fraction = Annotated[float, Range(low=0, high=1)]
Seconds = Annotated[int, Range(low=1, high=10_000_000)]
Text = Annotated[str, NotEmpty()]
OptionalText = Annotated[str | None, BeforeValidator(_empty_is_unset)]
Strings = Annotated[tuple[str, ...], BeforeValidator(tuples)]
Table = Annotated[dict[str, Any], AfterValidator(tuples)]
StringsOrString = Annotated[tuple[str, ...] | str, BeforeValidator(tuples)]
OptionalStringLists = Annotated[tuple[tuple[str, ...], ...] | None, BeforeValidator(tuples)]


def sections(section: type[Section], prefix: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Every table under `section` with its dotted name, parents first."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield prefix + name, field.annotation
            yield from sections(field.annotation, f"{prefix}{name}.")


def keys(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key of `section` and the tables under it, with its dotted name."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from keys(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def marks(field: FieldInfo) -> list[Mark]:
    """The ranges and choices that `field` carries."""
    return [mark for mark in field.metadata if isinstance(mark, Mark)]


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union without None; `annotation` alone where it is no union."""
    if get_origin(annotation) in (Union, UnionType):
        return tuple(member for member in get_args(annotation) if member is not NoneType)
    return (annotation,)


def describe(annotation: Any) -> str:
    """A type in the words of a TOML user: "an integer", "a list of strings", "one of ..."."""
    words = {str: "a string", int: "an integer", float: "a finite number", bool: "true or false"}
    described = []
    for member in alternatives(annotation):
        if get_origin(member) is Literal:
            described.append("one of " + ", ".join(f'"{choice}"' for choice in get_args(member)))
        elif get_origin(member) is tuple:
            item = get_args(member)[0]
            tables = get_origin(item) is None and issubclass(item, Section)
            items = "tables" if tables else "lists of strings" if get_origin(item) is tuple else "strings"
            described.append(f"a list of {items}")
        else:
            described.append(words.get(member, "a table"))
    return " or ".join(described)


def fits(value: Any, annotation: Any) -> bool:
    """Whether `value` is of a type, without conversion."""
    try:
        TypeAdapter(annotation, config=ConfigDict(strict=True)).validate_python(value)
    except ValidationError:
        return False
    return True

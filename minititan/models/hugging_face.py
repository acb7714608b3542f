"""A family in Hugging Face's form, as data: the fields of its `config.json` and the names of its tensors.

A family adds a table; reading and writing are in `minititan/hugging_face/`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

REQUIRED = object()  # as a default: a config.json without the field is refused


@dataclass(frozen=True)
class SameAs:
    """As a default: the value of another field of `config.json`."""

    name: str


@dataclass(frozen=True)
class Field:
    """A field of the arguments and the one of `config.json` that has its value."""

    argument: str
    default: Any = REQUIRED  # what `transformers` takes where config.json lacks the field
    name: str = ""  # in config.json; "": as in the arguments

    @property
    def key(self) -> str:
        return self.name or self.argument


@dataclass(frozen=True)
class HuggingFaceForm:
    """How a family looks as files of `transformers`.

    `tensors` maps patterns of parameter names to names of tensors; the first pattern that matches counts.
    Each `*` stands for any text, the same on both sides; `#` in a tensor's name for 0, 1, 2, ...: the
    parameter is those tensors stacked in numeric order along a new first dimension (experts, say).
    """

    model_type: str
    architecture: str
    fields: tuple[Field, ...]
    tensors: Mapping[str, str]
    # Fields with the only value that the model can do, which is also what a config.json without them means.
    fixed: Mapping[str, Any] = field(default_factory=dict)
    # rope_type -> the dataclass of its numbers; a family with rotary positions has the arguments
    # `rope_theta` and `rope_scaling`.
    rope_types: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()  # patterns of tensors in files that the model computes itself


def tensor_name(form: HuggingFaceForm, parameter: str) -> str:
    """Return the name of a parameter's tensor; with a `#` in it for one that is stacked.

    Raises ValueError where the form has no pattern for the parameter.
    """
    for pattern, name in form.tensors.items():
        if match := matched(pattern, parameter):
            return name.replace("*", "{}").format(*match.groups())
    raise ValueError(f"the Hugging Face form of {form.model_type} has no pattern for {parameter}")


def matched(pattern: str, name: str) -> re.Match[str] | None:
    """Return the match of a pattern whose stars stand for any text."""
    return re.fullmatch("(.*)".join(map(re.escape, pattern.split("*"))), name)

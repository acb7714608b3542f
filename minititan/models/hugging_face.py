"""A family in Hugging Face's form, as data: the fields of its `config.json` and the names of its tensors.

A family adds a table; reading and writing are in `minititan/hugging_face/`.
"""

import re
from collections.abc import Callable, Mapping
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
    other_name: str = ""  # that some writers give it
    null: bool = False  # a null in config.json is a value, None, and not the default
    # What an argument of None stands for, where config.json has to say it; made from all arguments.
    stands_for: Callable[[Mapping[str, Any]], Any] | None = None

    @property
    def key(self) -> str:
        return self.name or self.argument

    def key_in(self, config: Mapping[str, Any]) -> str:
        """Return the name that a `config.json` has for the field."""
        return self.other_name if self.key not in config and self.other_name in config else self.key


_COMMON = {
    "hidden_size": REQUIRED,
    "num_hidden_layers": REQUIRED,
    "num_attention_heads": REQUIRED,
    "num_key_value_heads": REQUIRED,
    "head_dim": None,
    "intermediate_size": REQUIRED,
    "vocab_size": REQUIRED,
    "max_position_embeddings": REQUIRED,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}


def decoder_fields(**defaults: Any) -> tuple[Field, ...]:
    """Return the fields of every decoder, with the defaults of a family where they are others."""
    kinds = {"head_dim": lambda args: args["hidden_size"] // args["num_attention_heads"]}
    return tuple(
        Field(name, default, null=name == "rope_scaling", stands_for=kinds.get(name))
        for name, default in (_COMMON | defaults).items()
    )


# As `HuggingFaceForm.arguments` of families whose router is the softmax alone.
SOFTMAX_ROUTER = {
    "first_k_dense_replace": 0,
    "n_shared_experts": 0,
    "scoring_func": "softmax",
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "router_bias": False,
    "score_correction": False,
    "router_bias_update_speed": 0.0,
}


@dataclass(frozen=True)
class HuggingFaceForm:
    """How a family looks as files of `transformers`.

    A family may have several, each for models with certain values of `arguments`.
    `tensors` maps patterns of parameter names to names of tensors; the first pattern that matches counts.
    Each `*` stands for any text, the same on both sides; `#` in a tensor's name for 0, 1, 2, ...: the
    parameter is those tensors stacked in numeric order along a new first dimension (experts, say).
    """

    model_type: str
    architecture: str
    fields: tuple[Field, ...]
    tensors: Mapping[str, str]
    # What arguments without a field are in this form; the first form of a family that agrees with a model's
    # is the model's.
    arguments: Mapping[str, Any] = field(default_factory=dict)
    # Fields with the only value that the model can do, which is also what a config.json without them means.
    fixed: Mapping[str, Any] = field(default_factory=dict)
    # rope_type -> the dataclass of its numbers; a family with rotary positions has the arguments
    # `rope_theta` and `rope_scaling`.
    rope_types: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()  # patterns of tensors in files that the model computes itself

    def agrees(self, args: Any) -> bool:
        """Whether a model with these arguments can be in this form."""
        return all(getattr(args, name) == value for name, value in self.arguments.items())

    def describes(self, config: Mapping[str, Any]) -> bool:
        """Whether a `config.json` is of this form."""
        fixed = (config.get(key) in (None, value) for key, value in self.fixed.items())
        return config.get("model_type") == self.model_type and all(fixed)


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

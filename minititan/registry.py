"""The models a run can name: `register` adds a family, `resolve` turns names into a spec and new arguments.

The built-in families are registered here. A user's model registers from their own module, which a run names
in `experimental.custom_import` or which a package announces under the entry-point group `minititan.models`;
no file of this library changes. `docs/models.md` has a complete small example.
"""

import dataclasses
import importlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

import pydantic
import torch
from torch import Tensor, nn

from minititan.config import ConfigError
from minititan.config.error import closest
from minititan.models import counts, decoder, deepseek_v3, gpt_oss, llama3, minimind, mixtral, qwen2, qwen3
from minititan.models.hugging_face import HuggingFaceForm
from minititan.models.meta import on_meta
from minititan.models.rotary import ROPE_TYPES

ENTRY_POINT_GROUP = "minititan.models"
Fault = Callable[
    [str, str, str], str
]  # (key, rule, way out) -> one line of a ConfigError, normally `config.fault`


@dataclass(frozen=True)
class ModelSpec:
    """All that the library must know of a family.

    A model has `embed_tokens`, `layers` (a ModuleDict of blocks), `norm` and `lm_head` (a Linear without
    bias), and `forward(tokens [B, T], positions, document_ids) -> hidden [B, T, D]`, which calls these parts
    and the blocks with positional arguments. It has no buffers, and no parameters without a dimension.
    Arguments are a frozen dataclass; a field `vocab_size` of None takes the tokenizer's size; a ValueError of
    its `__post_init__` is reported like any fault of `[model.args]`.
    """

    flavors: Mapping[str, Any]  # name -> arguments
    build: Callable[[Any], Any]  # called with the meta device as default
    init_: Callable[[str, Tensor, torch.Generator, Any], None]  # fills rows of the parameter of that name
    flops_per_token: Callable[[Any, int], int] | None = None  # (args, seq_len); None: TFLOP/s and MFU are n/a
    # args -> how many there are, and how many a token goes through; None: all.
    parameters: Callable[[Any], tuple[int, int]] | None = None
    # Module-name pattern -> style, or that of the arguments; None: no tensor parallelism.
    tensor_parallel_plan: Mapping[str, str] | Callable[[Any], Mapping[str, str]] | None = None
    hugging_face: tuple[HuggingFaceForm, ...] = ()  # what `transformers` calls it; (): no import and export

    def on_meta(self, args: Any) -> nn.Module:
        """Return a model of these arguments on the meta device: shapes and names, no numbers."""
        with on_meta():
            return self.build(args)

    def plan_of(self, args: Any) -> Mapping[str, str] | None:
        """Return the tensor-parallel plan of a model with these arguments."""
        plan = self.tensor_parallel_plan
        return plan(args) if callable(plan) else plan

    def parameters_of(self, args: Any) -> tuple[int, int]:
        """Return the number of parameters of a model, and of those that a token goes through."""
        if self.parameters is not None:
            return self.parameters(args)
        total = sum(parameter.numel() for parameter in self.on_meta(args).parameters())
        return total, total

    def dtypes_in(self, args: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Return the type of each parameter of a model that is cast: what it keeps exact stays so."""
        named = self.on_meta(args).to(dtype).named_parameters()
        return {name: parameter.dtype for name, parameter in named}

    def form_of(self, args: Any) -> HuggingFaceForm | None:
        """Return the form of Hugging Face of a model with these arguments; None where there is none."""
        return next((form for form in self.hugging_face if form.agrees(args)), None)


_registry: dict[str, ModelSpec] = {}


def register(name: str, spec: ModelSpec) -> None:
    """Add a family. A name stands for one spec: registering another under it is an error."""
    if _registry.get(name, spec) is not spec:
        raise ValueError(f"model {name!r} is registered already")
    _registry[name] = spec


def load_user_models(custom_import: str, fault: Fault) -> None:
    """Import the module `experimental.custom_import` names and every installed entry point of the group."""
    if custom_import:
        try:
            importlib.import_module(custom_import)
        except (ModuleNotFoundError, TypeError) as error:
            name = custom_import if custom_import.startswith(".") else getattr(error, "name", None)
            if not f"{custom_import}.".startswith(f"{name}."):
                raise  # the module is there, something that it imports is not
            way_out = "name an installed module, or put its folder on PYTHONPATH"
            raise ConfigError(fault("experimental.custom_import", "no such module", way_out)) from None
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        entry_point.load()


def resolve(
    name: str, flavor: str, overrides: Mapping[str, Any], vocab_size: int, fault: Fault
) -> tuple[ModelSpec, Any]:
    """Return the spec and the arguments of a run: the flavor's, with `[model.args]` and the vocabulary filled
    in.

    Raises ConfigError for an unknown name or flavor, and for a field that is unknown or of the wrong type.
    """
    spec = _lookup(_registry, name, "model.name", fault)
    args = _override(_lookup(spec.flavors, flavor, "model.flavor", fault), overrides, fault)
    if getattr(args, "vocab_size", 0) is None:
        args = dataclasses.replace(args, vocab_size=vocab_size)
    return spec, args


def families() -> Mapping[str, ModelSpec]:
    """Return all that is registered."""
    return _registry


def restored(name: str, args: Mapping[str, Any], fault: Fault) -> tuple[ModelSpec, Any]:
    """Return the spec and the arguments of a model; a checkpoint has all of them."""
    spec = _lookup(_registry, name, "model.name", fault)
    return spec, _override(next(iter(spec.flavors.values())), args, fault)


def _lookup(table: Mapping[str, Any], name: str, key: str, fault: Fault) -> Any:
    if name in table:
        return table[name]
    near = f"nearest: {found}; " if (found := closest(name, table)) else ""
    raise ConfigError(fault(key, "is not registered", f"{near}there are: {', '.join(table)}"))


def _nearest(name: str, names: Iterable[str]) -> str:
    near = closest(name, names)
    return f"nearest: {near}" if near else f"there are: {', '.join(names)}"


def _override(args: Any, overrides: Mapping[str, Any], fault: Fault) -> Any:
    """Return `args` with fields replaced, each value checked against the type of its field."""
    names = [field.name for field in dataclasses.fields(args)]
    unknown = [key for key in overrides if key not in names]
    if unknown:
        raise ConfigError(*(fault(f"model.args.{k}", "unknown field", _nearest(k, names)) for k in unknown))
    try:
        # Through JSON, since strict validation of Python objects takes no dict for a nested dataclass.
        merged = json.dumps(_merged(dataclasses.asdict(args), overrides), default=str)
        new: Any = pydantic.TypeAdapter(type(args)).validate_json(merged, strict=True)
    except pydantic.ValidationError as error:
        raise ConfigError(*(_field_fault(line, fault) for line in error.errors())) from None
    # Fields of a nested dataclass that it does not have are dropped without a word.
    if dropped := list(_dropped(overrides, dataclasses.asdict(new), "model.args")):
        raise ConfigError(
            *(fault(key, "unknown field", _nearest(name, known)) for key, name, known in dropped)
        )
    return new


def _merged(table: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return `table` with values replaced, inside nested tables too."""
    new = dict(table)
    for key, value in overrides.items():
        nested = isinstance(value, Mapping) and isinstance(table.get(key), Mapping)
        new[key] = _merged(table[key], value) if nested else value
    return new


def _field_fault(error: Any, fault: Fault) -> str:
    rule = error["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    rule = rule.replace("an object", "a table")  # what TOML calls it
    path = [str(part) for part in error["loc"] if part not in ROPE_TYPES]  # which pydantic adds
    if path and path[-1].isdigit():  # of a list
        rule = f"number {int(path.pop()) + 1} {rule}"
    return fault(".".join(["model.args", *path]), rule, "")


def _dropped(
    given: Mapping[str, Any], taken: Mapping[str, Any], path: str
) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield key, name and the known names of each field that is in `given` only."""
    for name, value in given.items():
        if name not in taken:
            yield f"{path}.{name}", name, taken
        elif isinstance(value, Mapping) and isinstance(taken[name], Mapping):
            yield from _dropped(value, taken[name], f"{path}.{name}")


def model_faults(model: nn.Module) -> list[str]:
    """Return how a model, as built on the meta device, breaks the contract of `ModelSpec`."""
    faults = [
        f"its model has no `{part}`"
        for part in ("embed_tokens", "layers", "norm", "lm_head")
        if not isinstance(getattr(model, part, None), nn.Module)
    ]
    layers, head = getattr(model, "layers", None), getattr(model, "lm_head", None)
    if layers is not None and not isinstance(layers, nn.ModuleDict):
        faults.append(f"its `layers` must be a ModuleDict, not a {type(layers).__name__}")
    if head is not None and not (isinstance(head, nn.Linear) and head.bias is None):
        faults.append("its `lm_head` must be a Linear without bias")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if trained <= {"lm_head.weight"}:  # FSDP reduces nothing where the hidden states have no gradient
        faults.append("its model must train more than its `lm_head`")
    faults += [f"its buffer {name} has no initial value" for name, _ in model.named_buffers()]
    faults += [
        f"its parameter {name} must have a dimension; use shape (1,)"
        for name, parameter in model.named_parameters()
        if parameter.ndim == 0
    ]
    return faults


_FAMILIES = {
    "llama3": (llama3.FLAVORS, (llama3.HUGGING_FACE,)),
    "qwen2": (qwen2.FLAVORS, (qwen2.HUGGING_FACE,)),
    "qwen3": (qwen3.FLAVORS, qwen3.HUGGING_FACE),
    "mixtral": (mixtral.FLAVORS, (mixtral.HUGGING_FACE,)),
    "deepseek_v3": (deepseek_v3.FLAVORS, deepseek_v3.HUGGING_FACE),
    "gpt_oss": (gpt_oss.FLAVORS, (gpt_oss.HUGGING_FACE,)),
    "minimind": (minimind.FLAVORS, minimind.HUGGING_FACE),
}
for _name, (_flavors, _forms) in _FAMILIES.items():
    register(
        _name,
        ModelSpec(
            flavors=_flavors,
            build=decoder.Decoder,
            init_=decoder.init_parameter,
            flops_per_token=counts.flops_per_token,
            parameters=counts.parameters,
            tensor_parallel_plan=decoder.tensor_parallel_plan,
            hugging_face=_forms,
        ),
    )

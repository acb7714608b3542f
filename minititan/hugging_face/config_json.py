"""`config.json` to the arguments of a model and back, in the forms of transformers 4 and 5.

What the model cannot do is refused by name. Fields that it does not use are kept as they were.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from minititan.config import ConfigError
from minititan.models.hugging_face import REQUIRED, Field, HuggingFaceForm, SameAs

CONFIG = "config.json"
_ROPE = {"rope_theta", "rope_scaling"}


def arguments_of(
    config: Mapping[str, Any], form: HuggingFaceForm, where: Path | str = CONFIG
) -> dict[str, Any]:
    """The arguments that a `config.json` describes. Raises ConfigError with all that the model cannot do."""
    check_not_quantised(config, where)
    if config.get("model_type") != form.model_type:
        found = json.dumps(config.get("model_type"))
        raise ConfigError(f'{where}: model_type = {found}: must be "{form.model_type}" for this model')
    faults = [
        f"{where}: {key} = {json.dumps(config[key])}: the model can only do {json.dumps(value)}"
        for key, value in form.fixed.items()
        if config.get(key) not in (None, value)
    ]
    flat = dict(config)
    if any(field.key == "rope_theta" for field in form.fields):
        theta, scaling, rope_faults = _rotary(config, form.rope_types)
        flat |= {"rope_theta": theta, "rope_scaling": scaling}
        if not (config.get("rope_scaling") or config.get("rope_parameters")):
            del flat["rope_scaling"]
        faults += [f"{where}: {fault}" for fault in rope_faults]
    values = {**form.arguments, **{field.argument: _value(field, flat) for field in form.fields}}
    lacking = [field.key for field in form.fields if values[field.argument] is REQUIRED]
    if lacking:
        faults.append(f"{where}: lacks {', '.join(lacking)}; fetch it again")
    if faults:
        raise ConfigError(*faults)
    return values


def check_not_quantised(config: Mapping[str, Any], where: Path | str) -> None:
    """Raises ConfigError where the weights beside this `config.json` are quantised."""
    quantised = config.get("quantization_config")
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        named = f" ({method})" if method else ""
        rule = f"the weights are quantised{named}, which is not read"
        raise ConfigError(f"{where}: quantization_config: {rule}; use a checkpoint in bfloat16")


def _value(field: Field, config: Mapping[str, Any]) -> Any:
    value = config.get(field.key_in(config))
    if value is not None or (field.null and field.key in config):
        return value
    if isinstance(field.default, SameAs):
        found = config.get(field.default.name)
        return REQUIRED if found is None else found
    return field.default


def _rotary(
    config: Mapping[str, Any], rope_types: Mapping[str, Any]
) -> tuple[Any, dict[str, Any] | None, list[str]]:
    """Base, scaling and faults of the rotary positions, in either form."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(key) or {}
    if not isinstance(given, dict):
        return None, None, [f"{key} = {json.dumps(given)}: must be an object"]
    kind = given.get("rope_type", given.get("type", "default"))
    theta = given.get("rope_theta", config.get("rope_theta"))
    partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    numbers = {k: v for k, v in given.items() if k not in ("rope_type", "type", "rope_theta")}
    numbers.pop("partial_rotary_factor", None)
    faults = [] if partial in (None, 1) else [f"partial_rotary_factor = {partial}: the model can only do 1.0"]
    if kind == "default":
        return theta, None, faults + list(_strange(key, numbers, ()))
    if kind not in rope_types:
        known = ", ".join(f'"{name}"' for name in ("default", *rope_types))
        return theta, None, [*faults, f"{key}.rope_type = {json.dumps(kind)}: the model can only do {known}"]
    defaults = {field.name: field.default for field in dataclasses.fields(rope_types[kind])}
    lacking = [name for name in rope_types[kind].required if name not in numbers]
    faults += [f"{key}: lacks {', '.join(lacking)}"] if lacking else []
    return theta, defaults | numbers, faults + list(_strange(key, numbers, list(defaults)))


def _strange(key: str, numbers: Mapping[str, Any], known: tuple[str, ...] | list[str]) -> Iterator[str]:
    for name, value in numbers.items():
        if name not in known:
            yield f"{key}.{name} = {json.dumps(value)}: not known for this rope_type"


def config_of(
    form: HuggingFaceForm,
    arguments: Mapping[str, Any],
    dtype: str,
    imported: Mapping[str, Any] | None,
    special_tokens: Mapping[str, int | None],
) -> dict[str, Any]:
    """The `config.json` of a model: the imported one with what has changed, or a new one.

    A new one is in the form of transformers 4, which 5 reads too.
    """
    arguments = json.loads(json.dumps(arguments))  # tuples as lists
    if imported is not None and form.describes(imported):
        config, known = dict(imported), arguments_of(imported, form)
    else:
        config = {"architectures": [form.architecture], "model_type": form.model_type}
        config |= {key: value for key, value in special_tokens.items() if value is not None}
        config |= form.fixed
        known = {}
    changed = [
        f for f in form.fields if f.argument not in known or known[f.argument] != arguments[f.argument]
    ]
    for field in changed:
        if field.key not in _ROPE:
            _set(config, field, arguments)
    if _ROPE & {field.key for field in changed}:
        _set_rotary(config, form, {field.key: arguments[field.argument] for field in form.fields})
    config["dtype" if "dtype" in config else "torch_dtype"] = dtype
    return config


def _set(config: dict[str, Any], field: Field, arguments: Mapping[str, Any]) -> None:
    value = arguments[field.argument]
    if value is None and field.stands_for is not None:
        value = field.stands_for(arguments)
    if value is None and not field.null:
        config.pop(field.key_in(config), None)
    else:
        config[field.key_in(config)] = value


def _set_rotary(config: dict[str, Any], form: HuggingFaceForm, values: Mapping[str, Any]) -> None:
    theta, scaling = values["rope_theta"], values.get("rope_scaling")
    if scaling is not None:
        scaling = {name: value for name, value in scaling.items() if value is not None}
    if config.get("rope_parameters"):
        config.pop("rope_scaling", None)
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": theta, **(scaling or {})}
    else:
        config["rope_theta"] = theta
        silent = next(field.default for field in form.fields if field.key == "rope_scaling")
        plain = None if silent is None else {"rope_type": "default"}
        config["rope_scaling"] = scaling or plain

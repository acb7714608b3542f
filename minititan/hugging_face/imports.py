"""Weights in Hugging Face's form as the first checkpoint of a run, `step-0`, with a TOML to train them on."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tomli_w
import torch
from torch import Tensor

from minititan import registry
from minititan.checkpoint.checkpointer import Checkpointer
from minititan.checkpoint.folder import step_folder
from minititan.config import Config, ConfigError, load
from minititan.config.command_line import WHERE, parse
from minititan.config.error import fault_line
from minititan.config.load import nested
from minititan.config.schema import all_keys
from minititan.data import build_tokenizer
from minititan.hugging_face import weights
from minititan.hugging_face.config_json import CONFIG, arguments_of, check_not_quantised
from minititan.hugging_face.exports import STATE, copy_assets, kept_state
from minititan.hugging_face.reading import Files, open_files, read_json
from minititan.hugging_face.target import check_new, new_folder, write_text

RUN_TOML = "run.toml"
TOKENIZER = "tokenizer"
_HEAD = """\
# Made by `minititan import` from {source}
# To train on: torchrun --nproc-per-node 1 -m minititan.train --job.config_file {toml}
# Text, learning rate, batch and steps are only to begin with: set your own.

"""
_DEFAULTS = {
    "optimizer.lr": 1e-5,
    "lr_scheduler.warmup_steps": 100,
    "lr_scheduler.decay_type": "cosine",
    "lr_scheduler.min_lr_factor": 0.1,
    "training.dataset": "stdlib",
    "training.local_batch_size": 1,
    "training.global_batch_size": 32,
    "training.seq_len": 2048,
    "training.steps": 1000,
    "checkpoint.enable": True,
    "checkpoint.interval": 100,
}
Table = dict[str, Any]  # dotted key -> value


def import_model(source: Path, words: Sequence[str], say: Callable[[str], None]) -> Path:
    """Write a run from a folder in Hugging Face's form or a `.pth` file; return its TOML.

    `words` are options as of a training run, with `job.dump_folder`; for a `.pth` file `model.name` and
    `model.flavor` too. Raises ConfigError, and leaves nothing behind then.
    """
    given = _options(words)
    run = Path(os.path.abspath(Path(given["job.dump_folder"]).expanduser()))
    check_new(run)
    custom = given.get("experimental.custom_import", "")
    registry.load_user_models(
        custom, lambda key, rule, way_out: fault_line(WHERE, key, custom, rule, way_out)
    )
    files = open_files(source)
    imported = read_json(source / CONFIG) if source.is_dir() else None
    table = _named(source, given) if imported is None else described(source / CONFIG, imported, given)
    assets = _assets(source, given)
    if assets is None:
        say(
            f"{source}: no tokenizer.json: the run gets the byte tokenizer; set model.hf_assets_path to yours"
        )
    own = {"job.dump_folder": str(run), "model.hf_assets_path": str(run / TOKENIZER) if assets else ""}
    description = f"{table['model.name']} from {source.name}"
    table = _DEFAULTS | table | own | {"job.description": description}
    with new_folder(run) as temporary:
        config = _loaded(table, temporary / RUN_TOML, words, quiet=True)
        spec, args = _model_of(config, assets, source / CONFIG, say)
        longest = getattr(args, "max_position_embeddings", config.training.seq_len)
        if config.where("training.seq_len") != WHERE and config.training.seq_len > longest:
            table |= {"training.seq_len": longest}
        config = _loaded(table, temporary / RUN_TOML, words)
        copy_assets(assets, temporary / TOKENIZER)
        _write_step(files, spec, args, config, temporary, imported)
        head = _HEAD.format(source=source, toml=run / RUN_TOML)
        write_text(temporary / RUN_TOML, head + _toml(config, own))
    return run / RUN_TOML


def _options(words: Sequence[str]) -> Table:
    given, faults = parse(words)
    if not faults and not given.get("job.dump_folder"):
        faults = [f"{WHERE}: --job.dump_folder: where to write the run; give a new folder"]
    if "job.config_file" in given:
        way_out = "give single keys: --section.key VALUE"
        file = given["job.config_file"]
        faults.append(fault_line(WHERE, "job.config_file", file, "is written, not read", way_out))
    if faults:
        raise ConfigError(*faults)
    return given


def _named(source: Path, given: Table) -> Table:
    """The model of a state dict, which the command line names."""
    lacking = [key for key in ("model.name", "model.flavor") if key not in given]
    if lacking:
        options = " and ".join(f"--{key}" for key in lacking)
        raise ConfigError(f"{source}: a state dict does not say what model it is of; give {options}")
    return {key: given[key] for key in ("model.name", "model.flavor")}


def described(where: Path, imported: Mapping[str, Any], given: Table) -> Table:
    """The model that a `config.json` describes: a family, its nearest flavor, and all arguments."""
    check_not_quantised(imported, where)
    forms = {name: spec.hugging_face for name, spec in registry.families().items() if spec.hugging_face}
    kind = imported.get("model_type")
    of_kind = {n: [form for form in all_of if form.model_type == kind] for n, all_of in forms.items()}
    name = given.get("model.name") or next((n for n, found in of_kind.items() if found), None)
    if name is None:
        there = ", ".join(sorted({form.model_type for all_of in forms.values() for form in all_of}))
        way_out = f"there are: {there}; a family of your own: --experimental.custom_import MODULE"
        raise ConfigError(f"{where}: model_type = {json.dumps(kind)}: no family has this type; {way_out}")
    if name not in forms:
        rule = "has no form of Hugging Face"
        raise ConfigError(fault_line(WHERE, "model.name", name, rule, f"there are: {', '.join(forms)}"))
    candidates = of_kind[name] or forms[name]
    form = next((form for form in candidates if form.describes(imported)), candidates[0])
    values = arguments_of(imported, form, where)
    args = {f"model.args.{key}": _set_ones(value) for key, value in values.items() if value is not None}
    flavor = _nearest_flavor(name, values, where)
    return {"model.name": name, "model.flavor": flavor} | args


def _nearest_flavor(family: str, values: Mapping[str, Any], where: Path) -> str:
    """The flavor with most of the values, in which what is to be None is None: TOML cannot say that."""

    spec = registry.families()[family]
    flavors = {name: asdict(args) for name, args in spec.flavors.items()}
    unset = [key for key, value in values.items() if value is None]
    tables = {key: value for key, value in values.items() if isinstance(value, Mapping)}

    def fits(own: Mapping[str, Any]) -> bool:
        parts = [(own[key] or {}, value) for key, value in tables.items()]
        return all(own[key] is None for key in unset) and all(
            name in value and (value[name] is not None or kept is None)
            for table, value in parts
            for name, kept in table.items()
        )

    fitting = [name for name, own in flavors.items() if fits(own)]
    if not fitting:
        rule = f"no flavor of {family} leaves {', '.join(unset)} unset"
        raise ConfigError(f"{where}: {rule}, and TOML cannot; register one that does")
    return min(fitting, key=lambda name: sum(flavors[name][key] != value for key, value in values.items()))


def _set_ones(value: Any) -> Any:
    """A table without what is None in it."""
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, Mapping) else value


def _assets(source: Path, given: Table) -> Path | None:
    """The folder or file of the tokenizer to copy."""
    if (chosen := given.get("model.hf_assets_path")) is not None:
        return Path(chosen).expanduser() if chosen else None
    return source if (source / "tokenizer.json").is_file() else None


def _loaded(table: Table, file: Path, words: Sequence[str], *, quiet: bool = False) -> Config:
    """The config that the table and the command line make, which wins."""
    file.write_text(tomli_w.dumps(nested(table)), encoding="utf-8")
    return load([f"--job.config_file={file}", *words], quiet=quiet)


def _toml(config: Config, own: Table) -> str:
    """What differs from the defaults, in the order of the manual."""
    keys = [key for key in all_keys() if config.where(key) != "default" and key != "job.config_file"]
    return tomli_w.dumps(nested({key: config.value(key) for key in keys} | own))


def _model_of(
    config: Config, assets: Path | None, described: Path, say: Callable[[str], None]
) -> tuple[registry.ModelSpec, Any]:
    def fault(key: str, rule: str, way_out: str) -> str:
        where = str(described) if config.where(key) == RUN_TOML else config.where(key)
        return fault_line(where, key, config.value(key), rule, way_out)

    tokenizer, model = build_tokenizer(str(assets or ""), fault), config.model
    spec, args = registry.resolve(model.name, model.flavor, model.args, tokenizer.vocab_size, fault)
    ids = tokenizer.vocab_size
    if ids > (vocabulary := getattr(args, "vocab_size", ids)):
        name = assets or "the byte tokenizer"
        say(f"{name}: has {ids} ids, more than the model's {vocabulary}: the run cannot use it as it is")
    return spec, args


def _write_step(
    files: Files,
    spec: registry.ModelSpec,
    args: Any,
    config: Config,
    run: Path,
    imported: Mapping[str, Any] | None,
) -> None:
    """Write `step-0` tensor by tensor."""
    model = spec.on_meta(args)
    form = spec.form_of(args)
    if form is None:
        rule = "has no form of Hugging Face for this model"
        raise ConfigError(config.fault("model.name", rule, "give its ModelSpec one"))
    parameters = weights.parameters_of_model(form, model)
    parameters = weights.matched_to(files, form, parameters)
    weights.check_tied(files, parameters)
    dtypes = {name: weights.dtype_of(files, parameter) for name, parameter in parameters.items()}
    metas = {
        f"model.{name}": torch.empty(parameter.shape, dtype=dtypes[name], device="meta")
        for name, parameter in parameters.items()
    }

    def read(key: str) -> Tensor:
        return weights.read_whole(files, parameters[key.removeprefix("model.")])

    folder = run / config.checkpoint.folder
    assets = str(run / TOKENIZER) if (run / TOKENIZER).is_dir() else ""
    Checkpointer(folder, keep_latest_k=0, rank=0).save(
        0,
        metas,
        {STATE: kept_state(imported, assets, step_folder(folder, 0), run)},
        model={"name": config.model.name, "flavor": config.model.flavor, "args": asdict(args)},
        read=read,
    )

"""A trained model wherever it lies (a run, its TOML, a checkpoint, a folder in Hugging Face's form), loaded
to be used and not trained: on one process, or tensor-parallel over all ranks.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minititan import registry
from minititan.build import vocabulary_shard
from minititan.checkpoint.agreement import rank
from minititan.checkpoint.checkpointer import Checkpointer, Verified
from minititan.checkpoint.manifest import COMMIT
from minititan.commands.checkpoint import steps_at
from minititan.config import ConfigError, load
from minititan.config.error import fault_line
from minititan.config.validate import undivided_heads
from minititan.data import Tokenizer, build_tokenizer
from minititan.distributed import Distributed
from minititan.hugging_face.config_json import CONFIG
from minititan.hugging_face.exports import kept_assets
from minititan.hugging_face.imports import described
from minititan.hugging_face.mesh import load_folder
from minititan.hugging_face.reading import open_files, read_json
from minititan.init import materialize
from minititan.loss import install_loss
from minititan.parallelisms import build_meshes
from minititan.parallelisms.expert_parallel import apply_expert_parallel, experts_faults
from minititan.parallelisms.tensor_parallel import apply_tensor_parallel, plan_faults
from minititan.parallelisms.unit import Unit
from minititan.run import checkpoint_folder_of

WHERE = "command line"
PREFIX = "model."
Say = Callable[[str], None]


@dataclass(frozen=True)
class Source:
    """A model that can be loaded."""

    path: Path
    spec: registry.ModelSpec
    args: Any
    tokenizer: Tokenizer
    add_bos: bool  # whether its texts begin with the bos token
    dtype: torch.dtype  # of most of its weights
    load: Callable[[Mapping[str, Tensor]], None]  # sets this rank's parts of the parameters


def source_at(path: Path, tokenizer: str | None, custom_import: str, say: Say) -> Source:
    """Return the model at a path, its files verified; every rank must call it. Raises ConfigError.

    `tokenizer`: a path instead of the model's own, or "none" for bytes.
    """
    if path.suffix == ".toml":
        return _of_run(path, tokenizer, custom_import, say)
    _load_user_models(custom_import, WHERE)
    if (path / CONFIG).is_file() and not (path / COMMIT).is_file():
        return _of_folder(path, tokenizer, say)
    *_, newest = steps_at(path)
    own = Checkpointer(newest.parent, keep_latest_k=0, rank=rank(), say=say)
    found = own.verified(newest) if newest == path else own.newest()
    assert found is not None, "there are steps in it"
    assets = "none" if tokenizer == "none" else tokenizer or str(kept_assets(found.path) or "none")
    made = _tokenizer(assets)
    # A run that trained on can have done without what its tokenizer does; a TOML would say so.
    return _of_checkpoint(own, found, made, found.manifest.step == 0 and made.adds_bos)


def _of_run(path: Path, tokenizer: str | None, custom_import: str, say: Say) -> Source:
    config = load([f"--job.config_file={path}"])
    custom, where = config.experimental.custom_import, config.where("experimental.custom_import")
    _load_user_models(custom_import or custom, WHERE if custom_import else where)
    own = Checkpointer(checkpoint_folder_of(config), keep_latest_k=0, rank=rank(), say=say)
    step = config.checkpoint.load_step
    found = own.verified(step) if step >= 0 else own.newest()
    if found is None:
        raise ConfigError(
            f"{own.folder}: holds no checkpoint of {path.name}; train it with checkpoint.enable"
        )
    if tokenizer is None:
        made = build_tokenizer(config.model.hf_assets_path, config.fault)
    else:
        made = _tokenizer(tokenizer)
    return _of_checkpoint(own, found, made, config.data.add_bos)


def _of_checkpoint(own: Checkpointer, found: Verified, tokenizer: Tokenizer, add_bos: bool) -> Source:
    path, saved = found.path, found.manifest
    name = saved.model.get("name")

    def fault(key: str, rule: str, way_out: str) -> str:
        if key == "model.name":
            way_out += "; give --experimental.custom_import MODULE for a model of your own"
        return fault_line(f"{path / COMMIT}", key, name if key == "model.name" else None, rule, way_out)

    spec, args = registry.restored(str(name), saved.model.get("args") or {}, fault)
    sizes: Counter[str] = Counter()
    for key, info in saved.tensors.items():
        if key.startswith(PREFIX):
            sizes[info.dtype] += math.prod(info.shape)
    if not sizes:
        raise ConfigError(f"{path}: holds no weights; give another checkpoint")

    def load_weights(parameters: Mapping[str, Tensor]) -> None:
        own.load(found, {PREFIX + key: tensor for key, tensor in parameters.items()}, cast=True)

    return Source(path, spec, args, tokenizer, add_bos, _dtype(sizes), load_weights)


def _of_folder(path: Path, tokenizer: str | None, say: Say) -> Source:
    imported, where = read_json(path / CONFIG), path / CONFIG
    table = described(where, imported, {})
    prefix = "model.args."
    values = {key.removeprefix(prefix): value for key, value in table.items() if key.startswith(prefix)}
    if tokenizer is None and not (path / "tokenizer.json").is_file():
        say(f"{path}: no tokenizer.json: texts are bytes; --tokenizer names another")
        tokenizer = "none"
    made = _tokenizer(tokenizer or str(path))

    def fault(key: str, rule: str, way_out: str) -> str:
        return fault_line(str(where), key, table.get(key), rule, way_out)

    name, flavor = table["model.name"], table["model.flavor"]
    spec, args = registry.resolve(name, flavor, values, made.vocab_size, fault)
    form = spec.form_of(args)
    assert form is not None, "its config.json was read by one"
    sizes: Counter[str] = Counter()
    for entry in open_files(path).entries.values():
        sizes[str(entry.dtype).removeprefix("torch.")] += math.prod(entry.shape)

    def load_weights(parameters: Mapping[str, Tensor]) -> None:
        load_folder(path, form, spec.on_meta(args), parameters, args, say)

    return Source(path, spec, args, made, made.adds_bos, _dtype(sizes), load_weights)


def _dtype(elements: Counter[str]) -> torch.dtype:
    """The type of most elements; float32 where that is none to compute in."""
    return getattr(torch, elements.most_common(1)[0][0], torch.float32)


def _tokenizer(path: str) -> Tokenizer:
    fault = lambda key, rule, way_out: fault_line(WHERE, "tokenizer", path, rule, way_out)  # noqa: E731
    return build_tokenizer("" if path == "none" else path, fault)


def _load_user_models(module: str, where: str) -> None:
    registry.load_user_models(
        module, lambda key, rule, way_out: fault_line(where, key, module, rule, way_out)
    )


# ---- the model


def load_model(source: Source, dtype: torch.dtype, place: Distributed) -> Any:
    """Return the model with its weights in `dtype`, in evaluation mode; every rank must call it.

    On several ranks it is tensor-parallel over all of them. Raises ConfigError.
    """
    spec, args, ranks = source.spec, source.args, place.world_size
    model = spec.on_meta(args).to(dtype)
    if ranks > 1:
        if rules := split_rules(model, source, ranks):
            raise ConfigError(*(f"torchrun: nproc = {ranks}: {rule}" for rule in rules))
        split(model, spec.plan_of(args) or {}, place)
    materialize(model, place.device)
    source.load(dict(model.named_parameters()))
    return model.eval()


def split_rules(model: Any, source: Source, ranks: int) -> list[str]:
    """Return what keeps a model from being tensor-parallel over so many ranks."""
    plan = source.spec.plan_of(source.args)
    if plan is None:
        return [f"the model of {source.path} has no tensor-parallel plan; start one process"]
    return [*undivided_heads(source.args, ranks), *plan_faults(model, plan), *experts_faults(model, ranks)]


def split(model: Any, plan: Mapping[str, str], place: Distributed) -> None:
    """Make a model on the meta device tensor-parallel over all ranks, for sequences of any length."""
    mesh = build_meshes(place.device.type, tp=place.world_size).tp
    assert mesh is not None
    install_loss(model.lm_head, vocabulary_shard(model, mesh, parallel=True), None)
    units = [Unit(f"layers.{name}", block) for name, block in model.layers.named_children()]
    units += [Unit(name, part) for name, part in model.named_children() if name != "layers"]
    unwraps = apply_tensor_parallel(model, mesh, plan, sequence_parallel=False)
    unwraps |= apply_expert_parallel(model, mesh, sequence_parallel=False)
    for unit in units:
        unit.localize(unwraps)
        unit.install()

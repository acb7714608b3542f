"""A checkpoint of a run as a folder that `transformers` reads, written tensor by tensor from its files."""

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minititan import registry
from minititan.checkpoint import manifest
from minititan.checkpoint.folder import check_checkpoint, sync_folder
from minititan.checkpoint.tensors import StepTensors, verified
from minititan.config import ConfigError
from minititan.config.error import fault_line
from minititan.data import build_tokenizer
from minititan.hugging_face.config_json import CONFIG, config_of
from minititan.hugging_face.target import check_new, new_folder
from minititan.hugging_face.weights import parameters_of
from minititan.hugging_face.writing import Layout, Shard, shards_of, write_index, write_json, write_shard

SHARD_BYTES = 5 * 10**9
STATE = "hugging_face"  # in train_state.json: what is kept for an export
# Of the tokenizer, and of the sampling that a model's authors suggest.
ASSETS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def export_model(
    step: Path,
    target: Path,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    tokenizer: str | None = None,
    custom_import: str = "",
) -> "Export":
    """Write a checkpoint as a folder in Hugging Face's form; return what was written.

    `tokenizer` is a folder or a tokenizer.json, "none", or None for the run's own. Raises ConfigError, and
    leaves nothing behind then.
    """
    check_checkpoint(step)
    check_new(target)
    registry.load_user_models(
        custom_import,
        lambda key, rule, way_out: fault_line("command line", key, custom_import, rule, way_out),
    )
    chosen = None if tokenizer in (None, "none") else Path(tokenizer).expanduser()
    assets = kept_assets(step) if tokenizer is None else chosen
    export = planned(step, assets, dtype=dtype, shard_bytes=shard_bytes)
    with new_folder(target) as temporary:
        write_shards(export, temporary, export.shards)
        write_rest(export, temporary)
    return export


@dataclass(frozen=True)
class Export:
    """What an export will write."""

    step: Path
    saved: manifest.Manifest
    shards: list[Shard]
    places: Mapping[str, tuple[str, int | None]]  # tensor -> key in the checkpoint, and which row of it
    config: dict[str, Any]
    assets: Path | None  # a folder with the tokenizer, or its file


def planned(
    step: Path,
    assets: Path | None,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    hashes: bool = True,
) -> Export:
    """The export of a checkpoint, whose files are verified first, with the tokenizer in `assets`.

    Without `hashes` only their sizes are. `dtype` None keeps that of each tensor; another leaves what the
    model keeps exact. Raises ConfigError.
    """
    saved = verified(step, hashes)
    imported = _kept(step).get("config")
    spec, form, args = _family(step, saved.model)
    prefix = "model."
    tensors = {k.removeprefix(prefix): info for k, info in saved.tensors.items() if k.startswith(prefix)}
    parameters = parameters_of(form, {name: info.shape for name, info in tensors.items()})
    cast = spec.dtypes_in(args, getattr(torch, dtype)) if dtype else {}
    layouts: list[Layout] = []
    places: dict[str, tuple[str, int | None]] = {}
    for name, parameter in parameters.items():
        for row, tensor in enumerate(parameter.tensors):
            places[tensor] = (prefix + name, row if parameter.stacked else None)
            own = cast[name] if dtype else getattr(torch, tensors[name].dtype)
            layouts.append(Layout(tensor, parameter.tensor_shape, own))
    tokenizer = build_tokenizer(str(assets or ""))
    special = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    sizes = Counter[torch.dtype]()
    for layout in layouts:
        sizes[layout.dtype] += layout.nbytes
    main_type = str(max(sizes, key=lambda dtype: sizes[dtype])).removeprefix("torch.")
    config = config_of(form, asdict(args), main_type, imported, special)
    return Export(step, saved, shards_of(layouts, shard_bytes), places, config, assets)


def write_shards(export: Export, folder: Path, shards: Iterable[Shard]) -> None:
    """Write some of the files with tensors."""
    tensors = StepTensors(export.step, export.saved)

    def read(name: str) -> Tensor:
        key, row = export.places[name]
        return tensors.read(key) if row is None else tensors.read(key)[row]

    for shard in shards:
        write_shard(folder, shard, read)


def write_rest(export: Export, folder: Path) -> None:
    """Write all files but those with tensors."""
    write_index(folder, export.shards)
    write_json(folder / CONFIG, export.config)
    copy_assets(export.assets, folder)


def copy_assets(source: Path | None, folder: Path) -> None:
    """Copy a tokenizer's files, those of a folder or of a tokenizer.json and what lies beside it."""
    if source is None:
        return
    folder.mkdir(exist_ok=True)
    for name in ASSETS:
        named = source if name == "tokenizer.json" and source.is_file() else None
        file = named or (source if source.is_dir() else source.parent) / name
        if file.is_file():
            shutil.copyfile(file, folder / name)
            with open(folder / name, "rb") as copied:
                os.fsync(copied.fileno())
    sync_folder(folder)


def _family(step: Path, model: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """The model's family, its form, and the model's arguments."""
    where = str(step / manifest.COMMIT)

    def fault(key: str, rule: str, way_out: str) -> str:
        if key == "model.name":
            way_out += "; give --experimental.custom_import MODULE for a model of your own"
        return fault_line(where, key, model.get("name") if key == "model.name" else None, rule, way_out)

    spec, args = registry.restored(str(model.get("name")), model.get("args") or {}, fault)
    form = spec.form_of(args)
    if form is None:
        rule = "this family has no form of Hugging Face for this model"
        raise ConfigError(fault_line(where, "model.name", model["name"], rule, "give its ModelSpec one"))
    return spec, form, args


def kept_assets(step: Path) -> Path | None:
    """Where the run of a checkpoint had its tokenizer; None for the built-in bytes."""
    kept = _kept(step).get("assets")
    if not kept:
        return None
    assets = Path(os.path.normpath(step / kept))
    if not assets.exists():
        rule = "the tokenizer of the run is not there any more"
        raise ConfigError(f"{assets}: {rule}; give it with --tokenizer, or --tokenizer none")
    return assets


def _kept(step: Path) -> dict[str, Any]:
    """What the run has kept for an export."""
    try:
        return json.loads((step / manifest.TRAIN_STATE).read_bytes()).get(STATE) or {}
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{step / manifest.TRAIN_STATE}: cannot be read ({error}); {manifest.WAY_OUT}"
        ) from None


def kept_state(config: Mapping[str, Any] | None, assets: str, step: Path, run: Path) -> dict[str, Any]:
    """What `train_state.json` of a step keeps: the imported `config.json`, and where the tokenizer is.

    One inside the folder of the run is named from the step, so that the run can be moved.
    """
    if assets:
        absolute = os.path.abspath(os.path.expanduser(assets))
        inside = os.path.commonpath([absolute, os.path.abspath(run)]) == os.path.abspath(run)
        assets = os.path.relpath(absolute, os.path.abspath(step)) if inside else absolute
    return {"config": config, "assets": assets}

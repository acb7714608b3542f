"""Weights in Hugging Face's form read into a sharded model, and written from a run on many ranks.

Each rank reads the slices that it has, and writes its share of the files from the checkpoint just saved: no
rank holds the whole model.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from minititan.checkpoint.agreement import RanksFailedError, agreed, first_rank, rank, world_size
from minititan.checkpoint.folder import move_aside
from minititan.hugging_face import exports, target, weights
from minititan.hugging_face.config_json import CONFIG, arguments_of
from minititan.hugging_face.reading import open_files, read_json
from minititan.models.hugging_face import HuggingFaceForm


def check_folder(path: Path, form: HuggingFaceForm, model: nn.Module) -> None:
    """Raises ConfigError where a folder (or `.pth` file) does not have the weights of the (meta) model."""
    imported_config(path, form)
    weights.matched_to(open_files(path), form, weights.parameters_of_model(form, model))


def imported_config(path: Path, form: HuggingFaceForm) -> dict[str, Any] | None:
    """The `config.json` of a folder, where there is one; ConfigError where the family cannot do it."""
    if not (path / CONFIG).is_file():
        return None
    config = read_json(path / CONFIG)
    arguments_of(config, form, path / CONFIG)
    return config


def load_folder(
    path: Path,
    form: HuggingFaceForm,
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    args: Any,
    say: Callable[[str], None],
) -> dict[str, Any] | None:
    """Set this rank's parts of the parameters, cast to their types; every rank must call it.

    `model` is the plain one on the meta device. Says where the arguments differ from `config.json`, which is
    returned.
    """
    try:
        with agreed():
            config = imported_config(path, form)
            files = open_files(path)
            found = weights.matched_to(files, form, weights.parameters_of_model(form, model))
        first_rank(lambda: weights.check_tied(files, found))
        with agreed():
            weights.load_into(parameters, files, found)
    except RanksFailedError as failed:
        raise failed.explained(f"{path}: could not be read", "use another folder") from None
    now = json.loads(json.dumps(asdict(args)))  # as in a config.json
    for key, value in (arguments_of(config, form) if config is not None else {}).items():
        # A size left to its default (None) shows in the shapes.
        if now[key] != value and not (now[key] is None and isinstance(value, int)):
            say(f"model.args.{key} = {now[key]}: {path / CONFIG} has {value}; the run's TOML wins")
    return config


def save_folder(step: Path, path: Path) -> None:
    """Write a checkpoint of this run as a folder in Hugging Face's form; every rank must call it.

    What is at `path`, a folder named `step-N`, is moved aside.
    """

    def begin() -> tuple[exports.Export, Path]:
        if path.is_dir() and any(path.iterdir()):
            move_aside(path.parent, int(path.name.removeprefix("step-")))
        # The step was written just now: hashing all of it here would keep the other ranks waiting.
        return exports.planned(step, exports.kept_assets(step), hashes=False), target.begin(path)

    def finish() -> None:
        exports.write_rest(export, temporary)
        target.finish(temporary, path)

    try:
        export, temporary = first_rank(begin)
        try:
            with agreed():
                exports.write_shards(export, temporary, export.shards[rank() :: world_size()])
            first_rank(finish)
        except BaseException:
            if rank() == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
    except RanksFailedError as failed:
        raise failed.explained(
            f"{path}: could not be written", "make room; minititan export writes it"
        ) from None

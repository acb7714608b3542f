"""Weights in Hugging Face's form as the first checkpoint of a run, `step-0`, with a TOML that trains them on."""

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
from minititan.config.schema import all_keys
from minititan.data import build_tokenizer
from minititan.hugging_face import weights
from minititan.hugging_face.config_json import CONFIG, arguments_of, check_not_quantised
from minititan.hugging_face.exports import STATE, copy_assets, kept_state
from minititan.hugging_face.reading import Files, open_files, read_json
from minititan.hugging_face.target import check_new, new_folder

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
    registry.load_user_models(given.get("experimental.custom_import", ""), _fault)
    files = open_files(source)
    imported = read_json(source / CONFIG) if source.is_dir() else None
    table = _named(source, given) if imported is None else _described(source / CONFIG, imported, given)
    assets = _assets(source, given)
    if assets is None:
        say(f"{source}: no tokenizer.json: the run gets the byte tokenizer; set model.hf_assets_path to yours")
    table |= {
        "job.dump_folder": str(run),
        "job.description": f"{table['model.name']} from {source.name}",
        "model.hf_assets_path": str(assets or ""),
    }
    with new_folder(run) as temporary:
        config = _checked(table, temporary / RUN_TOML, words)
        spec, args = _model_of(config)
        if assets is not None:
            (temporary / TOKENIZER).mkdir()
            copy_assets(assets, temporary / TOKENIZER)
        if config.training.seq_len > (longest := getattr(args, "max_position_embeddings", 2048)):
            table["training.seq_len"] = longest
            config = _checked(table, temporary / RUN_TOML, words)
        _write_step(files, spec, args, config, temporary, imported, TOKENIZER if assets else "", say)
        kept_path = str(run / TOKENIZER) if assets else ""
        toml = _final_toml(config, {"job.dump_folder": str(run), "model.hf_assets_path": kept_path})
        text = _HEAD.format(source=source, toml=run / RUN_TOML) + toml
        (temporary / RUN_TOML).write_text(text, encoding="utf-8")
    return run / RUN_TOML

"""Hugging Face's form read into sharded models and written from them: the same on every layout."""

import contextlib
import io
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from minititan.config import ConfigError, load
from minititan.run import check
from minititan.run_status import read_status
from minititan.train import main
from tests.distributed.harness import RankError, run_ranks
from tests.distributed.layouts import LAYOUTS
from tests.distributed.runs import Piece, piece
from tests.expert_family import numbered
from tests.toy_llama import SCALING, read, same_bits, save, tokenizer_files, toy

BASE = {
    "training.dataset": "stdlib",
    "training.steps": "1",
    "training.seq_len": "16",
    "training.global_batch_size": "8",
    "training.mixed_precision_param": "float32",
    "optimizer.lr": "1e-2",
    "lr_scheduler.warmup_steps": "1",
    "metrics.log_freq": "1",
    "activation_checkpoint.mode": "none",
    "checkpoint.enable": "true",
    "checkpoint.initial_load_in_hf": "true",
    "checkpoint.last_save_model_only": "true",
    "checkpoint.last_save_in_hf": "true",
}
FIELDS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "num_attention_heads": 8,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "rope_parameters": SCALING | {"rope_theta": 5000.0},
}
MORE = ("hsdp2x2", "tp2", "ddp2")
TIED = {"one": False, "dp2": True, "dp2-tp2": False, "hsdp2x2": True, "tp2": False, "ddp2": False}


def words_of(folder: Path, source: Path, tied: bool, layout: str, token_cache: Path) -> list[str]:
    toml = folder / "run.toml"
    args = {k: v for k, v in FIELDS.items() if k != "rope_parameters"}
    args |= {"intermediate_size": 80, "vocab_size": 300, "max_position_embeddings": 256, "rope_theta": 5000.0}
    args |= {"rms_norm_eps": 1e-5, "head_dim": 8, "tie_word_embeddings": str(tied).lower()}
    args |= {f"rope_scaling.{k}": v for k, v in SCALING.items() if k != "rope_type"}
    degrees = LAYOUTS[layout]
    keys = BASE | degrees.overrides() | {f"model.args.{k}": str(v) for k, v in args.items()}
    keys |= {"training.local_batch_size": "2", "data.cache_folder": str(token_cache)}
    keys |= {"checkpoint.initial_load_path": str(source), "job.dump_folder": str(folder / "out")}
    folder.mkdir(exist_ok=True)
    toml.touch()
    return [f"--job.config_file={toml}", *(f"--{key}={value}" for key, value in keys.items())]


def train_in_rank(rank: int, world: int, words: list[str]) -> dict[str, Any]:
    """Build a run, hand back this rank's pieces of the loaded weights, then take its one step and save."""
    from minititan.distributed import init_distributed
    from minititan.train import Trainer

    said = io.StringIO()
    with contextlib.redirect_stdout(said), warnings.catch_warnings():
        warnings.filterwarnings("error", message="torch.distributed is disabled")  # a rank reads alone
        trainer = Trainer.build(check(load(words), world), init_distributed(timeout_seconds=300))
        pieces = {name: piece(parameter.detach().float()) for name, parameter in trainer.parameters.items()}
        trainer.run()
    return {"pieces": pieces, "said": said.getvalue()}


def whole(results: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The tensors put together under the names that they have in files."""
    found: dict[str, np.ndarray] = {}
    for result in results:
        for name, part in result["pieces"].items():
            assert isinstance(part, Piece)
            full = found.setdefault(name, np.full(part.shape, np.nan, np.float32))
            full[tuple(slice(o, o + n) for o, n in zip(part.offset, part.values.shape, strict=True))] = (
                part.values
            )
    return {
        name if name.startswith("lm_head") else f"model.{name}": torch.from_numpy(values)
        for name, values in found.items()
    }


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    folder = tmp_path_factory.mktemp("sources")
    return {tied: save(toy(tie_word_embeddings=tied, **FIELDS), folder / str(tied)) for tied in (False, True)}


@pytest.mark.parametrize(
    "layout", ["one", "dp2", "dp2-tp2", *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
)
def test_in_and_out(sources: dict[bool, Path], layout: str, tmp_path: Path, token_cache: Path) -> None:
    source = sources[TIED[layout]]
    words = words_of(tmp_path, source, TIED[layout], layout, token_cache)
    results = run_ranks(train_in_rank, LAYOUTS[layout].ranks, words)
    given = dict(toy(tie_word_embeddings=TIED[layout], **FIELDS).named_parameters())
    assert same_bits(whole(results), {name: parameter.detach() for name, parameter in given.items()})
    said = results[0]["said"]
    assert f"Started from {source}, at step 0" in said and "wins" not in said
    assert not any("Started" in result["said"] for result in results[1:])

    folder = tmp_path / "out" / "hugging_face" / "step-1"
    trained = dict(read(folder).named_parameters())
    moved = [(trained[name] - parameter).abs().max().item() for name, parameter in given.items()]
    assert all(5e-3 < distance < 5e-2 for distance in moved)  # AdamW's first step is the learning rate
    from minititan.checkpoint.tensors import StepTensors, verified

    step = tmp_path / "out" / "checkpoint" / "step-1"
    tensors, saved = StepTensors(step, verified(step)), verified(step)
    for key in saved.tensors:
        name = key.removeprefix("model.") if "lm_head" in key else key
        assert torch.equal(tensors.read(key), trained[name])
    assert json.loads((folder / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )


def test_an_export_that_was_cut_off_is_made_up_for(
    sources: dict[bool, Path], tmp_path: Path, token_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of(tmp_path, sources[False], False, "one", token_cache)
    run_ranks(train_in_rank, 1, words)
    run, folder = tmp_path / "out", tmp_path / "out" / "hugging_face" / "step-1"
    written = {path.name: path.read_bytes() for path in folder.iterdir()}
    shutil.rmtree(folder.parent)
    (run / "run_status.json").write_text('{"state": "running"}')  # killed between the save and the export
    assert main(words) == 0
    assert f"Wrote {folder}" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == written
    assert read_status(run)["state"] == "finished"
    shutil.rmtree(folder.parent)  # by its owner: the run had finished
    assert main(words) == 0 and not folder.exists()


def test_each_rank_writes_a_part_of_the_files(
    sources: dict[bool, Path], tmp_path: Path, token_cache: Path
) -> None:
    words = words_of(tmp_path, sources[False], False, "dp2", token_cache)
    results = run_ranks(export_in_rank, 2, words, 60_000)
    one, other = (result["files"] for result in results)
    assert one and other and not set(one) & set(other)
    folder = tmp_path / "out" / "hugging_face" / "step-1"
    assert sorted(one + other) == sorted(path.name for path in folder.glob("*.safetensors"))
    read(folder)


def export_in_rank(rank: int, world: int, words: list[str], shard_bytes: int) -> dict[str, Any]:
    from minititan.hugging_face import exports

    files: list[str] = []
    plain_write, plain_shards = exports.write_shard, exports.shards_of

    def write(folder: Path, shard: Any, reader: Any) -> None:
        files.append(shard.name)
        plain_write(folder, shard, reader)

    exports.write_shard = write
    exports.shards_of = lambda layouts, _: plain_shards(layouts, shard_bytes)
    try:
        return train_in_rank(rank, world, words) | {"files": files}
    finally:
        exports.write_shard, exports.shards_of = plain_write, plain_shards


def test_what_differs_from_the_config_is_said(tmp_path: Path, token_cache: Path) -> None:
    """Without a path to load from it is the folder of the tokenizer."""
    source = save(toy(**FIELDS), tmp_path / "source")
    tokenizer_files(source)
    words = words_of(tmp_path / "run", source, False, "one", token_cache)
    words += ["--checkpoint.initial_load_path=", f"--model.hf_assets_path={source}"]
    words += [
        "--model.args.rms_norm_eps=1e-4",
        "--training.dtype=bfloat16",
        "--checkpoint.export_dtype=bfloat16",
    ]
    words += ["--training.mixed_precision_param=bfloat16"]
    said = run_ranks(train_in_rank, 1, words)[0]["said"]
    assert f"model.args.rms_norm_eps = 0.0001: {source}/config.json has 1e-05; the run's TOML wins" in said
    folder = tmp_path / "run" / "out" / "hugging_face" / "step-1"
    assert (folder / "tokenizer.json").is_file()
    tensors = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    config = json.loads((folder / "config.json").read_text())
    assert (config["dtype"], config["rms_norm_eps"]) == ("bfloat16", 1e-4)


def test_a_bad_folder_is_one_error_before_anything_starts(
    sources: dict[bool, Path], tmp_path: Path, token_cache: Path
) -> None:
    words = words_of(tmp_path, sources[False], True, "dp2", token_cache)
    with pytest.raises(RankError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        run_ranks(train_in_rank, 2, words)
    assert not (tmp_path / "out" / "checkpoint").exists()

    words += ["--model.args.intermediate_size=96"]
    with pytest.raises(
        ConfigError, match=r"other shapes: model.layers.0.mlp.gate_proj.weight \[80, 64\], here"
    ):
        check(load(words), 2)
    with pytest.raises(ConfigError, match=r"nowhere: no such file or folder"):
        check(load([*words, f"--checkpoint.initial_load_path={tmp_path}/nowhere"]), 2)


def test_an_imported_run_starts_on_any_layout(tmp_path: Path, token_cache: Path) -> None:
    """From the step that `minititan import` writes, in another type than that of the files."""
    from minititan.__main__ import main

    model = toy(torch.bfloat16, **FIELDS)
    source = save(model, tmp_path / "source")
    assert main(["import", str(source), "--job.dump_folder", str(tmp_path / "run")]) == 0
    keys = {k: v for k, v in BASE.items() if not k.startswith("checkpoint.")} | {
        "data.cache_folder": str(token_cache)
    }
    degrees = LAYOUTS["dp2-tp2"].overrides() | {"training.local_batch_size": "2"}
    words = [f"--{key}={value}" for key, value in (keys | degrees).items()]
    results = run_ranks(train_in_rank, 4, [f"--job.config_file={tmp_path}/run/run.toml", *words])
    assert same_bits(whole(results), dict(model.float().state_dict()))
    assert "Started from the imported weights in" in results[0]["said"]
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoint").iterdir()) == ["step-0", "step-1"]


def test_shards_of_stacked_experts_are_read_from_the_files_of_those_experts(
    tmp_path: Path, token_cache: Path
) -> None:
    source = tmp_path / "source"
    found = numbered(source)
    words = [f"--{key}={value}" for key, value in (BASE | LAYOUTS["dp2"].overrides()).items()]
    words += ["--training.local_batch_size=2", f"--data.cache_folder={token_cache}"]
    words += [
        "--model.name=numbered",
        "--model.flavor=small",
        "--experimental.custom_import=tests.expert_family",
    ]
    words += [f"--checkpoint.initial_load_path={source}", f"--job.dump_folder={tmp_path}/out"]
    (tmp_path / "run.toml").touch()
    words.append(f"--job.config_file={tmp_path}/run.toml")
    results = run_ranks(train_in_rank, 2, words)
    loaded = whole(results)
    assert results[0]["pieces"]["layers.1.up"].values.shape == (6, 6, 8)
    for expert in range(12):
        name = f"model.layers.1.block_sparse_moe.experts.{expert}.w3.weight"
        assert torch.equal(loaded["model.layers.1.up"][expert], found[name])
    out = load_file(tmp_path / "out" / "hugging_face" / "step-1" / "model.safetensors")
    assert out.keys() == found.keys()

"""`minititan import` and `minititan export` against `transformers`: the same bits, the same logits.

What is wrong with a folder is in test_hugging_face_faults.py.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli
import torch
from safetensors.torch import load_file

from minititan import registry
from minititan.__main__ import main
from tests import expert_family
from tests.expert_family import numbered
from tests.toy_llama import SCALING, VOCABULARY, read, same_bits, save, tokenizer_files, toy

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "tied": {"tie_word_embeddings": True},
    "multi-head": {"num_key_value_heads": 6},
    "head-dim": {"head_dim": 16},
    "scaled": {"rope_parameters": SCALING | {"rope_theta": 5000.0}},
}


def run_import(source: Path, run: Path, *words: str) -> Path:
    assert main(["import", str(source), "--job.dump_folder", str(run), *words]) == 0
    return run / "checkpoint" / "step-0"


def run_export(step: Path, folder: Path, *words: str) -> Path:
    assert main(["export", str(step), str(folder), *words]) == 0
    return folder


@pytest.mark.parametrize("old", [False, True], ids=["transformers5", "transformers4"])
@pytest.mark.parametrize("fields", VARIANTS.values(), ids=list(VARIANTS))
def test_there_and_back_is_the_same_model_to_the_bit(
    tmp_path: Path, fields: dict[str, Any], old: bool
) -> None:
    model = toy(**fields)
    source = save(model, tmp_path / "source", old=old)
    step = run_import(source, tmp_path / "run")
    folder = run_export(step, tmp_path / "folder", "--shard_size", "50kB")
    assert same_bits(read(folder).state_dict(), model.state_dict())
    assert json.loads((folder / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )


@pytest.mark.parametrize("tied", [False, True])
def test_bfloat16_stays_bfloat16(tmp_path: Path, tied: bool) -> None:
    model = toy(torch.bfloat16, tie_word_embeddings=tied)
    step = run_import(save(model, tmp_path / "source"), tmp_path / "run")
    folder = run_export(step, tmp_path / "folder")
    assert same_bits(read(folder).state_dict(), model.state_dict())
    again = run_import(folder, tmp_path / "again")
    wide = run_export(again, tmp_path / "wide", "--dtype", "float32")
    assert json.loads((wide / "config.json").read_text())["dtype"] == "float32"
    assert same_bits(read(wide).state_dict(), model.float().state_dict())


def test_narrower_on_request(tmp_path: Path) -> None:
    model = toy()
    step = run_import(save(model, tmp_path / "source"), tmp_path / "run")
    folder = run_export(step, tmp_path / "folder", "--dtype", "bfloat16")
    assert same_bits(read(folder).state_dict(), model.to(torch.bfloat16).state_dict())


def test_shards_are_as_small_as_asked_for_and_the_index_is_right(tmp_path: Path) -> None:
    model = toy()
    step = run_import(save(model, tmp_path / "source"), tmp_path / "run")
    folder = run_export(step, tmp_path / "folder", "--shard_size", "60000")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(folder.glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)
    ]
    found = {}
    for file in files:
        tensors = load_file(file)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 60_000 or len(tensors) == 1
        assert all(index["weight_map"][name] == file.name for name in tensors)
        found |= tensors
    assert same_bits(found, dict(model.state_dict()))
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    assert len(files) > 3


def test_unused_fields_of_the_config_come_back(tmp_path: Path) -> None:
    source = save(toy(), tmp_path / "source", old=True)
    config = json.loads((source / "config.json").read_text())
    more = {"use_cache": False, "eos_token_id": [7, 8, 9], "_name_or_path": "x/y", "architectures": ["Mine"]}
    (source / "config.json").write_text(json.dumps(config | more))
    step = run_import(source, tmp_path / "run", "--model.args.rms_norm_eps", "1e-3")
    exported = json.loads((run_export(step, tmp_path / "folder") / "config.json").read_text())
    assert exported == config | more | {"rms_norm_eps": 1e-3}


ASSETS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def test_the_tokenizer_travels_with_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save(toy(), tmp_path / "source")
    tokenizer_files(source)
    run_import(source, tmp_path / "run")
    assert "byte tokenizer" not in capsys.readouterr().out
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    toml = tomli.loads((moved / "run.toml").read_text())
    assert toml["model"]["hf_assets_path"] == str(tmp_path / "run" / "tokenizer")
    folder = run_export(moved / "checkpoint" / "step-0", tmp_path / "folder")
    for name in ASSETS:
        assert (folder / name).read_bytes() == (source / name).read_bytes()
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(folder).eos_token_id == 1


def test_without_a_tokenizer_both_ways_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = run_import(save(toy(), tmp_path / "source"), tmp_path / "run")
    assert "source: no tokenizer.json: the run gets the byte tokenizer" in capsys.readouterr().out
    folder = run_export(step, tmp_path / "folder")
    assert "No tokenizer is written" in capsys.readouterr().out
    assert not (folder / "tokenizer.json").exists()


def test_a_flavor_is_recognised_and_what_it_cannot_unset_is_avoided(tmp_path: Path) -> None:
    source = save(
        toy(rope_parameters=SCALING | {"rope_theta": 500_000.0}, tie_word_embeddings=True), tmp_path / "a"
    )
    run_import(source, tmp_path / "run-a")
    model = tomli.loads((tmp_path / "run-a" / "run.toml").read_text())["model"]
    assert model["args"]["rope_scaling"]["original_max_position_embeddings"] == 64
    run_import(save(toy(), tmp_path / "b"), tmp_path / "run-b")
    model = tomli.loads((tmp_path / "run-b" / "run.toml").read_text())["model"]
    assert model["flavor"] == "debugmodel" and "rope_scaling" not in model["args"]


def test_a_state_dict_of_torch_save(tmp_path: Path) -> None:
    model = toy()
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    sizes = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 80, "vocab_size": VOCABULARY, "max_position_embeddings": 256}
    words = [f"--model.args.{key}={value}" for key, value in sizes.items()]
    named = ["--model.name", "llama3", "--model.flavor", "debugmodel", *words]
    step = run_import(tmp_path / "weights.pth", tmp_path / "run", *named, "--model.args.rope_theta", "1000")
    folder = run_export(step, tmp_path / "folder")
    assert same_bits(read(folder).state_dict(), model.state_dict())
    config = json.loads((folder / "config.json").read_text())
    assert (config["rope_theta"], config["torch_dtype"], config["eos_token_id"]) == (1000.0, "float32", 257)
    tokens = torch.arange(20)[None]
    assert torch.equal(read(folder)(tokens).logits, model(tokens).logits)


def test_training_goes_on_from_what_transformers_computes(tmp_path: Path, token_cache: Path) -> None:
    """The first loss is that of `transformers` on the same batch; the trained model has the same logits."""
    model = toy(rope_parameters=SCALING | {"rope_theta": 5000.0})
    run_import(save(model, tmp_path / "source"), tmp_path / "run", "--training.seq_len=64")
    short = [
        "--training.steps=2",
        "--training.global_batch_size=2",
        "--optimizer.lr=1e-2",
        "--lr_scheduler.warmup_steps=1",
    ]
    short += [
        "--training.mixed_precision_param=float32",
        "--metrics.log_freq=1",
        f"--data.cache_folder={token_cache}",
    ]
    words = ["--job.config_file", str(tmp_path / "run" / "run.toml"), *short]
    assert main(["train", *words]) == 0

    batches = first_batches(words, 2)
    theirs = [
        model(batch["tokens"], labels=batch["tokens"], shift_labels=batch["labels"]).loss for batch in batches
    ]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    expected = torch.stack(theirs).mean().item()
    assert lines[0]["step"] == 1 and lines[0]["loss"] == pytest.approx(expected, rel=1e-5)

    trained = read(run_export(tmp_path / "run" / "checkpoint" / "step-2", tmp_path / "folder"))
    assert json.loads((tmp_path / "folder" / "config.json").read_text()) == json.loads(
        (tmp_path / "source" / "config.json").read_text()
    )
    tokens = torch.arange(64)[None] * 4
    ours = our_logits(words, tokens)
    found = trained(tokens).logits
    assert (found - ours).abs().max() < 1e-5 * ours.abs().max()
    assert (found - model(tokens).logits).abs().max() > 1e-2


def first_batches(words: list[str], count: int) -> list[dict[str, torch.Tensor]]:
    """The micro-batches of the first step of a run on one process."""
    from minititan import build
    from minititan.config import load
    from minititan.run import check

    run = check(load(words), 1)
    meshes: Any = SimpleNamespace(dp_rank=0)
    batches = iter(build.train_loader_of(run, meshes))
    return [next(batches) for _ in range(count)]


def our_logits(words: list[str], tokens: torch.Tensor) -> torch.Tensor:
    """What a trained run's model gives."""
    from minititan.checkpoint.checkpointer import Checkpointer
    from minititan.config import load
    from minititan.run import check

    run = check(load(words), 1)
    model = run.spec.build(run.args)
    target = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
    Checkpointer(run.checkpoint_folder, keep_latest_k=0, rank=0).load(2, target)
    return model.lm_head(model(tokens)).detach()


OWN_FAMILY = ("--experimental.custom_import", "tests.expert_family")


def test_experts_are_stacked_in_numeric_order(tmp_path: Path) -> None:
    from minititan.checkpoint.tensors import StepTensors, verified

    found = numbered(tmp_path / "source")
    step = run_import(tmp_path / "source", tmp_path / "run", *OWN_FAMILY)
    stacked = StepTensors(step, verified(step)).read("model.layers.1.up")
    for expert in range(12):
        tensor = found[f"model.layers.1.block_sparse_moe.experts.{expert}.w3.weight"]
        assert torch.equal(stacked[expert], tensor)
    folder = run_export(step, tmp_path / "folder", *OWN_FAMILY, "--shard_size", "1kB")
    back = {}
    for file in folder.glob("*.safetensors"):
        back |= load_file(file)
    assert same_bits(back, found)
    assert json.loads((folder / "config.json").read_text()) == json.loads(
        (tmp_path / "source" / "config.json").read_text()
    ) | {"torch_dtype": "float32"}


def test_a_family_without_a_form_and_one_that_is_not_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbered(tmp_path / "source")
    step = run_import(tmp_path / "source", tmp_path / "run", *OWN_FAMILY)
    monkeypatch.delitem(registry.families(), "numbered")
    assert main(["export", str(step), str(tmp_path / "folder")]) == 2
    assert "give --experimental.custom_import MODULE" in capsys.readouterr().err
    bare = registry.ModelSpec({"small": expert_family.Args()}, expert_family.Model, expert_family.init_)
    monkeypatch.setitem(registry.families(), "numbered", bare)
    assert main(["export", str(step), str(tmp_path / "folder")]) == 2
    assert "this family has no form of Hugging Face" in capsys.readouterr().err
    file = tmp_path / "run.toml"
    file.write_text('[model]\nname = "numbered"\nflavor = "small"\n[checkpoint]\nenable = true')
    words = ["--checkpoint.last_save_in_hf", "--checkpoint.last_save_model_only"]
    assert main(["train", "--job.config_file", str(file), *words]) == 2
    assert "the family numbered has no form of Hugging Face" in capsys.readouterr().err

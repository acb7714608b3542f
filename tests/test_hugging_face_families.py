"""Files of the families: which family and flavor they are of, what they leave open, types of the weights."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli
import torch
from safetensors.torch import load_file, save_file

from minititan.__main__ import main
from minititan.models import deepseek_v3, gpt_oss, qwen3
from minititan.registry import families
from tests.parity.families import VARIANTS, theirs
from tests.toy_llama import same_bits, save


def source(folder: Path, family: str, variant: str, **config: Any) -> Path:
    """A folder of the variant, with fields of its config.json changed; "gone" removes one."""
    save(theirs(*VARIANTS[family, variant]), folder / "source")
    file = folder / "source" / "config.json"
    content = json.loads(file.read_text()) | config
    file.write_text(json.dumps({key: value for key, value in content.items() if value != "gone"}))
    return folder / "source"


def run_import(folder: Path, *words: str) -> int:
    return main(["import", str(folder / "source"), "--job.dump_folder", str(folder / "run"), *words])


@pytest.mark.parametrize(
    "family, variant, flavor",
    [
        ("qwen2", "dense", "debugmodel"),
        ("qwen3", "dense", "debugmodel"),
        ("qwen3", "experts", "debugmodel_moe"),
        ("mixtral", "experts", "8x22B"),  # by the coefficient of the loss
        ("deepseek_v3", "softmax, groups", "debugmodel"),
        ("gpt_oss", "experts", "20b"),
    ],
)
def test_the_family_of_files_is_recognised(tmp_path, family, variant, flavor):
    source(tmp_path, family, variant)
    assert run_import(tmp_path) == 0
    model = tomli.loads((tmp_path / "run" / "run.toml").read_text())["model"]
    assert (model["name"], model["flavor"]) == (family, flavor)


def test_a_scaling_of_rotary_positions_in_the_form_of_transformers_4(tmp_path):
    scaling = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0}
    scaling |= {"mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}  # as DeepSeek-V3's
    old = {"rope_parameters": "gone", "rope_theta": 10_000, "rope_scaling": scaling}
    source(tmp_path, "deepseek_v3", "sigmoid, groups", **old)
    assert run_import(tmp_path) == 0
    args = tomli.loads((tmp_path / "run" / "run.toml").read_text())["model"]["args"]
    assert args["rope_theta"] == 10_000.0
    assert args["rope_scaling"].items() >= {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0}.items()
    step = tmp_path / "run" / "checkpoint" / "step-0"
    assert main(["export", str(step), str(tmp_path / "folder")]) == 0
    assert json.loads((tmp_path / "folder" / "config.json").read_text())["rope_scaling"] == scaling


def test_a_bias_in_float32_stays_so_beside_weights_in_bfloat16(tmp_path):
    model = theirs(*VARIANTS["deepseek_v3", "sigmoid, groups"]).bfloat16()
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias = layer.mlp.gate.e_score_correction_bias.float() + 1e-4
    save(model, tmp_path / "source", shard="1GB")
    assert run_import(tmp_path) == 0
    step = tmp_path / "run" / "checkpoint" / "step-0"
    assert main(["export", str(step), str(tmp_path / "folder")]) == 0
    assert json.loads((tmp_path / "folder" / "config.json").read_text())["dtype"] == "bfloat16"
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "folder"))
    assert same_bits(after, before)
    assert main(["export", str(step), str(tmp_path / "half"), "--dtype", "float16"]) == 0
    half = load_file(tmp_path / "half" / "model.safetensors")
    for name, tensor in before.items():
        exact = name.endswith("correction_bias")
        assert torch.equal(half[name], tensor if exact else tensor.half()), name
    assert before["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32


def test_the_layer_that_predicts_a_second_token_is_left_out(tmp_path):
    folder = source(tmp_path, "deepseek_v3", "sigmoid, groups")
    file = next(folder.glob("*.safetensors"))
    if index := next(folder.glob("*.index.json"), None):
        content = json.loads(index.read_text())
        content["weight_map"]["model.layers.61.eh_proj.weight"] = file.name
        index.write_text(json.dumps(content))
    save_file({**load_file(file), "model.layers.61.eh_proj.weight": torch.zeros(2)}, file)
    assert run_import(tmp_path) == 0


@pytest.mark.parametrize(
    "family, variant, config, fault",
    [
        (
            "gpt_oss",
            "experts",  # transformers takes that of the published models then
            {"rope_parameters": "gone"},
            "config.json: lacks rope_scaling; fetch it again",
        ),
        (
            "deepseek_v3",
            "softmax",
            {"topk_method": "best"},
            'config.json: topk_method = "best": the model can only do "greedy"',
        ),
        (
            "qwen3",
            "experts",
            {"mlp_only_layers": [1]},
            "config.json: mlp_only_layers = [1]: the model can only do []",
        ),
        ("mixtral", "experts", {"num_experts_per_tok": 13}, "num_experts_per_tok (13) must be between 1 and"),
        (
            "deepseek_v3",
            "sigmoid, groups",
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            "config.json: quantization_config: the weights are quantised (fp8), which is not read; use a",
        ),
        (
            "gpt_oss",
            "experts",
            {"quantization_config": {"quant_method": "mxfp4"}},
            "config.json: quantization_config: the weights are quantised (mxfp4), which is not read; use a",
        ),
    ],
)
def test_what_the_family_cannot_do_is_one_line(tmp_path, capsys, family, variant, config, fault):
    source(tmp_path, family, variant, **config)
    assert run_import(tmp_path) == 2
    printed = capsys.readouterr().err
    assert fault in printed and len(printed.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_family_that_cannot_leave_a_field_unset(tmp_path, capsys, monkeypatch):
    flavors = {"671B": deepseek_v3.FLAVORS["671B"]}  # it has compressed queries and YaRN
    own = replace(families()["deepseek_v3"], flavors=flavors)
    monkeypatch.setitem(families(), "deepseek_v3", own)
    source(tmp_path, "deepseek_v3", "queries not compressed")
    assert run_import(tmp_path) == 2
    assert "no flavor of deepseek_v3 leaves rope_scaling, q_lora_rank unset" in capsys.readouterr().err


def test_arguments_without_a_form_have_none():
    spec = families()["deepseek_v3"]
    assert [form.model_type for form in spec.hugging_face] == ["deepseek_v3", "deepseek_v2", "deepseek_v2"]
    args = deepseek_v3.FLAVORS["debugmodel"]
    assert spec.form_of(args) is deepseek_v3.V3
    assert spec.form_of(deepseek_v3.FLAVORS["16B"]) is deepseek_v3.V2
    assert spec.form_of(deepseek_v3.FLAVORS["236B"]) is deepseek_v3.V2_GROUPS
    softmax = replace(args, scoring_func="softmax")  # and still a bias: no published model has both
    assert spec.form_of(softmax) is None
    assert families()["minimind"].form_of(qwen3.FLAVORS["30B-A3B"]) is qwen3.SPARSE
    assert families()["gpt_oss"].form_of(gpt_oss.FLAVORS["20b"]) is gpt_oss.HUGGING_FACE

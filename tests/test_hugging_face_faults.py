"""What cannot be imported or exported: one clear line, and nothing is left behind."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minititan.__main__ import main
from minititan.hugging_face.config_json import arguments_of
from minititan.models.llama3 import HUGGING_FACE
from tests.test_checkpoint import largest_file
from tests.toy_llama import save, toy

INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-00004.safetensors"
Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(toy(num_hidden_layers=1), tmp_path_factory.mktemp("original"), shard="40KB")


@pytest.fixture
def source(original: Path, tmp_path: Path) -> Path:
    """A folder of four shards to be damaged."""
    folder = tmp_path / "source"
    folder.mkdir()
    for file in original.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    assert (folder / SHARD).is_file()
    return folder


def fails(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """What is printed by a command that must end with exit code 2."""
    capsys.readouterr()
    code = main([str(word) for word in words])
    printed = capsys.readouterr().err
    assert code == 2, printed
    assert "Traceback" not in printed
    return printed


def import_fails(capsys: pytest.CaptureFixture[str], source: Path, *words: str) -> str:
    there = sorted(path.name for path in source.parent.iterdir())
    printed = fails(capsys, "import", source, "--job.dump_folder", source.parent / "run", *words)
    assert sorted(path.name for path in source.parent.iterdir()) == there
    return printed


def index(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = json.loads((folder / INDEX).read_text())
        change(content["weight_map"])
        (folder / INDEX).write_text(json.dumps(content))

    return apply


def text(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def config(**fields: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text()) | fields
        kept = {key: value for key, value in content.items() if value != "gone"}
        (folder / "config.json").write_text(json.dumps(kept))

    return apply


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Changes the tensors of a shard, the index with them."""

    def apply(folder: Path) -> None:
        found = load_file(folder / SHARD)
        change(found)
        save_file(found, folder / SHARD)
        content = json.loads((folder / INDEX).read_text())
        places = {name: file for name, file in content["weight_map"].items() if file != SHARD}
        content["weight_map"] = places | dict.fromkeys(found, SHARD)
        (folder / INDEX).write_text(json.dumps(content))

    return apply


def twice(folder: Path) -> None:
    (folder / INDEX).write_text((folder / INDEX).read_text().replace(f'"{Q}"', '"lm_head.weight"'))


def cut(folder: Path) -> None:
    os.truncate(folder / SHARD, (folder / SHARD).stat().st_size - 3)


def key_of_a_shard(places: dict[str, str]) -> str:
    return next(name for name, file in places.items() if file == SHARD)


NAME = "must be the name of a .safetensors file in the same folder; do not trust this folder"
ESCAPES = (
    "../secret.safetensors",
    "/etc/passwd",
    "sub/x.safetensors",
    "..",
    "x.bin",
    ".safetensors/../../y.safetensors",
)
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    **{
        name: (index(lambda p, name=name: p.update({Q: name})), f"{INDEX}: {json.dumps(name)}: {NAME}")
        for name in ESCAPES
    },
    "cut short": (cut, f"{SHARD}: damaged (Error while deserializing header"),
    "empty": (text(SHARD, ""), f"{SHARD}: damaged (Error while deserializing header"),
    "not safetensors": (text(SHARD, "x" * 1000), f"{SHARD}: damaged (Error while deserializing header"),
    "missing shard": (lambda f: (f / SHARD).unlink(), f"{SHARD}: missing, {INDEX} names it; fetch it again"),
    "index names a tensor twice": (twice, f"{INDEX}: not valid JSON (lm_head.weight: named twice)"),
    "index not JSON": (text(INDEX, "{"), f"{INDEX}: not valid JSON"),
    "index without places": (
        text(INDEX, '{"metadata": {}}'),
        f"{INDEX}: weight_map must give each tensor a file",
    ),
    "index is a list": (text(INDEX, "[]"), f"{INDEX}: must hold a JSON object"),
    "index of numbers": (
        text(INDEX, '{"weight_map": {"a": 1}}'),
        f"{INDEX}: weight_map must give each tensor a file",
    ),
    "tensor not in its file": (
        index(lambda p: p.update({"more": SHARD})),
        f"{SHARD}: has no more, which {INDEX} says",
    ),
    "tensor in another file": (
        index(lambda p: p.update({key_of_a_shard(p): "model-00001-of-00004.safetensors"})),
        f"and {INDEX} says model-00001-of-00004.safetensors",
    ),
    "tensor not in the index": (index(lambda p: p.pop(key_of_a_shard(p))), f"and {INDEX} does not name it"),
    "no weights": (lambda f: (f / INDEX).unlink(), f"has no model.safetensors and no {INDEX}"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: missing; fetch it again"),
    "config not JSON": (text("config.json", "hello"), "config.json: not valid JSON"),
    "config a list": (text("config.json", "[1]"), "config.json: must hold a JSON object"),
    "config nested": (text("config.json", "[" * 100_000), "config.json: not valid JSON"),
    "other family": (
        config(model_type="gpt9"),
        'config.json: model_type = "gpt9": no family has this type; there are: deepseek_v2, ',
    ),
    "no family": (config(model_type="gone"), "config.json: model_type = null: no family has this type"),
    "no sizes": (
        config(hidden_size="gone", vocab_size=None),
        "config.json: lacks hidden_size, vocab_size; fetch it again",
    ),
    "size of a wrong type": (
        config(hidden_size="48"),
        'config.json: model.args.hidden_size = "48": must be a valid integer',
    ),
    "impossible sizes": (config(num_key_value_heads=4), "must be a multiple of num_key_value_heads (4)"),
    "other size": (
        config(intermediate_size=96),
        "other shapes: model.layers.0.mlp.gate_proj.weight [80, 48], here [96, 48]",
    ),
    "more layers": (config(num_hidden_layers=2), "lacks: model.layers.1.input_layernorm.weight, "),
    "bias": (config(attention_bias=True), "config.json: attention_bias = true: the model can only do false"),
    "activation": (config(hidden_act="gelu"), 'hidden_act = "gelu": the model can only do "silu"'),
    "rope type": (
        config(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        'config.json: rope_parameters.rope_type = "dynamic": the model can only do "default", "llama3", ',
    ),
    "old rope type": (
        config(rope_scaling={"type": "linear", "factor": 2.0}),
        'config.json: rope_scaling.rope_type = "linear": the model can only do "default", "llama3"',
    ),
    "half a scaling": (
        config(rope_scaling={"rope_type": "llama3", "factor": 2.0}),
        "rope_scaling: lacks low_freq_factor, high_freq_factor, original_max_position_embeddings",
    ),
    "strange scaling": (
        config(rope_parameters={"beta": 3}),
        "rope_parameters.beta = 3: not known for this rope_type",
    ),
    "scaling no table": (config(rope_scaling=[1]), "config.json: rope_scaling = [1]: must be an object"),
    "partial": (config(partial_rotary_factor=0.5), "partial_rotary_factor = 0.5: the model can only do 1.0"),
    "quantised": (
        config(quantization_config={"quant_method": "fp8"}),
        "quantization_config: the weights are quantised (fp8), which is not read; use a",
    ),
    "four bits in config": (
        config(quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}),
        "quantization_config: the weights are quantised (mxfp4), which is not read; use a",
    ),
    "four bits": (
        tensors(lambda t: t.update({f"{name}_blocks": t.pop(name).to(torch.uint8) for name in list(t)})),
        "_blocks is U8",
    ),
    "eight bits": (
        tensors(lambda t: t.update({name: value.to(torch.float8_e4m3fn) for name, value in t.items()})),
        "is F8_E4M3 and ",
    ),
    "one tensor more": (
        tensors(lambda t: t.update({"model.extra": torch.zeros(2)})),
        "has more than the model: model.extra;",
    ),
}


@pytest.mark.parametrize("damage, part", DAMAGE.values(), ids=list(DAMAGE))
def test_a_damaged_folder_is_refused(source, capsys, damage, part):
    damage(source)
    printed = import_fails(capsys, source)
    assert part in printed
    assert printed.count("\n") <= 5


def test_faults_are_told_together(source, capsys):
    config(attention_bias=True, hidden_act="relu", vocab_size="gone")(source)
    assert import_fails(capsys, source).count("\n") == 3


def test_a_tied_weight_must_not_have_two_values(source, capsys):
    config(tie_word_embeddings=True)(source)
    assert (
        "lm_head.weight differs from model.embed_tokens.weight, with which the model ties it; "
        "set tie_word_embeddings to false" in import_fails(capsys, source)
    )


def test_a_tied_weight_may_be_there_under_any_of_its_names(source, tmp_path):
    whole = {}
    for file in source.glob("*.safetensors"):
        whole |= load_file(file)
        file.unlink()
    (source / INDEX).unlink()
    config(tie_word_embeddings=True)(source)
    embedding = whole.pop("model.embed_tokens.weight")
    save_file(whole | {"lm_head.weight": embedding}, source / "model.safetensors")
    assert main(["import", str(source), "--job.dump_folder", str(tmp_path / "run")]) == 0
    assert main(["export", str(tmp_path / "run/checkpoint/step-0"), str(tmp_path / "out")]) == 0
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(back["model.embed_tokens.weight"], embedding) and "lm_head.weight" not in back


def test_buffers_of_old_folders_are_left_out(source, tmp_path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors(lambda t: t.update({name: torch.zeros(4)}))(source)
    assert main(["import", str(source), "--job.dump_folder", str(tmp_path / "run")]) == 0


# Command lines


def test_wrong_paths_and_options_of_import(source, capsys, tmp_path):
    assert "nowhere: no such file or folder" in import_fails(capsys, tmp_path / "nowhere")
    assert "one file of a model; give the folder" in import_fails(capsys, source / SHARD)
    printed = import_fails(capsys, source, "--training.stepz=1", "--optimizer.lr=-1")
    assert "command line: training.stepz" in printed and "optimizer.lr = -1" in printed
    assert "is written, not read" in import_fails(capsys, source, "--job.config_file=x.toml")
    assert "nowhere_module" in import_fails(capsys, source, "--experimental.custom_import=nowhere_module")
    assert "SOURCE comes first" in fails(capsys, "import", "--job.dump_folder", tmp_path / "run", source)
    assert "--job.dump_folder: where to write the run" in fails(capsys, "import", source)
    assert 'model.name = "llama4": has no form' in import_fails(capsys, source, "--model.name=llama4")


def test_nothing_is_overwritten(source, capsys, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "notes.txt").write_text("mine")
    assert import_fails(capsys, source) == (
        f"{run}: is not empty, and nothing is overwritten; choose another path or remove it\n"
    )
    (run / "notes.txt").unlink()
    assert main(["import", str(source), "--job.dump_folder", str(run)]) == 0
    step = run / "checkpoint" / "step-0"
    assert "is not empty" in fails(capsys, "export", step, source)
    assert "is there and no folder" in fails(capsys, "export", step, source / "config.json")


def test_a_full_disk_leaves_nothing_behind(source, capsys, tmp_path):
    with largest_file(50_000):
        assert "step 0 could not be saved (rank 0: File too large)" in import_fails(capsys, source)
    assert main(["import", str(source), "--job.dump_folder", str(tmp_path / "run")]) == 0
    with largest_file(50_000):
        printed = fails(capsys, "export", tmp_path / "run/checkpoint/step-0", tmp_path / "out")
    assert (
        printed
        == f"{tmp_path}/out: could not be written (File too large); make room or choose another path\n"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "source"]


def test_wrong_steps_and_options_of_export(source, capsys, tmp_path):
    run = tmp_path / "run"
    assert main(["import", str(source), "--job.dump_folder", str(run)]) == 0
    step, out = run / "checkpoint" / "step-0", tmp_path / "out"
    assert "must be a checkpoint" in fails(capsys, "export", tmp_path / "nowhere", out)
    assert fails(capsys, "export", run / "checkpoint", out).endswith("inside it: step-0\n")
    assert "command line: argument --dtype: invalid choice" in fails(
        capsys, "export", step, out, "--dtype", "int8"
    )
    assert "--shard_size 5 apples: must be a size" in fails(
        capsys, "export", step, out, "--shard_size", "5 apples"
    )
    assert "--shard_size 0: must be a size" in fails(capsys, "export", step, out, "--shard_size", "0")
    assert "no such file or folder" in fails(capsys, "export", step, out, "--tokenizer", tmp_path / "none")
    assert "required: DIR" in fails(capsys, "export", step)
    shard = step / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert f"{shard}: damaged" in fails(capsys, "export", step, out)
    assert not out.exists()


# State dicts


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


NAMED = ("--model.name=llama3", "--model.flavor=debugmodel")


@pytest.mark.parametrize(
    "content, part",
    [
        (b"", "not a state dict that can be read safely"),
        (b"hello", "not a state dict that can be read safely"),
        (pickle.dumps(Evil()), "not a state dict that can be read safely"),
        (Evil(), "not a state dict that can be read safely"),
        ([1, 2], "holds more than tensors by name (list)"),
        ({"model": {"a": torch.zeros(2)}}, "holds more than tensors by name (model)"),
        ({}, "holds no tensors by name"),
        ({"a": torch.zeros(2)}, "lacks: model.embed_tokens.weight"),
        ({"a": torch.zeros(2, dtype=torch.int8)}, "a is int8: only float64"),
    ],
)
def test_a_file_that_is_no_state_dict_is_refused(capsys, tmp_path, monkeypatch, content, part):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "weights.pth"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    assert part in import_fails(capsys, file, *NAMED)
    assert not Path("evil").exists()


def test_a_state_dict_needs_a_name(capsys, tmp_path):
    torch.save({"a": torch.zeros(2)}, tmp_path / "weights.pth")
    assert import_fails(capsys, tmp_path / "weights.pth", NAMED[0]) == (
        f"{tmp_path}/weights.pth: a state dict does not say what model it is of; give --model.flavor\n"
    )
    printed = import_fails(capsys, tmp_path / "weights.pth", NAMED[0], "--model.flavor=debugmodle")
    assert "nearest: debugmodel" in printed


# What transformers takes where config.json is silent


def test_absent_fields_mean_what_they_mean_to_transformers():
    sizes = {"hidden_size": 64, "intermediate_size": 8, "vocab_size": 9}
    bare: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 4} | sizes
    theirs = toy().config.__class__(**{key: value for key, value in bare.items() if key != "model_type"})
    found = arguments_of(bare, HUGGING_FACE)
    for name, value in found.items():
        if name not in (*HUGGING_FACE.arguments, "head_dim", "rope_theta", "rope_scaling"):
            assert value == getattr(theirs, name), name
    assert theirs.rope_parameters == {"rope_type": "default", "rope_theta": 10_000.0}
    assert theirs.head_dim == 64 // 4 and found["head_dim"] is None
    assert (found["rope_theta"], found["rope_scaling"]) == (10_000.0, None)

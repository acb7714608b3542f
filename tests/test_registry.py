"""The registry: misuse is one clear line; a model from outside the package trains on any layout."""

import contextlib
import io
import json
import math
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from minititan import registry
from minititan.config import Config, ConfigError, load
from minititan.config.error import fault_line
from minititan.models.arguments import DecoderArgs
from minititan.models.decoder import Decoder
from minititan.models.rotary import RopeScaling
from minititan.parallelisms.tensor_parallel import STYLES
from minititan.run import check
from tests.distributed.harness import run_ranks

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """Models that a test registers are gone after it."""
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))


def resolve(name: str = "llama3", flavor: str = "8B", **overrides: Any) -> Any:
    config = Config.model_validate({"model": {"name": name, "flavor": flavor, "args": overrides}})
    return registry.resolve(name, flavor, config.model.args, 264, config.fault)


def faults_of(*names: str, **overrides: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(*names, **overrides)
    return [fault.removeprefix("default: ") for fault in caught.value.faults]


# ---- names and fields


def test_unknown_names_name_the_nearest_and_all():
    families = ", ".join(registry.families())
    assert {"llama3", "qwen2", "qwen3", "mixtral", "minimind"} <= set(registry.families())
    assert faults_of("Llama") == [
        f'model.name = "Llama": is not registered; nearest: llama3; there are: {families}'
    ]
    flavors = "debugmodel, debugmodel_moe, 30M, 64M, 120M, 1B, 198M-A64M, 1B-A320M"
    assert faults_of("minimind", "64m") == [
        f'model.flavor = "64m": is not registered; nearest: 64M; there are: {flavors}'
    ]
    assert faults_of("minimind", "huge") == [
        f'model.flavor = "huge": is not registered; there are: {flavors}'
    ]


def test_unknown_fields_are_all_reported():
    first, second = faults_of(hiden_size=64, colour=1)
    assert first == "model.args.hiden_size = 64: unknown field; nearest: hidden_size"
    assert second.startswith("model.args.colour = 1: unknown field; there are: hidden_size, num_hidden_")


def test_an_unknown_field_of_a_nested_table_is_not_dropped():
    assert faults_of(rope_scaling={"colour": "llama3", "factor": 2.0}) == [
        'model.args.rope_scaling.colour = "llama3": unknown field; '
        "there are: factor, low_freq_factor, high_freq_factor, original_max_position_embeddings, rope_type"
    ]
    # With no scaling in the flavor too.
    assert faults_of("llama3", "10M", rope_scaling={"factr": 2.0}) == [
        "model.args.rope_scaling.factr = 2.0: unknown field; nearest: factor"
    ]


@pytest.mark.parametrize(
    "field, value, fault",
    [
        ("hidden_size", "64", 'hidden_size = "64": must be a valid integer'),
        ("hidden_size", 64.5, "hidden_size = 64.5: must be a valid integer"),
        ("hidden_size", True, "hidden_size = true: must be a valid integer"),
        ("rope_theta", "x", 'rope_theta = "x": must be a valid number'),
        ("tie_word_embeddings", 1, "tie_word_embeddings = 1: must be a valid boolean"),
        ("rope_scaling", 8.0, "rope_scaling = 8.0: must be a table"),
        ("rope_scaling", {"factor": "x"}, 'rope_scaling.factor = "x": must be a valid number'),
        (
            "rope_scaling",
            {"rope_type": "ntk"},
            'rope_scaling = {rope_type = "ntk"}: rope_type must be one of llama3, yarn',
        ),
    ],
)
def test_wrong_types(field, value, fault):
    assert faults_of(**{field: value}) == [f"model.args.{fault}"]


@pytest.mark.parametrize(
    "overrides, rule",
    [
        ({"hidden_size": 0}, "hidden_size (0) must be at least 1"),
        ({"vocab_size": -1}, "vocab_size (-1) must be at least 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers (0) must be at least 1"),
        ({"head_dim": 0}, "head_dim (0) must be at least 1"),
        ({"max_position_embeddings": 0}, "max_position_embeddings (0) must be at least 1"),
        ({"rope_theta": 0.0}, "rope_theta (0.0) must be above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps (nan) must be finite"),
        (
            {"num_key_value_heads": 3},
            "num_attention_heads (32) must be a multiple of num_key_value_heads (3)",
        ),
        ({"head_dim": 5}, "the width of a head (5) must be even, for rotary positions"),
    ],
)
def test_sizes_that_make_no_decoder(overrides, rule):
    (fault,) = faults_of(**overrides)
    assert fault.startswith("model.args = {") and fault.endswith(f": {rule}")


@pytest.mark.parametrize(
    "scaling, rule",
    [
        ({"factor": 0.0}, "factor (0.0) must be above 0 and finite"),
        ({"rope_type": "yarn", "factor": float("inf")}, "factor (inf) must be above 0 and finite"),
        ({"high_freq_factor": 1.0}, "high_freq_factor (1.0) must be above low_freq_factor (1.0)"),
    ],
)
def test_scalings_that_make_no_positions(scaling, rule):
    (fault,) = faults_of(rope_scaling=scaling)
    assert fault.startswith("model.args.rope_scaling = {") and fault.endswith(f": {rule}")


def test_a_wrong_value_in_a_list_is_told_by_its_key_and_number():
    given = {"layer_types": ["full_attention", "x"], "num_hidden_layers": 2}
    with pytest.raises(ConfigError) as caught:
        registry.resolve(
            "gpt_oss", "debugmodel", given, 264, lambda key, rule, way: fault_line("X", key, 1, rule, way)
        )
    assert caught.value.faults == (
        "X: model.args.layer_types = 1: number 2 must be 'sliding_attention' or 'full_attention'",
    )


def test_where_a_fault_comes_from(tmp_path):
    (tmp_path / "run.toml").write_text("[model.args]\nhidden_size = 'x'\n")
    argv = ["--job.config_file", str(tmp_path / "run.toml"), "--model.args.head_dim", "1.5"]
    config = load(argv)
    with pytest.raises(ConfigError) as caught:
        registry.resolve("llama3", "8B", config.model.args, 264, config.fault)
    assert caught.value.faults == (
        'run.toml: model.args.hidden_size = "x": must be a valid integer',
        "command line: model.args.head_dim = 1.5: must be a valid integer",
    )


def test_overrides_make_new_arguments_and_leave_the_flavor():
    flavor = registry._registry["llama3"].flavors["8B"]
    spec, args = resolve(hidden_size=64, rope_theta=7, rope_scaling={"factor": 4})
    assert args == replace(flavor, hidden_size=64, rope_theta=7.0, rope_scaling=RopeScaling(factor=4.0))
    assert flavor.hidden_size == 4096 and flavor.rope_scaling == RopeScaling(8.0)
    assert spec.build is Decoder


def test_a_nested_override_keeps_the_other_fields_of_the_flavor():
    flavor = DecoderArgs(rope_scaling=RopeScaling(8.0, 2.0, 5.0, 99))
    registry.register("other", replace(registry._registry["llama3"], flavors={"one": flavor}))
    _, args = resolve("other", "one", rope_scaling={"high_freq_factor": 6.0})
    assert args.rope_scaling == RopeScaling(8.0, 2.0, 6.0, 99)


def test_vocabulary_unset_is_the_tokenizers():
    assert resolve("llama3", "10M")[1].vocab_size == 264
    assert resolve("llama3", "10M", vocab_size=300)[1].vocab_size == 300
    assert resolve("llama3", "8B")[1].vocab_size == 128_256


def test_a_name_stands_for_one_spec():
    spec = registry._registry["llama3"]
    registry.register("llama3", spec)  # the same again: a module imported by two ways
    with pytest.raises(ValueError, match="model 'llama3' is registered already"):
        registry.register("llama3", replace(spec, flops_per_token=None))
    assert registry._registry["llama3"] is spec


# ---- modules that register


@pytest.mark.parametrize("name", ["no_such_module", "json.no_such_module", ".relative", "model.py"])
def test_a_missing_module_is_named(name):
    config = Config.model_validate({"experimental": {"custom_import": name}})
    with pytest.raises(ConfigError) as caught:
        registry.load_user_models(name, config.fault)
    assert str(caught.value) == (
        f'default: experimental.custom_import = "{name}": no such module; '
        "name an installed module, or put its folder on PYTHONPATH"
    )


def test_what_is_wrong_inside_a_module_is_not_hidden(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "imports_nothing_there.py").write_text("import not_there_at_all\n")
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        registry.load_user_models("imports_nothing_there", Config().fault)
    (tmp_path / "wrong_type.py").write_text("len(1)\n")
    with pytest.raises(TypeError, match="has no len"):
        registry.load_user_models("wrong_type", Config().fault)


# ---- models that do not keep the contract


@dataclass(frozen=True)
class Args:
    vocab_size: int | None = None


class Model(nn.Module):
    """All that the contract asks for, and little else."""

    def __init__(self, args: Args) -> None:
        super().__init__()
        assert args.vocab_size is not None
        self.embed_tokens = nn.Embedding(args.vocab_size, 8)
        self.layers = nn.ModuleDict({"0": nn.Linear(8, 8)})
        self.norm = nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, args.vocab_size, bias=False)


PLAN = {"embed_tokens": "embedding", "layers.*": "residual", "norm": "norm", "lm_head": "head"}


def run_faults(tmp_path: Path, build: Any, plan: Any = None, tp: int = 1) -> list[str]:
    spec = registry.ModelSpec({"one": Args()}, build, lambda *_: None, tensor_parallel_plan=plan)
    registry.register("mine", spec)
    tables = {
        "job": {"dump_folder": str(tmp_path)},
        "model": {"name": "mine", "flavor": "one"},
        "parallelism": {"tensor_parallel_degree": tp},
        "activation_checkpoint": {"mode": "none"},
    }
    with pytest.raises(ConfigError) as caught:
        check(Config.model_validate(tables), tp)
    return [fault.removeprefix("default: ") for fault in caught.value.faults]


def test_a_model_without_a_plan_cannot_be_split(tmp_path):
    assert run_faults(tmp_path, Model, tp=2) == [
        'parallelism.tensor_parallel_degree = 2: the model "mine" has no tensor-parallel plan; '
        "give its spec one, or use 1"
    ]


def test_a_plan_that_misses_modules_names_them(tmp_path):
    class More(Model):
        def __init__(self, args: Args) -> None:
            super().__init__(args)
            self.layers["0"].add_module("inner", nn.Linear(8, 8))
            self.gain = nn.Parameter(torch.ones(8))

    head, tail = "parallelism.tensor_parallel_degree = 2: ", "; mend the plan of the model mine, or use 1"
    # `layers.*` is the block itself, not what is inside.
    assert run_faults(tmp_path, More, PLAN, tp=2) == [
        f"{head}the tensor-parallel plan names no style for {where}{tail}"
        for where in (
            "parameters outside of the model's parts (More)",
            "the module 'layers.0.inner' (Linear)",
        )
    ]


def test_a_style_that_does_not_exist(tmp_path):
    (fault,) = run_faults(tmp_path, Model, PLAN | {"layers.*": "columns"}, tp=2)
    assert "the tensor-parallel plan has 'layers.*': 'columns', no style; styles: embedding, norm," in fault


def test_a_model_that_lacks_parts_or_has_more_than_can_be_served(tmp_path):
    class Other(nn.Module):
        def __init__(self, args: Args) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8)])
            self.norm = nn.LayerNorm(8)
            self.lm_head = nn.Linear(8, 264)
            self.register_buffer("table", torch.ones(3))
            self.gain = nn.Parameter(torch.tensor(1.0))

    assert run_faults(tmp_path, Other) == [
        f'model.name = "mine": {rule}'
        for rule in (
            "its model has no `embed_tokens`",
            "its `layers` must be a ModuleDict, not a ModuleList",
            "its `lm_head` must be a Linear without bias",
            "its buffer table has no initial value",
            "its parameter gain must have a dimension; use shape (1,)",
        )
    ]


# ---- the example of docs/models.md, from outside the package

OVERRIDES = {
    "model.name": "scaled_gpt",
    "model.flavor": "tiny",
    "training.dtype": "float64",
    "training.steps": 3,
    "training.seq_len": 32,
    "training.local_batch_size": 2,
    "training.global_batch_size": 4,
    "optimizer.lr": 1e-2,
    "lr_scheduler.warmup_steps": 0,
    "metrics.log_freq": 1,
    "metrics.log_batch_hash": True,
}
KINDS = {
    "none": {"activation_checkpoint.mode": "none"},
    "full": {"activation_checkpoint.mode": "full"},
    "op": {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"},
    "plain": {  # tensor parallelism alone
        "activation_checkpoint.mode": "none",
        "parallelism.disable_sequence_parallel": True,
        "parallelism.disable_embedding_parallel": True,
    },
}


def _train(rank: int, world: int, paths: list[str], folder: Path, runs: dict[str, dict]) -> dict[str, Any]:
    """By run, the losses and gradient norms of `metrics.jsonl`."""
    sys.path[:0] = paths
    from minititan.train import main

    (folder / "run.toml").touch()
    logged = {}
    for name, keys in runs.items():
        argv = [f"--{key}={str(value).lower()}" for key, value in keys.items()]
        with contextlib.redirect_stdout(io.StringIO()):
            main(["--job.config_file", f"{folder}/run.toml", f"--job.dump_folder={folder}/{name}", *argv])
        lines = (folder / name / "metrics.jsonl").read_text().splitlines()
        logged[name] = [
            (line["loss"], line["grad_norm"], line["batch_sha256"]) for line in map(json.loads, lines)
        ]
    return logged


def train(folder: Path, ranks: int, runs: dict[str, dict], paths: list[str], **keys: Any) -> dict[str, Any]:
    """The runs of the example on `ranks` ranks, by name."""
    folder.mkdir()
    text = folder / "text.txt"
    text.write_text(" ".join(str(7**n) for n in range(60)))
    data = {"training.dataset_path": text, "data.cache_folder": folder / "cache"}
    base = OVERRIDES | data | {f"parallelism.{key}_degree": value for key, value in keys.items()}
    runs = {name: base | more for name, more in runs.items()}
    return run_ranks(_train, ranks, paths, folder, runs)[0]


CUSTOM = {"experimental.custom_import": "scaled_gpt"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("example") / "alone"
    runs = {name: CUSTOM | KINDS[name] for name in ("none", "full", "op")}
    logged = train(folder, 1, runs, [str(EXAMPLES)])
    assert logged["full"] == logged["op"] == logged["none"]
    losses = [loss for loss, _, _ in logged["none"]]
    assert len(losses) == 3 and losses[-1] < losses[0]  # it learns
    return logged["none"]


@pytest.mark.parametrize(
    "keys, kinds",
    [
        ({"data_parallel_shard": 2}, ("none", "op")),
        ({"tensor_parallel": 2}, ("full", "plain")),
        ({"data_parallel_shard": 2, "tensor_parallel": 2}, ("none", "op", "plain")),
        ({"pipeline_parallel": 2, "tensor_parallel": 2}, ("none", "op")),
    ],
    ids=["dp2", "tp2", "dp2-tp2", "pp2-tp2"],
)
def test_a_model_of_ones_own_on_every_layout(keys, kinds, alone, tmp_path):
    runs = {name: CUSTOM | KINDS[name] for name in kinds}
    ranks = math.prod(keys.values())
    logged = train(tmp_path / "run", ranks, runs, [str(EXAMPLES)], **keys)
    for name, steps in logged.items():
        for found, expected in zip(steps, alone, strict=True):
            assert found[:2] == pytest.approx(expected[:2], rel=1e-9), name
            assert found[2] == expected[2], name


def test_a_model_from_an_entry_point(alone, tmp_path):
    """What an installed package has: a module, and a dist-info folder that announces it."""
    site = tmp_path / "site"
    info = site / "somebodys_models-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys-models\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[minititan.models]\nscaled_gpt = somebodys_model\n")
    (site / "somebodys_model.py").write_text((EXAMPLES / "scaled_gpt.py").read_text())
    logged = train(tmp_path / "run", 1, {"none": KINDS["none"]}, [str(site)])
    assert logged["none"] == alone


def test_the_page_has_the_example_as_it_is():
    page = (EXAMPLES.parent / "models.md").read_text()
    assert f"```python\n{(EXAMPLES / 'scaled_gpt.py').read_text()}```" in page
    assert set(STYLES) == set(
        re.findall(r"^\| `(\w+)` \|.*\|.*\|$", page.partition("| style |")[2], re.MULTILINE)
    )

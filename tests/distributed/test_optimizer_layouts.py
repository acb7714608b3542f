"""Muon and parameter groups on layouts, by numbers, in float64; their state in checkpoints."""

import contextlib
import io
from pathlib import Path

import pytest
import torch

from tests.distributed.harness import run_ranks
from tests.distributed.layouts import Overrides
from tests.distributed.runs import lines
from tests.distributed.small import EVERY_STEP, FLOAT64, build, degrees

# Widths that no degree divides evenly over both axes: 3 x 20 rows over 2 x 2 ranks, 70 columns.
MUON: Overrides = FLOAT64 | {
    "optimizer.name": "Muon",
    "optimizer.lr": "1e-2",
    "optimizer.param_groups": '[{pattern = "*.o_proj.weight", lr = 3e-3, weight_decay = 0.0}, '
    '{pattern = "layers.1.mlp.up_proj.weight", name = "AdamW"}, {pattern = "*norm*", lr = 1e-3}]',
    "model.args.hidden_size": "60",
    "model.args.num_attention_heads": "6",
    "model.args.num_key_value_heads": "2",
    "model.args.intermediate_size": "70",
}


def train(rank: int, world: int, folder: Path, cache: Path, keys: Overrides) -> dict[str, torch.Tensor]:
    """Train; return the full parameters and moments."""
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = build(rank, world, folder, cache, MUON | keys)
        trainer.run()
    tensors = trainer.checkpoints.tensors()
    full = {key: getattr(value, "full_tensor", lambda value=value: value)() for key, value in tensors.items()}
    return full if rank == 0 else {}


@pytest.fixture(scope="module")
def one(tmp_path_factory, token_cache) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("one")
    return folder, run_ranks(train, 1, folder, token_cache, {})[0]


def assert_same(folder: Path, tensors: dict[str, torch.Tensor], one, loss=1e-9, other=1e-7) -> None:
    found, expected = lines(folder), lines(one[0])
    assert len(found) == len(expected) == 5
    for here, there in zip(found, expected, strict=True):
        assert here["loss"] == pytest.approx(there["loss"], rel=loss)
        assert here["grad_norm"] == pytest.approx(there["grad_norm"], rel=max(loss, 1e-7))
    assert tensors.keys() == one[1].keys()
    assert sum(key.endswith(".momentum_buffer") for key in tensors) == 2 * 7 - 1
    for key, value in one[1].items():
        assert (tensors[key] - value).norm() <= other * value.norm(), key


@pytest.mark.parametrize("shard, tp", [(2, 1), (1, 2), (2, 2)], ids=["dp2", "tp2", "dp2-tp2"])
def test_muon_is_the_same_on_every_layout(shard, tp, one, tmp_path, token_cache):
    tensors = run_ranks(train, shard * tp, tmp_path, token_cache, degrees(shard, tp))[0]
    assert_same(tmp_path, tensors, one)


def test_muon_of_experts_that_are_spread(tmp_path, token_cache):
    """Three experts on each of two ranks, of which FSDP shards the columns."""
    model = {"model.name": "qwen3", "model.flavor": "debugmodel_moe", "model.args.num_experts": "6"}
    model |= {"model.args.moe_intermediate_size": "24", "optimizer.param_groups": "[]"}
    single = run_ranks(train, 1, tmp_path / "one", token_cache, model)[0]
    spread = degrees(4) | {"parallelism.expert_parallel_degree": "2"}
    tensors = run_ranks(train, 4, tmp_path / "ep2", token_cache, model | spread)[0]
    for here, there in zip(lines(tmp_path / "ep2"), lines(tmp_path / "one"), strict=True):
        assert here["loss"] == pytest.approx(there["loss"], rel=1e-9)
    assert sum(key.endswith(".momentum_buffer") for key in tensors) == 2 * 8
    for key, value in single.items():
        assert (tensors[key] - value).norm() <= 1e-7 * value.norm(), key


def test_muon_in_float32_is_within_the_bounds_of_float32(tmp_path, token_cache):
    """With the iteration in bfloat16 the parameters differed by 1e-2 after 10 steps."""
    keys = {"training.dtype": "float32", "training.mixed_precision_param": "float32"}
    single = run_ranks(train, 1, tmp_path / "one", token_cache, keys)[0]
    tensors = run_ranks(train, 2, tmp_path / "tp2", token_cache, degrees(tp=2) | keys)[0]
    assert_same(tmp_path / "tp2", tensors, (tmp_path / "one", single), 1e-5, 1e-4)


def test_muon_goes_on_from_a_checkpoint_of_another_layout(one, tmp_path, token_cache):
    three = EVERY_STEP | {"training.steps": "3", "lr_scheduler.total_steps": "5"}
    run_ranks(train, 4, tmp_path, token_cache, degrees(2, 2) | three)
    tensors = run_ranks(train, 1, tmp_path, token_cache, EVERY_STEP)[0]
    assert_same(tmp_path, tensors, one)

"""Runs of a model with experts: what balances them on several ranks, over a restart, beside validation, in
float16.

Cases that users of other trainers reported are here, in test_moe.py (an expert without a token, all tokens to
one), test_moe_decoder.py (recomputation that routes differently) and test_routing.py (a bias that is
replaced, not changed in place; a range of layers without experts; tokens that are dropped).
"""

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch

from minititan.checkpoint.folder import step_folder
from minititan.checkpoint.tensors import StepTensors, verified
from tests.distributed.harness import run_ranks
from tests.distributed.layouts import Overrides
from tests.distributed.runs import lines
from tests.distributed.small import EVERY_STEP, FLOAT64, build, degrees

MOE: Overrides = {
    "model.name": "deepseek_v3",
    "model.flavor": "debugmodel",
    "model.args.moe_intermediate_size": "32",
    "model.args.router_aux_loss_coef": "0.5",
    "model.args.router_z_loss_coef": "0.01",
    "model.args.router_bias_update_speed": "0.01",
    "training.global_batch_size": "8",
    "training.local_batch_size": "8",
    "training.steps": "4",
    "lr_scheduler.total_steps": "4",
}
BIAS = "layers.1.mlp.gate.e_score_correction_bias"


def train(rank: int, world: int, folder: Path, cache: Path, keys: Overrides) -> dict[str, torch.Tensor]:
    """Train; return the full parameters and the first moments."""
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = build(rank, world, folder, cache, MOE | keys)
        trainer.run()
    tensors = trainer.checkpoints.tensors()
    return {key: getattr(value, "full_tensor", lambda value=value: value)() for key, value in tensors.items()}


def train_each(
    rank: int, world: int, folder: Path, cache: Path, runs: dict[str, Overrides]
) -> dict[str, Any]:
    return {name: train(rank, world, folder / name, cache, keys) for name, keys in runs.items()}


# ---- layouts: a loss that is over all ranks, and an optimizer that sees matrices whole

EVERYWHERE: Overrides = FLOAT64 | {
    "model.args.router_aux_loss_scope": "batch",
    "optimizer.name": "Muon",
    "optimizer.lr": "1e-2",
}


@pytest.fixture(scope="module")
def one(tmp_path_factory, token_cache) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("one")
    runs = {"whole": EVERYWHERE, "halves": EVERYWHERE | {"training.local_batch_size": "4"}}
    return folder, run_ranks(train_each, 1, folder, token_cache, runs)[0]


@pytest.mark.parametrize("shard, tp", [(2, 1), (1, 2)], ids=["dp2", "tp2"])
def test_a_loss_over_all_ranks_and_muon_are_the_same_on_every_layout(shard, tp, one, tmp_path, token_cache):
    keys = EVERYWHERE | degrees(shard, tp) | {"training.local_batch_size": str(8 // shard)}
    ranks = run_ranks(train, 2, tmp_path, token_cache, keys)
    folder, expected = one[0] / "whole", one[1]["whole"]
    for here, there in zip(lines(tmp_path), lines(folder), strict=True):
        for key in ("loss", "grad_norm"):
            assert here[key] == pytest.approx(there[key], rel=1e-9), key
        assert here["routing"]["auxiliary_loss"] == pytest.approx(there["routing"]["auxiliary_loss"])
        one_load, other_load = (dict(record["routing"]["layers"]["1"]) for record in (here, there))
        assert one_load.pop("entropy") == pytest.approx(other_load.pop("entropy"))
        assert one_load == other_load and one_load["dropped_tokens"] == 0
    assert expected[f"model.{BIAS}"].abs().max() > 0.015
    for tensors in ranks:
        assert torch.equal(tensors[f"model.{BIAS}"], expected[f"model.{BIAS}"])
        for key, value in expected.items():
            assert (tensors[key] - value).norm() <= 1e-7 * value.norm(), key
    assert "optimizer.layers.1.mlp.experts.up_proj.momentum_buffer" in expected


def test_the_loss_over_a_micro_batch_depends_on_how_the_batch_is_cut(one):
    whole, halves = (one[1][name]["model.layers.1.mlp.gate.weight"] for name in ("whole", "halves"))
    assert (whole - halves).norm() > 1e-5 * whole.norm()


# ---- restarts and validation


def stop_and_go(rank: int, world: int, folder: Path, cache: Path) -> dict[str, Any]:
    validating = {
        "validation.enable": "true",
        "validation.dataset": "stdlib",
        "validation.freq": "1",
        "validation.steps": "2",
        "validation.seq_len": "32",
    }
    keys = FLOAT64 | EVERY_STEP
    straight = train(rank, world, folder / "straight", cache, keys)
    train(rank, world, folder / "resumed", cache, keys | validating | {"training.steps": "2"})
    return {"straight": straight, "resumed": train(rank, world, folder / "resumed", cache, keys | validating)}


def test_biases_are_saved_and_go_on_and_validation_leaves_them_alone(tmp_path, token_cache):
    found = run_ranks(stop_and_go, 1, tmp_path, token_cache)[0]
    assert found["straight"].keys() == found["resumed"].keys()
    for key, value in found["straight"].items():
        assert torch.equal(found["resumed"][key], value), key
    records = [line for line in lines(tmp_path / "resumed") if "loss" in line]
    assert sum("validation_loss" in line for line in lines(tmp_path / "resumed")) == 4
    for here, there in zip(records, lines(tmp_path / "straight"), strict=True):
        assert here["routing"] == there["routing"]
    saved = []
    for step in (1, 2, 3, 4):
        path = step_folder(tmp_path / "resumed" / "out" / "checkpoint", step)
        saved.append(StepTensors(path, verified(path)).read(f"model.{BIAS}"))
    assert torch.equal(saved[3], found["straight"][f"model.{BIAS}"])
    for before, after in zip([torch.zeros_like(saved[0]), *saved], saved, strict=False):
        assert set((after - before).abs().mul(100).round().tolist()) <= {0.0, 1.0}  # by 0.01, or not
        assert not torch.equal(before, after)


# ---- what is trained and what is logged; float16


ONE_STEP: Overrides = {"training.steps": "1", "training.max_norm": "0", "lr_scheduler.warmup_steps": "0"}
WEIGHTS = {"checkpoint.enable": "true", "checkpoint.last_save_model_only": "true"}
TYPES = ("training.mixed_precision_param", "checkpoint.export_dtype")
HALF = {"training.mixed_precision_param": "float16", "training.loss_scale_init": "1024"}
KINDS: dict[str, Overrides] = {
    "plain": ONE_STEP,
    "without": ONE_STEP | {"model.args.router_aux_loss_coef": "0.0", "model.args.router_z_loss_coef": "0.0"},
    "float16": ONE_STEP | HALF,
    "bfloat16": ONE_STEP | WEIGHTS | dict.fromkeys(("training.dtype", *TYPES), "bfloat16"),
    "forced": ONE_STEP | {"debug.moe_force_load_balance": "true"},
    "overflow": ONE_STEP | HALF | {"training.loss_scale_init": "1e12"},
}


def test_auxiliary_losses_are_trained_apart_from_the_loss_and_scaled_with_it(tmp_path, token_cache):
    found = run_ranks(train_each, 1, tmp_path, token_cache, KINDS)[0]
    records = {name: lines(tmp_path / name)[0] for name in KINDS}
    assert records["plain"]["loss"] == records["without"]["loss"]
    assert records["without"]["routing"]["auxiliary_loss"] == 0.0
    assert 0.5 < records["plain"]["routing"]["auxiliary_loss"] < 0.5 * 4 + 0.1
    gate = "optimizer.layers.1.mlp.gate.weight.exp_avg"
    plain, without, half = (found[name][gate] for name in ("plain", "without", "float16"))
    assert (plain - without).norm() > plain.norm() / 2  # mostly that of the auxiliary losses
    assert (plain - half).norm() < 0.02 * plain.norm()
    assert records["overflow"]["skipped_steps"] == 1  # and nothing is moved
    assert not found["overflow"][f"model.{BIAS}"].any() and found["float16"][f"model.{BIAS}"].any()
    pure = found["bfloat16"][f"model.{BIAS}"]
    assert pure.dtype == torch.float32 and pure.abs().max() == torch.tensor(0.01)
    saved = verified(step_folder(tmp_path / "bfloat16" / "out" / "checkpoint", 1)).tensors
    assert {name for name, info in saved.items() if info.dtype != "bfloat16"} == {f"model.{BIAS}"}
    assert {layer["load"] for layer in records["forced"]["routing"]["layers"].values()} == {1.0}


def weights_of_losses(rank: int, world: int, folder: Path, cache: Path) -> list[float]:
    """The factor on the auxiliary losses of a sequence, step by step."""
    growing = {"training.global_batch_size_schedule": "[{step = 2, size = 16}]"}
    found = []
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = build(rank, world, folder, cache, MOE | HALF | growing | {"training.local_batch_size": "4"})
        batches = iter(trainer.loader)
        for _ in range(3):
            trainer.step(batches)
            found.append(trainer.parts[0].routing.loss_weight)
    return found


def test_sequences_of_a_step_share_the_auxiliary_losses(tmp_path, token_cache):
    """Micro-batches too. On every layout the weight is the same, so no comparison of layouts would see it
    wrong.
    """
    (found,) = run_ranks(weights_of_losses, 1, tmp_path, token_cache)
    assert found == [1024 / 8, 1024 / 16, 1024 / 16]

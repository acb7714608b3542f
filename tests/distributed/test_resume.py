"""What a run says and refuses when it goes on from a checkpoint: changed settings, other models, damage."""

import contextlib
import io
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.checkpoints import flip
from tests.distributed.harness import run_ranks
from tests.distributed.layouts import Overrides
from tests.distributed.runs import lines
from tests.distributed.small import EVERY_STEP, build

BASE: Overrides = EVERY_STEP | {
    "training.steps": "2",
    "lr_scheduler.total_steps": "6",
    "training.global_batch_size": "4",
    "training.seq_len": "16",
}
MODEL_ONLY: Overrides = {"checkpoint.last_save_model_only": "true"}


@dataclass
class Outcome:
    """What a run said and, when it was refused, why; how far it had come when it began."""

    said: list[str]
    refused: list[str]
    step: int | None


def attempt(rank: int, world: int, folder: Path, cache: Path, keys: Overrides) -> Outcome:
    """Train to the end, or to the refusal."""
    from minititan.config import ConfigError

    out = io.StringIO()
    step = None
    try:
        with contextlib.redirect_stdout(out):
            trainer = build(rank, world, folder, cache, BASE | keys)
            step = trainer.steps_done
            trainer.run()
    except ConfigError as error:
        return Outcome(out.getvalue().splitlines(), list(error.faults), step)
    return Outcome(out.getvalue().splitlines(), [], step)


def attempts(rank: int, world: int, calls: dict[str, tuple[Path, Path, Overrides]]) -> dict[str, Outcome]:
    return {name: attempt(rank, world, *call) for name, call in calls.items()}


def checkpoints(folder: Path) -> Path:
    return folder / "out" / "checkpoint"


def damage(folder: Path, step: int) -> Path:
    """Flips a bit in a shard of the step."""
    shard = next(checkpoints(folder).glob(f"step-{step}/*.distcp"))
    flip(shard)
    return shard


@pytest.fixture(scope="module")
def saved(tmp_path_factory, token_cache) -> Path:
    """A run of 2 steps."""
    folder = tmp_path_factory.mktemp("saved")
    (outcome,) = run_ranks(attempt, 1, folder, token_cache, {})
    assert outcome.refused == [] and sorted(os.listdir(checkpoints(folder))) == ["step-1", "step-2"]
    return folder


# name: (changed keys, what is refused or said, with {step-2} for the folder)
REFUSED: dict[str, tuple[Overrides, list[str]]] = {
    "fewer layers": (
        {"model.args.num_hidden_layers": "1"},
        ["{step-2}: has more than this run: model.layers.1.", "use the model and arguments"],
    ),
    "more layers": (
        {"model.args.num_hidden_layers": "3"},
        ["{step-2}: lacks model.layers.2.", "use the model and arguments"],
    ),
    "a wider model": (
        {"model.args.hidden_size": "128"},
        ["{step-2}: other shapes: model.embed_tokens.weight [264, 64], here [264, 128];"],
    ),
    "another type": (
        {"training.dtype": "float64", "training.mixed_precision_param": "auto"},
        ["{step-2}: other dtypes: model.embed_tokens.weight float32, here float64;"],
    ),
    "another algorithm": (
        {"optimizer.name": "Muon"},
        [
            "{step-2}: lacks optimizer.layers.0.",
            ".momentum_buffer",
            "{step-2}: has more than this run: optimizer.layers.0.",
            "use the optimizer that it was saved with, or checkpoint.exclude_from_loading",
        ],
    ),
    "another algorithm for some": (
        {"optimizer.param_groups": '[{pattern = "layers.1.mlp.up_proj.weight", name = "Muon"}]'},
        ["{step-2}: lacks optimizer.layers.1.mlp.up_proj.weight.momentum_buffer; use the optimizer that"],
    ),
}
SAID: dict[str, tuple[Overrides, list[str]]] = {
    "nothing changed": ({}, []),
    "other constants": (
        {"optimizer.beta1": "0.8", "optimizer.eps": "1e-6", "optimizer.weight_decay": "0.2"},
        [
            "optimizer.beta1 = 0.8: the checkpoint has 0.9; the config wins",
            "optimizer.eps = 1e-06: the checkpoint has 1e-08; the config wins",
            "optimizer.weight_decay = 0.2: the checkpoint has 0.1; the config wins",
        ],
    ),
    "another rate and schedule": (
        {"optimizer.lr": "5e-4", "lr_scheduler.total_steps": "8"},
        [
            "optimizer.lr = 0.0005: the checkpoint has 0.001; the config wins",
            "lr_scheduler.total_steps = 8: the checkpoint has 6; the config wins",
        ],
    ),
    "other groups": (
        {"optimizer.param_groups": '[{pattern = "lm_head.weight", lr = 1e-4}]'},
        [
            'optimizer.param_groups = [{pattern = "lm_head.weight", name = unset, lr = 0.0001, '
            "weight_decay = unset}]: the checkpoint has []; the config wins"
        ],
    ),
    "another way to compute": ({"optimizer.implementation": "for-loop"}, []),
}


@pytest.fixture(scope="module")
def outcomes(saved, tmp_path_factory, token_cache) -> dict[str, Outcome]:
    calls = {}
    for name, (keys, _) in (REFUSED | SAID).items():
        folder = tmp_path_factory.mktemp("changed")
        shutil.copytree(saved, folder, dirs_exist_ok=True)
        calls[name] = (folder, token_cache, {"training.steps": "3"} | keys)
    model_only = tmp_path_factory.mktemp("model-only")
    calls["model only"] = (model_only, token_cache, MODEL_ONLY)
    initial = {"checkpoint.initial_load_path": str(checkpoints(model_only) / "step-2")}
    whole = initial | {"checkpoint.initial_load_model_only": "false"}
    calls["from weights"] = (tmp_path_factory.mktemp("new"), token_cache, initial)
    calls["from weights as if whole"] = (tmp_path_factory.mktemp("new"), token_cache, whole)
    larger = whole | {"model.args.num_hidden_layers": "3", "checkpoint.load_strict": "false"}
    calls["what matches"] = (tmp_path_factory.mktemp("new"), token_cache, larger | {"training.steps": "3"})
    calls["going on from weights"] = (model_only, token_cache, {"training.steps": "3"})
    return run_ranks(attempts, 1, calls)[0] | {"path": Outcome([str(model_only)], [], None)}


@pytest.mark.parametrize("name", REFUSED)
def test_another_model_or_algorithm_is_refused_by_name(outcomes, name: str) -> None:
    text = "\n".join(outcomes[name].refused)
    assert outcomes[name].step is None
    for part in REFUSED[name][1]:
        assert part.removeprefix("{step-2}") in text
    assert all("/checkpoint/step-2: " in line for line in outcomes[name].refused)


@pytest.mark.parametrize("name", SAID)
def test_changed_settings_are_told_and_win(outcomes, name: str) -> None:
    outcome = outcomes[name]
    assert outcome.refused == [] and outcome.step == 2
    assert [line for line in outcome.said if "the config wins" in line] == SAID[name][1]


def test_a_model_alone_gives_weights_and_what_else_is_asked_of_it_is_refused(outcomes) -> None:
    path = f"{outcomes['path'].said[0]}/out/checkpoint/step-2"
    assert outcomes["from weights"].step == 0 and outcomes["from weights"].refused == []
    assert outcomes["from weights as if whole"].refused == [
        f"command line: checkpoint.initial_load_model_only = false: {path} holds a model only; set it to true"
    ]
    (line,) = outcomes["going on from weights"].refused
    assert "it holds a model only: set checkpoint.initial_load_path to start from it" in line


def test_what_matches_is_loaded_where_that_is_asked_for(outcomes) -> None:
    outcome = outcomes["what matches"]
    path = f"{outcomes['path'].said[0]}/out/checkpoint/step-2"
    assert outcome.refused == [] and outcome.step == 2
    told = [line for line in outcome.said if line.endswith(": skipped, as checkpoint.load_strict = false")]
    assert len(told) == 1 and told[0].startswith(f"{path}: lacks model.layers.2.")


# Damage


def test_a_run_goes_on_from_the_last_whole_step_on_all_ranks(saved, tmp_path, token_cache):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    shard = damage(tmp_path, 2)
    results = run_ranks(attempt, 2, tmp_path, token_cache, {"parallelism.data_parallel_shard_degree": "2"})
    fault = f"{shard}: damaged (its SHA-256 is not that of what was saved)"
    assert [outcome.step for outcome in results] == [1, 1]
    assert results[0].said[:3] == [
        f"{fault}; step 1 is used",
        f"A newer checkpoint was moved aside: {checkpoints(tmp_path)}/abandoned-step-2-0",
        "Resumed from step 1, saved by 1 processes",
    ]
    assert sorted(os.listdir(checkpoints(tmp_path))) == ["abandoned-step-2-0", "step-1", "step-2"]
    assert [line["step"] for line in lines(tmp_path) if "loss" in line][-1] == 2  # done again


def test_damage_of_what_was_asked_for_and_of_everything_is_one_error_on_all_ranks(
    saved, tmp_path, token_cache
):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    shard = damage(tmp_path, 2)
    fault = f"{shard}: damaged (its SHA-256 is not that of what was saved)"
    two = {"parallelism.data_parallel_shard_degree": "2"}
    initial = {"checkpoint.initial_load_path": str(shard.parent), "job.dump_folder": str(tmp_path / "new")}
    calls = {
        "load_step": (tmp_path, token_cache, two | {"checkpoint.load_step": "2"}),
        "initial_load_path": (tmp_path / "other", token_cache, two | initial),
    }
    results = run_ranks(attempts, 2, calls)
    first = damage(tmp_path, 1)
    results += run_ranks(attempts, 2, {"newest": (tmp_path, token_cache, two)})
    for outcome in (*results[0].values(), *results[1].values()):
        assert outcome.refused == [f"{fault}; use another checkpoint"]
    for outcome in (*results[2].values(), *results[3].values()):
        assert outcome.refused == [
            fault,
            f"{first}: damaged (its SHA-256 is not that of what was saved)",
            f"{checkpoints(tmp_path)}: none of its checkpoints is whole; remove them to start afresh",
        ]
    assert sorted(os.listdir(checkpoints(tmp_path))) == ["step-1", "step-2"]

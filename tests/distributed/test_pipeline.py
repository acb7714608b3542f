"""What rows of the layout matrix do not show of a pipeline: validation, the metrics of experts, how often
gradients are exchanged, what is not finite on one stage, weights from and for Hugging Face's form.
"""

import contextlib
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from minititan.hugging_face.reading import open_files
from tests.distributed.expert_layouts import MOE
from tests.distributed.harness import run_ranks
from tests.distributed.layouts import BASE, TIED, Overrides
from tests.distributed.runs import arguments, lines

PIPELINE: Overrides = {
    "parallelism.pipeline_parallel_degree": "2",
    "parallelism.pipeline_parallel_microbatch_size": "4",
    "training.local_batch_size": "16",
}
V_SHAPED: Overrides = PIPELINE | {
    "parallelism.pipeline_parallel_schedule": "ZBVZeroBubble",
    "model.args.num_hidden_layers": "4",
}
VALIDATED: Overrides = {
    "training.steps": "2",
    "validation.enable": "true",
    "validation.dataset": "stdlib",
    "validation.seq_len": "24",
    "validation.local_batch_size": "3",
    "validation.freq": "1",
    "validation.steps": "3",
}


def trainer_of(world: int, folder: Path, cache: Path, keys: Overrides) -> Any:
    from minititan.config import load
    from minititan.distributed import init_distributed
    from minititan.run import check
    from minititan.train import Trainer

    words = arguments(BASE | {"data.cache_folder": str(cache)} | keys, folder)
    return Trainer.build(check(load(words), world), init_distributed(timeout_seconds=120))


def trained(rank: int, world: int, folder: Path, cache: Path, keys: Overrides) -> list[dict[str, Any]]:
    """Train, and return what was logged."""
    with contextlib.redirect_stdout(io.StringIO()):
        trainer_of(world, folder, cache, keys).run()
    return lines(folder) if rank == 0 else []


@pytest.mark.parametrize("keys", [PIPELINE, V_SHAPED | TIED], ids=["1F1B", "ZBVZeroBubble tied"])
def test_validation_is_that_of_one_process(keys: Overrides, tmp_path: Path, token_cache: Path) -> None:
    """At another length and batch size than training's; and training goes on as without it."""
    plain = {key: value for key, value in keys.items() if not key.startswith(("parallelism", "training"))}
    own = run_ranks(trained, 1, tmp_path / "one", token_cache, plain | VALIDATED)[0]
    found = run_ranks(trained, 2, tmp_path / "pp", token_cache, keys | VALIDATED)[0]
    assert len(found) == len(own) == 4
    for one, other in zip(own, found, strict=True):
        for key in ("loss", "grad_norm", "validation_loss"):
            if key in one:
                assert other[key] == pytest.approx(one[key], rel=1e-12)
        assert other.get("validation_tokens") == one.get("validation_tokens")


def test_the_metrics_of_experts_are_of_all_stages(tmp_path: Path, token_cache: Path) -> None:
    keys = MOE | {"training.steps": "2", "training.local_batch_size": "32"}
    own = run_ranks(trained, 1, tmp_path / "one", token_cache, keys)[0]
    found = run_ranks(trained, 2, tmp_path / "pp", token_cache, PIPELINE | keys)[0]
    for one, other in zip(own, found, strict=True):
        assert list(other["routing"]["layers"]) == ["0", "1"]
        assert other["routing"]["auxiliary_loss"] == pytest.approx(one["routing"]["auxiliary_loss"], 1e-12)
        for layer, load in one["routing"]["layers"].items():
            assert other["routing"]["layers"][layer] == pytest.approx(load, rel=1e-12)


def exchanges(rank: int, world: int, folder: Path, cache: Path, keys: Overrides) -> Counter[str]:
    """How often each collective between data-parallel ranks is called in a step."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group

    calls: Counter[str] = Counter()

    def counted(name: str) -> Any:
        plain = getattr(_fsdp_param_group, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return plain(*args, **kwargs)

        return mock.patch.object(_fsdp_param_group, name, call)

    assert _fsdp_collectives is not None
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = trainer_of(world, folder, cache, keys)
        with counted("foreach_reduce"), counted("foreach_all_gather"):
            trainer.step(iter(trainer.loader))
    return calls


@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble"])
def test_gradients_are_exchanged_once_a_step(schedule: str, tmp_path: Path, token_cache: Path) -> None:
    """However many batches and micro-batches there are; parameters are gathered once as well in 1F1B."""
    keys = PIPELINE | {
        "parallelism.pipeline_parallel_schedule": schedule,
        "parallelism.data_parallel_shard_degree": "2",
        "parallelism.pipeline_parallel_microbatch_size": "2",
        "training.local_batch_size": "4",  # four times two micro-batches
        "model.args.num_hidden_layers": "4",
    }
    for calls in run_ranks(exchanges, 4, tmp_path, token_cache, keys):
        units = 4 // 2 + 1  # a rank's layers, and the embedding or the head
        assert calls["foreach_reduce"] == units
        if schedule == "1F1B":
            assert calls["foreach_all_gather"] == units


def broken(rank: int, world: int, folder: Path, cache: Path, keys: Overrides, where: str) -> str:
    """Train with a gradient that is not finite from the parameter `where` on; return the error."""
    from minititan.config import ConfigError

    with contextlib.redirect_stdout(io.StringIO()):
        trainer = trainer_of(world, folder, cache, keys)
        if where in trainer.parameters:
            trainer.parameters[where].register_hook(lambda grad: grad * torch.inf)
        try:
            trainer.run()
        except ConfigError as error:
            return str(error)
    return ""


def test_a_gradient_of_another_stage_is_named(tmp_path: Path, token_cache: Path) -> None:
    name = "layers.1.mlp.up_proj.weight"
    errors = run_ranks(broken, 2, tmp_path, token_cache, PIPELINE, name)
    assert f"the gradient of {name} is not finite on rank 1" in errors[0] and all(errors)


def test_weights_come_from_hugging_face_form_and_go_there(tmp_path: Path, token_cache: Path) -> None:
    """A run of no step but one at a rate of zero writes what it has read."""
    keys = {
        "training.steps": "1",
        "training.dtype": "float32",
        "training.mixed_precision_param": "float32",
        "checkpoint.enable": "true",
        "checkpoint.last_save_model_only": "true",
        "checkpoint.last_save_in_hf": "true",
    }
    run_ranks(trained, 1, tmp_path / "one", token_cache, TIED | keys)
    source = tmp_path / "one" / "out" / "hugging_face" / "step-1"
    keys |= {
        "optimizer.lr": "0",
        "checkpoint.initial_load_in_hf": "true",
        "checkpoint.initial_load_path": str(source),
    }
    run_ranks(trained, 2, tmp_path / "pp", token_cache, PIPELINE | TIED | keys)
    before = open_files(source)
    after = open_files(tmp_path / "pp" / "out" / "hugging_face" / "step-1")
    assert before.entries.keys() == after.entries.keys() and before.entries
    for name in before.entries:
        assert torch.equal(before.read(name), after.read(name)), name
    assert json.loads((source / "config.json").read_text())["tie_word_embeddings"]

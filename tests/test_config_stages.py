"""Which modules a stage of a pipeline has, and what of schedules, stages and micro-batches is refused."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining.schedules import get_schedule_class

from minititan import registry
from minititan.config import Config
from minititan.config.stages import (
    SCHEDULES,
    pipeline_faults,
    schedule_of,
    stage_faults,
    stages_of,
)
from minititan.parallelisms.stages import stage_fault


def config_of(degree: int = 2, schedule: str = "1F1B", local: int = 8, **keys: Any) -> Config:
    keys = {f"pipeline_parallel_{key}": value for key, value in keys.items() if key != "modules"} | {
        "module_fqns_per_model_part": keys.get("modules")
    }
    section = {"pipeline_parallel_degree": degree, "pipeline_parallel_schedule": schedule, **keys}
    return Config.model_validate({"parallelism": section, "training": {"local_batch_size": local}})


def layers(count: int) -> list[str]:
    return [str(layer) for layer in range(count)]


def faults_of(count: int, config: Config) -> list[str]:
    found = [*pipeline_faults(config), *stage_faults(config, layers(count))]
    return [fault.removeprefix("default: ") for fault in found]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_rule_of_micro_batches_is_that_of_the_schedule(name: str, ranks: int) -> None:
    """Against the schedule itself, which refuses, or asserts that each receive has its send."""
    schedule = SCHEDULES[name]
    kind: Any = get_schedule_class(name)
    for of_rank in (1,) if schedule.stages == 1 else (2,) if schedule.stages == 2 else (2, 3):
        stages = [
            SimpleNamespace(
                stage_index=index * ranks,
                num_stages=of_rank * ranks,
                group_rank=0,
                group_size=ranks,
                submod=None,
                is_first=index == 0,
                is_last=False,
            )
            for index in range(of_rank)
        ]
        for micro_batches in range(1, 14):
            takes = True
            try:
                kind(stages if of_rank > 1 else stages[0], n_microbatches=micro_batches, loss_fn=torch.sum)
            except ValueError:
                takes = False
            assert schedule.takes(micro_batches, of_rank * ranks, ranks) == takes, (of_rank, micro_batches)


def test_stages_are_balanced_with_embedding_and_head_counted() -> None:
    def counts(count: int, config: Config) -> list[int]:
        assert faults_of(count, config) == []
        stages = stages_of(config, layers(count))
        names = [name for stage in stages for name in stage]
        assert names == ["embed_tokens", *(f"layers.{i}" for i in range(count)), "norm", "lm_head"]
        assert stages[0][0] == "embed_tokens" and stages[-1][-2:] == ["norm", "lm_head"]
        return [sum(name.startswith("layers.") for name in stage) for stage in stages]

    assert counts(6, config_of()) == [3, 3]
    assert counts(7, config_of()) == [4, 3]
    assert counts(16, config_of(4)) == [4, 5, 4, 3]
    assert counts(4, config_of(4)) == [1, 2, 1, 0]
    assert counts(6, config_of(first_stage_less_layers=0, last_stage_less_layers=2)) == [4, 2]
    assert counts(6, config_of(schedule="Interleaved1F1B")) == [1, 2, 2, 1]
    assert counts(10, config_of(schedule="LoopedBFS", layers_per_stage=2)) == [1, 2, 2, 2, 2, 1]


def test_stages_by_name() -> None:
    modules = [["tok_embeddings", "layers.0"], ["layers.1", "layers.2", "norm", "output"]]
    config = config_of(modules=modules)
    assert faults_of(3, config) == []
    assert stages_of(config, layers(3), ["positions"]) == [
        ["positions", "embed_tokens", "layers.0"],
        ["layers.1", "layers.2", "norm", "lm_head"],
    ]


WRONG_MODULES = {
    "model has no layers.9": [["embed_tokens", "layers.0", "layers.9"], ["layers.1", "norm", "lm_head"]],
    "layers.0 is there 2 times": [["embed_tokens", "layers.0"], ["layers.0", "layers.1", "norm", "lm_head"]],
    "lacks layers.1": [["embed_tokens", "layers.0"], ["norm", "lm_head"]],
    "in its order": [["embed_tokens", "layers.1"], ["layers.0", "norm", "lm_head"]],
    "norm with lm_head in the last": [["embed_tokens", "layers.0", "layers.1", "norm"], ["lm_head"]],
    "makes 1 stages; 1F1B needs 2": [["embed_tokens", "layers.0", "layers.1", "norm", "lm_head"]],
}


@pytest.mark.parametrize("rule", WRONG_MODULES)
def test_modules_that_are_no_stages(rule: str) -> None:
    (fault,) = faults_of(2, config_of(modules=WRONG_MODULES[rule]))
    assert fault.startswith("parallelism.module_fqns_per_model_part = ") and rule in fault


REFUSED = {
    'parallelism.pipeline_parallel_schedule = "Interleave1F1B": no such schedule; nearest: Interleaved1F1B; '
    "there are: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble, DualPipeV": (
        4,
        config_of(schedule="Interleave1F1B"),
    ),
    "parallelism.pipeline_parallel_microbatch_size = 3: must divide training.local_batch_size (8); "
    "allowed: 1, 2, 4, 8": (4, config_of(microbatch_size=3, schedule="GPipe")),
    "parallelism.pipeline_parallel_microbatch_size = 4: of training.local_batch_size = 8 2 micro-batches are "
    "fewer than the 4 stages of 1F1B; allowed: 1, 2": (4, config_of(4, microbatch_size=4)),
    "parallelism.pipeline_parallel_microbatch_size = 1: of training.local_batch_size = 9 9 micro-batches do "
    "not go in even rounds: must be a multiple of 4; allowed: 3, 9": (
        4,
        config_of(schedule="Interleaved1F1B", local=9),
    ),
    "parallelism.pipeline_parallel_degree = 4: 1 layers (3 with embedding and head) are fewer than 4 stages; "
    "use fewer stages or more layers": (1, config_of(4)),
    "parallelism.pipeline_parallel_first_stage_less_layers = 9: is more than the layers of a stage (7); "
    "allowed: 0 to 7": (4, config_of(first_stage_less_layers=9)),
    "parallelism.pipeline_parallel_layers_per_stage = 2: makes 3 stages; 1F1B needs 2: 1 on each of 2 ranks; "
    "allowed: 3, 4, 5, or leave it out": (4, config_of(layers_per_stage=2)),
    "parallelism.pipeline_parallel_layers_per_stage = 1: makes 6 stages; ZBVZeroBubble needs 4: 2 on each of "
    "2 ranks; leave it out": (4, config_of(schedule="ZBVZeroBubble", layers_per_stage=1)),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_refused(fault: str) -> None:
    assert faults_of(*REFUSED[fault]) == [fault]


def test_a_split_backward_pass_goes_with_no_compile_no_resharding_no_choice_by_operator() -> None:
    keys = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "zbvzerobubble"}
    tables = {
        "parallelism": keys | {"fsdp_reshard_after_forward": "always"},
        "compile": {"enable": True},
        "activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"},
    }
    config = Config.model_validate(tables)
    assert [fault.split(" = ")[0].removeprefix("default: ") for fault in pipeline_faults(config)] == [
        "parallelism.pipeline_parallel_schedule",
        "activation_checkpoint.selective_ac_option",
        "parallelism.fsdp_reshard_after_forward",
    ]
    found = schedule_of(config)
    assert found is not None and found.name == "ZBVZeroBubble"
    tables["parallelism"]["pipeline_parallel_schedule"] = "1F1B"
    assert pipeline_faults(Config.model_validate(tables)) == []


@pytest.mark.parametrize("family", ["llama3", "qwen3", "deepseek_v3", "gpt_oss"])
def test_a_family_can_be_cut_into_stages(family: str) -> None:
    spec = registry.families()[family]
    for flavor in ("debugmodel", "debugmodel_moe"):
        if (args := spec.flavors.get(flavor)) is not None:
            _, args = registry.resolve(family, flavor, {}, 64, lambda *words: ": ".join(words))
            with torch.device("meta"):
                part = spec.build(args)
            assert stage_fault(part, args.hidden_size) is None


class NoSeams(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.norm = torch.nn.Embedding(8, 4), torch.nn.LayerNorm(4)
        self.layers = torch.nn.ModuleDict({"0": torch.nn.Linear(4, 4)})
        self.lm_head = torch.nn.Linear(4, 8, bias=False)

    def forward(self, tokens: torch.Tensor, positions: Any = None, document_ids: Any = None) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.norm(x)


def test_a_model_that_needs_all_its_parts_is_named() -> None:
    assert (stage_fault(NoSeams(), 4) or "").startswith("its forward does not go on without absent parts")


@pytest.fixture(autouse=True)
def quiet() -> Any:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)

"""How experts are spread is refused where it does not fit the model or the processes, with what would fit."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from minititan.config import ConfigError, load
from minititan.run import check
from tests.test_config_validate import SHARD, TP, Args, faults_of, layout_of

EP = "parallelism__expert_parallel_degree"
ETP = "parallelism__expert_tensor_parallel_degree"


@dataclass(frozen=True)
class Mixture(Args):
    num_experts: int = 12


def test_layouts() -> None:
    spread = layout_of(8, Mixture(), **{EP: 4, TP: 2})
    assert (spread.dp_shard, spread.tp, spread.ep, spread.etp) == (4, 2, 4, 1)
    split = layout_of(8, Mixture(), **{EP: 4, TP: 2, ETP: 2})
    assert (split.dp_shard, split.tp, split.ep, split.etp) == (4, 2, 4, 2)
    off = layout_of(8, Mixture(), **{TP: 4, ETP: 3})  # with experts whole, its value counts for nothing
    assert (off.ep, off.etp) == (1, 1)


def test_experts_that_do_not_divide() -> None:
    key = "parallelism.expert_parallel_degree"
    assert faults_of(8, Mixture(), **{EP: 8}) == [
        f"{key} = 8: must divide num_experts (12); allowed: 1, 2, 4"
    ]
    # Wrong degrees of the others are told as well; what would fit is then not known.
    faults = faults_of(8, Mixture(), **{EP: 5, SHARD: 3})
    assert len(faults) == 2 and faults[1] == f"{key} = 5: must divide num_experts (12)"


def test_more_than_the_ranks_that_there_are() -> None:
    key = "parallelism.expert_parallel_degree"
    assert faults_of(4, Mixture(), **{EP: 6}) == [
        f"{key} = 6: must divide data_parallel_shard_degree x tensor_parallel_degree (4); allowed: 1, 2, 4"
    ]
    assert faults_of(8, Mixture(), **{EP: 12, TP: 2, ETP: 2}) == [
        f"{key} = 12: must divide data_parallel_shard_degree (4); allowed: 1, 2, 4"
    ]
    replicas = {"parallelism__data_parallel_replicate_degree": 4}  # each has all experts
    assert faults_of(8, Mixture(), **{EP: 4}, **replicas)[0].endswith("(2); allowed: 1, 2")


def test_the_degree_inside_an_expert() -> None:
    assert faults_of(8, Mixture(), **{EP: 2, TP: 4, ETP: 2}) == [
        "parallelism.expert_tensor_parallel_degree = 2: must be 1 or tensor_parallel_degree (4); "
        "with 1, experts are spread over those ranks too"
    ]


@pytest.mark.parametrize("args", [Args(), Mixture(num_experts=0)])
def test_a_model_without_experts(args: Any) -> None:
    assert faults_of(8, args, **{EP: 2}) == [
        'parallelism.expert_parallel_degree = 2: the model "llama3" debugmodel has no experts; use 1'
    ]


def test_a_router_needs_the_sequence_split() -> None:
    whole: dict[str, Any] = {TP: 2, "parallelism__disable_sequence_parallel": True}
    assert layout_of(2, Args(), **whole).tp == 2
    assert faults_of(2, Mixture(), **whole) == [
        "parallelism.disable_sequence_parallel = true: a mixture of experts needs the sequence split under "
        "tensor parallelism; set it to false"
    ]


def faults_of_run(folder: Path, world_size: int, *words: str) -> tuple[str, ...]:
    (folder / "run.toml").write_text('[model]\nname = "qwen3"\nflavor = "debugmodel_moe"\n')
    common = [f"--job.config_file={folder}/run.toml", f"--job.dump_folder={folder}/out"]
    with pytest.raises(ConfigError) as caught:
        check(load([*common, *words]), world_size)
    return caught.value.faults


def test_an_expert_is_split_evenly(tmp_path: Path) -> None:
    degrees = "--parallelism.tensor_parallel_degree=4", "--parallelism.expert_parallel_degree=2"
    width = "--model.args.moe_intermediate_size=90"
    rule = "the hidden width of layers.0.mlp.experts.gate_proj (90) must be a multiple of 4"
    assert rule in faults_of_run(tmp_path, 4, degrees[0], width)[0]
    faults = faults_of_run(tmp_path, 8, *degrees, width, "--parallelism.expert_tensor_parallel_degree=4")
    assert rule in faults[0]
    # Whole experts have any width: the one fault is of another key.
    assert len(faults_of_run(tmp_path, 4, *degrees, width, "--training.seq_len=18")) == 1

"""How sequences are split is refused where it does not fit their length, the heads or the model."""

import logging
from pathlib import Path
from typing import Any

import pytest

from minititan.config import ConfigError, load
from minititan.run import check
from tests.test_config_experts import EP, ETP, Mixture
from tests.test_config_validate import SHARD, TP, Args, faults_of, layout_of

CP = "parallelism__context_parallel_degree"
METHOD: dict[str, Any] = {"parallelism__context_parallel_method": "all_to_all"}
UNBALANCED: dict[str, Any] = {"parallelism__context_parallel_load_balancer": "none"}
KEY = "parallelism.context_parallel_degree"


def test_layouts() -> None:
    layout = layout_of(8, **{CP: 2, TP: 2})
    assert (layout.dp_shard, layout.cp, layout.tp, layout.dp) == (2, 2, 2, 2)
    assert layout.batch_sizes.at(1) == 16  # ranks of one sequence do not count
    assert layout_of(8, Mixture(), **{CP: 2, TP: 2, EP: 4, SHARD: 2}).ep == 4  # over ranks of all three


def test_lengths() -> None:
    seq_len = {"training__seq_len": 100}
    assert faults_of(4, **{CP: 4}, **seq_len) == [
        "training.seq_len = 100: must be a multiple of 2 x context_parallel_degree (4) = 8; nearest: 96 or "
        '104; or set context_parallel_load_balancer = "none"'
    ]
    assert layout_of(4, **{CP: 4}, **seq_len, **UNBALANCED).cp == 4
    assert faults_of(4, **{CP: 4}, **UNBALANCED, training__seq_len=3) == [
        "training.seq_len = 3: must be a multiple of context_parallel_degree (4); nearest: 4"
    ]
    both = {CP: 2, TP: 4}
    assert faults_of(8, **both, **seq_len, **UNBALANCED) == [
        "training.seq_len = 100: must be a multiple of context_parallel_degree (2) x tensor_parallel_degree "
        "(4) = 8; nearest: 96 or 104; or set parallelism.disable_sequence_parallel"
    ]
    validation = {"validation__enable": True, "validation__seq_len": 24}
    assert [fault.partition(" x ")[0] for fault in faults_of(8, **both, **seq_len, **validation)] == [
        "training.seq_len = 100: must be a multiple of 2",
        "validation.seq_len = 24: must be a multiple of 2",
    ]
    whole = {"parallelism__disable_sequence_parallel": True}
    assert layout_of(8, **both, **seq_len, **validation, **whole).cp == 2


def test_degrees_that_do_not_multiply() -> None:
    assert faults_of(8, **{CP: 3}, **UNBALANCED, training__seq_len=300) == [
        f"{KEY} = 3: times data_parallel_replicate_degree (1) must divide the world size (8)"
    ]
    assert faults_of(8, **{CP: 2, SHARD: 8}) == [
        "parallelism.data_parallel_shard_degree = 8: times data_parallel_replicate_degree (1) times "
        "tensor_parallel_degree (1) times context_parallel_degree (2) is 16 and must be the world size (8); "
        "allowed: 4, or -1"
    ]


def test_heads() -> None:
    args = Args(num_attention_heads=12, num_key_value_heads=2)
    length = {"training__seq_len": 1920}
    assert layout_of(8, args, **{CP: 8}, **length).cp == 8  # the method that gathers takes any number
    assert faults_of(8, args, **{CP: 8}, **METHOD, **length) == [
        f"{KEY} = 8: must divide num_attention_heads (12) with context_parallel_method = "
        '"all_to_all"; allowed: 1, 2, 3, 4, 6, 12; or use "all_gather"'
    ]
    assert faults_of(8, args, **{CP: 4, TP: 2}, **METHOD, **length) == [
        f"{KEY} = 4: times tensor_parallel_degree (2) must divide num_attention_heads (12) with "
        'context_parallel_method = "all_to_all"; allowed: 1, 2, 3, 6; or use "all_gather"'
    ]
    assert layout_of(4, args, **{CP: 4}, **METHOD, **length).cp == 4  # its kv heads are repeated
    assert layout_of(8, object(), **{CP: 8}, **METHOD).cp == 8


def test_experts_over_ranks_of_one_sequence() -> None:
    assert faults_of(8, Mixture(), **{CP: 4, EP: 3, TP: 2, SHARD: 1}) == [
        "parallelism.expert_parallel_degree = 3: must divide data_parallel_shard_degree x "
        "context_parallel_degree x tensor_parallel_degree (8); allowed: 1, 2, 4"
    ]
    assert faults_of(8, Mixture(), **{CP: 4, EP: 6, TP: 2, ETP: 2})[0].endswith(
        "must divide data_parallel_shard_degree x context_parallel_degree (4); allowed: 1, 2, 4"
    )


def loaded(folder: Path, *words: str) -> Any:
    (folder / "run.toml").touch()
    common = [f"--job.config_file={folder}/run.toml", f"--job.dump_folder={folder}/out"]
    return load([*common, f"--{KEY}=2", *(f"--parallelism.context_parallel_{word}" for word in words)])


def test_only_the_balancers_that_are_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, "load_balancer=ptrr")
    assert caught.value.faults == (
        'command line: parallelism.context_parallel_load_balancer = "ptrr": must be one of "headtail", '
        '"none"',
    )
    assert loaded(tmp_path, "load_balancer=").parallelism.context_parallel_load_balancer is None


def test_the_method_of_torchtitan_is_another_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for words in (["rotate_method=allgather"], ["rotate_method=alltoall", "method=all_to_all"]):
        loaded(tmp_path, *words)
        assert caplog.messages == []
    loaded(tmp_path, "rotate_method=alltoall")
    assert caplog.messages == [
        'command line: parallelism.context_parallel_rotate_method = "alltoall": keys and values are gathered '
        'at once, as by context_parallel_method = "all_gather"; the other method is "all_to_all", by heads'
    ]


def test_a_model_whose_attention_knows_its_own_tokens_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "docs" / "examples")
    (tmp_path / "run.toml").write_text('[model]\nname = "scaled_gpt"\nflavor = "small"\n')
    words = [f"--job.config_file={tmp_path}/run.toml", f"--job.dump_folder={tmp_path}/out"]
    with pytest.raises(ConfigError) as caught:
        check(load([*words, "--experimental.custom_import=scaled_gpt", f"--{KEY}=2"]), 2)
    assert caught.value.faults == (
        f"command line: {KEY} = 2: its model has no `causal_mask` that it takes masks from; docs/models.md "
        "says what it takes, or use 1",
    )

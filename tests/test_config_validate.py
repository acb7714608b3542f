"""A layout that does not fit the processes or the model is refused, with the values that would fit."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minititan.config import Config, ConfigError, Layout, load, validate
from minititan.config.batches import BatchSizes
from minititan.config.data import BatchSize
from minititan.config.validate import divisors


@dataclass(frozen=True)
class Args:
    """Llama 3.1 8B's numbers."""

    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    vocab_size: int = 128256
    max_position_embeddings: int = 131072
    tie_word_embeddings: bool = False


def config_of(**overrides: Any) -> Config:
    """`training__seq_len=8` stands for `training.seq_len = 8`."""
    tables: dict[str, dict[str, Any]] = {}
    for name, value in overrides.items():
        section, _, key = name.partition("__")
        tables.setdefault(section, {})[key] = value
    return Config.model_validate(tables)


def layout_of(
    world_size: int, args: Any = Args(), plan: Any = True, vocab: Any = 264, **overrides: Any
) -> Layout:
    return validate(config_of(**overrides), args, world_size, tensor_parallel_plan=plan, vocab_size=vocab)


def faults_of(*positional: Any, **overrides: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        layout_of(*positional, **overrides)
    return [fault.removeprefix("default: ") for fault in caught.value.faults]


REPLICATE = "parallelism__data_parallel_replicate_degree"
SHARD = "parallelism__data_parallel_shard_degree"
TP = "parallelism__tensor_parallel_degree"


def batches(size: int, *changes: tuple[int, int]) -> BatchSizes:
    return BatchSizes(((1, size), *changes))


def test_layouts() -> None:
    assert layout_of(1) == Layout(1, 1, 1, 1, batches(8), 8)
    assert layout_of(8, **{TP: 2}) == Layout(8, 1, 4, 2, batches(32), 8)
    hsdp = layout_of(16, **{REPLICATE: 2, SHARD: 4, TP: 2}, training__global_batch_size=128)
    assert hsdp == Layout(16, 2, 4, 2, batches(128), 8)
    assert hsdp.dp == 8 and hsdp.accumulation_steps(1) == 2
    replicated = layout_of(
        2, **{REPLICATE: 2, SHARD: 1}, training__local_batch_size=3, training__global_batch_size=18
    )
    assert replicated == Layout(2, 2, 1, 1, batches(18), 3)


def test_batch_sizes_change_at_their_steps() -> None:
    sizes = batches(8, (4, 16), (5, 2))
    assert [sizes.at(step) for step in range(1, 8)] == [8, 8, 8, 16, 2, 2, 2]
    assert [sizes.run(step) for step in (1, 3, 4, 5, 100)] == [(8, 3), (8, 1), (16, 1), (2, None), (2, None)]
    for first in range(1, 8):
        for last in range(first - 1, 9):
            samples = sum(sizes.at(step) for step in range(first, last + 1))
            assert sizes.samples(first, last) == samples
            assert sizes.steps(first, samples) == last - first + 1
            assert sizes.steps(first, samples + sizes.at(last + 1) - 1) == last - first + 1


def test_every_size_of_a_schedule_must_fit() -> None:
    schedule = (BatchSize(step=3, size=24), BatchSize(step=9, size=32))
    more = {"training__global_batch_size": 16, "training__global_batch_size_schedule": schedule}
    (fault,) = faults_of(2, **more)
    key, rule = fault.split(" = ", 1)
    assert key == "training.global_batch_size_schedule"
    assert "size 24 must be a multiple of local_batch_size (8) x data-parallel degree (2) = 16; " in rule
    assert rule.endswith("nearest: 16 or 32")


DEGREES = [
    (
        8,
        {TP: 3},
        "parallelism.tensor_parallel_degree = 3: times data_parallel_replicate_degree (1) must divide the "
        "world size (8); allowed: 1, 2, 4, 8",
    ),
    (
        64,
        {TP: 3},
        "parallelism.tensor_parallel_degree = 3: times data_parallel_replicate_degree (1) must divide the "
        "world size (64); allowed: 1, 2, 4, 8",
    ),
    (
        12,
        {REPLICATE: 3, TP: 8},
        "parallelism.tensor_parallel_degree = 8: times data_parallel_replicate_degree (3) must divide the "
        "world size (12); allowed: 1, 2, 4",
    ),
    (
        8,
        {REPLICATE: 3},
        "parallelism.data_parallel_replicate_degree = 3: times tensor_parallel_degree (1) must divide the "
        "world size (8); allowed: 1, 2, 4, 8",
    ),
    (
        8,
        {REPLICATE: 4, TP: 4},
        "parallelism.data_parallel_replicate_degree = 4: times tensor_parallel_degree (4) must divide the "
        "world size (8); allowed: 1, 2",
    ),
    (
        8,
        {REPLICATE: 2, SHARD: 3, TP: 2},
        "parallelism.data_parallel_shard_degree = 3: times data_parallel_replicate_degree (2) times "
        "tensor_parallel_degree (2) is 12 and must be the world size (8); allowed: 2, or -1",
    ),
    (
        8,
        {SHARD: 4},
        "parallelism.data_parallel_shard_degree = 4: times data_parallel_replicate_degree (1) times "
        "tensor_parallel_degree (1) is 4 and must be the world size (8); allowed: 8, or -1",
    ),
]


@pytest.mark.parametrize("world_size, degrees, fault", DEGREES)
def test_degrees_that_do_not_multiply(world_size: int, degrees: dict, fault: str) -> None:
    assert fault in faults_of(world_size, training__seq_len=2400, **degrees)


def test_degrees_of_which_none_divides() -> None:
    assert faults_of(8, object(), **{REPLICATE: 3, TP: 5}, training__seq_len=2000) == [
        "parallelism.data_parallel_replicate_degree = 3: must divide the world size (8); allowed: 1, 2, 4, 8",
        "parallelism.tensor_parallel_degree = 5: times data_parallel_replicate_degree (1) must divide the "
        "world size (8); allowed: 1, 2, 4, 8",
    ]


@settings(deadline=None)  # a busy machine is no fault
@given(st.integers(1, 64), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9) | st.just(-1))
def test_degrees_multiply_or_every_allowed_value_does(
    world_size: int, replicate: int, tp: int, shard: int
) -> None:
    degrees = {REPLICATE: replicate, TP: tp, SHARD: shard, "parallelism__disable_sequence_parallel": True}
    try:
        layout = layout_of(world_size, object(), **degrees)
    except ConfigError as error:
        assert shard == -1 or replicate * tp * shard != world_size
        key, _, allowed = error.faults[0].removeprefix("default: ").partition("; allowed: ")
        name = key.split(" = ")[0].replace(".", "__")
        for value in allowed.removesuffix(", or -1").split(", "):
            fitting = degrees | {name: int(value), SHARD: -1}
            if len(error.faults) == 1:
                assert layout_of(world_size, object(), **fitting).world_size == world_size
    else:
        assert layout.dp_replicate * layout.dp_shard * layout.tp == world_size
        assert (layout.dp_replicate, layout.tp) == (replicate, tp)


def test_heads() -> None:
    assert faults_of(3, training__seq_len=2049, **{TP: 3}) == [
        "parallelism.tensor_parallel_degree = 3: must divide num_key_value_heads (8); allowed: 1, 2, 4, 8"
    ]
    assert faults_of(8, Args(num_attention_heads=12, num_key_value_heads=8), **{TP: 8}) == [
        "parallelism.tensor_parallel_degree = 8: must divide num_attention_heads (12); allowed: 1, 2, 4"
    ]
    assert layout_of(8, **{TP: 8}).tp == 8
    assert layout_of(5, object(), training__seq_len=2000, **{TP: 5}).tp == 5


def test_the_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "llama3_8b.toml"
    file.write_text("[parallelism]\ntensor_parallel_degree = 3\n[training]\nseq_len = 2049")
    with pytest.raises(ConfigError) as caught:
        validate(load(["--job.config_file", str(file)]), Args(), 3, tensor_parallel_plan=True, vocab_size=264)
    assert caught.value.faults == (
        "llama3_8b.toml: parallelism.tensor_parallel_degree = 3: must divide num_key_value_heads (8); "
        "allowed: 1, 2, 4, 8",
    )


def test_no_tensor_parallel_plan() -> None:
    assert faults_of(2, Args(), False, **{TP: 2}) == [
        'parallelism.tensor_parallel_degree = 2: the model "llama3" has no tensor-parallel plan; give its '
        "spec one, or use 1"
    ]
    assert layout_of(2, Args(), False).tp == 1


def test_sequence_parallel_lengths() -> None:
    rule = "must be a multiple of tensor_parallel_degree (4) for sequence parallelism"
    way_out = "or set parallelism.disable_sequence_parallel"
    validation = {"validation__enable": True, "validation__seq_len": 3}
    assert faults_of(4, **{TP: 4}, training__seq_len=10, **validation) == [
        f"training.seq_len = 10: {rule}; nearest: 8 or 12; {way_out}",
        f"validation.seq_len = 3: {rule}; nearest: 4; {way_out}",
    ]
    assert layout_of(4, **{TP: 4}, training__seq_len=12, validation__seq_len=3).tp == 4
    whole = {"parallelism__disable_sequence_parallel": True}
    assert layout_of(4, **{TP: 4}, training__seq_len=10, **validation, **whole).tp == 4
    assert layout_of(4, training__seq_len=10).tp == 1


def test_longer_than_the_model_goes() -> None:
    args = Args(max_position_embeddings=1024)
    rule = "must be at most the model's max_position_embeddings (1024)"
    way_out = "lower it, or raise model.args.max_position_embeddings"
    assert faults_of(1, args, validation__enable=True, validation__seq_len=1025) == [
        f"training.seq_len = 2048: {rule}; {way_out}",
        f"validation.seq_len = 1025: {rule}; {way_out}",
    ]
    assert layout_of(1, args, training__seq_len=1024)


def test_global_batch() -> None:
    rule = "must be a multiple of local_batch_size (3) x data-parallel degree (4) = 12"
    batch = {"training__local_batch_size": 3, TP: 2}
    assert faults_of(8, **batch, training__global_batch_size=20) == [
        f"training.global_batch_size = 20: {rule}; nearest: 12 or 24, or -1"
    ]
    assert faults_of(8, **batch, training__global_batch_size=6) == [
        f"training.global_batch_size = 6: {rule}; nearest: 12, or -1"
    ]
    assert layout_of(8, **batch, training__global_batch_size=36).accumulation_steps(1) == 3
    assert layout_of(8, **batch).batch_sizes.at(1) == 12


def test_vocabulary() -> None:
    assert faults_of(1, Args(vocab_size=256), True, 264) == [
        'model.hf_assets_path = "": the tokenizer has 264 ids, the model\'s vocabulary only 256; '
        "set model.args.vocab_size = 264, or use the model's tokenizer"
    ]
    assert layout_of(1, Args(vocab_size=264), True, 264)
    assert layout_of(1, object(), True, 264)


def test_tied_embedding_is_split_with_its_head() -> None:
    whole = {"parallelism__disable_embedding_parallel": True}
    tied = Args(tie_word_embeddings=True)
    assert faults_of(2, tied, **{TP: 2}, **whole) == [
        "parallelism.disable_embedding_parallel = true: a tied embedding and head are split together under "
        "tensor parallelism; use false, or untie them"
    ]
    assert (
        layout_of(2, tied, **whole)
        and layout_of(2, tied, **{TP: 2})
        and layout_of(2, Args(), **{TP: 2}, **whole)
    )


def test_all_faults_at_once() -> None:
    found = faults_of(
        8,
        Args(vocab_size=256, max_position_embeddings=64),
        **{TP: 3, SHARD: -1},
        training__seq_len=128,
        lr_scheduler__total_steps=1,
    )
    assert [fault.split(" = ")[0] for fault in found] == [
        "lr_scheduler.total_steps",
        "parallelism.tensor_parallel_degree",
        "training.seq_len",
        "training.seq_len",
        "model.hf_assets_path",
        "parallelism.tensor_parallel_degree",
    ]


def test_rules_without_layout_hold_here_too() -> None:
    assert faults_of(2, **{TP: 0}) == ["parallelism.tensor_parallel_degree = 0: must be at least 1"]
    assert faults_of(2, parallelism__enable_async_tensor_parallel=True)[0].startswith(
        "parallelism.enable_async_tensor_parallel = true: asynchronous tensor parallelism is not there yet"
    )


@given(st.integers(1, 5000))
def test_divisors(number: int) -> None:
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]

"""Which dimension FSDP shards beside tensor parallelism, against where DTensor looks for the shards."""

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from minititan.config import ConfigError, load
from minititan.parallelisms.fsdp import splits_alike, uneven_faults
from minititan.run import check


def chunk(start: int, rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """First row and number of rows of a rank."""
    size = -(-rows // ranks)
    first = min(rows, size * rank)
    return start + first, min(rows, first + size) - first


def dtensor_finds_them(rows: int, tp: int, shards: int) -> bool:
    for shard, rank in itertools.product(range(shards), range(tp)):
        first, size = chunk(*chunk(0, rows, tp, rank), shards, shard)
        (found_size,), (found_first,) = _compute_local_shape_and_global_offset(
            (rows,), (shards, tp), [shard, rank], [_StridedShard(0, split_factor=tp), Shard(0)]
        )
        if size != found_size or (size and first != found_first):
            return False
    return True


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("shards", [1, 2, 3, 4, 5])
def test_splits_alike_says_whether_dtensor_knows_the_shards(tp: int, shards: int) -> None:
    for rows in range(1, 48):
        assert splits_alike(rows, tp, shards) == dtensor_finds_them(rows, tp, shards), rows


def test_the_smallest_example() -> None:
    """7 rows on tp 2 are 4 and 3, on 3 shards 2, 2, 0 and 1, 1, 1; DTensor looks for 2, 2, 1 and 1, 1, 0."""
    assert not splits_alike(7, 2, 3)
    assert splits_alike(8, 2, 3)


def test_what_can_be_sharded_in_neither_dimension() -> None:
    model = nn.ModuleDict({"wide": nn.Linear(6, 7), "narrow": nn.Linear(5, 7, bias=False)})
    assert uneven_faults(model, {"wide": "column", "narrow": "column"}, 2, 3) == [
        "the 7 rows of wide.bias do not split evenly over 2 ranks and 3 shards",
        "the 7 rows of narrow.weight do not split evenly over 2 ranks and 3 shards, "
        "nor its 5 columns over the shards alone",
    ]
    assert uneven_faults(model, {"wide": "column", "narrow": "row"}, 6, 1) == [
        "the 7 rows of wide.weight leave some of 6 tensor-parallel ranks without any",
        "the 7 rows of wide.bias leave some of 6 tensor-parallel ranks without any",
    ]
    assert uneven_faults(model, {"wide": "residual", "narrow": "row"}, 2, 3) == []


def test_it_is_a_fault_of_the_config(tmp_path: Path) -> None:
    (tmp_path / "run.toml").touch()
    keys = {
        "parallelism.tensor_parallel_degree": 2,
        "model.args.vocab_size": 265,
        "training.local_batch_size": 1,
        "job.dump_folder": tmp_path / "out",
    }
    words = [f"--job.config_file={tmp_path}/run.toml", *(f"--{key}={value}" for key, value in keys.items())]
    check(load(words), world_size=8)  # 192 columns over 4 shards
    with pytest.raises(ConfigError, match=r"tensor_parallel_degree = 2: the 265 rows of embed_tokens"):
        check(load([*words, "--model.args.hidden_size=176"]), world_size=12)
    assert torch.distributed.is_initialized() is False

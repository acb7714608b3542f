"""The harness itself: a rank's failure, death or hang is an error with its cause, never a hang or a pass."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.harness import RankError, run_ranks


def sum_of_ranks(rank: int, world: int, offset: torch.Tensor) -> tuple[int, torch.Tensor]:
    total = offset + rank
    dist.all_reduce(total)
    return rank, total


def fail_on_one(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("the cause")
    dist.barrier()


def die_on_one(rank: int, world: int) -> None:
    if rank == 0:
        os._exit(7)
    dist.barrier()


def hang_on_one(rank: int, world: int) -> None:
    if rank == 1:
        time.sleep(3600)


def environment(rank: int, world: int) -> tuple[str, str, int]:
    return os.environ["RANK"], os.environ["WORLD_SIZE"], torch.get_num_threads()


def test_a_failing_rank_raises_with_its_traceback_and_ends_the_others():
    started = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1:\n(?s:.*)in fail_on_one(?s:.*)ValueError: the cause"):
        run_ranks(fail_on_one, 3)
    assert time.monotonic() - started < 60


def test_a_dying_rank_raises():
    with pytest.raises(RankError, match="rank 0: died with exit code 7"):
        run_ranks(die_on_one, 2)


def test_a_hanging_rank_times_out_and_says_where():
    run_ranks(environment, 1)  # the server is warm, so the time below is the rank's own
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"had not ended after 5 s(?s:.*)rank 1:(?s:.*)in hang_on_one"):
        run_ranks(hang_on_one, 2, timeout=5)
    assert time.monotonic() - started < 30


def test_results_come_in_rank_order_and_tensors_are_copied():
    results = run_ranks(sum_of_ranks, 4, torch.tensor([1.0, 0.5]))
    assert [rank for rank, _ in results] == [0, 1, 2, 3]
    for _, total in results:
        assert total.tolist() == [10.0, 8.0]  # 4 x offset + 0 + 1 + 2 + 3


def test_each_rank_knows_its_place_and_has_one_thread():
    assert run_ranks(environment, 2) == [("0", "2", 1), ("1", "2", 1)]

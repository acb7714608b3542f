"""Runs a function on several gloo ranks, each a process forked from a server that has torch loaded.

Importing torch is nearly the whole cost of starting ranks; the server pays it once a test session. Ranks meet
through a file, so no ports are used. Arguments and results travel as plain pickles: tensors are copied, not
shared, and a result outlives its process.
"""

import datetime
import faulthandler
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar

R = TypeVar("R")

# How long the other ranks may go on after one has failed, so that they can report too.
GRACE_SECONDS = 3.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.distributed.preload"])


class RankError(RuntimeError):
    """At least one rank failed; the message holds their tracebacks, the first to fail first."""


def run_ranks(fn: Callable[..., R], nprocs: int, *args: object, timeout: float = 120) -> list[R]:
    """The results of `fn(rank, nprocs, *args)` on `nprocs` ranks, in rank order.

    `fn` is a function at the top of a module; the default process group exists when it is called and is taken
    down after it. RankError: a rank raised or died. TimeoutError, with the stacks: one had not ended
    `timeout` seconds after the last one started. No rank outlives the call.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        call = pickle.dumps((fn, args))
        ranks = [
            _context.Process(target=_rank_main, args=(call, rank, nprocs, folder, timeout))
            for rank in range(nprocs)
        ]
        try:
            for process in ranks:
                process.start()
            ended = _wait(ranks, timeout)
        finally:
            for process in ranks:
                if process.pid is not None:
                    process.kill()
                    process.join()
        _raise_faults(ranks, folder, ended, timeout)
        return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(nprocs)]


def _wait(ranks: Sequence[BaseProcess], timeout: float) -> list[bool]:
    """Which ranks ended by themselves; returns early once one has failed and the grace is over."""
    deadline = time.monotonic() + timeout
    failed = False
    while alive := [process for process in ranks if process.exitcode is None]:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        connection.wait([process.sentinel for process in alive], timeout=left)
        if not failed and any(process.exitcode for process in ranks):
            failed = True
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return [process.exitcode is not None for process in ranks]


def _raise_faults(ranks: Sequence[BaseProcess], folder: Path, ended: list[bool], timeout: float) -> None:
    errors = sorted(folder.glob("error-*"), key=lambda path: path.stat().st_mtime_ns)
    texts = [f"rank {path.name.removeprefix('error-')}:\n{path.read_text()}" for path in errors]
    for rank, process in enumerate(ranks):
        if ended[rank] and process.exitcode != 0 and not (folder / f"error-{rank}").exists():
            texts.append(f"rank {rank}: died with exit code {process.exitcode}")
    if texts:
        raise RankError("\n".join(texts))
    if not all(ended):
        hung = [rank for rank, done in enumerate(ended) if not done]
        stacks = [f"rank {rank}:\n{(folder / f'stack-{rank}').read_text()}" for rank in hung]
        raise TimeoutError("\n".join([f"ranks {hung} had not ended after {timeout:g} s", *stacks]))


def _rank_main(call: bytes, rank: int, world: int, folder: Path, timeout: float) -> None:
    import torch
    import torch.distributed as dist

    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({key: str(value) for key, value in place.items()}, OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    with (folder / f"stack-{rank}").open("w") as stack:
        faulthandler.dump_traceback_later(0.9 * timeout, file=stack)
        try:
            fn, args = pickle.loads(call)
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/rendezvous",
                rank=rank,
                world_size=world,
                timeout=datetime.timedelta(seconds=timeout),
            )
            result = fn(rank, world, *args)
            if dist.is_initialized():
                # Without it a rank that is ahead closes connections that others still use.
                dist.barrier()
                dist.destroy_process_group()
            (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
        except BaseException:
            (folder / f"error-{rank}").write_text(traceback.format_exc())
            # Taking the group down may wait for ranks that will never come.
            os._exit(1)
        finally:
            faulthandler.cancel_dump_traceback_later()

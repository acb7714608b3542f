"""What a run on several ranks really does: what it sends, when its stages compute, what autograd keeps.

Counts are taken below everything that is counted: operators that communicate are seen by the dispatcher,
saved tensors by autograd's own hooks. A rank is a forked process with one thread, on gloo.
"""

import multiprocessing
import pickle
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from schedules import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Span
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minititan.cpu import set_up_cpu

R = TypeVar("R")


def on_ranks(work: Callable[..., R], ranks: int, *args: object) -> list[R]:
    """Return what `work(rank, ranks, *args)` returns on each of so many ranks."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [
            context.Process(target=_rank, args=(work, rank, ranks, folder, args)) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        while any(process.is_alive() for process in processes):
            if any(process.exitcode for process in processes):
                for process in processes:
                    process.kill()
            time.sleep(0.02)
        if any(process.exitcode for process in processes):
            raise SystemExit("a rank failed")
        return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(ranks)]


def _rank(work: Callable[..., Any], rank: int, ranks: int, folder: Path, args: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    set_up_cpu()  # as a run does
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    result = pickle.dumps(work(rank, ranks, *args))
    dist.barrier()
    dist.destroy_process_group()
    (folder / str(rank)).write_bytes(result)


class Traffic(TorchDispatchMode):
    """Counts the bytes that this rank must send for its collectives, by process group and operator.

    The least that an algorithm sends is counted, whatever the backend does: of n ranks' tensor of N bytes, a
    gathering or a scattered sum sends N (n-1)/n a rank, a sum that all get twice that; to itself a rank sends
    nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func._schema.name.split("::")[1].strip("_"), args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        if name in (
            "wait_tensor",
            "wrap_tensor_autograd",
            "barrier",
            "recv",
            "recv_any_source",
            "monitored_barrier",
        ):
            return
        group = _group(args)
        ranks, first = group.size(), args[0]
        if name in ("all_gather_into_tensor", "all_gather_into_tensor_out"):
            count = first.nbytes * (ranks - 1)
        elif name == "allgather_base":
            count = args[1].nbytes * (ranks - 1)
        elif name == "allgather":
            count = sum(x.nbytes for x in args[1]) * (ranks - 1)
        elif name == "reduce_scatter_tensor":
            count = first.nbytes * (ranks - 1) // ranks
        elif name == "reduce_scatter_base":
            count = first.nbytes * (ranks - 1)
        elif name in ("all_reduce", "allreduce"):
            whole = first.nbytes if isinstance(first, Tensor) else sum(x.nbytes for x in first)
            count = 2 * whole * (ranks - 1) // ranks
        elif name == "all_to_all_single":
            rows = sum(args[2]) - args[2][group.rank()]
            count = rows * first[0].nbytes if len(first) else 0
        elif name == "send":
            count = sum(x.nbytes for x in first)
        elif name == "broadcast":
            count = sum(x.nbytes for x in first) if args[2] == group.rank() else 0
        else:
            raise NotImplementedError(f"{name} is not counted yet")
        self.sent[group.group_name, name] += count

    def over(self, group: dist.ProcessGroup, *names: str) -> int:
        """Return the bytes that went over a group, by operators whose names have one of `names` in them."""
        return sum(
            count
            for (of, name), count in self.sent.items()
            if of == group.group_name and (not names or any(part in name for part in names))
        )


def _group(args: tuple[Any, ...]) -> dist.ProcessGroup:
    for arg in args:
        if isinstance(arg, str):
            try:
                return torch.distributed.distributed_c10d._resolve_process_group(arg)  # pyright: ignore
            except (RuntimeError, ValueError):
                continue  # the operation of a sum
        if isinstance(arg, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(arg)
            except RuntimeError:
                continue
    raise NotImplementedError("an operator without a process group")


class Stages:
    """Records when the stages of this rank compute, and the bytes that autograd keeps for each.

    Each computation is stretched to the `seconds` of its kind by sleeping: then a machine with fewer cores
    than ranks shows what the schedule leaves idle, not what the cores do.
    """

    def __init__(self, pipeline: Any, seconds: Mapping[str, float]) -> None:
        self.seconds = seconds
        parameters = [p for part in pipeline.parts.values() for p in part.parameters()]
        self.parameters = {p.untyped_storage().data_ptr() for p in parameters}
        self.stage = -1
        self.begin_step()
        for stage in pipeline.stages:
            self._watch(stage)

    def begin_step(self) -> None:
        """Forget what was recorded."""
        self.spans: list[Span] = []
        self.holders: Counter[tuple[int, int]] = Counter()  # of a stage's tensor, by address
        self.bytes: Counter[int] = Counter()  # by stage
        self.most: dict[int, int] = {}
        self.of_one: dict[int, int] = {}  # of the first micro-batch

    def hooks(self) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(lambda tensor: _Kept(self, tensor), _Kept.unpack)

    def sample(self) -> None:
        """Take what is kept now, between two computations."""
        for stage, count in self.bytes.items():
            self.most[stage] = max(self.most.get(stage, 0), count)
        if len(forwards := [s for s in self.spans if s.action.stage == self.stage]) == 1:
            self.of_one.setdefault(forwards[0].action.stage, self.bytes[self.stage])

    def _watch(self, stage: Any) -> None:
        index = stage.stage_index
        forward, backward = stage.forward_one_chunk, stage.backward_one_chunk
        weight = stage.backward_weight_one_chunk

        def run(kind: str, micro_batch: int, call: Callable[[], Any]) -> Any:
            self.sample()
            begin, self.stage = time.monotonic(), index
            result = call()
            time.sleep(max(0.0, begin + self.seconds[kind] - time.monotonic()))
            self.spans.append(Span(Action(kind, index, micro_batch), begin, time.monotonic()))
            return result

        def forward_one_chunk(micro_batch: int, *args: Any, **options: Any) -> Any:
            return run(FORWARD, micro_batch, lambda: forward(micro_batch, *args, **options))

        def backward_one_chunk(micro_batch: int, *args: Any, **options: Any) -> Any:
            kind = BACKWARD if options.get("full_backward", True) else INPUT
            return run(kind, micro_batch, lambda: backward(micro_batch, *args, **options))

        def backward_weight_one_chunk(micro_batch: int, *args: Any, **options: Any) -> Any:
            return run(WEIGHT, micro_batch, lambda: weight(micro_batch, *args, **options))

        stage.forward_one_chunk, stage.backward_one_chunk = forward_one_chunk, backward_one_chunk
        stage.backward_weight_one_chunk = backward_weight_one_chunk


class _Kept:
    """A tensor that autograd keeps; its bytes count once, however many keep them, and no parameter's do."""

    def __init__(self, stages: Stages, tensor: Tensor) -> None:
        # Detached: a tensor with its graph would keep alive what a split backward never visits.
        self.tensor, self.stages = tensor.detach(), stages
        storage = tensor.untyped_storage()
        own = storage.data_ptr() not in stages.parameters
        self.size = min(tensor.nbytes, storage.nbytes()) if own else 0
        self.key = (stages.stage, tensor.data_ptr())
        self.step = stages.holders
        if not self.step[self.key]:
            stages.bytes[stages.stage] += self.size
        self.step[self.key] += 1

    @staticmethod
    def unpack(kept: "_Kept") -> Tensor:
        return kept.tensor

    def __del__(self) -> None:
        self.step[self.key] -= 1
        if not self.step[self.key] and self.step is self.stages.holders:
            self.stages.bytes[self.key[0]] -= self.size

"""What a step is made of: its kernels alone, the host's phases, and its collectives, each to be run or timed
apart.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from minititan.parallelisms import collectives

KERNELS = ("mm", "addmm", "bmm", "baddbmm", "grouped_mm", "attention")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


class Kernels(TorchDispatchMode):
    """Records the matrix products and attention kernels that run, with copies of their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.split("::")[1].strip("_")
        if name in KERNELS or "attention" in name:
            copies = tree_map_only(Tensor, Tensor.clone, (args, dict(kwargs or {})))
            self.calls.append((func, *copies))
        return func(*args, **(kwargs or {}))

    def run(self) -> dict[str, float]:
        """Run all; return the seconds of products and of attention."""
        spent: Counter[str] = Counter()
        for func, args, kwargs in self.calls:
            kind = "attention" if "attention" in func._schema.name else "products"
            begin = time.perf_counter()
            func(*args, **kwargs)
            spent[kind] += time.perf_counter() - begin
        return dict(spent)

    def peak(self) -> float:
        """Return the FLOP/s of the fastest of the matrix products, each repeated."""
        best = 0.0
        shapes = {}
        for func, args, _ in self.calls:
            if func is torch.ops.aten.mm.default:
                shapes[tuple(args[0].shape), tuple(args[1].shape)] = args
        for (left, right), args in shapes.items():
            time_each = min(seconds(lambda a=args: torch.mm(*a)) for _ in range(5))
            best = max(best, 2 * left[0] * left[1] * right[1] / time_each)
        return best


class Phases:
    """Adds up the host's time by phase; of a phase inside another, only to the inner one."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self.stack: list[float] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        self.stack.append(0.0)
        try:
            yield
        finally:
            spent = time.perf_counter() - begin
            self.spent[name] += spent - self.stack.pop()
            if self.stack:
                self.stack[-1] += spent

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            with self.phase(name):
                return call(*args, **options)

        return timed


def timed_iterator(batches: Iterator[Any], phases: Phases) -> Iterator[Any]:
    while True:
        with phases.phase("data"):
            batch = next(batches)
        yield batch


@contextmanager
def collectives_as(replacements: Mapping[str, Callable[..., Tensor]]) -> Iterator[None]:
    """Put others in the place of the collectives, wherever the package uses them."""
    with ExitStack() as patches:
        for name, replacement in replacements.items():
            original = getattr(collectives, name)
            for module in [m for n, m in sys.modules.items() if n.startswith("minititan")]:
                if vars(module).get(name) is original:
                    patches.enter_context(mock.patch.object(module, name, replacement))
        yield


def without_ranks(group_size: int) -> dict[str, Callable[..., Tensor]]:
    """Collectives that send nothing: of the right shapes, and with the local values."""
    return {
        "all_gather": lambda x, group: x.repeat(group_size, *[1] * (x.dim() - 1)),
        "reduce_scatter": lambda x, group: x[: len(x) // group_size].clone(),
        "all_reduce": lambda x, group, operation="sum": x.clone(),
    }

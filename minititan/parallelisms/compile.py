"""torch.compile of blocks, each as one graph; one with a mixture of experts in parts around its experts.

How many rows an expert gets is known only when it runs, and the host waits for it: inside a graph that is a
break, and computing on in another precision could choose other experts than the router did.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from minititan.models.moe import Experts
from minititan.parallelisms.unit import Unit


def apply_compile(unit: Unit, backend: str) -> None:
    """Compile the unit's computation, in place."""
    if not _has_experts(unit.module):
        unit.compute = _compiled(unit.compute, unit.module, backend)
        return
    for part in _parts_around_experts(unit.module):
        part.forward = _compiled(part.forward, part, backend)


def _compiled(forward: Callable[..., Any], module: nn.Module, backend: str) -> Callable[..., Any]:
    """Return `forward` compiled as one graph.

    What the compiler has made, and its limit (8), are by code object. Equal layers share it and are compiled
    once, but not where a part, or recomputation around the layer, is a `partial` or a forward of its own:
    these the compiler tells apart by identity, and nine layers would be too many (2.13).
    """
    if isinstance(forward, partial) or any("forward" in vars(part) for part in module.modules()):
        forward = _with_own_code(forward)
    return torch.compile(forward, backend=backend, fullgraph=True)


def _with_own_code(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `forward`, with a code object that no other has."""

    def call(*inputs: Any) -> Any:
        return forward(*inputs)

    call.__code__ = call.__code__.replace(co_name=f"call_{id(call)}")
    return call


def _has_experts(module: nn.Module) -> bool:
    return any(isinstance(part, Experts) for part in module.modules())


def _parts_around_experts(module: nn.Module) -> Iterator[nn.Module]:
    for part in module.children():
        if not _has_experts(part):
            yield part
        elif not isinstance(part, Experts):
            yield from _parts_around_experts(part)

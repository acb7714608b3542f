"""torch.compile of blocks, each as one graph; one with a mixture of experts in parts around its experts.

How many rows an expert gets is known only when it runs, and the host waits for it: inside a graph that is a
break, and computing on in another precision could choose other experts than the router did.
"""

from collections.abc import Iterator

import torch
from torch import nn

from minititan.models.moe import Experts
from minititan.parallelisms.unit import Unit


def apply_compile(unit: Unit, backend: str) -> None:
    """Compile the unit's computation, in place."""
    if not _has_experts(unit.module):
        unit.compute = torch.compile(unit.compute, backend=backend, fullgraph=True)
        return
    for part in _parts_around_experts(unit.module):
        part.forward = torch.compile(part.forward, backend=backend, fullgraph=True)


def _has_experts(module: nn.Module) -> bool:
    return any(isinstance(part, Experts) for part in module.modules())


def _parts_around_experts(module: nn.Module) -> Iterator[nn.Module]:
    for part in module.children():
        if not _has_experts(part):
            yield part
        elif not isinstance(part, Experts):
            yield from _parts_around_experts(part)

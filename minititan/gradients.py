"""Gradients across ranks: sums that are still open, the global norm, clipping.

Norms are taken of local shards and summed over the mesh axes that shard them, so a gradient is never gathered
and parameters on different meshes can be mixed.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from minititan.distributed import local_part

_foreach_mul_: Any = torch._foreach_mul_  # pyright: ignore[reportPrivateImportUsage]
foreach_norm: Any = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]


def finish_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Sum the gradients that are still parts of a sum over `tp`. FSDP does this itself for the parameters it
    holds.
    """
    grad: Any
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(parameter, DTensor) and grad is not None and grad.placements != parameter.placements:
            parameter.grad = grad.redistribute(placements=parameter.placements)


@torch.no_grad()
def unscale_gradients(parameters: Sequence[nn.Parameter], scale: float) -> None:
    """Divide all gradients by the loss scale."""
    grads = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    _foreach_mul_(grads, 1 / scale)


@torch.no_grad()
def clip_gradients(parameters: Sequence[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients, whose global norm is `norm`, so that it is at most `max_norm` (0: leave them)."""
    grads = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if max_norm > 0 and grads:
        _foreach_mul_(grads, torch.clamp(max_norm / (norm + 1e-6), max=1.0))


@torch.no_grad()
def gradient_norm(parameters: Sequence[nn.Parameter], pipeline: dist.ProcessGroup | None = None) -> Tensor:
    """Return the 2-norm of all gradients of the model, as if on one process, a tensor on the device.

    Every rank must call it. `pipeline`: the ranks that have the other stages.
    """
    alike: dict[object, list[Tensor]] = {}  # gradients on the same mesh, sharded over the same of its axes
    for parameter in parameters:
        if parameter.grad is not None:
            alike.setdefault(_sharded_axes(parameter.grad), []).append(parameter.grad)
    squares = [_squared_norm(grads) for grads in alike.values()]
    square = torch.stack(squares).sum() if squares else torch.zeros(())
    if pipeline is not None:
        dist.all_reduce(square, group=pipeline)
    return square.sqrt()


def _sharded_axes(grad: Tensor) -> object:
    if not isinstance(grad, DTensor):
        return None
    return grad.device_mesh, tuple(
        i for i, placement in enumerate(grad.placements) if not placement.is_replicate()
    )


def _squared_norm(grads: list[Tensor]) -> Tensor:
    dtype = torch.promote_types(grads[0].dtype, torch.float32)
    square = torch.stack(foreach_norm([local_part(grad) for grad in grads], 2, dtype=dtype)).square().sum()
    axes = _sharded_axes(grads[0])
    if isinstance(axes, tuple):
        mesh, sharded = axes
        for axis in sharded:
            if mesh.size(axis) > 1:
                dist.all_reduce(square, group=mesh.get_group(axis))
    return square

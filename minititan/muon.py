"""Muon: momentum whose update is made orthogonal, for matrices inside the layers (arXiv:2502.16982).

The rule is that of `torch.optim.Muon`, extended to DTensors: momentum is kept in shards, and the update is
gathered to the full matrix before it is made orthogonal, since that of a shard would be another update. Every
rank orthogonalises every matrix and keeps its own part. The iteration, always in bfloat16 in torch, runs in
the dtype of the run's computation: rounding it more coarsely would let layouts drift apart.

A parameter of three dimensions is a stack of matrices, those of experts, each with an update of its own;
where a rank's shard is some of them whole, nothing is gathered.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from minititan.distributed import local_part

AdjustLR = Literal["match_rms_adamw", "original"]
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration (kellerjordan.github.io/posts/muon)
EPS = 1e-7


def orthogonalize(matrix: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Return a matrix, or each of a stack, with its singular values pushed towards 1 by Newton-Schulz
    iterations in `dtype`.
    """
    a, b, c = COEFFICIENTS
    wide = matrix.shape[-2] <= matrix.shape[-1]
    x = matrix.to(dtype) if wide else matrix.to(dtype).mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    add_product = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT


def adjusted_lr(lr: float, adjust: AdjustLR, shape: Sequence[int]) -> float:
    """Return the rate for matrices of this full shape; `match_rms_adamw` makes AdamW's rates fit."""
    rows, columns = shape[-2:]
    if adjust == "original":
        return lr * math.sqrt(max(1, rows / columns))
    return lr * 0.2 * math.sqrt(max(rows, columns))


def muon(
    parameters: Sequence[Any],
    momenta: Sequence[Any],
    *,
    lr: float,
    weight_decay: float,
    momentum: float,
    steps: int,
    adjust: AdjustLR,
    dtype: torch.dtype,
    left_out: Tensor | None = None,
) -> None:
    """Update matrices, DTensors or not, and their momenta in place; every rank that shares one takes part.

    `left_out`, on the device: 1 where they are to stay as they are.
    """
    for parameter, buffer in zip(parameters, momenta, strict=True):
        before = None if left_out is None else [local_part(x).clone() for x in (parameter, buffer)]
        gradient = parameter.grad.to(buffer.dtype)
        buffer.lerp_(gradient, 1 - momentum)
        update: Any = gradient.lerp(buffer, momentum)  # Nesterov's
        local = local_part(parameter)
        if isinstance(parameter, DTensor):
            update = update.to_local() if _has_whole_matrices(parameter) else update.full_tensor()
        own = orthogonalize(update, steps, dtype)
        own = own if own.shape == local.shape else _own_part(own, parameter)
        local.mul_(1 - lr * weight_decay)
        local.add_(own, alpha=-adjusted_lr(lr, adjust, parameter.shape))
        if left_out is not None and before is not None:
            for tensor, old in zip((local, local_part(buffer)), before, strict=True):
                tensor.copy_(torch.where(left_out > 0, old, tensor))


def _has_whole_matrices(parameter: DTensor) -> bool:
    """Whether this rank holds matrices of a stack, each of them whole."""
    return parameter.ndim > 2 and all(getattr(p, "dim", 0) == 0 for p in parameter.placements)


def _own_part(full: Tensor, parameter: Tensor) -> Tensor:
    """Return the part of `full` that this rank holds of the parameter."""
    if not isinstance(parameter, DTensor):
        return full
    return full[_own_slices(full.shape, parameter.device_mesh, parameter.placements)]


@cache
def _own_slices(whole: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> tuple[slice, ...]:
    shape, offset = compute_local_shape_and_global_offset(whole, mesh, placements)
    return tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))

"""Differentiable collectives on local tensors, the same in eager mode and inside `torch.compile`.

They call the operators below `torch.distributed._functional_collectives`, whose Python names changed between
torch 2.11 and 2.13, and wait at once, so that no `AsyncCollectiveTensor` reaches a compiled region (a
compiled block returned a zero gradient for one). The sequence is dimension 1. A group is given by its name.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _get_group_size_by_name

_ops = torch.ops._c10d_functional


def group_size(group: str) -> int:
    """Return how many ranks the group has."""
    return _get_group_size_by_name(group)  # pyright: ignore[reportArgumentType]


def all_gather(x: Tensor, group: str) -> Tensor:
    """Return the ranks' x [N, ...] one after another, [ranks*N, ...]; not differentiable."""
    return _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), group_size(group), group))


def reduce_scatter(x: Tensor, group: str) -> Tensor:
    """Return this rank's part of the sum over ranks of x [ranks*N, ...], [N, ...]; not differentiable."""
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(x.contiguous(), "sum", group_size(group), group))


def all_reduce(x: Tensor, group: str, operation: str = "sum") -> Tensor:
    """Return the sum (or "max") over ranks of x; not differentiable."""
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), operation, group))


def all_to_all(x: Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> Tensor:
    """Return the rows that the ranks sent to this one, one rank's after another's; not differentiable.

    `sent` of the rows of x [N, ...] go to each rank, `received` come from each.
    """
    return _ops.wait_tensor(_ops.all_to_all_single(x.contiguous(), received, sent, group))


def _gather(x: Tensor, group: str) -> Tensor:
    batch = x.shape[0]
    parts = (
        all_gather(x, group).unflatten(0, (-1, batch)).transpose(0, 1).contiguous()
    )  # [B, ranks, T/ranks, D]
    return _reshaped(parts, (batch, -1, x.shape[-1]))  # [B, T, D]


def _scatter(x: Tensor, group: str) -> Tensor:
    parts = x.unflatten(1, (group_size(group), -1)).transpose(0, 1)  # [ranks, B, T/ranks, D]
    return reduce_scatter(parts.flatten(0, 1), group)  # [B, T/ranks, D]


def _reshaped(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return x in another shape, not a view to autograd: FSDP warns where a unit's output is one."""
    return torch.ops.aten._unsafe_view.default(x, shape)


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _scatter(grad, ctx.group), None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return _scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _gather(grad, ctx.group), None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return _reshaped(x.contiguous(), x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return all_reduce(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return all_to_all(x, received, sent, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return all_to_all(grad, ctx.sent, ctx.received, ctx.group), None, None, None


def gather_sequence(x: Tensor, group: str) -> Tensor:
    """Return the whole sequence [B, T, D] of x [B, T/ranks, D]; gradients are summed over ranks and
    scattered.
    """
    return _GatherSequence.apply(x, group)


def reduce_scatter_sequence(x: Tensor, group: str) -> Tensor:
    """Return this rank's part [B, T/ranks, D] of the sum of x [B, T, D]; gradients are gathered."""
    return _ReduceScatterSequence.apply(x, group)


def copy_to_ranks(x: Tensor, group: str) -> Tensor:
    """Return x, the same on all ranks, for computations that differ; gradients are summed over ranks."""
    return _Copy.apply(x, group)


def reduce_from_ranks(x: Tensor, group: str) -> Tensor:
    """Return the sum of x over ranks; the gradient, the same on all ranks, passes as it is."""
    return _Reduce.apply(x, group)


def exchange_rows(x: Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> Tensor:
    """Return what `all_to_all` does; gradients take the way back."""
    return _AllToAll.apply(x, received, sent, group)

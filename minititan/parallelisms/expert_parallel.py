"""Expert parallelism: experts are spread over ranks and tokens are sent to theirs (arXiv:2006.16668).

Each rank routes its own tokens. On the axis `ep` of the experts' mesh each rank holds some of the experts:
the rows of tokens go to them by all-to-all and come back the same way. On its axis `etp` (or `tp`, where
experts are not spread) each rank holds a part of the hidden width of an expert: the ranks gather their tokens
before the experts and sum up what comes out after them. Nothing is dropped or padded. An expert sees the
tokens of all ranks that it serves, so its gradient is whole but for other copies of it, which FSDP adds up.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from minititan.models.moe import Experts, Router
from minititan.parallelisms.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    exchange_rows,
    gather_sequence,
    group_size,
    reduce_scatter_sequence,
)
from minititan.parallelisms.unit import Unwrap


def apply_expert_parallel(
    model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool = True
) -> dict[str, Unwrap]:
    """Spread the experts of `model` over the mesh, with the axis `ep` or one of tensor parallelism or both.

    Returns how each parameter of experts is unwrapped. Without `sequence_parallel` all ranks of the axis of
    tensor parallelism have the same tokens; gradients would be wrong then.
    """
    unwraps: dict[str, Unwrap] = {}
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            found = _spread_parameters(module, mesh)
            unwraps |= {f"{name}.{key}": unwrap for key, unwrap in found.items()}
            _set_edges(module, mesh, _gathered if sequence_parallel else _summed)
    return unwraps


def connect_routers(
    model: nn.Module, sequence: Sequence[ProcessGroup], tokens: Sequence[ProcessGroup]
) -> None:
    """Give routers their sums over the ranks that share a sequence, and over all that have tokens: those of
    the groups of `sequence` and of `tokens`, one after another.
    """
    for router in model.modules():
        if isinstance(router, Router):
            if sequence:
                router.sum_over_sequence = partial(_sum, groups=[group.group_name for group in sequence])
            router.sum_over_batch = partial(_sum, groups=[group.group_name for group in tokens])


def _sum(x: Tensor, groups: Sequence[str]) -> Tensor:
    for group in groups:
        x = all_reduce(x, group)
    return x


def experts_faults(model: nn.Module, degree: int) -> list[str]:
    """Return why the width of experts cannot be split `degree` ways, each a line."""
    return [
        f"the hidden width of {name}.{key} ({width}) must be a multiple of {degree}"
        for name, module in model.named_modules()
        if isinstance(module, Experts)
        for key, parameter in module.named_parameters()
        if (axis := module.HIDDEN_AXES.get(key)) is not None and (width := parameter.shape[axis]) % degree
    ]


def _spread_parameters(experts: Experts, mesh: DeviceMesh) -> dict[str, Unwrap]:
    """Shard the parameters: by expert on `ep`, by hidden width on the other axis."""
    unwraps: dict[str, Unwrap] = {}
    for key, parameter in list(experts.named_parameters()):
        hidden, placements, share = experts.HIDDEN_AXES.get(key), list[Placement](), 1
        for axis, name in enumerate(mesh.mesh_dim_names or ()):
            if name == "ep":
                placements.append(Shard(0))
            elif hidden is not None:
                placements.append(Shard(hidden))
            else:
                placements.append(Replicate())
                share = mesh.size(axis)
        spread = distribute_tensor(parameter, mesh, placements)
        experts.register_parameter(key, nn.Parameter(spread, parameter.requires_grad))
        gradients = [Partial() if placement.is_replicate() else placement for placement in placements]
        unwraps[key] = partial(_unwrapped, gradients=gradients, share=share)
    return unwraps


def _unwrapped(parameter: DTensor, gradients: list[Placement], share: int) -> Tensor:
    """Return the local tensor; of what ranks add to their sum alike (a bias of the output), a share."""
    local = parameter.to_local(grad_placements=gradients)
    return local / share if share > 1 else local


def _set_edges(experts: Experts, mesh: DeviceMesh, in_parts: Callable[..., Tensor]) -> None:
    for name in mesh.mesh_dim_names or ():
        group = mesh.get_group(name).group_name
        if name == "ep":
            experts.exchange = partial(_exchange, group=group)
        else:
            experts.forward = partial(in_parts, experts.forward, group)


def _gathered(
    forward: Callable[..., Tensor], group: str, x: Tensor, weights: Tensor, indices: Tensor, counts: Tensor
) -> Tensor:
    """The forward of experts of which each rank of the group has a part: on the tokens of all of them."""
    x, weights = (gather_sequence(rows.unsqueeze(0), group).squeeze(0) for rows in (x, weights))
    out = forward(x, weights, all_gather(indices, group), all_reduce(counts, group))
    return reduce_scatter_sequence(out.unsqueeze(0), group).squeeze(0)


def _summed(forward: Callable[..., Tensor], group: str, *inputs: Tensor) -> Tensor:
    """The same on tokens that all ranks of the group have."""
    return all_reduce(forward(*inputs), group)


def _exchange(
    compute: Callable[[Tensor, Tensor], Tensor], rows: Tensor, counts: Tensor, group: str
) -> Tensor:
    """Compute on the ranks that have the experts; `rows` [M, D] by expert, `counts` [E] of all experts."""
    with torch.no_grad():
        ranks = group_size(group)
        own = len(counts) // ranks
        received = all_to_all(counts, [own] * ranks, [own] * ranks, group).unflatten(0, (ranks, own))
        sent = counts.unflatten(0, (ranks, own))
        # The one moment in a layer when the host waits for the device: how many rows come and go.
        coming, going = torch.stack([received.sum(1), sent.sum(1)]).tolist()
        # Rows come by rank and then by expert, and are computed by expert and then by rank.
        experts = torch.arange(own, device=rows.device).repeat(ranks)
        experts = experts.repeat_interleave(received.flatten(), output_size=sum(coming))
        order = experts.argsort(stable=True)
    rows = exchange_rows(rows, coming, going, group)
    out = compute(rows[order], received.sum(0))
    out = torch.empty_like(out).index_copy(0, order, out)
    return exchange_rows(out, going, coming, group)

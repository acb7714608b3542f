"""Fully sharded data parallelism by FSDP2 (`fully_shard`; arXiv:2304.11277), hybrid-sharded and replicated as
well.

One path serves all: a 1-axis mesh shards; a (replicate, shard) mesh shards within and replicates across; a
(n, 1) mesh only replicates. Gradients are summed: the loss is divided by the global number of labels already.
Experts have a mesh of their own, inside the unit of their block.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from minititan.distributed import local_part
from minititan.models.moe import Experts, Router
from minititan.parallelisms.tensor_parallel import BY_ROWS, style_of


def apply_fsdp(
    model: Any,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    experts_mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    reshard_after_forward: str,
    cpu_offload: bool = False,
) -> None:
    """Shard `model` in place: the blocks, the embedding, and the last norm with the head, are a unit each.

    `param_dtype` is the dtype of computation (None: that of the parameters). `reshard_after_forward`:
    `always` frees a unit's gathered parameters after its forward, `never` keeps them for the backward,
    `default` frees all but those of norm and head, which the backward needs at once. `cpu_offload` keeps
    shards, gradients and moments in the host's memory; the model must be materialised there.
    """
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=False)
    pinned = mesh.device_type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pinned) if cpu_offload else OffloadPolicy()
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload}
    options["shard_placement_fn"] = _placement_function(model, mesh, experts_mesh)
    # Changed in place by whole tensors, and not to be cast.
    options["ignored_params"] = {
        module.e_score_correction_bias
        for module in model.modules()
        if isinstance(module, Router) and module.e_score_correction_bias is not None
    }
    reshard = reshard_after_forward != "never"
    reshard_last = reshard_after_forward == "always"
    embedding, last = [model.embed_tokens], [model.norm, model.lm_head]
    ends = (model.embed_tokens, model.lm_head)
    if None not in ends and model.embed_tokens.weight is model.lm_head.weight:  # tied: one unit
        embedding, last = [], [model.embed_tokens, model.norm, model.lm_head]
    units = [(embedding, reshard), *(([block], reshard) for block in blocks), (last, reshard_last)]
    for modules, frees in units:
        present = [module for module in modules if module is not None]
        if present:
            fully_shard(present, reshard_after_forward=frees, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no averaging
            module.set_gradient_divide_factor(1.0)


def _placement_function(
    model: nn.Module, mesh: DeviceMesh, experts_mesh: DeviceMesh
) -> Callable[[nn.Parameter], Any]:
    """Return what tells FSDP the dimension that it shards of a parameter and, for experts, their mesh."""
    modules = [module for module in model.modules() if isinstance(module, Experts)]
    experts = {id(parameter) for module in modules for parameter in module.parameters()}
    place = _on_mesh(experts_mesh) if experts and experts_mesh is not mesh else None

    def placement(parameter: nn.Parameter) -> Any:
        if id(parameter) not in experts:
            return sharded_dimension(parameter, mesh.size(-1))
        dimension = experts_dimension(parameter, experts_mesh.size(-1))
        return dimension if place is None else place(dimension)

    return placement


def _on_mesh(mesh: DeviceMesh) -> Callable[[Shard], Any]:
    """Return what makes FSDP shard a parameter over another mesh than its unit's.

    torch has no public name for it (2.13).
    """
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_common import (
            FSDPMeshInfo,
            HSDPMeshInfo,
            ShardPlacementResult,
        )
    except ImportError as error:
        raise RuntimeError(f"expert parallelism needs torch 2.13, this is {torch.__version__}") from error
    info = FSDPMeshInfo(mesh, 0) if mesh.ndim == 1 else HSDPMeshInfo(mesh, 1, 0)
    return lambda dimension: ShardPlacementResult(dimension, info)


def experts_dimension(parameter: nn.Parameter, shards: int) -> Shard:
    """Return the dimension of experts that FSDP shards: the first that divides, or the experts unevenly.

    Experts that are spread over ranks are the same number on each, so DTensor knows uneven shards as well.
    """
    shape = local_part(parameter).shape
    return next((Shard(i) for i, size in enumerate(shape) if size % shards == 0), Shard(0))


def sharded_dimension(parameter: nn.Parameter, shards: int) -> Shard | None:
    """Return the dimension that FSDP shards; None: its default, the first.

    It is the second where tensor parallelism has split the first into parts whose shards DTensor would look
    for in the wrong place: it splits over `shards` first, and FSDP the other way round (torch 2.13; a wrong
    start, and wrong checkpoints). `uneven_faults` finds what cannot be sharded there either.
    """
    if not isinstance(parameter, DTensor) or parameter.placements != (Shard(0),):
        return None
    return None if splits_alike(len(parameter), parameter.device_mesh.size(), shards) else Shard(1)


def uneven_faults(model: nn.Module, plan: Mapping[str, str], tp: int, shards: int) -> list[str]:
    """Return the parameters that cannot be sharded over `shards` ranks and `tp`, each a line."""
    faults = []
    for name, parameter in model.named_parameters():
        if style_of(name.rpartition(".")[0], plan) not in BY_ROWS:
            continue
        rows, *columns = parameter.shape
        if not all(_chunks(range(rows), tp)):  # FSDP cannot reduce the gradient of nothing
            faults.append(f"the {rows} rows of {name} leave some of {tp} tensor-parallel ranks without any")
        elif not splits_alike(rows, tp, shards) and (not columns or columns[0] % shards):
            neither = f", nor its {columns[0]} columns over the shards alone" if columns else ""
            faults.append(
                f"the {rows} rows of {name} do not split evenly over {tp} ranks and {shards} shards{neither}"
            )
    return faults


def splits_alike(rows: int, tp: int, shards: int) -> bool:
    """Whether rows split over `tp` and then `shards` are where they are if split the other way round."""
    parts = [[len(part) for part in _chunks(chunk, shards)] for chunk in _chunks(range(rows), tp)]
    together = [sum(sizes) for sizes in zip(*parts, strict=True)]
    turned = [[len(part) for part in _chunks(range(size), tp)] for size in together]
    return parts == [list(sizes) for sizes in zip(*turned, strict=True)]


def _chunks(rows: range, ranks: int) -> list[range]:
    """Return the rows of each rank as `torch.chunk` gives them, short or empty at the end."""
    size = -(-len(rows) // ranks)
    return [rows[rank * size : (rank + 1) * size] for rank in range(ranks)]

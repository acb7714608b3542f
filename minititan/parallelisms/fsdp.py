"""Fully sharded data parallelism by FSDP2 (`fully_shard`; arXiv:2304.11277), hybrid-sharded and replicated as
well.

One path serves all: a 1-axis mesh shards; a (replicate, shard) mesh shards within and replicates across; a
(n, 1) mesh only replicates. Gradients are summed: the loss is divided by the global number of labels already.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def apply_fsdp(
    model: Any,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    reshard_after_forward: str,
) -> None:
    """Shard `model` in place: the blocks, the embedding, and the last norm with the head, are a unit each.

    `param_dtype` is the dtype of computation (None: that of the parameters). `reshard_after_forward`:
    `always` frees a unit's gathered parameters after its forward, `never` keeps them for the backward,
    `default` frees all but those of norm and head, which the backward needs at once.
    """
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=False)
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
            fully_shard(present, mesh=mesh, mp_policy=policy, reshard_after_forward=frees)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no averaging
            module.set_gradient_divide_factor(1.0)

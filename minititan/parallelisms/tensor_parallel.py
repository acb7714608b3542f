"""Tensor parallelism: parameters are DTensors on the `tp` axis, computation is on local tensors.

A plan maps module-name patterns to styles; a `*` stays within one part of a name, between dots. A style
shards the module's parameters, so that checkpoints can reshard them, and says which collective stands at the
module's edge. Between collectives a unit (a block, the embedding, the last norm, the head) is plain PyTorch:
its parameters are unwrapped once, at its boundary and outside the compiled region. The stock styles of torch
compute on DTensors instead, which costs dispatch at each operator, crashes with checkpointing and compile
together, and gave a zero embedding gradient under compile (seen with torch 2.13).

With sequence parallelism (arXiv:2205.05198) the residual stream between units is split along the sequence;
without, each rank holds all of it.

Styles: `embedding` (rows of the vocabulary spread over ranks), `norm` (whole on each rank, feeds sharded
modules), `column` (output features spread), `row` (input features spread, outputs summed), `replicated`
(whole on each rank, used on the rank's own heads or features), `residual` (whole on each rank, used on the
residual stream), `head` (rows of the vocabulary spread; applied by the loss). Of a mixture of experts:
`router` (whole on each rank, used on the rank's own tokens), `experts` (`expert_parallel.py` splits them),
`gathered` (a module of `column` and `row` parts that is fed the residual stream).
"""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from minititan.parallelisms.collectives import (
    copy_to_ranks,
    gather_sequence,
    reduce_from_ranks,
    reduce_scatter_sequence,
)
from minititan.parallelisms.unit import Unwrap

STYLES = (
    *("embedding", "norm", "column", "row", "replicated", "residual", "head"),
    *("router", "experts", "gathered"),
)
BY_ROWS = ("embedding", "column", "head")  # the styles that split a parameter's first dimension


def apply_tensor_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Mapping[str, str],
    *,
    sequence_parallel: bool = True,
    embedding_parallel: bool = True,
) -> dict[str, Unwrap]:
    """Shard every parameter of `model` but experts over the one-axis `mesh`; return how each is unwrapped.

    Raises ValueError where the plan leaves a parameter out: without a style it would get a wrong gradient.
    """
    if faults := plan_faults(model, plan):
        raise ValueError("; ".join(faults))
    group = mesh.get_group().group_name
    unwraps: dict[str, Unwrap] = {}
    shared: dict[int, nn.Parameter] = {}  # parameters that several modules share stay shared
    module: Any
    for name, module in model.named_modules():
        style = style_of(name, plan)
        if style in (None, "experts"):
            continue
        if style == "embedding" and not embedding_parallel:
            style = "residual"
            module.forward = partial(_embed_own_tokens, module, group, mesh, sequence_parallel)
        else:
            _set_edge(module, style, group, mesh, sequence_parallel)
        for key, parameter in dict(module.named_parameters(recurse=False)).items():
            if style == "router" and not parameter.requires_grad:
                continue  # a bias that is no weight: the same on all ranks, and in no sum
            placement, gradient = _placements(style, key, sequence_parallel)
            unwraps[f"{name}.{key}"] = partial(DTensor.to_local, grad_placements=[gradient])
            if id(parameter) not in shared:
                sharded = distribute_tensor(parameter, mesh, [placement])
                shared[id(parameter)] = nn.Parameter(sharded, parameter.requires_grad)
            module.register_parameter(key, shared[id(parameter)])
    return unwraps


def style_of(name: str, plan: Mapping[str, str]) -> str | None:
    """Return the style of the module `name`: that of the first pattern that matches."""
    return next((style for pattern, style in plan.items() if _matches(name, pattern)), None)


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def plan_faults(model: nn.Module, plan: Mapping[str, str]) -> list[str]:
    """Return what keeps `plan` from serving `model`, each a line; the model may be on the meta device."""
    faults = [
        f"the tensor-parallel plan has {pattern!r}: {style!r}, no style; styles: {', '.join(STYLES)}"
        for pattern, style in plan.items()
        if style not in STYLES
    ]
    for name, module in model.named_modules():
        if dict(module.named_parameters(recurse=False)) and style_of(name, plan) is None:
            where = f"the module {name!r}" if name else "parameters outside of the model's parts"
            faults.append(f"the tensor-parallel plan names no style for {where} ({type(module).__name__})")
    return faults


def _placements(style: str, key: str, sequence_parallel: bool) -> tuple[Placement, Placement]:
    """Return how a parameter is placed, and how the gradient that one rank computes for it relates to the
    whole.
    """
    if style in BY_ROWS:
        return Shard(0), Shard(0)
    if style == "row" and key == "weight":
        return Shard(1), Shard(1)
    # Whole on each rank. Each sees a part of the sequence, or of the heads, and so a part of the gradient,
    # unless all of them see the whole residual stream.
    return Replicate(), Partial() if sequence_parallel or style in ("replicated", "router") else Replicate()


def _set_edge(module: Any, style: str, group: str, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    enter = gather_sequence if sequence_parallel else copy_to_ranks
    leave = reduce_scatter_sequence if sequence_parallel else reduce_from_ranks
    if style in ("norm", "gathered", "row"):
        assert "forward" not in vars(module), f"{type(module).__name__} has a forward beside its class's"
        module.edge, module.edge_group = leave if style == "row" else enter, group
        module.__class__ = _with_edge(type(module), style)
    elif style == "embedding":
        module.forward = partial(_embed, module, leave, group, mesh)


@cache
def _with_edge(kind: Any, style: str) -> type:
    """Return `kind` with the collective of the style in its forward.

    A class, as FSDP does it: a module's own forward torch.compile tells apart by identity, and makes each
    layer a graph of its own (2.13).
    """

    def forward(self: Any, x: Tensor) -> Any:
        if style == "norm":
            return self.edge(kind.forward(self, x), self.edge_group)
        if style == "gathered":
            return kind.forward(self, self.edge(x, self.edge_group))
        out = self.edge(F.linear(x, self.weight), self.edge_group)
        return out if self.bias is None else out + self.bias  # added once, after the sum

    return type(kind.__name__, (kind,), {"forward": forward})


def _embed(
    module: nn.Embedding, leave: Callable[[Tensor, str], Tensor], group: str, mesh: DeviceMesh, tokens: Tensor
) -> Tensor:
    rows = module.weight.shape[0]
    index = tokens - first_row(module.num_embeddings, mesh)
    mine = (index >= 0) & (index < rows)
    return leave(F.embedding(index.where(mine, 0), module.weight) * mine.unsqueeze(-1), group)


def _embed_own_tokens(
    module: nn.Embedding, group: str, mesh: DeviceMesh, sequence_parallel: bool, tokens: Tensor
) -> Tensor:
    if sequence_parallel:
        tokens = tokens.unflatten(1, (mesh.size(), -1))[:, mesh.get_local_rank()]  # [B, T/ranks]
    return F.embedding(tokens, module.weight)


def first_row(rows: int, mesh: DeviceMesh) -> int:
    """Return the global index of this rank's first row of a parameter that is sharded along dimension 0."""
    return min(rows, -(-rows // mesh.size()) * mesh.get_local_rank())

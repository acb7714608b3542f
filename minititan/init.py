"""Initial weights as a function of (seed, parameter name): the same on every layout, without a seed
checkpoint.

A parameter is cut into blocks of rows; each block has a generator keyed by (seed, name, block), so a rank
computes the blocks that its shard touches and nothing else.
"""

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

BLOCK_ELEMENTS = 2**16  # a constant: another value is another initialisation


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give the meta parameters of `model` memory on `device`, unset; shared ones stay shared."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(
                    torch.empty_like(parameter, device=device), parameter.requires_grad
                )
            module.register_parameter(name, made[id(parameter)])


@torch.no_grad()
def init_parameters(
    named_parameters: dict[str, nn.Parameter],
    init_: Callable[[str, Tensor, torch.Generator], None],
    seed: int,
) -> None:
    """Set each parameter, DTensor or not, to its values by (seed, name); drawn in float32 always.

    Raises ValueError where `init_` leaves a value unset.
    """
    for name, parameter in named_parameters.items():
        local, offset = located_part(parameter)
        if local.numel():
            _fill(name, local, parameter.shape, offset, init_, seed)


def located_part(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return this rank's part of a tensor, DTensor or not, and where in the whole it begins."""
    whole = parameter.detach()
    if not isinstance(whole, DTensor):
        return whole, (0,) * whole.ndim
    _, offset = compute_local_shape_and_global_offset(whole.shape, whole.device_mesh, whole.placements)
    return whole.to_local(), offset


def _fill(
    name: str,
    local: Tensor,
    full_shape: torch.Size,
    offset: Sequence[int],
    init_: Callable[[str, Tensor, torch.Generator], None],
    seed: int,
) -> None:
    """Fill the slice of the parameter that begins at `offset`, block of rows by block of rows."""
    row_elements = max(1, full_shape[1:].numel())
    rows = max(1, BLOCK_ELEMENTS // row_elements)
    first, last = offset[0], offset[0] + local.shape[0]
    columns = tuple(
        slice(start, start + size) for start, size in zip(offset[1:], local.shape[1:], strict=True)
    )
    for block in range(first // rows, -(-last // rows)):
        start = block * rows
        values = torch.full(
            (min(rows, full_shape[0] - start), *full_shape[1:]), torch.nan, dtype=torch.float32
        )
        init_(name, values, _generator(seed, name, block))
        if values.isnan().any():
            raise ValueError(f"the model's init_ leaves values of {name} unset")
        low, high = max(first, start), min(last, start + len(values))
        local[low - first : high - first].copy_(values[(slice(low - start, high - start), *columns)])


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)

"""Experts on several ranks against whole ones on each, by outputs, gradients, and collectives."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from minititan.models.moe import ClampedExperts, Experts, SwiGLUExperts
from minititan.parallelisms.activation_checkpoint import apply_activation_checkpoint
from minititan.parallelisms.expert_parallel import apply_expert_parallel
from minititan.parallelisms.unit import Unit
from tests.distributed.harness import run_ranks

EXPERTS, WIDTH, HIDDEN, TOP_K, RANKS = 8, 6, 8, 2, 4
KINDS: dict[str, Callable[..., Experts]] = {"swiglu": SwiGLUExperts, "with biases": ClampedExperts}
MESHES = {
    "ep4": ((4,), ("ep",)),
    "ep2-etp2": ((2, 2), ("ep", "etp")),
    "tp4": ((4,), ("tp",)),
}


def random_choice(rank: int, tokens: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    return scores.topk(TOP_K, dim=-1).indices


CHOICES: dict[str, Callable[[int], Tensor]] = {  # rank -> indices [N, K]
    "random": random_choice,
    "all to two experts": lambda rank: torch.tensor([[7, 2]]).expand(5, TOP_K),
    "each rank to one of its own": lambda rank: torch.tensor([[2 * rank, 2 * rank + 1]]).expand(5, TOP_K),
    "no tokens at all": lambda rank: torch.zeros(0, TOP_K, dtype=torch.int64),
    "as many as the rank": lambda rank: random_choice(rank, tokens=rank),
}
UNEVEN = "as many as the rank"  # ranks that share a sequence have parts of the same length


def experts_of(kind: str) -> nn.ModuleDict:
    torch.manual_seed(0)
    experts = KINDS[kind](EXPERTS, WIDTH, HIDDEN).double()
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    return nn.ModuleDict({"experts": experts})


def spread(kind: str, mesh: str, checkpointing: str = "none") -> nn.ModuleDict:
    """The experts as a unit that is spread over the ranks of a mesh."""
    model = experts_of(kind)
    sizes, names = MESHES[mesh]
    unwraps = apply_expert_parallel(model, init_device_mesh("cpu", sizes, mesh_dim_names=names))
    unit = Unit("experts", model["experts"])
    unit.localize(unwraps)
    if checkpointing != "none":
        mode = "selective" if checkpointing == "op" else checkpointing
        apply_activation_checkpoint([unit], mode, "op", {"early_stop": False})
    unit.install()
    return model


def forward_backward(model: nn.ModuleDict, indices: Tensor, rank: int) -> dict[str, Tensor]:
    """Output and gradients of tokens of this rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    draw = partial(torch.rand, dtype=torch.float64, generator=generator)
    x = (draw(len(indices), WIDTH) - 0.5).requires_grad_()
    weights = draw(len(indices), TOP_K).requires_grad_()
    out = model["experts"](x, weights, indices, torch.bincount(indices.flatten(), minlength=EXPERTS))
    (out * draw(len(indices), WIDTH)).sum().backward()
    found = {"out": out.detach(), "x": x.grad, "weights": weights.grad}
    return found | {name: parameter.grad for name, parameter in model.named_parameters()}  # pyright: ignore[reportReturnType]


def compare(rank: int, world: int, kind: str) -> dict[Any, float]:
    """The largest differences of each mesh and choice from whole experts on this rank."""
    worst = {}
    for mesh in MESHES:
        for choice, indices_of in CHOICES.items():
            if choice == UNEVEN and mesh != "ep4":
                continue
            indices = indices_of(rank)
            expected = forward_backward(experts_of(kind), indices, rank)
            found = forward_backward(spread(kind, mesh), indices, rank)
            for name in expected:
                value: Any = found[name]
                if name.startswith("experts."):
                    dist.all_reduce(expected[name])
                    value = value.full_tensor()
                assert value.shape == expected[name].shape, name
                difference = (value - expected[name]).norm().item()
                worst[mesh, choice, name] = difference / max(1.0, expected[name].norm().item())
    return worst


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients(kind: str) -> None:
    for worst in run_ranks(compare, RANKS, kind):
        assert len(worst) == (2 * 4 + 5) * (3 + len(experts_of(kind)["experts"].state_dict()))
        assert {key: value for key, value in worst.items() if not value < 1e-13} == {}


def count(rank: int, world: int) -> dict[Any, Counter[str]]:
    """The collectives of a forward and of its backward."""
    counted = {}
    for mesh in MESHES:
        for checkpointing in ("none", "op", "full"):
            model = spread("swiglu", mesh, checkpointing)
            with CommDebugMode() as mode:
                forward_backward(model, random_choice(rank), rank)
            names = {op.__name__.partition(".")[0]: n for op, n in mode.get_comm_counts().items() if n}
            counted[mesh, checkpointing] = Counter(names)
    return counted


def test_collectives_and_their_recomputation() -> None:
    """Rows go and come back, forward and backward, and their numbers go once. What is gathered around split
    experts: tokens, their weights and choices; what comes out is scattered. Kept collectives ("op") are not
    done again.
    """
    (counted, *others) = run_ranks(count, RANKS)
    assert all(other == counted for other in others)
    exchange, recomputed = {"all_to_all_single": 5}, {"all_to_all_single": 3}
    edge = {"all_gather_into_tensor": 3 + 1, "all_reduce": 1, "reduce_scatter_tensor": 1 + 2}
    again = {"all_gather_into_tensor": 3, "all_reduce": 1, "reduce_scatter_tensor": 1}
    for mesh, once, more in (
        ("ep4", exchange, recomputed),
        ("tp4", edge, again),
        ("ep2-etp2", exchange | edge, recomputed | again),
    ):
        assert counted[mesh, "none"] == counted[mesh, "op"] == once, mesh
        assert counted[mesh, "full"] == Counter(once) + Counter(more), mesh

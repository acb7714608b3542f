"""Attention over sequences that are split over ranks, against the same attention over whole ones."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from minititan.models.attention import Attention
from minititan.models.latent_attention import LatentAttention
from minititan.models.masks import causal_mask
from minititan.models.rotary import inverse_frequencies, rotary_tables
from minititan.parallelisms.context_parallel import apply_context_parallel, build_split
from tests.distributed.harness import run_ranks

WIDTH, LENGTH, BATCH, CHANNELS = 24, 16, 3, 6
METHODS, BALANCERS = ("all_gather", "all_to_all"), ("headtail", "none")
KINDS = {
    "grouped": lambda: Attention(WIDTH, 8, 2, CHANNELS),
    "sinks": lambda: Attention(WIDTH, 4, 4, CHANNELS, bias=True, out_bias=True, sinks=True),
    "latent": lambda: LatentAttention(
        WIDTH, 4, q_rank=8, kv_rank=10, plain_dim=4, rotary_dim=CHANNELS, value_dim=5, scale=0.3
    ),
}
WINDOWS, DOCUMENTS = (None, 5), (False, True)


class Model(nn.Module):
    """One attention where context parallelism looks for it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        attention = KINDS[kind]().double()
        for parameter in attention.parameters():
            nn.init.normal_(parameter, std=0.3)
        self.layers = nn.ModuleDict({"0": attention})
        self.causal_mask = causal_mask

    def forward(
        self, tokens: Tensor, positions: Tensor, window: int | None, document_ids: Tensor | None = None
    ) -> Tensor:
        frequencies = inverse_frequencies(CHANNELS, 100.0, None)
        cos, sin = rotary_tables(positions, frequencies, torch.float64)
        mask = self.causal_mask(
            positions.shape[-1], window, document_ids, CHANNELS, torch.float64, torch.device("cpu")
        )
        return self.layers["0"](tokens, cos, sin, mask)


def batch_of(documents: bool) -> dict[str, Tensor]:
    """Vectors in the place of tokens, and a weight of each output in that of labels."""
    generator = torch.Generator().manual_seed(1)
    batch = {
        name: torch.rand(BATCH, LENGTH, WIDTH, dtype=torch.float64, generator=generator) - 0.5
        for name in ("tokens", "labels")
    }
    if documents:
        begins = torch.rand(BATCH, LENGTH, generator=generator) < 0.2
        places = torch.arange(LENGTH).expand(BATCH, LENGTH)
        first = torch.where(begins, places, 0).cummax(1).values
        batch |= {"document_ids": begins.cumsum(1), "positions": places - first}
    return batch


def gradients(model: Model, batch: dict[str, Tensor], window: int | None) -> dict[str, Tensor]:
    inputs = dict(batch)
    labels, tokens = inputs.pop("labels"), inputs["tokens"].clone().requires_grad_()
    if "positions" not in inputs:
        inputs["positions"] = torch.arange(LENGTH)
    out = model(**inputs | {"tokens": tokens}, window=window)
    (out * labels).sum().backward()
    found: dict[str, Any] = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"out": out.detach(), "tokens": tokens.grad} | found


def compare(rank: int, world: int) -> dict[Any, float]:
    """The largest differences of each case."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    worst = {}
    for kind, method, balancer, window, documents in product(KINDS, METHODS, BALANCERS, WINDOWS, DOCUMENTS):
        batch, split = batch_of(documents), build_split(mesh, balancer)
        expected = gradients(Model(kind), batch, window)
        model = Model(kind)
        apply_context_parallel(model, split, method)
        found = gradients(model, split.batch(batch), window)
        for name, whole in expected.items():
            if name in ("out", "tokens"):
                whole = split.part(whole)
            else:
                dist.all_reduce(found[name])
            difference = (found[name] - whole).norm() / whole.norm()
            worst[kind, method, balancer, window, documents, name] = difference.item()
    return worst


@pytest.mark.parametrize("ranks", [2, 4])
def test_outputs_and_gradients(ranks: int) -> None:
    for worst in run_ranks(compare, ranks):
        assert len(worst) == 16 * sum(2 + len(Model(kind).state_dict()) for kind in KINDS)
        assert {key: value for key, value in worst.items() if not value < 1e-13} == {}

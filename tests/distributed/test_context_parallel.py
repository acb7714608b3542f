"""Attention over sequences that are split over ranks, against the same attention over whole ones."""

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from minititan.models.attention import Attention
from minititan.models.latent_attention import LatentAttention
from minititan.models.masks import causal_mask
from minititan.models.rotary import inverse_frequencies, rotary_tables
from minititan.parallelisms.activation_checkpoint import apply_activation_checkpoint
from minititan.parallelisms.context_parallel import Split, apply_context_parallel, build_split
from minititan.parallelisms.unit import Unit
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


def count(rank: int, world: int) -> dict[Any, Counter[str]]:
    """The collectives of a forward and of its backward."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    batch, counted = batch_of(documents=False), {}
    for method, checkpointing in product(METHODS, ("none", "op", "full")):
        model, split = Model("grouped"), build_split(mesh, "headtail")
        apply_context_parallel(model, split, method)
        unit = Unit("layers.0", model.layers["0"])
        if checkpointing != "none":
            mode = "selective" if checkpointing == "op" else checkpointing
            apply_activation_checkpoint([unit], mode, "op", {"early_stop": False})
        unit.install()
        with CommDebugMode() as mode:
            gradients(model, split.batch(batch), None)
        names = {op.__name__.partition(".")[0]: n for op, n in mode.get_comm_counts().items() if n}
        counted[method, checkpointing] = Counter(names)
    return counted


def test_collectives_and_their_recomputation() -> None:
    """Keys and values come in one gathering, their gradients go in one sum; or queries, keys and values go
    together and outputs come back, and their gradients likewise. Kept collectives ("op") are not done again.
    """
    (counted, other) = run_ranks(count, 2)
    assert counted == other
    gather, exchange = {"all_gather_into_tensor": 1}, {"all_to_all_single": 2}
    once = {"all_gather": gather | {"reduce_scatter_tensor": 1}, "all_to_all": {"all_to_all_single": 4}}
    for method, again in (("all_gather", gather), ("all_to_all", exchange)):
        assert counted[method, "none"] == counted[method, "op"] == once[method]
        assert counted[method, "full"] == Counter(once[method]) + Counter(again)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_token_has_one_rank_and_head_and_tail_are_as_much_to_do(ranks: int) -> None:
    tokens = torch.arange(24)[None]
    for head_tail in (True, False):
        splits = [Split("", rank, ranks, head_tail) for rank in range(ranks)]
        batches = [split.batch({"tokens": tokens, "labels": tokens + 1}) for split in splits]
        parts = [batch["tokens"][0] for batch in batches]
        assert torch.cat(parts).sort().values.equal(tokens[0])
        for batch, part in zip(batches, parts, strict=True):
            assert batch["labels"][0].equal(part + 1) and batch["positions"][0].equal(part)
        keys = [int((part + 1).sum()) for part in parts]  # that the queries of a rank see
        assert (len(set(keys)) == 1) == head_tail
        whole = torch.arange(24.0).view(1, 1, 24, 1)
        dealt = splits[0].deal(whole)  # [ranks, 1, 1, 24/ranks, 1]
        assert dealt.flatten(1).equal(torch.stack(parts).float())
        assert splits[0].join(dealt).equal(whole)

"""Checkpoints of one layout read on others, bitwise; and failures of one rank, seen by all."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from minititan.checkpoint.checkpointer import Checkpointer
from minititan.config import ConfigError
from minititan.optimizer import build_optimizer, optimizer_tensors
from tests.checkpoints import largest_file
from tests.distributed.harness import run_ranks


@dataclass(frozen=True)
class Layout:
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1

    @property
    def ranks(self) -> int:
        return self.dp_replicate * self.dp_shard * self.tp


# Sizes that no layout divides evenly; with 4 shards `first.bias` leaves some ranks without any element.
class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.first = nn.Linear(6, 3)
        self.second = nn.Linear(3, 11, bias=False)
        self.norm = nn.RMSNorm(6)


PLACEMENTS = {"embed.weight": Shard(0), "first.weight": Shard(1), "second.weight": Shard(0)}


def values(name: str, shape: torch.Size, draw: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * draw + sum(map(ord, name)))
    return torch.randn(shape, generator=generator)


def mesh_of(layout: Layout) -> DeviceMesh:
    sizes = (layout.dp_replicate, layout.dp_shard, layout.tp)
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp_replicate", "dp_shard", "tp"))


def build(layout: Layout) -> tuple[Net, torch.optim.Optimizer]:
    """The model with parameters on this layout, as the trainer has them, and its optimizer."""
    model = Net()
    if layout.ranks > 1:
        mesh = mesh_of(layout)
        if layout.tp > 1:
            for name, parameter in list(model.named_parameters()):
                owner, _, leaf = name.rpartition(".")
                placement = PLACEMENTS.get(name, Replicate())
                sharded = distribute_tensor(parameter.detach(), mesh["tp"], [placement])
                setattr(model.get_submodule(owner), leaf, nn.Parameter(sharded))
        fully_shard(
            model, mesh=mesh["dp_replicate", "dp_shard"] if layout.dp_replicate > 1 else mesh["dp_shard"]
        )
    named = dict(model.named_parameters())
    optimizer = build_optimizer(
        named,
        name="AdamW",
        lr=0.1,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
        implementation="fused",
        no_decay=["norm.*"],
    )
    return model, optimizer


def local_slice(tensor: DTensor) -> tuple[slice, ...]:
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))


def set_values(target: Tensor, full: Tensor) -> None:
    with torch.no_grad():
        if isinstance(target, DTensor):
            target.to_local().copy_(full[local_slice(target)])
        else:
            target.copy_(full)


def full(tensor: Tensor) -> Tensor:
    """The global tensor, put together from the slices of all ranks."""
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    whole = torch.full(tensor.shape, float("nan"), dtype=tensor.dtype)
    slices: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(slices, (local_slice(tensor), tensor.to_local().detach()))
    for place, values in slices:
        whole[place] = values
    return whole


def tensors_of(model: Net, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    return {f"model.{name}": parameter.detach() for name, parameter in named.items()} | {
        f"optimizer.{key}": tensor for key, tensor in optimizer_tensors(optimizer, named).items()
    }


def fill(model: Net) -> None:
    for name, parameter in model.named_parameters():
        set_values(parameter, values(name, parameter.shape, 0))


def train(model: Net, optimizer: torch.optim.Optimizer, draws: range) -> None:
    """Steps with made-up gradients, equal on all layouts: every element of the state gets its own value."""
    for draw in draws:
        for name, parameter in model.named_parameters():
            gradient = torch.empty_like(parameter)
            set_values(gradient, values(name, parameter.shape, draw))
            parameter.grad = gradient
        optimizer.step()


def everything(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: full(tensor) for key, tensor in tensors.items()}


def save_on(rank: int, name: str, root: Path) -> dict[str, Tensor]:
    model, optimizer = build(LAYOUTS[name])
    fill(model)
    train(model, optimizer, range(1, 4))
    tensors = tensors_of(model, optimizer)
    state = {"dataloader": {"samples_consumed": 24}}
    Checkpointer(root / name, keep_latest_k=0, rank=rank).save(3, tensors, state)
    return everything(tensors)


def load_on(rank: int, name: str, folder: Path) -> dict[str, Any]:
    model, optimizer = build(LAYOUTS[name])
    tensors = tensors_of(model, optimizer)
    checkpointer = Checkpointer(folder, keep_latest_k=0, rank=rank)
    newest = checkpointer.newest()
    assert newest is not None
    state = checkpointer.load(newest, tensors)
    loaded = everything(tensors)
    train(model, optimizer, range(4, 6))
    continued = everything(tensors_of(model, optimizer))
    return {
        "ranks": newest.manifest.layout["world_size"],
        "state": state,
        "loaded": loaded,
        "continued": continued,
    }


def save_and_load(rank: int, world: int, root: Path, saves: list[str], loads: list[tuple[str, str]]) -> dict:
    results: dict[Any, Any] = {name: save_on(rank, name, root) for name in saves}
    return results | {(before, after): load_on(rank, after, root / before) for before, after in loads}


LAYOUTS = {
    "one": Layout(),
    "dp2": Layout(dp_shard=2),
    "tp2": Layout(tp=2),
    "ddp3": Layout(dp_replicate=3),
    "dp4": Layout(dp_shard=4),
    "dp2_tp2": Layout(dp_shard=2, tp=2),
    "hsdp": Layout(dp_replicate=2, dp_shard=2),
}

# (saved by, read by), in an order in which each is saved before it is read.
PAIRS = [
    ("one", "dp2_tp2"),
    ("dp2_tp2", "dp4"),
    ("dp4", "hsdp"),
    ("hsdp", "dp2_tp2"),
    ("dp2_tp2", "ddp3"),
    ("dp4", "tp2"),
    ("hsdp", "dp2"),
    ("dp2_tp2", "one"),
    ("ddp3", "one"),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, list[Any]]:
    """What all ranks saved, by layout, and what they loaded, by pair: few starts of ranks serve all pairs."""
    root = tmp_path_factory.mktemp("layouts")
    gathered: dict[Any, list[Any]] = {"one": [save_on(0, "one", root)]}
    for world, saves in ((4, ["dp2_tp2", "dp4", "hsdp"]), (3, ["ddp3"]), (2, [])):
        loads = [pair for pair in PAIRS if LAYOUTS[pair[1]].ranks == world]
        results = run_ranks(save_and_load, world, root, saves, loads)
        gathered |= {key: [result[key] for result in results] for key in results[0]}
    return gathered | {pair: [load_on(0, "one", root / pair[0])] for pair in PAIRS if pair[1] == "one"}


def reference(draws: range) -> dict[str, Tensor]:
    """Plain tensors and an optimizer of one process, without any checkpoint."""
    model, optimizer = build(LAYOUTS["one"])
    fill(model)
    train(model, optimizer, draws)
    return everything(tensors_of(model, optimizer))


def assert_equal(
    got: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 0, atol: float = 0
) -> None:
    """Bitwise, unless tolerances are given."""
    assert got.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(got[key], tensor, rtol=rtol, atol=atol, msg=key)


# Not bitwise: vectorised kernels round the tail of a shard differently.
ROUNDING = {"rtol": 1e-5, "atol": 1e-6}


@pytest.mark.parametrize("before, after", PAIRS)
def test_any_layout_reads_what_another_wrote(outcomes, before, after):
    saved = outcomes[before][0]
    assert_equal(saved, reference(range(1, 4)), **ROUNDING)
    continued = reference(range(1, 6))
    for result in outcomes[before, after]:
        assert result["state"] == {"dataloader": {"samples_consumed": 24}}
        assert result["ranks"] == LAYOUTS[before].ranks
        assert_equal(result["loaded"], saved)
        assert_equal(result["continued"], continued, **ROUNDING)


def attempt(work: Callable[[], object]) -> str:
    """The user's error of `work`, or nothing."""
    try:
        work()
    except ConfigError as error:
        return str(error)
    return ""


def fail_on(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Saves and loads in which only one of the ranks meets a fault."""
    checkpointer = Checkpointer(folder, keep_latest_k=0, rank=rank)

    def tensors(value: float) -> dict[str, Tensor]:
        mesh = init_device_mesh("cpu", (world,))
        return {"model.w": distribute_tensor(torch.full((4000,), value), mesh, [Shard(0)])}

    checkpointer.save(1, tensors(1.0), {})
    found: dict[str, Any] = {}
    for failing in range(world):
        with largest_file(4000) if rank == failing else nullcontext():
            found[f"write{failing}"] = attempt(lambda: checkpointer.save(2, tensors(2.0), {}))
        dist.barrier()
        found[f"left{failing}"] = sorted(os.listdir(folder))
        dist.barrier()
    found["unserialisable"] = ""
    try:
        checkpointer.save(2, tensors(2.0), {"a": object()} if rank == 0 else {})
    except RuntimeError as error:
        found["unserialisable"] = str(error)

    # A plain tensor that all ranks have, but not with the same value.
    found["at odds"] = ""
    try:
        checkpointer.save(2, tensors(2.0) | {"optimizer.w.step": torch.tensor(float(rank))}, {})
    except RuntimeError as error:
        found["at odds"] = str(error)
    checkpointer.save(2, tensors(2.0) | {"optimizer.w.step": torch.tensor(7.0)}, {})

    # As pipeline stages do: each rank has some of the keys.
    own = {f"model.stage{rank}": torch.full((3,), float(rank))}
    checkpointer.save(4, own, {})
    loaded = {f"model.stage{rank}": torch.zeros(3)}
    checkpointer.load(4, loaded)
    found["stage"] = loaded[f"model.stage{rank}"]
    asked = loaded if rank == 0 else loaded | {"model.more": torch.zeros(3)}
    found["missing"] = attempt(lambda: checkpointer.load(4, asked))
    found["surplus"] = attempt(lambda: checkpointer.load(4, {"model.stage0": torch.zeros(3)}))

    target = tensors(0.0)
    checkpointer.load(1, target)
    found["first"] = full(target["model.w"])
    shard = folder / "step-1" / "__1_0.distcp"
    dist.barrier()
    if rank == 0:
        shard.write_bytes(bytes(shard.stat().st_size))
    dist.barrier()
    found["damaged"] = attempt(lambda: checkpointer.load(1, target))
    dist.barrier()
    if rank == 0:
        shard.unlink()
    dist.barrier()
    found["gone"] = attempt(lambda: checkpointer.load(1, target))
    return found


def test_a_fault_of_one_rank_is_one_error_on_all_and_costs_nothing(tmp_path):
    folder = tmp_path / "checkpoint"
    results = run_ranks(fail_on, 2, folder)
    for key in (
        "write0",
        "write1",
        "left0",
        "left1",
        "unserialisable",
        "at odds",
        "missing",
        "surplus",
        "damaged",
        "gone",
    ):
        assert results[0][key] == results[1][key], key
    first = results[0]
    for failing in (0, 1):
        assert first[f"write{failing}"] == (
            f'checkpoint.folder = "{folder}": step 2 could not be saved (rank {failing}: File too large); '
            "make room or set another job.dump_folder; the newest checkpoint is step 1"
        )
        assert first[f"left{failing}"] == ["step-1"]
    assert "object is not JSON serializable" in first["unserialisable"]
    assert "optimizer.w.step has other values on rank 0 than on rank 1" in first["at odds"]
    assert first["missing"].startswith(f"{folder}/step-4: lacks model.more;")
    assert first["surplus"].startswith(f"{folder}/step-4: has more than this run: model.stage1;")
    damaged = f"{folder}/step-1/__1_0.distcp: damaged (its SHA-256 is not that of what was saved)"
    assert first["damaged"] == f"{damaged}; use another checkpoint"
    assert first["gone"] == f"{folder}/step-1/__1_0.distcp: missing; use another checkpoint"
    for rank, result in enumerate(results):
        assert torch.equal(result["stage"], torch.full((3,), float(rank)))
        assert torch.equal(result["first"], torch.ones(4000))
    assert sorted(os.listdir(folder)) == ["step-1", "step-2", "step-4"]

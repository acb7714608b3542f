"""Runs a row of the layout matrix in forked ranks and compares all of its numbers with those of one process.

Each rank hands back its pieces of every tensor with their places, so nothing that gathers inside the library
takes part in the proof, and copies that should be equal are seen to be.
"""

import contextlib
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tests.distributed.harness import run_ranks
from tests.distributed.layouts import BASE, Overrides, Row

EXACT = ("step", "batch_sha256", "tokens_seen", "samples_consumed", "lr")
TENSORS = ("gradients", "parameters", "exp_avg", "exp_avg_sq")

# Relative, the largest over steps, or over parameters by norm. In float32 the order in which numbers are
# added moves losses by about 1e-6.
BOUNDS = {
    "float64": {"loss": 1e-9, "grad_norm": 1e-9, **dict.fromkeys(TENSORS, 1e-7)},
    "float32": {"loss": 1e-5, "grad_norm": 1e-5, **dict.fromkeys(TENSORS, 1e-4)},
}


@dataclass(frozen=True)
class Piece:
    """A rank's part of a tensor: it begins at `offset` in the whole, whose shape is `shape`."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: np.ndarray


Pieces = dict[str, Piece]


@dataclass
class Part:
    """What one rank hands back: its pieces of gradients (step 1, unclipped), parameters and moments."""

    steps: list[dict[str, Any]] = field(default_factory=list)  # of metrics.jsonl; rank 0
    norms: list[float] = field(default_factory=list)
    tensors: dict[str, Pieces] = field(default_factory=dict)


@dataclass(frozen=True)
class Numbers:
    """A run's numbers, put together from its ranks."""

    steps: list[dict[str, Any]]
    tensors: dict[str, dict[str, np.ndarray]]


def arguments(keys: Overrides, folder: Path) -> list[str]:
    """The command line of a run in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.toml").touch()
    keys = keys | {"job.dump_folder": f"{folder}/out"}
    return [f"--job.config_file={folder}/run.toml", *(f"--{key}={value}" for key, value in keys.items())]


def lines(folder: Path) -> list[dict[str, Any]]:
    """The objects in the `metrics.jsonl` of the run in `folder`."""
    return [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]


def train_in_rank(rank: int, world: int, row: Row, folder: str, token_cache: str) -> None:
    """Run the training that `row` describes in `folder`."""
    from minititan.train import main

    keys = BASE | {"data.cache_folder": token_cache} | row.same | row.overrides
    with contextlib.redirect_stdout(io.StringIO()):
        main(arguments(keys, Path(folder)))


def piece(tensor: torch.Tensor) -> Piece:
    local: Any = tensor.detach()
    if not isinstance(local, DTensor):
        return Piece(tuple(tensor.shape), (0,) * tensor.ndim, local.numpy().copy())
    _, offset = compute_local_shape_and_global_offset(local.shape, local.device_mesh, local.placements)
    local = local.to_local()
    return Piece(tuple(tensor.shape), offset, local.numpy().copy())


@contextlib.contextmanager
def recorded(part: Part, parameters: dict[str, torch.nn.Parameter]) -> Iterator[None]:
    """Record in `part` each step's gradient norm and, at the first step, the gradients that it is of."""
    from minititan import train

    plain: Callable[..., torch.Tensor] = train.gradient_norm

    def observed(*args: Any) -> torch.Tensor:
        if "gradients" not in part.tensors:
            grads = {name: p.grad for name, p in parameters.items()}
            part.tensors["gradients"] = {name: piece(g) for name, g in grads.items() if g is not None}
        norm = plain(*args)
        part.norms.append(norm.item())
        return norm

    with mock.patch.object(train, "gradient_norm", observed):
        yield


def record_in_rank(rank: int, world: int, row: Row, folder: str, token_cache: str) -> Part:
    """Run the training that `row` describes and hand back this rank's part of its numbers."""
    from minititan.config import load
    from minititan.distributed import init_distributed
    from minititan.run import check
    from minititan.train import Trainer

    part = Part()
    keys = BASE | {"data.cache_folder": token_cache} | row.same | row.overrides
    with contextlib.redirect_stdout(io.StringIO()):
        run = check(load(arguments(keys, Path(folder))), world)
        trainer = Trainer.build(run, init_distributed(timeout_seconds=300))
        with recorded(part, trainer.parameters):
            trainer.run()
    part.tensors["parameters"] = {name: piece(p) for name, p in trainer.parameters.items()}
    for moment in ("exp_avg", "exp_avg_sq"):
        state = trainer.optimizer.state
        part.tensors[moment] = {
            name: piece(state[p][moment]) for name, p in trainer.parameters.items() if p.requires_grad
        }
    if rank == 0:
        part.steps = [line for line in lines(Path(folder)) if "loss" in line]
    return part


def record(row: Row, folder: Path, token_cache: Path) -> Numbers:
    """The numbers of the run that `row` describes."""
    parts = run_ranks(record_in_rank, row.ranks, row, str(folder), str(token_cache), timeout=600)
    assert all(part.norms == parts[0].norms for part in parts), f"{row}: ranks have other gradient norms"
    names = parts[0].tensors
    return Numbers(parts[0].steps, {n: assembled(row, n, [p.tensors[n] for p in parts]) for n in names})


def assembled(row: Row, kind: str, ranks: list[Pieces]) -> dict[str, np.ndarray]:
    """The whole tensors; fails where two ranks have other values for one element, or none has any."""
    whole: dict[str, np.ndarray] = {}
    for pieces in ranks:
        for name, part in pieces.items():
            full = whole.setdefault(name, np.full(part.shape, np.nan, part.values.dtype))
            here = tuple(slice(o, o + n) for o, n in zip(part.offset, part.values.shape, strict=True))
            known = ~np.isnan(full[here])
            same = np.array_equal(full[here][known], part.values[known])
            assert same, f"{row}: ranks have other {kind} of {name}"
            full[here] = part.values
    for name, full in whole.items():
        assert not np.isnan(full).any(), f"{row}: no rank has all {kind} of {name}"
    return whole


def differences(found: Numbers, expected: Numbers) -> dict[str, float]:
    """The largest relative difference of each quantity; fails where what must be equal to the bit is not."""
    for key in EXACT:
        assert [s[key] for s in found.steps] == [s[key] for s in expected.steps], f"{key} differs"
    result = {
        key: max(
            abs(one[key] - other[key]) / abs(other[key])
            for one, other in zip(found.steps, expected.steps, strict=True)
        )
        for key in ("loss", "grad_norm")
    }
    for kind in TENSORS:
        ones, others = found.tensors[kind], expected.tensors[kind]
        assert ones.keys() == others.keys(), f"{kind} of other parameters"
        result[kind] = max(_difference(ones[name], others[name]) for name in others)
    return result


def _difference(one: np.ndarray, other: np.ndarray) -> float:
    size = float(np.linalg.norm(other))
    return float(np.linalg.norm(one - other)) / size if size else float(np.linalg.norm(one))


def too_large(row: Row, found: dict[str, float]) -> dict[str, float]:
    """Those of the differences that are above their bound (NaN is)."""
    bounds = BOUNDS["float32" if row.float32 else "float64"]
    return {key: value for key, value in found.items() if not value <= bounds[key]}

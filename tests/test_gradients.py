"""Norm and clipping: as `torch.nn.utils` on one process, as on the gathered gradients on a mesh."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from minititan.build import model_of
from minititan.config import Config
from minititan.gradients import clip_gradients, finish_gradients, gradient_norm
from minititan.init import init_parameters
from minititan.models.decoder import Decoder, init_parameter
from minititan.parallelisms import build_meshes
from minititan.run import check
from tests.distributed.harness import run_ranks


def parameters_with_gradients() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for shape in ((3, 4), (5,), (2, 0), (1,)):
        parameter = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
        parameter.grad = torch.randn(shape, generator=generator, dtype=torch.float64)
        parameters.append(parameter)
    return [*parameters, nn.Parameter(torch.zeros(3))]  # the last one took no part


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e3])
def test_clipping_against_torch(max_norm):
    own, reference = parameters_with_gradients(), parameters_with_gradients()
    expected = torch.nn.utils.clip_grad_norm_(reference, max_norm)
    torch.testing.assert_close(gradient_norm(own), expected, rtol=1e-14, atol=0)
    clip_gradients(own, gradient_norm(own), max_norm)
    for one, other in zip(own, reference, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-13, atol=0)


def test_zero_leaves_gradients_as_they_are():
    own, before = parameters_with_gradients(), parameters_with_gradients()
    clip_gradients(own, gradient_norm(own), 0.0)
    assert gradient_norm(own) == torch.nn.utils.get_total_norm([p.grad for p in before[:-1]])  # pyright: ignore[reportArgumentType]
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(own[:-1], before, strict=False))  # pyright: ignore[reportArgumentType]


def test_no_gradient_at_all():
    own = [nn.Parameter(torch.ones(2))]
    assert gradient_norm(own) == 0
    clip_gradients(own, gradient_norm(own), 1.0)


# ---- on ranks: the gradients of a real backward

LAYOUTS = {  # replicate, shard, tp, keys
    "fsdp": (1, 4, 1, {}),
    "fsdp-tp": (1, 2, 2, {}),
    "fsdp-tp-plain": (1, 2, 2, {"disable_sequence_parallel": True, "disable_embedding_parallel": True}),
    "hsdp": (2, 2, 1, {}),
    "tp": (1, 1, 4, {}),
}
ARGS = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 36}
ARGS |= {"num_key_value_heads": 4, "vocab_size": 265}  # a vocabulary that no layout divides
MAX_NORM = 1e-3


def run_of(folder: str, world: int, replicate: int, shard: int, tp: int, keys: dict[str, bool]) -> Any:
    tables = {
        "job": {"dump_folder": folder},
        "model": {"args": ARGS},
        "training": {"dtype": "float64", "seq_len": 8},
        "activation_checkpoint": {"mode": "none"},
        "parallelism": keys
        | {
            "data_parallel_replicate_degree": replicate,
            "data_parallel_shard_degree": shard,
            "tensor_parallel_degree": tp,
        },
    }
    return check(Config.model_validate(tables), world)


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(265, (4, 9), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def whole(parameters: dict[str, Any]) -> dict[str, Tensor]:
    # A copy: what is whole on each rank would be the gradient itself.
    return {name: parameter.grad.full_tensor().clone() for name, parameter in parameters.items()}


def on_ranks(rank: int, world: int, folder: str) -> dict[str, Any]:
    results, made = {}, {}
    for layout, (replicate, shard, tp, keys) in LAYOUTS.items():
        degrees = replicate, shard, tp
        meshes = made[degrees] = made.get(degrees) or build_meshes(
            "cpu", **dict(zip(("dp_replicate", "dp_shard", "tp"), degrees, strict=True))
        )
        model = model_of(run_of(folder, world, replicate, shard, tp, keys), meshes, torch.device("cpu"))
        parameters = dict(model.named_parameters())
        tokens, labels = (part.chunk(replicate * shard)[meshes.dp_rank] for part in batch())
        model.lm_head(model(tokens), labels).backward()
        finish_gradients(list(parameters.values()))
        gradients = whole(parameters)
        norm = gradient_norm(list(parameters.values()))
        clip_gradients(list(parameters.values()), norm, MAX_NORM)
        results[layout] = norm, gradients, whole(parameters)
        dist.barrier()
    return results


@pytest.fixture(scope="module")
def gathered(tmp_path_factory):
    return run_ranks(on_ranks, 4, str(tmp_path_factory.mktemp("gradients")))


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> dict[str, Tensor]:
    """The gradients of a plain model on one process."""
    args = run_of(str(tmp_path_factory.mktemp("plain")), 1, 1, 1, 1, {}).args
    model = Decoder(args).double()
    parameters = dict(model.named_parameters())
    init_parameters(parameters, lambda name, *rows: init_parameter(name, *rows, args=args), seed=0)
    tokens, labels = batch()
    logits = model.lm_head(model(tokens)).flatten(0, 1)
    F.cross_entropy(logits, labels.flatten(), reduction="sum").backward()
    return {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_norm_and_clipping_on_a_mesh(layout, gathered, plain):
    expected = torch.stack([gradient.square().sum() for gradient in plain.values()]).sum().sqrt()
    for result in gathered:
        norm, gradients, clipped = result[layout]
        assert gradients.keys() == plain.keys()
        assert norm.item() == pytest.approx(expected.item(), rel=1e-12)
        for name, gradient in plain.items():
            assert (gradients[name] - gradient).norm() < 1e-12 * gradient.norm(), name
            scaled = gradients[name] * (MAX_NORM / (norm + 1e-6))
            torch.testing.assert_close(clipped[name], scaled, rtol=1e-14, atol=0)
        total = torch.stack([gradient.square().sum() for gradient in clipped.values()]).sum().sqrt()
        assert total.item() == pytest.approx(MAX_NORM, rel=1e-6)

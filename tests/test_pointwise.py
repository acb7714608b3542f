"""The parts of a block that have a backward pass of their own, beside their plain forms and autograd."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minititan.models.pointwise import RMSNorm, rotate, swiglu
from minititan.models.rotary import inverse_frequencies, rotary_tables


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def results(call: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The output and the gradients of the inputs, for an upstream gradient that is not contiguous."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = call(*leaves)
    upstream = numbers(*reversed(out.shape), seed=9).permute(*reversed(range(out.dim())))
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def own_norm(x: Tensor, weight: Tensor) -> Tensor:
    norm = RMSNorm(x.shape[-1], eps=1e-5)
    return torch.func.functional_call(norm, {"weight": weight}, (x,))


def plain_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[..., : a.shape[-1]], sin[..., : a.shape[-1]]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


@pytest.mark.parametrize("shape", [(3, 8), (2, 5, 8), (2, 3, 5, 8)])
def test_a_norm_and_its_gradients(shape):
    inputs = numbers(*shape, seed=0), numbers(8, seed=1)
    torch.testing.assert_close(results(own_norm, *inputs), results(plain_norm, *inputs))


def test_a_norm_of_heads_that_lie_across_the_tokens():
    inputs = numbers(2, 5, 12, seed=0), numbers(4, seed=1)

    def heads(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, weight: norm(x.unflatten(-1, (-1, 4)).transpose(1, 2), weight)

    torch.testing.assert_close(results(heads(own_norm), *inputs), results(heads(plain_norm), *inputs))


def test_a_norm_in_bfloat16_is_pytorchs():
    x, weight = numbers(2, 5, 8, seed=0).bfloat16(), numbers(8, seed=1).bfloat16()
    assert torch.equal(own_norm(x, weight), F.rms_norm(x, (8,), weight, 1e-5))


def test_a_norm_whose_weight_is_not_trained():
    x = numbers(3, 8, seed=0).requires_grad_()
    norm = RMSNorm(8, eps=1e-5, dtype=torch.float64).requires_grad_(False)
    norm(x).sum().backward()
    (expected,) = torch.autograd.grad(plain_norm(x, norm.weight).sum(), x)
    torch.testing.assert_close(x.grad, expected)


def test_a_rotation_and_its_gradient():
    positions = torch.arange(5) * 7
    cos, sin = rotary_tables(positions, inverse_frequencies(6, 100.0, None), torch.float64, 1.3)
    x = numbers(2, 5, 3, 6, seed=0)

    def turned(rotation: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x: rotation(x.transpose(1, 2), cos, sin)

    torch.testing.assert_close(results(turned(rotate), x), results(turned(plain_rotation), x))


def test_swiglu_and_its_gradients():
    inputs = numbers(2, 5, 6, seed=0), numbers(2, 5, 6, seed=1)
    torch.testing.assert_close(
        results(swiglu, *inputs), results(lambda a, b: a * torch.sigmoid(a) * b, *inputs)
    )


def test_swiglu_leaves_what_it_keeps_for_the_backward_pass():
    """A split backward pass goes through it twice."""
    gate, up = (numbers(4, 6, seed=seed).requires_grad_() for seed in (0, 1))
    out = swiglu(gate, up)
    first = torch.autograd.grad(out.sum(), (gate, up), retain_graph=True)
    second = torch.autograd.grad(out.sum(), (gate, up))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

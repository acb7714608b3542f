"""The pointwise parts of a block in as few passes over memory as eager kernels allow: norm, rotation, SwiGLU.

Written with PyTorch's own operators, each would keep what only its backward pass makes from inputs that are
kept anyway, and go through memory two or three times as often. Inside torch.compile the plain forms are
used, which the compiler fuses.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# In lower precisions PyTorch's operators decide what is rounded when.
UNROUNDED = (torch.float32, torch.float64)

_silu_backward: Any = torch.ops.aten.silu_backward.grad_input


class RMSNorm(nn.RMSNorm):
    """x / rms(x) times a weight, over the last dimension (arXiv:1910.07467)."""

    def forward(self, x: Tensor) -> Tensor:
        # CUDA has one kernel for it.
        if x.device.type != "cpu" or x.dtype not in UNROUNDED or _compiling():
            return super().forward(x)
        return _RMSNorm.apply(x, self.weight, self.eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        scale = square.div_(x.shape[-1]).add_(eps).rsqrt_()  # [..., 1]
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        products = (grad * normed).flatten(0, -2)
        grad_weight = products.sum(0) if ctx.needs_input_grad[1] else None
        mean = products.mv(weight).div_(x.shape[-1]).view_as(scale)
        grad_x = torch.mul(grad, weight, out=products.reshape(grad.shape))
        return grad_x.addcmul_(normed, mean, value=-1).mul_(scale), grad_weight, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [B, H, T, C] turned by the tables of `rotary_tables`: (a, b) -> (a cos - b sin, b cos + a sin)
    for the halves of its channels.
    """
    if x.dtype in UNROUNDED and not _compiling():
        return _Rotate.apply(x, cos, sin)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, -1), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    out = torch.empty_like(x)
    (a, b), (new_a, new_b) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    cos, sin = cos[..., : a.shape[-1]], sin[..., : a.shape[-1]]
    torch.mul(a, cos, out=new_a).addcmul_(b, sin, value=-direction)
    torch.mul(b, cos, out=new_b).addcmul_(a, sin, value=direction)
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up (arXiv:2002.05202)."""
    return F.silu(gate) * up if _compiling() else _SwiGLU.apply(gate, up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up = ctx.saved_tensors
        grad_silu = grad * up
        return _silu_backward(grad_silu, gate, grad_input=grad_silu), F.silu(gate).mul_(grad)


def _compiling() -> bool:
    return torch.compiler.is_compiling()

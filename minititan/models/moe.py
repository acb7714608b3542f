"""Mixtures of experts: each token goes through the few experts that the router chooses, none is dropped.

Sources: arXiv:1701.06538, arXiv:2101.03961 (balancing loss), arXiv:2401.06066 (shared experts),
arXiv:2412.19437 (sigmoid scores, groups, balancing by a bias, the loss of one sequence), arXiv:2202.08906
(router z-loss).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Routing(NamedTuple):
    """What a router did with this rank's tokens; all of it adds up over ranks and micro-batches."""

    counts: Tensor  # [E], int64: how many tokens chose each expert
    loss: Tensor  # the auxiliary losses times their coefficients, summed over sequences; differentiable
    entropy: Tensor  # of the probabilities of the experts, summed over tokens


class Router(nn.Module):
    """Scores in float32 (float64 of a float64 model), and the top k of them: [B, T, D] -> [N, K], N = B*T."""

    def __init__(self, width: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.weight = nn.Parameter(torch.empty(experts, width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Routing]:
        """Return weights [N, K] and the indices [N, K] of the chosen experts, and what was done."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.flatten(0, 1).to(dtype), self.weight.to(dtype))
        scores = logits.softmax(-1)
        weights, indices = scores.topk(self.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        with torch.no_grad():
            counts = torch.bincount(indices.flatten(), minlength=self.weight.shape[0])
            entropy = -(scores * scores.clamp(min=1e-30).log()).sum()
        return weights, indices, Routing(counts, scores.new_zeros(()), entropy)


class Experts(nn.Module):
    """SwiGLU experts: a token's rows [N, D] through the experts chosen for it, [N, D]."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Parameter(torch.empty(experts, hidden, width))  # [E, F, D]
        self.up_proj = nn.Parameter(torch.empty(experts, hidden, width))  # [E, F, D]
        self.down_proj = nn.Parameter(torch.empty(experts, width, hidden))  # [E, D, F]
        # Where experts are spread over ranks: takes `compute`, rows and counts, exchanges the rows before it
        # and after it.
        self.exchange: Callable[[Callable[[Tensor, Tensor], Tensor], Tensor, Tensor], Tensor] | None = None

    def forward(self, x: Tensor, weights: Tensor, indices: Tensor, counts: Tensor) -> Tensor:
        """Return the weighted sums [N, D] of what the chosen experts make of x [N, D].

        `weights` and `indices` [N, K]; `counts` [E] of `indices`.
        """
        order = indices.flatten().argsort(stable=True)
        rows = x[order // indices.shape[1]]  # [N*K, D], by expert
        out = self.exchange(self.compute, rows, counts) if self.exchange else self.compute(rows, counts)
        out = torch.empty_like(out).index_copy(0, order, out).unflatten(0, indices.shape)  # [N, K, D]
        return (out * weights.unsqueeze(-1)).sum(1).to(x.dtype)

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return what this rank's experts make of rows [M, D]: counts[0] of expert 0, and so on."""
        parts = rows.split(counts.tolist())
        out = [
            F.linear(F.silu(F.linear(part, gate)) * F.linear(part, up), down)
            for part, gate, up, down in zip(parts, self.gate_proj, self.up_proj, self.down_proj, strict=True)
        ]
        return torch.cat(out)


class MoE(nn.Module):
    """A feed-forward of experts: [B, T, D] -> [B, T, D] and what the router did."""

    def __init__(self, router: Router, experts: Experts, shared_experts: nn.Module | None) -> None:
        super().__init__()
        self.gate = router
        self.experts = experts
        self.shared_experts = shared_experts

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        weights, indices, routing = self.gate(x)
        out = self.experts(x.flatten(0, 1), weights, indices, routing.counts).view_as(x)
        if self.shared_experts is not None:
            out = out + self.shared_experts(x)[0]
        return out, routing


class RoutingRecord:
    """What the routers of a model did since it was last cleared, by the name of the layer.

    Training adds to it in each forward, evaluation does not. `loss_weight` is the factor on the auxiliary
    losses: 1 / the number of sequences in a step, so that their mean is what is trained.
    """

    def __init__(self) -> None:
        self.layers: dict[str, Routing] = {}
        self.loss_weight: float | Tensor = 1.0

    def add(self, layer: str, routing: Routing, x: Tensor) -> Tensor:
        """Note what a layer's router did; return its output x, whose backward is that of its losses too."""
        detached = Routing(*(tensor.detach() for tensor in routing))
        before = self.layers.get(layer)
        self.layers[layer] = detached if before is None else Routing(*map(torch.add, before, detached))
        if not routing.loss.requires_grad:
            return x
        return _WithLoss.apply(x, routing.loss, self.loss_weight)

    def clear(self) -> None:
        self.layers = {}


class _WithLoss(torch.autograd.Function):
    """x as it is, and in the backward the gradient of a loss that is added to the model's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, weight: float | Tensor) -> Tensor:
        ctx.weight, ctx.loss = weight, (loss.dtype, loss.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        dtype, device = ctx.loss
        return grad, torch.as_tensor(ctx.weight, dtype=dtype, device=device), None

"""Mixtures of experts: each token goes through the few experts that the router chooses, none is dropped.

Sources: arXiv:1701.06538, arXiv:2101.03961 (balancing loss), arXiv:2401.06066 (shared experts),
arXiv:2412.19437 (sigmoid scores, groups, balancing by a bias, the loss of one sequence), arXiv:2202.08906
(router z-loss).
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minititan.models.pointwise import swiglu

GROUPED = (torch.bfloat16, torch.float16, torch.float32)  # the dtypes of `grouped_mm`
TINY = 1e-20  # added to sums of scores: sigmoids may all be zero


class Routing(NamedTuple):
    """What a router did with this rank's tokens; all of it adds up over ranks and micro-batches."""

    counts: Tensor  # [E], int64: how many tokens chose each expert
    loss: Tensor  # the auxiliary losses times their coefficients, summed over sequences; differentiable
    entropy: Tensor  # of the probabilities of the experts, summed over tokens


class Router(nn.Module):
    """Scores in float32 (float64 of a float64 model), and the top k of them: [B, T, D] -> [N, K], N = B*T.

    Every token counts, padding too. In training a router also returns its auxiliary losses: the balancing
    loss E/(K N) sum_i counts_i p_i, with the mean probability p_i of an expert, which is 1 for even loads,
    and the mean square of the log-sum-exp of the logits. `balance_scope` says over which tokens the counts
    are: of each sequence, or of a micro-batch on all ranks, which depends on how the batch is cut.
    """

    def __init__(
        self,
        width: int,
        experts: int,
        top_k: int,
        *,
        scoring: Literal["softmax", "sigmoid"] = "softmax",
        normalise: bool = True,
        scale: float = 1.0,
        groups: int = 1,
        chosen_groups: int = 1,
        bias: bool = False,
        correction: bool = False,
        correction_speed: float = 0.0,
        balance_coef: float = 0.0,
        balance_scope: Literal["sequence", "batch"] = "sequence",
        z_coef: float = 0.0,
    ) -> None:
        super().__init__()
        self.top_k, self.scoring, self.normalise, self.scale = top_k, scoring, normalise, scale
        self.groups, self.chosen_groups = groups, chosen_groups
        self.correction_speed = correction_speed
        self.balance_coef, self.balance_scope, self.z_coef = balance_coef, balance_scope, z_coef
        self.weight = nn.Parameter(torch.empty(experts, width))
        self.bias = nn.Parameter(torch.empty(experts)) if bias else None
        # Added to the scores for the choice of experts, and no part of the weights. Not trained: each step
        # changes it in place by what it has counted, so it is kept whole and in float32 at least.
        self.e_score_correction_bias = (
            nn.Parameter(torch.empty(experts), requires_grad=False) if correction else None
        )
        self.forced = False  # for measurements: experts in turn, whatever the scores
        # Where a sequence is split over ranks, and where other ranks have tokens of the same micro-batch: the
        # sums over those ranks of a tensor. They are not differentiated.
        self.sum_over_sequence: Callable[[Tensor], Tensor] | None = None
        self.sum_over_batch: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Routing]:
        """Return weights [N, K] and the indices [N, K] of the chosen experts, and what was done."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(dtype)
        logits = F.linear(x.flatten(0, 1).to(dtype), self.weight.to(dtype), bias)  # [N, E]
        scores = logits.sigmoid() if self.scoring == "sigmoid" else logits.softmax(-1)
        indices = self.choose(scores)
        weights = scores.gather(1, indices)  # [N, K]
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + TINY)
        counts = self.count(indices, len(x))
        loss = entropy = scores.new_zeros(())
        if self.training:
            shares = scores / (scores.sum(-1, keepdim=True) + TINY) if self.scoring == "sigmoid" else scores
            loss = self.losses(logits, shares, counts)
            entropy = -torch.xlogy(shares.detach(), shares.detach()).sum()
        return weights * self.scale, indices, Routing(counts.sum(0), loss, entropy)

    @torch.no_grad()
    def choose(self, scores: Tensor) -> Tensor:
        """Return the indices [N, K] of the experts of each token by scores [N, E]."""
        if self.forced:
            turns = torch.arange(len(scores) * self.top_k, device=scores.device)
            return (turns % scores.shape[1]).view(-1, self.top_k)
        if self.e_score_correction_bias is not None:
            scores = scores + self.e_score_correction_bias.to(scores.device)
        if self.groups > 1:
            grouped = scores.unflatten(1, (self.groups, -1))  # [N, groups, E / groups]
            # DeepSeek-V3 goes by the best two of a group, DeepSeek-V2, which has no bias, by the best.
            best = 1 if self.e_score_correction_bias is None else 2
            of_groups = grouped.topk(best, dim=-1).values.sum(-1)
            chosen = of_groups.topk(self.chosen_groups, dim=-1).indices
            left_out = torch.ones_like(of_groups, dtype=torch.bool).scatter(1, chosen, False)
            scores = grouped.masked_fill(left_out.unsqueeze(-1), float("-inf")).flatten(1)
        return scores.topk(self.top_k, dim=-1).indices

    @torch.no_grad()
    def count(self, indices: Tensor, sequences: int) -> Tensor:
        """Return how many tokens of each of the sequences chose each expert, [B, E], by indices [N, K]."""
        experts = self.weight.shape[0]
        first = torch.arange(sequences, device=indices.device).unsqueeze(-1) * experts
        places = (indices.view(sequences, -1) + first).flatten()
        counts = torch.zeros(sequences * experts, dtype=torch.int64, device=indices.device)
        return counts.scatter_add(0, places, torch.ones_like(places)).view(sequences, experts)

    def losses(self, logits: Tensor, shares: Tensor, counts: Tensor) -> Tensor:
        """Return this rank's part of the auxiliary losses times their coefficients, summed over sequences.

        `logits` and the probabilities `shares` [N, E]; `counts` [B, E] of this rank's tokens.
        """
        if not (self.balance_coef or self.z_coef):
            return logits.new_zeros(())
        of_sequences = self.sum_over_sequence(counts) if self.sum_over_sequence else counts
        loss = logits.new_zeros(len(counts))
        if self.balance_coef:
            chosen = of_sequences
            if self.balance_scope == "batch":
                chosen = counts.sum(0, keepdim=True)
                chosen = self.sum_over_batch(chosen) if self.sum_over_batch else chosen
            chosen = chosen.to(shares.dtype)
            loads = chosen / chosen.mean(-1, keepdim=True)  # [B or 1, E], even: 1
            loss = loss + self.balance_coef * (loads * shares.unflatten(0, (len(counts), -1)).sum(1)).sum(-1)
        if self.z_coef:
            squares = logits.logsumexp(-1).square()
            loss = loss + self.z_coef * squares.unflatten(0, (len(counts), -1)).sum(1)
        return (loss * self.top_k / of_sequences.sum(-1)).sum()  # by the tokens of a whole sequence

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """Cast and move all, but leave the correction bias in float32 at least."""
        before = None if self.e_score_correction_bias is None else self.e_score_correction_bias.detach()
        super()._apply(fn, recurse)
        after = self.e_score_correction_bias
        if before is not None and after is not None and after.itemsize < 4:
            exact = (after if before.is_meta else before).to(after.device, torch.float32)
            self.e_score_correction_bias = nn.Parameter(exact.detach(), requires_grad=False)
        return self


class Experts(nn.Module):
    """Experts of some kind: a token's rows [N, D] through the experts chosen for it, [N, D].

    A kind has parameters whose first dimension are the experts, and `compute`. What ranks that each hold a
    part of the hidden width F make of a row adds up.
    """

    HIDDEN_AXES: ClassVar[Mapping[str, int]] = {}  # by parameter: the dimension of F; the others have none

    def __init__(self) -> None:
        super().__init__()
        # Where experts are spread over ranks: takes `compute`, rows and counts, exchanges the rows before it
        # and after it.
        self.exchange: Callable[[Callable[[Tensor, Tensor], Tensor], Tensor, Tensor], Tensor] | None = None

    def forward(self, x: Tensor, weights: Tensor, indices: Tensor, counts: Tensor) -> Tensor:
        """Return the weighted sums [N, D] of what the chosen experts make of x [N, D].

        `weights` and `indices` [N, K]; `counts` [E] of `indices`.
        """
        order = indices.flatten().argsort(stable=True)
        rows = _Spread.apply(x, order, indices.shape[1])  # [N*K, D], by expert
        out = self.exchange(self.compute, rows, counts) if self.exchange else self.compute(rows, counts)
        out = torch.empty_like(out).index_copy(0, order, out).unflatten(0, indices.shape)  # [N, K, D]
        return (out * weights.to(out.dtype).unsqueeze(-1)).sum(1)

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return what this rank's experts make of rows [M, D]: counts[0] of expert 0, and so on."""
        raise NotImplementedError


class SwiGLUExperts(Experts):
    """Experts that are feed-forward layers as `FeedForward`."""

    HIDDEN_AXES: ClassVar = {"gate_proj": 1, "up_proj": 1, "down_proj": 2}

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Parameter(torch.empty(experts, hidden, width))  # [E, F, D]
        self.up_proj = nn.Parameter(torch.empty(experts, hidden, width))  # [E, F, D]
        self.down_proj = nn.Parameter(torch.empty(experts, width, hidden))  # [E, D, F]

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        gate = grouped_product(rows, self.gate_proj.mT, counts)
        up = grouped_product(rows, self.up_proj.mT, counts)
        return grouped_product(swiglu(gate, up), self.down_proj.mT, counts)


class ClampedExperts(Experts):
    """The experts of gpt-oss (arXiv:2508.10925): with biases, and a SwiGLU whose inputs are clamped.

    Gate and up are the even and the odd columns of one matrix.
    """

    HIDDEN_AXES: ClassVar = {"gate_up_proj": 2, "gate_up_proj_bias": 1, "down_proj": 1}

    def __init__(
        self, experts: int, width: int, hidden: int, alpha: float = 1.702, limit: float = 7.0
    ) -> None:
        super().__init__()
        self.alpha, self.limit = alpha, limit
        self.gate_up_proj = nn.Parameter(torch.empty(experts, width, 2 * hidden))  # [E, D, 2F]
        self.gate_up_proj_bias = nn.Parameter(torch.empty(experts, 2 * hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, width))  # [E, F, D]
        self.down_proj_bias = nn.Parameter(torch.empty(experts, width))

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        both = grouped_product(rows, self.gate_up_proj, counts)
        both = both + _by_row(self.gate_up_proj_bias, counts, both)
        gate, up = both[:, ::2].clamp(max=self.limit), both[:, 1::2].clamp(-self.limit, self.limit)
        hidden = gate * (self.alpha * gate).sigmoid() * (up + 1)  # [M, F]
        out = grouped_product(hidden, self.down_proj, counts)
        return out + _by_row(self.down_proj_bias, counts, out)


def grouped_product(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Return rows [M, A] times weights [E, A, B], [M, B]: counts[0] rows by the first, and so on.

    By one operator where it has the dtype and rows are a multiple of 16 bytes long, by a loop elsewhere.
    """
    sizes = (rows.shape[1] * rows.itemsize, weights.shape[2] * weights.itemsize)
    if rows.dtype in GROUPED and not any(size % 16 for size in sizes):
        return F.grouped_mm(rows, weights, offs=counts.cumsum(0, dtype=torch.int32))
    parts = rows.split(counts.tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weights.unbind(), strict=True)])


def _by_row(bias: Tensor, counts: Tensor, rows: Tensor) -> Tensor:
    """Return the bias [E, B] of each row's expert, [M, B]; its gradient is summed in float32 at least."""
    wide = bias.to(torch.promote_types(bias.dtype, torch.float32))
    return wide.repeat_interleave(counts, dim=0, output_size=len(rows)).to(rows.dtype)


class _Spread(torch.autograd.Function):
    """x [N, D] -> [N*K, D], K rows a token, in the given order.

    The backward gathers and sums; that of indexing would add up in an order of its own on a GPU.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, top_k: int) -> Tensor:
        ctx.top_k = top_k
        ctx.save_for_backward(order)
        return x.index_select(0, order // top_k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (order,) = ctx.saved_tensors
        tokens = torch.empty_like(grad).index_copy(0, order, grad)
        return tokens.unflatten(0, (-1, ctx.top_k)).sum(1), None, None


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
        # Not a view to autograd: FSDP warns where a stage's output is one.
        return torch.ops.aten._unsafe_view.default(x, x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        dtype, device = ctx.loss
        if isinstance(ctx.weight, Tensor):
            return grad, ctx.weight.to(device, dtype), None
        # A number is filled in on the device: copied there, the host would wait.
        return grad, torch.full((), ctx.weight, dtype=dtype, device=device), None

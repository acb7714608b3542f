"""Cross entropy from hidden states, the head applied in chunks of tokens.

The logits of a batch never exist as a whole: each chunk's logits, loss and gradients are computed at once in
the forward, so the memory is one chunk's and no product is computed twice. Under tensor parallelism each rank
holds the head's rows for its part of the vocabulary; three small all-reduces a chunk take the place of
gathering logits (`disable_loss_parallel` gathers them).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minititan.parallelisms.collectives import all_gather, all_reduce

IGNORED = -100  # the label of a token that is not in the loss
CHUNK_ELEMENTS = 2**27  # logits in one chunk at the most: 512 MiB in float32
CPU_CHUNK_TOKENS = 512  # enough for fast products, and few enough for the logits to stay in a cache


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's part of the vocabulary under tensor parallelism: rows `first` and following of `rows` a
    rank.
    """

    group: str  # the name of the tp process group
    rows: int  # on each rank but the last ones, ceil(V / ranks)
    first: int
    parallel: bool  # False: gather the logits of all ranks


def install_loss(lm_head: Any, shard: VocabularyShard | None, compile_backend: str | None) -> None:
    """Make `lm_head(hidden [B, T, D], labels [B, T])` return the sum of the token losses, and
    `lm_head(hidden)` logits.

    Labels of -100 are left out. The sum is in float32 at least and the same on all tp ranks. A third argument
    is a factor on the gradients, not on the sum: float16 needs it before they are rounded for the first time.
    """
    chunk = _chunk_gradients
    if compile_backend is not None:
        chunk = torch.compile(chunk, backend=compile_backend, fullgraph=True, dynamic=False)
    lm_head.forward = partial(_head, lm_head, shard, chunk)


def _head(
    lm_head: nn.Linear,
    shard: VocabularyShard | None,
    chunk: Callable[..., tuple[Tensor, Tensor]],
    hidden: Tensor,
    labels: Tensor | None = None,
    factor: Tensor | None = None,
) -> Tensor:
    if labels is None:
        logits = F.linear(hidden, lm_head.weight)
        return logits if shard is None else _all_columns(logits, shard)[..., : lm_head.out_features]
    # Not by the rows that this rank has: a chunk has collectives, and must be the same on all tp ranks.
    columns = lm_head.out_features if shard is None or not shard.parallel else shard.rows
    size = max(1, CHUNK_ELEMENTS // columns)
    size = min(size, CPU_CHUNK_TOKENS) if hidden.device.type == "cpu" else size
    return _HeadLoss.apply(
        hidden.flatten(0, 1),
        lm_head.weight,
        labels.flatten(),
        factor,
        shard,
        chunk,
        size,
        torch.is_grad_enabled(),
    )


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [N, D]
        weight: Tensor,  # [V, D], or this rank's rows
        labels: Tensor,  # [N]
        factor: Tensor | None,
        shard: VocabularyShard | None,
        chunk: Callable[..., tuple[Tensor, Tensor]],
        size: int,  # of a chunk, in tokens
        with_gradients: bool,
    ) -> Tensor:
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        grad_hidden = torch.empty_like(hidden) if with_gradients else None
        grad_weight = None
        for part in (slice(start, start + size) for start in range(0, len(hidden), size)):
            loss, grad_logits = chunk(F.linear(hidden[part], weight), labels[part], shard, factor)
            total += loss
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[part])
                grad_weight = _added_product(grad_weight, grad_logits.t(), hidden[part], total.dtype)
        ctx.weight_dtype = weight.dtype
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad, (grad_weight * grad).to(ctx.weight_dtype), *[None] * 6


def _added_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return total + a b, in `dtype` from the second chunk on: a bfloat16 sum would lose the small terms."""
    if total is None:
        return a @ b
    if a.dtype == dtype:
        return total.addmm_(a, b)
    return total.to(dtype).add_(a @ b)


def _chunk_gradients(
    logits: Tensor, labels: Tensor, shard: VocabularyShard | None, factor: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the sum of one chunk's losses and its gradient by `logits` [N, V or this rank's columns], times
    `factor`.
    """
    columns, dtype, first = logits.shape[1], logits.dtype, 0
    if shard is not None:
        first = shard.first if shard.parallel else 0
        logits = _padded(logits, shard) if shard.parallel else _all_columns(logits, shard)
    group = shard.group if shard is not None and shard.parallel else None
    logits = logits.to(torch.promote_types(dtype, torch.float32))

    valid = labels != IGNORED
    index = labels - first
    mine = (valid & (index >= 0) & (index < logits.shape[1])).unsqueeze(-1)
    index = index.unsqueeze(-1).where(mine, 0)

    largest = logits.amax(dim=-1, keepdim=True)
    largest = all_reduce(largest, group, "max") if group else largest
    target = (logits.gather(-1, index) - largest).where(mine, 0.0)
    target = all_reduce(target, group) if group else target
    # From here in place. The compiler fuses what is not, and would copy back what is done to an input.
    shifted = logits - largest if torch.compiler.is_compiling() else logits.sub_(largest)
    exponentials = shifted.exp_()
    total = exponentials.sum(dim=-1, keepdim=True)
    total = all_reduce(total, group) if group else total
    loss = (total.log() - target).squeeze(-1).where(valid, 0.0).sum()

    weight = valid.unsqueeze(-1).to(total.dtype)
    weight = weight if factor is None else weight * factor
    grad = exponentials.mul_(weight / total).scatter_add_(-1, index, -weight * mine)
    if shard is not None and not shard.parallel:
        grad = grad[:, shard.first :]
    return loss, grad[:, :columns].to(dtype)


def _padded(logits: Tensor, shard: VocabularyShard) -> Tensor:
    """Return this rank's columns, filled up to those of a full shard by logits that no softmax counts."""
    return F.pad(logits, (0, shard.rows - logits.shape[-1]), value=float("-inf"))


def _all_columns(logits: Tensor, shard: VocabularyShard) -> Tensor:
    """Return the columns of all ranks, those of short shards filled up at the end."""
    parts = all_gather(_padded(logits, shard).unsqueeze(0), shard.group)  # [ranks, ..., rows]
    return parts.movedim(0, -2).flatten(-2)

"""Validation: the mean token loss over a set, summed over all ranks and divided by the number of labels once.

It changes nothing of training: no gradients, no counters, the data position of training untouched.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from minititan.distributed import to_device
from minititan.loss import IGNORED

if TYPE_CHECKING:
    from minititan.parallelisms.pipeline import Pipeline

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class ValidationResult:
    """`tokens`: labels in the loss, over all ranks."""

    loss: float
    tokens: int
    seconds: float

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))  # e^700 is the largest power that a float holds


@torch.no_grad()
def run_validation(
    parts: Sequence[Any],
    batches: Iterable[Batch],
    own_part: Callable[[Batch], Batch],
    device: torch.device,
    group: dist.ProcessGroup,
    pipeline: "Pipeline | None" = None,
) -> ValidationResult:
    """Return the result over the batches of all ranks of `group`; every rank must call it.

    A batch has `tokens` and `labels` [b, T], of which a rank computes `own_part`; each rank must have the
    same number of batches. `parts` is the model, or those parts of it that go through `pipeline` with those
    of other ranks.
    """
    start = time.perf_counter()
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # losses, labels
    training = [part.training for part in parts]
    for part in parts:
        part.eval()
    if pipeline is not None:
        pipeline.begin_evaluation()
    for batch in batches:
        inputs = own_part(to_device(batch, device))
        sums[1] += (inputs["labels"] != IGNORED).sum()
        sums[0] += _token_losses(parts[0], inputs) if pipeline is None else pipeline.token_losses(inputs)
    for part, mode in zip(parts, training, strict=True):
        part.train(mode)
    dist.all_reduce(sums, group=group)
    if pipeline is not None:  # one stage has the losses, all have the labels
        dist.all_reduce(sums[:1], group=pipeline.group)
    loss, tokens = sums.tolist()
    return ValidationResult(loss / max(tokens, 1.0), int(tokens), time.perf_counter() - start)


def _token_losses(model: Any, batch: Batch) -> Tensor:
    """Return the sum of the token losses of a batch."""
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    return model.lm_head(model(**inputs), batch["labels"])

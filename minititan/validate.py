"""Validation: the mean token loss over a set, summed over all ranks and divided by the number of labels once.

It changes nothing of training: no gradients, no counters, the data position of training untouched.
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minititan.loss import IGNORED

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
    model: Any,
    batches: Iterable[Batch],
    own_part: Callable[[Batch], Batch],
    device: torch.device,
    group: dist.ProcessGroup,
) -> ValidationResult:
    """Return the result over the batches of all ranks of `group`; every rank must call it.

    A batch has `tokens` and `labels` [b, T], of which a rank computes `own_part`; each rank must have the
    same number of batches.
    """
    start = time.perf_counter()
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # losses, labels
    training = model.training
    model.eval()
    for batch in batches:
        inputs = own_part({name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()})
        labels = inputs.pop("labels")
        sums[0] += model.lm_head(model(**inputs), labels)
        sums[1] += (labels != IGNORED).sum()
    model.train(training)
    dist.all_reduce(sums, group=group)
    loss, tokens = sums.tolist()
    return ValidationResult(loss / max(tokens, 1.0), int(tokens), time.perf_counter() - start)

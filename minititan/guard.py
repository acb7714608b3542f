"""Whether a step's update is made: not where a loss or gradient is not finite, or the loss has jumped.

All ranks decide alike, by one small all-reduce a step before the update, for which the host waits. What was
not finite is looked for only once something was not: a loss names its rank; a gradient has been summed over
ranks by then, so it is named by its parameter and the ranks that hold the broken part.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from minititan.config import ConfigError
from minititan.loss_scale import LossScale
from minititan.step_requests import on_any_rank

WAY_OUT = "lower optimizer.lr, or look at the data; a restart goes on from the last checkpoint"


@dataclass
class Guard:
    """Judges each step; what must survive a restart is in `state`.

    `policy` "skip" leaves at most `max_in_a_row` updates out in a row. `spike_factor`: a loss above that many
    times the median of the last `spike_window` ones is treated like one that is not finite (None: no such
    rule). A gradient that overflows because of the loss scale is routine: the update is left out whatever the
    policy. `fault` makes a ConfigError's line of a key, a rule and a way out.
    """

    policy: Literal["raise", "skip"]
    max_in_a_row: int
    spike_factor: float | None
    spike_window: int
    fault: Callable[[str, str, str], str]
    say: Callable[[str], None] = print
    scale: LossScale | None = None  # of float16
    skipped: int = 0  # updates left out in the whole run
    in_a_row: int = 0
    losses: list[float] = field(default_factory=list)  # of the last steps whose update was made

    def allows(
        self,
        step: int,
        loss: Tensor,
        labels: Tensor,
        norm: Tensor,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        on_any_rank: Callable[[list[Tensor]], list[bool]] = on_any_rank,
    ) -> bool:
        """Return whether to make the update of `step`; every rank must call it, before it clips gradients.

        `loss` is the sum of this rank's token losses, `labels` the number of labels in the step, `norm` the
        gradient norm, `group` all data-parallel ranks; `on_any_rank` tells for flags whether any rank of the
        run has them set. Raises ConfigError on all ranks alike.
        """
        mean = self._mean(loss, labels, group)
        flags = [~loss.isfinite(), ~norm.isfinite().to(loss.device), self._is_spike(mean)]
        bad_loss, bad_gradient, spike = on_any_rank(flags)
        if not (bad_loss or bad_gradient or spike):
            self.in_a_row = 0
            if self.scale is not None:
                self.scale.note_good_step()
            if self.spike_factor is not None:
                self.losses = [*self.losses, mean.item()][-self.spike_window :]
            return True
        if bad_gradient and not bad_loss and self.scale is not None and self.scale.can_shrink:
            self._shrink(step, self.scale)
            return False
        if bad_loss or bad_gradient:
            key, cause = "debug.nan_policy", _not_finite(loss if bad_loss else None, parameters)
        else:
            key = "debug.loss_spike_factor"
            cause = f"the loss is {mean.item():.4f}, the median of the {self.spike_window} before it "
            cause += f"{median(self.losses):.4f}"
        self._leave_out(step, key, cause)
        return False

    def _mean(self, loss: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = loss.to(torch.float64, copy=True)
        if self.spike_factor is not None:
            dist.all_reduce(total, group=group)
        return total / labels

    def _is_spike(self, mean: Tensor) -> Tensor:
        if self.spike_factor is None or len(self.losses) < self.spike_window:
            return torch.zeros_like(mean, dtype=torch.bool)
        return mean > self.spike_factor * median(self.losses)

    def _leave_out(self, step: int, key: str, cause: str) -> None:
        if self.policy == "raise":
            rule = f"step {step}: {cause}; its update was not made, nothing of it is saved"
            raise ConfigError(self.fault(key, rule, WAY_OUT))
        self.skipped, self.in_a_row = self.skipped + 1, self.in_a_row + 1
        if self.in_a_row > self.max_in_a_row:
            rule = f"step {step} is one more in a row without an update: {cause}"
            raise ConfigError(self.fault("debug.max_skipped_in_a_row", rule, WAY_OUT))
        self.say(f"Step {step}: {cause}; its update is left out ({self.skipped} so far)")

    def _shrink(self, step: int, scale: LossScale) -> None:
        scale.shrink()
        self.skipped += 1
        self.say(
            f"Step {step}: a gradient overflows; its update is left out, the loss scale is {scale.value:g}"
        )

    def state(self) -> dict[str, Any]:
        """Return what a restart needs, as JSON."""
        scale = {} if self.scale is None else {"loss_scale": self.scale.state()}
        return {
            "skipped_steps": self.skipped,
            "skipped_in_a_row": self.in_a_row,
            "losses": self.losses,
            **scale,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        self.skipped, self.in_a_row = state["skipped_steps"], state["skipped_in_a_row"]
        self.losses = state["losses"][-self.spike_window :]
        if self.scale is not None and "loss_scale" in state:
            self.scale.restore(state["loss_scale"])


def _not_finite(loss: Tensor | None, parameters: Mapping[str, nn.Parameter]) -> str:
    """Return what is not finite and where; every rank must call it. `loss` None: losses are finite."""
    own = [] if loss is not None else [name for name, p in parameters.items() if not _is_finite(p.grad)]
    entries: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(entries, (math.nan if loss is None else loss.item(), own))
    if loss is not None:
        broken = {rank: value for rank, (value, _) in enumerate(entries) if not math.isfinite(value)}
        return "the loss is " + ", ".join(f"{value} on rank {rank}" for rank, value in broken.items())
    found = [name for _, names in entries for name in names]  # other ranks' of a pipeline too
    names = [name for name in dict.fromkeys([*parameters, *found]) if name in found]
    if not names:  # each is finite, the sum of their squares is not
        return "the gradient norm is not finite"
    ranks = ", ".join(str(rank) for rank, (_, names) in enumerate(entries) if names)
    # The backward pass goes from the last to the first, and takes what is broken along.
    more = f" (and of {len(names) - 1} parameters before it)" if len(names) > 1 else ""
    return f"the gradient of {names[-1]}{more} is not finite on rank {ranks}"


def _is_finite(grad: Tensor | None) -> bool:
    local = grad.to_local() if isinstance(grad, DTensor) else grad
    return local is None or bool(local.isfinite().all())

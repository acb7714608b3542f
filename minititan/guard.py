"""Whether a step's update is made: not where a loss or gradient is not finite, or the loss has jumped.

All ranks decide alike, by one small all-reduce a step before the update. A guard that is `late` never makes
the host wait for it: the device itself leaves the update out (`left_out`, which the optimizer reads there),
and the host reads at the next step what became of this one, while the device has that step's passes to do.
Whatever a late guard does, it does of the same numbers and in the same order; `settle` reads what is still
open, before anything of a step is logged, saved or validated.

A loss that is not finite names its rank; a gradient has been summed over ranks by then, so it is named by its
parameter and the ranks that hold the broken part.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minititan.config import ConfigError
from minititan.distributed import local_part
from minititan.gradients import foreach_norm
from minititan.loss_scale import LossScale
from minititan.step_requests import StepRequests, on_any_rank

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
    late: bool = False  # not with a loss scale: the next forward pass needs it
    left_out: Tensor | None = None  # late: 1 where the last step's update is to be left out, else 0
    _open: "_Judged | None" = None  # late: what the host has not read yet

    def allows(
        self,
        step: int,
        loss: Tensor,
        labels: Tensor,
        norm: Tensor,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        requests: StepRequests | None = None,
    ) -> bool:
        """Return whether to make the update of `step`; every rank must call it, before it clips gradients.

        `loss` is the sum of this rank's token losses, `labels` the number of labels in the step, `norm` the
        gradient norm, `group` all data-parallel ranks; `requests` are agreed upon on the way. Late, it is
        always to be made, but for what `left_out` says. Raises ConfigError on all ranks alike.
        """
        if requests is not None:
            requests.begin_step()
        self.settle()
        mean = self._mean(loss, labels, group)
        flags = torch.stack([~loss.isfinite(), ~norm.isfinite().to(loss.device), self._is_spike(mean)])
        found = on_any_rank(flags, requests.own() if requests is not None else ())
        numbers = torch.cat([torch.stack([loss.double(), mean]), found.double()])
        judged = _Judged(step, parameters, requests, numbers)
        if not self.late:
            return self._decide(judged)
        assert self.scale is None, "the loss scale of the next step follows from this one's gradients"
        self.left_out = found[: len(flags)].amax().float()
        self._open = judged.on_its_way()
        return True

    def settle(self) -> None:
        """Read what a late guard has left open; every rank must call it.

        Raises ConfigError on all ranks alike.
        """
        if self._open is not None:
            judged, self._open = self._open, None
            self._decide(judged)

    def _decide(self, judged: "_Judged") -> bool:
        """Draw the consequences of a step; return whether its update is made."""
        step, (loss, mean, *found) = judged.step, judged.read()
        bad_loss, bad_gradient, spike, *asked = (flag > 0 for flag in found)
        if judged.requests is not None:
            judged.requests.agree(asked)
        if not (bad_loss or bad_gradient or spike):
            self.in_a_row = 0
            if self.scale is not None:
                self.scale.note_good_step()
            if self.spike_factor is not None:
                self.losses = [*self.losses, mean][-self.spike_window :]
            return True
        if bad_gradient and not bad_loss and self.scale is not None and self.scale.can_shrink:
            self._shrink(step, self.scale)
            return False
        if bad_loss or bad_gradient:
            key, cause = "debug.nan_policy", _not_finite(loss if bad_loss else None, judged)
        else:
            key = "debug.loss_spike_factor"
            cause = f"the loss is {mean:.4f}, the median of the {self.spike_window} before it "
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
        """Return what a restart needs, as JSON; of a late guard, once all is settled."""
        assert self._open is None, "a step of which it is not known whether it counts"
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


class _Judged(NamedTuple):
    """A step with what decides it: `numbers` are this rank's loss, the mean loss, and the flags."""

    step: int
    parameters: Mapping[str, nn.Parameter]
    requests: StepRequests | None
    numbers: Tensor
    broken: Tensor | None = None  # by parameter; None: the gradients are still there to be looked at
    copied: Any = None  # the event after which they are on the host

    def on_its_way(self) -> "_Judged":
        """Begin to copy all of it to the host, which can do other things meanwhile."""
        numbers, broken = _to_host(self.numbers), _to_host(_broken(self.parameters))
        copied = torch.cuda.Event() if self.numbers.is_cuda else None
        if copied is not None:
            copied.record()
        return self._replace(numbers=numbers, broken=broken, copied=copied)

    def read(self) -> list[float]:
        """Return the numbers; the host waits until they are there."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.numbers.tolist()

    def broken_names(self) -> list[str]:
        """Return the parameters whose gradients are not finite on this rank."""
        broken = _broken(self.parameters) if self.broken is None else self.broken
        return [name for name, found in zip(self.parameters, broken.tolist(), strict=True) if found]


def _to_host(tensor: Tensor) -> Tensor:
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)


def _not_finite(loss: float | None, judged: _Judged) -> str:
    """Return what is not finite and where; every rank must call it. `loss` None: losses are finite."""
    own = [] if loss is not None else judged.broken_names()
    entries: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(entries, (math.nan if loss is None else loss, own))
    if loss is not None:
        broken = {rank: value for rank, (value, _) in enumerate(entries) if not math.isfinite(value)}
        return "the loss is " + ", ".join(f"{value} on rank {rank}" for rank, value in broken.items())
    found = [name for _, names in entries for name in names]  # other ranks' of a pipeline too
    names = [name for name in dict.fromkeys([*judged.parameters, *found]) if name in found]
    if not names:  # each is finite, the sum of their squares is not
        return "the gradient norm is not finite"
    ranks = ", ".join(str(rank) for rank, (_, names) in enumerate(entries) if names)
    # The backward pass goes from the last to the first, and takes what is broken along.
    more = f" (and of {len(names) - 1} parameters before it)" if len(names) > 1 else ""
    return f"the gradient of {names[-1]}{more} is not finite on rank {ranks}"


def _broken(parameters: Mapping[str, nn.Parameter]) -> Tensor:
    """Return for each parameter whether this rank's part of its gradient is not finite, on the device."""
    grads = {name: local_part(p.grad) for name, p in parameters.items() if p.grad is not None}
    grads = {name: grad for name, grad in grads.items() if grad.numel()}
    largest = dict(zip(grads, foreach_norm([*grads.values()], math.inf), strict=True)) if grads else {}
    none = torch.zeros((), device=next(iter(largest.values())).device if largest else None)
    return torch.stack([~largest.get(name, none).isfinite() for name in parameters])

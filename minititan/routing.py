"""What the routers of a model did in a step, summed over all ranks, and what follows from it.

The sums are taken once a step, where a correction bias needs them or the step is logged; micro-batches have
been added up on each rank by then. Models without a `RoutingRecord` are left alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minititan.distributed import local_part
from minititan.models.moe import Router, Routing, RoutingRecord


@dataclass(frozen=True)
class LayerLoad:
    """A layer's routing in one step."""

    load: float  # tokens of the busiest expert over the mean
    entropy: float  # of the probabilities of a token's experts, in nats; the mean over tokens
    dead_experts: int  # that no token chose
    dropped_tokens: int  # choices that reached no expert


@dataclass(frozen=True)
class StepRouting:
    """The routing of one step in the layers that have experts, over the whole batch."""

    auxiliary_loss: float  # all of them times their coefficients; in the gradients, not in the loss
    layers: Mapping[str, LayerLoad]


class StepRouters:
    """The routers of a model from step to step; every rank must call its methods.

    `parts` are the model, or some of its layers, with one record; `groups`: the ranks of all groups together
    have different tokens of a step, each token once; `pipeline`: the ranks with the other layers.
    """

    def __init__(
        self,
        parts: Sequence[Any],
        groups: Sequence[dist.ProcessGroup],
        pipeline: dist.ProcessGroup | None = None,
    ) -> None:
        self.record = getattr(parts[0], "routing", None)
        self.groups, self.pipeline = groups, pipeline
        self.routers: dict[str, Router] = {
            name: module
            for part in parts
            for name, block in part.layers.named_children()
            for module in block.modules()
            if isinstance(module, Router)
        }
        self._sums: dict[str, Routing] | None = None

    def begin(self, loss_weight: float) -> None:
        """Begin a step in which the auxiliary losses of a sequence count `loss_weight`."""
        self._sums = None
        if isinstance(self.record, RoutingRecord):
            self.record.clear()
            self.record.loss_weight = loss_weight

    @torch.no_grad()
    def correct(self, left_out: Tensor | None = None) -> None:
        """Move the correction biases, in place: down for experts of more tokens than the mean, else up
        (arXiv:2408.15664). `left_out`, on the device: 1 where they are to stay as they are.
        """
        if not any(router.correction_speed for router in self.routers.values()):
            return
        for name, sums in self.sums().items():
            router, counts = self.routers[name], sums.counts
            bias: Any = router.e_score_correction_bias
            if bias is not None:
                step = (counts.mean() - counts).sign() * router.correction_speed
                step = step if left_out is None else step * (1 - left_out)
                local = local_part(bias)
                local += step.to(local.device, local.dtype)

    def result(self, sequences: int, tokens: int) -> StepRouting | None:
        """Return what was done in a step of so many sequences and tokens; None without a router."""
        layers = {
            name: (sums.loss.item(), _load(self.routers[name], sums, tokens))
            for name, sums in self.sums().items()
        }
        if self.pipeline is not None:
            found: list[Any] = [None] * dist.get_world_size(self.pipeline)
            dist.all_gather_object(found, layers, group=self.pipeline)
            every = {name: layer for layers in found for name, layer in layers.items()}
            layers = {name: every[name] for name in sorted(every, key=int)}
        if not layers:
            return None
        loss = sum(loss for loss, _ in layers.values())
        return StepRouting(loss / sequences, {name: load for name, (_, load) in layers.items()})

    def sums(self) -> dict[str, Routing]:
        """Return the step's routing by layer over all ranks, in float64."""
        if self._sums is None:
            layers = self.record.layers if isinstance(self.record, RoutingRecord) else {}
            self._sums = dict(zip(layers, _summed([*layers.values()], self.groups), strict=True))
        return self._sums


def _summed(layers: Sequence[Routing], groups: Sequence[dist.ProcessGroup]) -> list[Routing]:
    """Add up over ranks, in one tensor of float64, in which counts are exact."""
    if not layers:
        return []
    flat = [torch.cat([x.double().flatten() for x in routing]) for routing in layers]
    total = torch.cat(flat)
    for group in groups:
        dist.all_reduce(total, group=group)
    return [Routing(part[:-2], part[-2], part[-1]) for part in total.split([len(x) for x in flat])]


def _load(router: Router, sums: Routing, tokens: int) -> LayerLoad:
    counts: Tensor = sums.counts
    return LayerLoad(
        load=(counts.max() / counts.mean()).item(),
        entropy=sums.entropy.item() / tokens,
        dead_experts=int((counts == 0).sum()),
        dropped_tokens=tokens * router.top_k - int(counts.sum()),
    )

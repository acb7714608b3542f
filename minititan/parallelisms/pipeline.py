"""Pipeline parallelism: groups of layers on ranks of their own, micro-batches one after another through them
(arXiv:1811.06965), by the schedules of `torch.distributed.pipelining`.

A stage is the model with parts left out: its parameters keep their names, so neither initial weights nor
checkpoints know of stages. Each rank reads all of its column's samples: the stream [b, T, D] alone travels
between stages, split along the sequence where tensor parallelism splits it; the shapes are told to torch,
which would find them out by a forward and a backward pass of its own. A head that is tied to the embedding
of another stage is a copy without a name: its gradient is added to the embedding's, and its values are
fetched anew before they are used.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from minititan.distributed import local_part

Batch = Mapping[str, Tensor]


class Stage(PipelineStage):
    """A stage whose ranks exchange gradients when asked to, not after each batch that goes through."""

    exchanges = True

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if self.exchanges:
            super().perform_reduce_grad(grad_scale_factor)


class Pipeline:
    """The stages of a rank and how batches go through those of all ranks; all of a column must call it."""

    def __init__(
        self,
        parts: Mapping[int, Any],
        ranks: Sequence[int],
        mesh: DeviceMesh,
        schedule: str,
        *,
        micro_batches: int,
        micro_batch_size: int,
        seq_len: int,
        shards: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        tied: bool,
    ) -> None:
        """`parts` are this rank's by their stage, `ranks` the rank on `mesh` of every stage.

        The stream between stages has `seq_len` / `shards` tokens of `width` in `dtype`. `tied`: the head of
        the last stage is a copy of the first one's embedding.
        """
        self.parts, self.ranks, self.rank, self.last = parts, ranks, mesh.get_local_rank(), len(ranks) - 1
        self.group, self.shards, self.width = mesh.get_group(), shards, width
        self.dtype, self.device = dtype, device
        self.tied = _Tied(parts, ranks, self.rank, self.group) if tied else None
        self.total = self.labels = torch.zeros((), device=device)
        self.scale: float | None = None

        def example(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

        tokens = torch.empty((micro_batch_size, seq_len), dtype=torch.int64, device="meta")
        between = example(micro_batch_size, seq_len // shards, width)
        hidden = example(micro_batch_size, seq_len, width)
        self.stages = [
            Stage(
                part,
                index,
                len(ranks),
                device,
                input_args=tokens if index == 0 else between,
                output_args=hidden if index == self.last else between,
                group=self.group,
            )
            for index, part in parts.items()
        ]
        kind = get_schedule_class(schedule)
        stages: Any = self.stages if issubclass(kind, PipelineScheduleMulti) else self.stages[0]
        self.schedule = kind(stages, n_microbatches=micro_batches, loss_fn=self._loss, scale_grads=False)

    def forward_backward(self, batches: Sequence[Batch], labels: Tensor, scale: float | None) -> Tensor:
        """Add up the gradients of this column's batches, exchange them once; return the sum of token losses,
        on all stages the same.

        Gradients are those of the losses / `labels`, and times `scale` where it is given.
        """
        self.labels, self.scale = labels, scale
        self.total = torch.zeros((), dtype=torch.promote_types(self.dtype, torch.float32), device=self.device)
        if self.tied is not None:
            self.tied.fetch()
        for index, batch in enumerate(batches):
            for stage in self.stages:
                stage.exchanges = index == len(batches) - 1
            tokens = (batch["tokens"],) if 0 in self.parts else ()
            target = batch["labels"] if self.last in self.parts else None
            context: Any = _context(batch)
            self.schedule.step(*tokens, target=target, return_outputs=False, **context)
        for part in self.parts.values():
            _lay_out_gradients(part)
        if self.tied is not None:
            self.tied.add_gradient()
        dist.all_reduce(self.total, group=self.group)
        return self.total

    def _loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        head = self.parts[self.last].lm_head
        if self.scale is not None:
            loss = head(hidden, labels, self.scale / self.labels)
            self.total += loss.detach()
            return loss
        loss = head(hidden, labels)
        self.total += loss.detach()
        return loss / self.labels

    @torch.no_grad()
    def token_losses(self, batch: Batch) -> Tensor:
        """Return the sum of a batch's token losses on the rank with the last stage, 0 on the others.

        The batch goes through stage by stage, at any size.
        """
        x, context = batch["tokens"], _context(batch)
        for index, part in self.parts.items():
            if index > 0 and self.ranks[index - 1] != self.rank:
                rows, length = batch["tokens"].shape
                x = torch.empty(
                    (rows, length // self.shards, self.width), dtype=self.dtype, device=self.device
                )
                dist.recv(x, group=self.group, group_src=self.ranks[index - 1])
            x = part(x, **context)
            if index == self.last:
                return part.lm_head(x, batch["labels"])
            if self.ranks[index + 1] != self.rank:
                dist.send(x.contiguous(), group=self.group, group_dst=self.ranks[index + 1])
        return torch.zeros((), device=self.device)

    def begin_evaluation(self) -> None:
        """Make the stages ready for `token_losses`."""
        if self.tied is not None:
            self.tied.fetch()


class _Tied:
    """The embedding of the first stage and, of the last, the head that is a copy of it."""

    def __init__(
        self, parts: Mapping[int, Any], ranks: Sequence[int], rank: int, group: dist.ProcessGroup
    ) -> None:
        self.group, self.rank, self.first, self.last = group, rank, ranks[0], ranks[-1]
        # Taken now: while FSDP has gathered a unit's parameters, its modules hold others.
        self.embedding: nn.Parameter | None = parts[0].embed_tokens.weight if 0 in parts else None
        last = len(ranks) - 1
        self.head: nn.Parameter | None = parts[last].lm_head.weight if last in parts else None

    @torch.no_grad()
    def fetch(self) -> None:
        """Give the head the embedding's values."""
        own = None if self.embedding is None else local_part(self.embedding)
        copy = None if self.head is None else local_part(self.head)
        self._move(own, copy, self.first, self.last)

    @torch.no_grad()
    def add_gradient(self) -> None:
        """Add the head's gradient to the embedding's."""
        own = None if self.embedding is None else local_part(self.embedding.grad)
        part = None if self.head is None else local_part(self.head.grad)
        received = None if own is None else torch.empty_like(own)
        self._move(part, received, self.last, self.first)
        if own is not None and received is not None:
            own += received
        if self.head is not None:
            self.head.grad = None

    def _move(self, source: Tensor | None, target: Tensor | None, sender: int, receiver: int) -> None:
        if source is not None and target is not None:
            target.copy_(source)
        elif source is not None and source.numel():
            dist.send(source.contiguous(), group=self.group, group_dst=receiver)
        elif target is not None and target.numel():
            dist.recv(target, group=self.group, group_src=sender)


def _context(batch: Batch) -> dict[str, Tensor]:
    """What every stage needs of a batch: positions [B, T], and document ids where there are any."""
    context = {name: tensor for name, tensor in batch.items() if name not in ("tokens", "labels")}
    tokens = batch["tokens"]
    context.setdefault("positions", torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens))
    return context


def _lay_out_gradients(part: nn.Module) -> None:
    """Lay gradients out like their parameters, as optimizers expect: a schedule that splits the backward pass
    keeps a transposed gradient as it is (torch 2.13), where autograd would copy it.
    """
    for parameter in part.parameters():
        if parameter.grad is not None and not local_part(parameter.grad).is_contiguous():
            parameter.grad = parameter.grad.clone(memory_format=torch.contiguous_format)

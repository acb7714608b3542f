"""Context parallelism: each rank of the axis `cp` has a part of every sequence.

All but attention works on the rank's own tokens. Attention meets those of the others in one of two ways:
`all_gather` brings the keys and values of the whole sequence to each rank (their gradients are summed and
scattered in the backward); `all_to_all` gives each rank the whole sequence of some heads, and takes the
outputs back (arXiv:2309.14509). A token's labels, positions and place in its document go with it.

Causal attention costs a token the more the later it stands. With the balance of head and tail a sequence is
cut into twice as many chunks as ranks, and each rank has one from the beginning and its counterpart from the
end. A chunk sees its keys and those before it, so without documents or a window no mask is needed.

Under tensor parallelism too, `cp` is the outer split of a sequence, `tp` the inner.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from minititan.models.masks import Mask, attend, causal_mask
from minititan.parallelisms.collectives import exchange_rows, gather_sequence

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Split:
    """How a sequence is dealt out to the ranks of a group: in chunks of one length, one or two to each."""

    group: str
    rank: int
    ranks: int
    head_tail: bool

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """Return which chunks a rank has, in its order."""
        return (rank, 2 * self.ranks - 1 - rank) if self.head_tail else (rank,)

    def part(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's part of x, whose dimension `dim` is a sequence."""
        own = self.chunks_of(self.rank)
        chunks = x.unflatten(dim, (self.ranks * len(own), -1))
        return torch.cat([chunks.select(dim, chunk) for chunk in own], dim)

    def batch(self, batch: Batch) -> Batch:
        """Return this rank's part of a batch, and the positions of its tokens.

        `document_ids` stay those of the whole sequences: masks need the keys' too.
        """
        tokens = batch["tokens"]
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[:2])
        batch = {"positions": positions, **batch}
        return {name: x if name == "document_ids" else self.part(x) for name, x in batch.items()}

    def join(self, parts: Tensor) -> Tensor:
        """Return whole sequences [B, H, T, C] of the parts [ranks, B, H, T/ranks, C] of all ranks."""
        place = {}
        for rank in range(self.ranks):
            chunks = parts[rank].chunk(len(self.chunks_of(rank)), dim=2)
            place |= dict(zip(self.chunks_of(rank), chunks, strict=True))
        return torch.cat([place[chunk] for chunk in sorted(place)], dim=2)

    def deal(self, x: Tensor) -> Tensor:
        """Return the parts [ranks, B, H, T/ranks, C] of whole sequences [B, H, T, C]."""
        chunks = x.chunk(self.ranks * len(self.chunks_of(0)), dim=2)
        own = [torch.cat([chunks[chunk] for chunk in self.chunks_of(rank)], 2) for rank in range(self.ranks)]
        return torch.stack(own)


def build_split(mesh: DeviceMesh, balancer: str | None) -> Split:
    """Return how sequences are dealt out over the one-axis `mesh`: by "headtail", else in one piece each."""
    group = mesh.get_group().group_name
    return Split(group, mesh.get_local_rank(), mesh.size(), head_tail=balancer == "headtail")


def apply_context_parallel(model: Any, split: Split, method: str) -> None:
    """Make the attention of `model` meet the whole sequence, by `all_gather` or `all_to_all`, in place.

    The model then takes what `Split.batch` returns. Raises ValueError where it lacks the seams.
    """
    if faults := seam_faults(model):
        raise ValueError("; ".join(faults))
    gathers = method == "all_gather"
    model.causal_mask = partial(_rank_mask, split, gathers)
    # One for all layers: torch.compile tells such apart by identity, and would compile each layer.
    attend = partial(_attend_to_gathered if gathers else _attend_by_heads, split)
    for module in _attentions(model.layers):
        module.attend = attend


def seam_faults(model: Any) -> list[str]:
    """Return why context parallelism cannot split the sequences of `model`, each a line."""
    if not callable(getattr(model, "causal_mask", None)):
        return ["its model has no `causal_mask` that it takes masks from"]
    return [
        f"layers.{name} has no attention that computes by an attribute `attend`"
        for name, block in model.layers.named_children()
        if not _attentions(block)
    ]


def _attentions(module: nn.Module) -> list[Any]:
    return [part for part in module.modules() if callable(getattr(part, "attend", None))]


def _rank_mask(
    split: Split,
    of_own_rows: bool,
    length: int,
    window: int | None,
    document_ids: Tensor | None,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Mask:
    """Return `causal_mask` of whole sequences, of which this rank has `length` tokens: of its own tokens to
    all, or of all.
    """
    whole = split.ranks * length
    places = split.part(torch.arange(whole, device=device), 0) if of_own_rows else None
    return causal_mask(whole, window, document_ids, head_dim, dtype, device, places)


def _attend_to_gathered(
    split: Split,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`attend` of this rank's queries to the keys and values of all ranks."""
    both = torch.cat((k, v), dim=-1)  # [B, K, T/ranks, C+V]
    parts = gather_sequence(both.view(1, -1, both.shape[-1]), split.group).view(split.ranks, *both.shape)
    k, v = split.join(parts).split((k.shape[-1], v.shape[-1]), dim=-1)  # [B, K, T, ...]
    if mask is not None:
        return attend(q, k, v, mask, scale, sinks)
    return attend_to_prefixes(split, q, k, v, scale, sinks)


def attend_to_prefixes(
    split: Split, q: Tensor, k: Tensor, v: Tensor, scale: float | None, sinks: Tensor | None
) -> Tensor:
    """Return causal attention of this rank's queries to the keys and values of whole sequences: of each chunk
    to itself and what lies before it.
    """
    own = split.chunks_of(split.rank)
    chunk = q.shape[2] // len(own)
    ends = [(number + 1) * chunk for number in own]
    outs = [
        attend(part, k[:, :, :end], v[:, :, :end], None, scale, sinks)
        for part, end in zip(q.split(chunk, dim=2), ends, strict=True)
    ]
    return torch.cat(outs, dim=2)


def _attend_by_heads(
    split: Split,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`attend` over whole sequences with some of the heads; key and value heads fewer than ranks are
    repeated.
    """
    ranks = split.ranks
    repeats = ranks // math.gcd(k.shape[1], ranks)
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    sent = [x.unflatten(1, (ranks, -1)).transpose(0, 1) for x in (q, k, v)]  # [ranks, B, H/ranks, T/ranks, C]
    rows = _to_each(torch.cat([x.flatten(1) for x in sent], dim=1), split.group)
    came = rows.split([x[0].numel() for x in sent], dim=1)
    q, k, v = (split.join(x.view(like.shape)) for x, like in zip(came, sent, strict=True))
    if sinks is not None:
        sinks = sinks.unflatten(0, (ranks, -1))[split.rank]
    parts = split.deal(attend(q, k, v, mask, scale, sinks))  # [ranks, B, H/ranks, T/ranks, V]
    out = _to_each(parts.flatten(1), split.group).view(parts.shape)
    return out.transpose(0, 1).flatten(1, 2)  # [B, H, T/ranks, V]


def _to_each(rows: Tensor, group: str) -> Tensor:
    """Send a row to each rank; return the row that each sent here."""
    ones = [1] * len(rows)
    return exchange_rows(rows, ones, ones, group)

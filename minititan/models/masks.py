"""Attention with masks: to what a token sees of its document, of the tokens within a window, or of a cache.

A mask is a boolean tensor, or on a GPU one of FlexAttention (arXiv:2412.05496), which never has the whole
matrix of scores and leaves out its empty blocks. Where plain causal attention does, there is none.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Mask = Any  # a boolean tensor that broadcasts to [B, H, T, keys], a BlockMask of FlexAttention, None: causal
SMALLEST_HEAD = 16  # of FlexAttention's kernels


def causal_mask(
    length: int,
    window: int | None,
    document_ids: Tensor | None,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    places: Tensor | None = None,
) -> Mask:
    """Return the mask of `length` tokens for heads of `dtype`.

    A token sees itself and those before it, `window` in all, inside its run of equal `document_ids` [B, T].
    `places`: of the queries, where they are some of the tokens only.
    """
    by_blocks = device.type == "cuda" and head_dim >= SMALLEST_HEAD and dtype != torch.float64
    is_plain = document_ids is None and (window is None or window >= length)
    if is_plain and (places is None or not by_blocks):
        return None
    if by_blocks:
        return block_mask(length, window, document_ids, device, places)
    places = torch.arange(length, device=device) if places is None else places
    return _boolean(places, length, window, document_ids)


def cached_mask(length: int, keys: int, window: int | None, device: torch.device) -> Mask:
    """Return the mask of the last `length` of `keys` tokens, whose keys and values are in a cache."""
    if length == keys and (window is None or window >= keys):
        return None
    return _boolean(torch.arange(keys - length, keys, device=device), keys, window, None)


def block_mask(
    length: int,
    window: int | None,
    document_ids: Tensor | None,
    device: torch.device,
    places: Tensor | None = None,
) -> Any:
    """Return the mask of `causal_mask` as FlexAttention takes it."""
    batch = None if document_ids is None else len(document_ids)
    queries = length if places is None else len(places)
    rule = _rule(window, document_ids, places)
    return _flex_attention()[1](rule, batch, None, queries, length, device=device)


def _rule(
    window: int | None, document_ids: Tensor | None, places: Tensor | None = None
) -> Callable[..., Tensor]:
    """Return what says, of indices that broadcast, whether a query sees a key."""

    def allowed(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        query = query if places is None else places[query]
        seen = query >= key
        if window is not None:
            seen = seen & (query - key < window)
        if document_ids is not None:
            seen = seen & (document_ids[b, query] == document_ids[b, key])
        return seen

    return allowed


def _boolean(places: Tensor, keys: int, window: int | None, document_ids: Tensor | None) -> Tensor:
    batch = 1 if document_ids is None else len(document_ids)
    row = torch.arange(batch, device=places.device)[:, None, None, None]
    key = torch.arange(keys, device=places.device)
    seen = _rule(window, document_ids)(row, row, places[:, None], key)
    return seen.expand(batch, 1, len(places), keys)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Return attention [B, H, T, V] of queries [B, H, T, C] to keys [B, K, keys, C] and values [..., V].

    Without a mask the queries are the last of the keys. `scale` is on the scores (default 1/sqrt(C)). `sinks`
    [H] are scores that take their part of the softmax and have no value (arXiv:2309.17453).
    """
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1])
    grouped = q.shape[1] != k.shape[1]
    if mask is not None and not isinstance(mask, Tensor):
        return _attend_by_blocks(q, k, v, mask, scale, sinks, grouped)
    length, width = q.shape[-2], v.shape[-1]
    if sinks is not None:
        q, k, v, mask = _with_sinks(q, k, v, mask, sinks / scale)
    if q.shape[-1] != v.shape[-1]:
        # The kernels that never have all scores take one width for all, on a GPU a multiple of 8.
        widest = -(-max(q.shape[-1], v.shape[-1]) // 8) * 8
        q, k, v = (F.pad(x, (0, widest - x.shape[-1])) for x in (q, k, v))
    queries, keys = q.shape[-2], k.shape[-2]
    if mask is None and queries < keys:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return out[..., -length:, :width]


def _with_sinks(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor, Mask]:
    """Return all with one more key ahead, which every query sees, and one more channel, in which the product
    with that key is the sink of the head and with the others 0.
    """
    channel = sinks.to(q.dtype)[:, None, None].expand(*q.shape[:-1], 1)
    q = torch.cat((q, channel), dim=-1)  # [B, H, T, C+1]
    first = F.pad(k.new_ones(()).expand(*k.shape[:2], 1, 1), (k.shape[-1], 0))  # [B, K, 1, C+1]
    k = torch.cat((first, F.pad(k, (0, 1))), dim=-2)  # [B, K, keys+1, C+1]
    v = F.pad(v, (0, 0, 1, 0))  # [B, K, keys+1, V]
    if mask is None:
        return F.pad(q, (0, 0, 1, 0)), k, v, None  # as many queries more as keys; the new one is of no use
    return q, k, v, F.pad(mask, (1, 0), value=True)


def _attend_by_blocks(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, sinks: Tensor | None, grouped: bool
) -> Tensor:
    flex = _flex_attention()[0]
    if sinks is None:
        return flex(q, k, v, block_mask=mask, scale=scale, enable_gqa=grouped)
    from torch.nn.attention.flex_attention import AuxRequest

    lse = AuxRequest(lse=True)
    out, aux = flex(q, k, v, block_mask=mask, scale=scale, enable_gqa=grouped, return_aux=lse)
    # e^lse is the sum over the keys, to which e^sink is added.
    return out * torch.sigmoid(aux.lse - sinks[:, None]).unsqueeze(-1).to(out.dtype)


@cache
def _flex_attention() -> tuple[Any, Any]:
    """FlexAttention and the maker of its masks, compiled: eager, both have the whole matrix."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return torch.compile(flex_attention, dynamic=False), torch.compile(create_block_mask, dynamic=False)

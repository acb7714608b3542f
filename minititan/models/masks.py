"""Attention that stays inside documents: by a boolean mask, or on a GPU by FlexAttention, which never has the
whole matrix of scores and leaves out its empty blocks (arXiv:2412.05496).
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Mask = Any  # a boolean tensor [B, 1, T, T], a BlockMask of FlexAttention, or None: causal
SMALLEST_HEAD = 16  # of FlexAttention's kernels


def document_mask(document_ids: Tensor, head_dim: int, dtype: torch.dtype) -> Mask:
    """Return the causal mask inside runs of equal `document_ids` [B, T], for heads of `dtype`."""
    if document_ids.is_cuda and head_dim >= SMALLEST_HEAD and dtype != torch.float64:
        return block_mask(document_ids)
    same = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    return same.tril()  # [B, 1, T, T], True where attention is allowed


def cached_mask(positions: Tensor, keys: int) -> Tensor:
    """Return the causal mask [T, keys] of tokens at `positions` [T] to those at 0..keys-1."""
    return torch.arange(keys, device=positions.device) <= positions[:, None]


def block_mask(document_ids: Tensor) -> Any:
    """Return the same mask as FlexAttention takes it."""
    B, T = document_ids.shape

    def allowed(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (document_ids[b, query] == document_ids[b, key])

    return _flex_attention()[1](allowed, B, None, T, T, device=document_ids.device)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Return attention [B, H, T, C] of queries [B, H, T, C] to keys and values [B, K, T, C]."""
    grouped = q.shape[1] != k.shape[1]
    if mask is None or isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
        )
    return _flex_attention()[0](q, k, v, block_mask=mask, enable_gqa=grouped)


@cache
def _flex_attention() -> tuple[Any, Any]:
    """FlexAttention and the maker of its masks, compiled: eager, both have the whole matrix."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return torch.compile(flex_attention, dynamic=False), torch.compile(create_block_mask, dynamic=False)

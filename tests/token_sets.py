"""Prepared sets of given tokens."""

from pathlib import Path

import numpy as np

from minititan.data import Tokens
from minititan.data.encode import token_dtype
from minititan.data.shards import write_manifest, write_shard
from minititan.data.tokens import open_prepared


def save_tokens(
    folder: Path,
    tokens: np.ndarray,
    starts: np.ndarray,
    vocab_size: int,
    cuts: tuple[int, ...] = (),
    label: str = "",
) -> Tokens:
    """A set of `tokens` with documents at `starts`, in shards cut at `cuts`, which are starts."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for number, (begin, end) in enumerate(zip((0, *cuts), (*cuts, len(tokens)), strict=True)):
        inside = starts[(starts >= begin) & (starts < end)] - begin
        parts = [(tokens[begin:end], inside)]
        entries.append(write_shard(folder, f"{number:05d}-000", token_dtype(vocab_size), parts))
    write_manifest(folder, entries, token_dtype(vocab_size), vocab_size, "tokenizer")
    return open_prepared(folder, label)

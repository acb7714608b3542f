"""Tokens one after another: the cache of keys and values, the choice of a token, its text as it comes.

Sampling: temperature, then the `top_k` likeliest, then the nucleus of `top_p` (arXiv:1904.09751). A choice
takes one uniform number of the seed's sequence, in float64 on the CPU, so that a seed gives the same text on
every device and layout, as far as their logits agree.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FIRST_ROOM = 256  # tokens
REPLACEMENT = "\ufffd"  # what decoding puts for bytes that are no UTF-8, or not yet
LONGEST_CHARACTER = 4  # bytes, and so tokens


class Cache:
    """The keys and values of one layer (see `KeyValueCache`), in memory that doubles when it is full."""

    def __init__(self) -> None:
        self.length = 0
        self._kept: tuple[Tensor, ...] = ()

    def extend(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Put new keys, values or the like behind what is kept, along dimension 2; return all of each."""
        end = self.length + new[0].shape[2]
        if not self._kept or end > self._kept[0].shape[2]:
            room = max(2 * end, FIRST_ROOM)
            grown = tuple(t.new_empty(*t.shape[:2], room, *t.shape[3:]) for t in new)
            for larger, kept in zip(grown, self._kept, strict=False):
                larger[:, :, : self.length] = kept[:, :, : self.length]
            self._kept = grown
        for kept, tensor in zip(self._kept, new, strict=True):
            kept[:, :, self.length : end] = tensor
        self.length = end
        return tuple(kept[:, :, :end] for kept in self._kept)


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. `temperature` 0: the likeliest; `top_k` 0 and `top_p` 1: among all."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


class NoNumberError(ValueError):
    """A model gave logits that are infinite or NaN."""


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Return the token drawn by its logits [V]. Raises NoNumberError."""
    if not logits.isfinite().all():
        raise NoNumberError
    if sampling.temperature == 0:
        return int(logits.argmax())
    values, tokens = (logits.double().cpu() / sampling.temperature).sort(descending=True, stable=True)
    if sampling.top_k:
        values = values[: sampling.top_k]
    sums = values.softmax(0).cumsum(0)
    # The fewest that reach top_p: those before which it is not reached.
    kept = int((sums[:-1] < sampling.top_p).sum()) + 1 if sampling.top_p < 1 else len(sums)
    drawn = torch.rand((), dtype=torch.float64, generator=generator) * sums[kept - 1]
    return int(tokens[min(int(torch.searchsorted(sums[:kept], drawn, right=True)), kept - 1)])


def takes_caches(model: Any) -> bool:
    """Whether a model's forward keeps keys and values; a user's own need not."""
    return "caches" in inspect.signature(model.forward).parameters


@torch.no_grad()
def tokens_after(
    prompt: Sequence[int],
    model: Any,
    sampling: Sampling,
    *,
    cached: bool = True,
    agree: Callable[[int], int] = lambda token: token,
) -> Iterator[int]:
    """Yield what `model`, in evaluation mode, puts after the prompt, without end.

    Without `cached`, or where the model has no cache, each token takes a forward over all before it. `agree`
    gives the token of rank 0 to all ranks; a negative one ends it.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    caches = {name: Cache() for name in model.layers} if cached and takes_caches(model) else None
    device = model.embed_tokens.weight.device
    tokens, done = torch.tensor([prompt], device=device), 0
    while True:
        new = tokens[:, done:]  # [1, T]
        positions = torch.arange(done, tokens.shape[1], device=device)
        hidden = model(new) if caches is None else model(new, positions, caches=caches)
        token = agree(choose(model.lm_head(hidden[:, -1:])[0, -1], sampling, generator))
        if token < 0:
            return
        yield token
        done = 0 if caches is None else tokens.shape[1]
        tokens = torch.cat((tokens, tokens.new_tensor([[token]])), dim=1)


class TextStream:
    """The text of tokens as they come: a character is shown once all of its bytes are there."""

    def __init__(self, decode: Callable[[Iterable[int]], str], before: Sequence[int] = ()) -> None:
        """`before`: tokens whose text is not given; some tokenizers leave out a space at the beginning."""
        self._decode = decode
        self._tokens = list(before)
        self._read = len(self._tokens)  # so many of them are shown whole
        self._shown = decode(self._tokens)

    def add(self, token: int) -> str:
        """Return the text that is certain now and was not before."""
        self._tokens.append(token)
        text = certain = self._decode(self._tokens)
        while certain.endswith(REPLACEMENT) and len(text) - len(certain) < LONGEST_CHARACTER - 1:
            certain = certain[:-1]
        if not text.startswith(self._shown) and len(self._tokens) - self._read < LONGEST_CHARACTER:
            return ""  # a tokenizer with tokens of bytes shows none of a row of them while one is missing
        new = certain[len(self._shown) :]
        if new and certain == text:  # the rest is read in the context of these tokens alone
            self._tokens = self._tokens[self._read :]
            self._read, self._shown = len(self._tokens), self._decode(self._tokens)
        elif new:
            self._shown = certain
        return new

    def end(self) -> str:
        """Return what is left: bytes that have become no character."""
        return self._decode(self._tokens)[len(self._shown) :]

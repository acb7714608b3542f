"""Documents to tokens, in batches of bounded size, while the next ones are read.

A long document is encoded in pieces, cut where common tokenizers cut as well (before a line that follows a
newline, else before a word), by a rule that depends on its text alone. So memory does not grow with a
document, the threads of the tokenizer share a long one, and the same text gives the same tokens in any file.

The caller's thread reads and cuts; ENCODERS threads hand batches to the tokenizer, which spreads each over
the cores without Python's lock, and turn what it gives into arrays: while one does so, the batch of another
keeps the cores busy.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from minititan.data.tokenizer import Tokenizer

PIECE_CHARACTERS = 1 << 16
BATCH_CHARACTERS = 1 << 20
BATCH_PIECES = 4096
ENCODERS = 2


class Piece(NamedTuple):
    text: str
    first: bool
    last: bool


class Encoded(NamedTuple):
    """Tokens of consecutive pieces, and the offsets in them at which documents start."""

    tokens: np.ndarray
    starts: np.ndarray
    text_bytes: int
    """UTF-8 bytes of the text."""
    documents: int
    """Documents that were read for them, those without text as well."""


def pieces_of(document: Iterable[str], limit: int) -> Iterator[Piece]:
    """The document's text in pieces of at most `limit` characters; none for an empty document."""
    text, first = "", True
    for block in document:
        text, begin = text + block, 0
        while len(text) - begin > limit:
            end = _cut(text, begin, begin + limit)
            yield Piece(text[begin:end], first, False)
            begin, first = end, False
        text = text[begin:]
    if text:
        yield Piece(text, first, True)


def _cut(text: str, begin: int, end: int) -> int:
    """Where to end a piece of text[begin:end]: at the start of a line, else of a word, else at `end`.

    `text` goes on past `end`.
    """
    at = text.rfind("\n", begin, end)
    while at >= 0:
        if not text[at + 1].isspace():
            return at + 1
        at = text.rfind("\n", begin, at)
    at = text.rfind(" ", begin + 1, end)
    while at >= 0:
        if not text[at + 1].isspace() and not text[at - 1].isspace():
            return at
        at = text.rfind(" ", begin + 1, at)
    return end


def encode(
    documents: Iterable[Iterable[str]], tokenizer: Tokenizer, *, add_bos: bool, add_eos: bool
) -> Iterator[Encoded]:
    """The documents' tokens in order, each document between `bos_id` and `eos_id` where asked for."""
    bos, eos = tokenizer.bos_id if add_bos else None, tokenizer.eos_id if add_eos else None
    waiting: deque[Future[Encoded]] = deque()
    with ThreadPoolExecutor(ENCODERS, thread_name_prefix="encode") as pool:
        for pieces, documents_read in _batches(documents):
            waiting.append(pool.submit(_encode_batch, pieces, documents_read, tokenizer, bos, eos))
            if len(waiting) > ENCODERS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _batches(documents: Iterable[Iterable[str]]) -> Iterator[tuple[list[Piece], int]]:
    batch: list[Piece] = []
    characters = documents_read = 0
    for document in documents:
        documents_read += 1
        for piece in pieces_of(document, PIECE_CHARACTERS):
            batch.append(piece)
            characters += len(piece.text)
            if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_PIECES:
                yield batch, documents_read
                batch, characters, documents_read = [], 0, 0
    if batch or documents_read:
        yield batch, documents_read


def _encode_batch(
    batch: list[Piece], documents_read: int, tokenizer: Tokenizer, bos: int | None, eos: int | None
) -> Encoded:
    dtype = token_dtype(tokenizer.vocab_size)
    parts: list[np.ndarray] = [np.empty(0, dtype)]
    starts: list[int] = []
    size = text_bytes = 0
    for piece, ids in zip(batch, tokenizer.encode_batch([piece.text for piece in batch]), strict=True):
        tokens = [np.asarray(ids, dtype=dtype)]
        if piece.first:
            starts.append(size)
            tokens = tokens if bos is None else [np.array([bos], dtype), *tokens]
        if piece.last and eos is not None:
            tokens.append(np.array([eos], dtype))
        parts.extend(tokens)
        size += sum(map(len, tokens))
        text_bytes += len(piece.text) if piece.text.isascii() else len(piece.text.encode())
    return Encoded(np.concatenate(parts), np.array(starts, dtype=np.int64), text_bytes, documents_read)


def token_dtype(vocab_size: int) -> np.dtype:
    """The little-endian type that tokens are stored in."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")

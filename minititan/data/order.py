"""The order contract, version 1: which sample stands at which place of the global stream.

Sample S(g) at global index g is a pure function of the data, the seed, the sequence length and g: epoch
e = g // n, and inside the epoch a keyed permutation of the n samples. The permutation is a balanced Feistel
network with cycle-walking (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002), so nothing is
ever materialised and any index is reached in constant time. Nothing else in the library decides an order;
docs/data.md states the same in words, and a change of any number here is a new version.
"""

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

ORDER_VERSION = 1
ROUNDS = 8

Indices = NDArray[np.int64]


def epoch_key(seed: int, epoch: int) -> NDArray[np.uint64]:
    """The round keys [ROUNDS] of one epoch's permutation."""
    text = f"minititan order {ORDER_VERSION} seed {seed} epoch {epoch}"
    return np.frombuffer(blake2b(text.encode(), digest_size=8 * ROUNDS).digest(), dtype="<u8").astype(
        np.uint64
    )


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014), modulo 2^64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(indices: Indices, n: int, key: NDArray[np.uint64]) -> Indices:
    """The places of `indices` (each in [0, n)) under the permutation of [0, n) that `key` selects."""
    assert 1 <= n <= 1 << 62, n
    half_bits = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half_bits)) - 1)
    out = np.asarray(indices, dtype=np.uint64)
    assert out.size == 0 or int(out.max()) < n, "index outside the permutation's domain"
    outside = np.ones(out.shape, dtype=bool)
    while outside.any():
        walking = out[outside]
        left, right = walking >> half_bits, walking & mask
        for round_key in key:
            left, right = right, left ^ (_mix(right + round_key) & mask)
        out[outside] = (left << half_bits) | right
        outside = out >= np.uint64(n)
    return out.astype(np.int64)


def samples_at(start: int, count: int, n: int, seed: int) -> Indices:
    """The samples S(start) ... S(start + count - 1) of a set of n samples; the range may cross epochs."""
    parts: list[Indices] = []
    position, stop = start, start + count
    while position < stop:
        epoch, offset = divmod(position, n)
        size = min(n - offset, stop - position)
        parts.append(permute(np.arange(offset, offset + size), n, epoch_key(seed, epoch)))
        position += size
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

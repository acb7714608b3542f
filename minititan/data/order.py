"""The order contract, version 1: which sample stands at which place of the global stream.

Sample S(g) at global index g is a pure function of the data, the seed, the sequence length and g: epoch
e = g // n, and inside the epoch a keyed permutation of the n samples. The permutation is a balanced Feistel
network of modular additions with cycle-walking (Black and Rogaway, "Ciphers with arbitrary finite domains",
2002), so nothing is ever materialised and any index is reached in constant time. Nothing else in the library
decides an order; docs/data.md states the same in words, and a change of any number here is a new version.
"""

from hashlib import blake2b
from math import isqrt

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
    side = np.uint64(isqrt(n - 1) + 1)  # the network permutes side^2 >= n places, hardly more than n
    out = np.array(indices, dtype=np.uint64)
    outside = np.ones(out.shape, dtype=bool)
    while outside.any():
        left, right = np.divmod(out[outside], side)
        for round_key in key:
            left, right = right, (left + _mix(right + round_key) % side) % side
        out[outside] = left * side + right
        outside = out >= np.uint64(n)
    return out.astype(np.int64)


def samples_at(indices: Indices, n: int, seed: int) -> Indices:
    """The samples S(g) for the global indices g in `indices`, of a set of n samples."""
    out = np.empty_like(indices)
    epochs, places = np.divmod(indices, n)
    for epoch in np.unique(epochs).tolist():
        inside = epochs == epoch
        out[inside] = permute(places[inside], n, epoch_key(seed, epoch))
    return out

"""The order contract: a change of any sample's place, and a permutation that is none, are failures here."""

from hashlib import blake2b
from math import isqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minititan.data.order import epoch_key, permute, samples_at

MASK = (1 << 64) - 1


def reference_sample(g: int, n: int, seed: int) -> int:
    """S(g) as docs/data.md words it, in plain integers."""
    epoch, place = divmod(g, n)
    digest = blake2b(f"minititan order 1 seed {seed} epoch {epoch}".encode(), digest_size=64).digest()
    keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(8)]
    side = isqrt(n - 1) + 1
    while True:
        left, right = divmod(place, side)
        for key in keys:
            x = (right + key) & MASK
            x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
            x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
            left, right = right, (left + (x ^ (x >> 31)) % side) % side
        place = left * side + right
        if place < n:
            return place


def test_places_outside_the_domain_are_refused():
    with pytest.raises(AssertionError):
        permute(np.arange(1), 0, epoch_key(0, 0))


def test_version_1_stays_as_it_is():
    """Runs in the field stand on these numbers: a new order is a new version."""
    first = [373, 487, 167, 609, 264, 871, 226, 229, 660, 950, 300, 816]
    assert samples_at(np.arange(12), 1000, 0).tolist() == first
    across_epochs = [341, 896, 954, 496, 31, 519, 814, 668, 316, 756]
    assert samples_at(np.arange(995, 1005), 1000, 7).tolist() == across_epochs
    assert samples_at(np.array([10**15]), 10**12 + 39, 1).tolist() == [298582099238]


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 3000), st.integers(0, 2**64 - 1), st.integers(0, 1000))
def test_each_epoch_is_a_bijection(n: int, seed: int, epoch: int):
    places = permute(np.arange(n), n, epoch_key(seed, epoch))
    assert np.array_equal(np.sort(places), np.arange(n))


@settings(deadline=None, max_examples=100)
@given(
    st.integers(1, 1 << 62), st.integers(0, 2**32), st.lists(st.integers(0, 1 << 62), min_size=1, max_size=8)
)
def test_agrees_with_plain_integers(n: int, seed: int, places: list[int]):
    expected = [reference_sample(g, n, seed) for g in places]
    assert samples_at(np.array(places), n, seed).tolist() == expected


def test_every_order_is_as_likely():
    counts: dict[tuple[int, ...], int] = {}
    for epoch in range(3000):
        order = tuple(permute(np.arange(3), 3, epoch_key(0, epoch)).tolist())
        counts[order] = counts.get(order, 0) + 1
    # 500 each; 6 standard deviations are 122.
    assert len(counts) == 6 and all(378 < count < 622 for count in counts.values()), counts


def test_neighbours_do_not_stay_neighbours():
    order = permute(np.arange(100_000), 100_000, epoch_key(3, 0)).astype(float)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(order, np.arange(100_000))[0, 1]) < 0.02
    other_seed = permute(np.arange(100_000), 100_000, epoch_key(4, 0)).astype(float)
    assert abs(np.corrcoef(order, other_seed)[0, 1]) < 0.02

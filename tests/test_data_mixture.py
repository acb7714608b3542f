"""Mixtures: exact shares after every block, the same stream from any place on, in plain integers too."""

from fractions import Fraction
from hashlib import blake2b
from math import floor

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from minititan.data.mixture import BLOCK, Mixture, Stage
from minititan.data.order import permute
from tests.test_data_order import reference_sample

SEED = 3


def reference_stream(sizes: list[int], stages: list[Stage], length: int) -> list[int]:
    """The stream as docs/data.md words it, made from its beginning, place by place."""
    stream: list[int] = []
    taken = [0] * len(sizes)
    for number, stage in enumerate(stages):
        end = stages[number + 1].start if number + 1 < len(stages) else length
        shares = [Fraction(weight) for weight in stage.weights]
        block = 0
        while len(stream) < end:
            quotas, running = [], Fraction(0)
            for share in shares:
                before, running = running, running + share / sum(shares)
                upto = [
                    floor(bound * BLOCK * b + Fraction(1, 2))
                    for bound in (before, running)
                    for b in (block, block + 1)
                ]
                quotas.append((upto[3] - upto[2]) - (upto[1] - upto[0]))
            assert sum(quotas) == BLOCK and min(quotas) >= 0
            owners = [source for source, quota in enumerate(quotas) for _ in range(quota)]
            text = f"minititan order 1 seed {SEED} block {stage.start + block * BLOCK}"
            key = np.frombuffer(blake2b(text.encode(), digest_size=64).digest(), dtype="<u8").astype(
                np.uint64
            )
            places = permute(np.arange(BLOCK), BLOCK, key).tolist()
            for place in places[: end - len(stream)]:
                source = owners[place]
                stream.append(sum(sizes[:source]) + reference_sample(taken[source], sizes[source], SEED))
                taken[source] += 1
            block += 1
    return stream[:length]


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[list[int], list[Stage]]:
    count = draw(st.integers(2, 4))
    sizes = draw(st.lists(st.integers(1, 3 * BLOCK), min_size=count, max_size=count))
    weight = st.sampled_from(["0.5", "1", "2.25", "0.1", "3", "1e-2"])
    starts = sorted({0, *draw(st.lists(st.integers(1, 3 * BLOCK), max_size=2))})
    weights = [tuple(draw(st.lists(weight, min_size=count, max_size=count))) for _ in starts]
    return sizes, [Stage(start, own) for start, own in zip(starts, weights, strict=True)]


@settings(deadline=None, max_examples=15)
@given(mixtures(), st.data())
def test_the_stream_is_that_of_plain_integers_from_any_place(mixture, data: st.DataObject):
    sizes, stages = mixture
    expected = reference_stream(sizes, stages, 4 * BLOCK)
    stream = Mixture(sizes, stages, SEED)
    assert stream.samples_at(np.arange(4 * BLOCK)).tolist() == expected
    places = data.draw(st.lists(st.integers(0, 4 * BLOCK - 1), min_size=1, max_size=20))
    assert stream.samples_at(np.array([places])).tolist() == [[expected[place] for place in places]]
    ends = np.cumsum(sizes)
    for place in places:
        owners = np.searchsorted(ends, expected[:place], side="right")
        assert stream.counts(place) == np.bincount(owners, minlength=len(sizes)).tolist()


def test_every_source_has_its_share_after_every_block():
    stage = Stage(0, ("0.7", "0.2", "0.0999", "0.0001"))
    stream = Mixture([10**9] * 4, [stage], 0)
    for block in (1, 2, 3, 1000, 10**6, 123_456_789):
        counts = stream.counts(block * BLOCK)
        for count, weight in zip(counts, stage.weights, strict=True):
            assert abs(count - Fraction(weight) * block * BLOCK) <= 1


def test_a_weight_of_zero_gives_nothing_until_it_changes():
    stream = Mixture([50, 70], [Stage(0, ("1", "0")), Stage(100, ("0", "1"))], 0)
    samples = stream.samples_at(np.arange(240))
    assert sorted(samples[:50]) == sorted(samples[50:100]) == list(range(50))
    assert sorted(samples[100:170]) == sorted(samples[170:]) == list(range(50, 120))


@settings(deadline=None, max_examples=15)
@given(mixtures())
def test_the_end_is_where_a_source_would_begin_again(mixture):
    sizes, stages = mixture
    stream = Mixture(sizes, stages, SEED)
    end = stream.end()
    assert all(count <= size for count, size in zip(stream.counts(end), sizes, strict=True))
    assert any(count > size for count, size in zip(stream.counts(end + 1), sizes, strict=True))


def test_one_source_is_the_stream_without_a_mixture():
    stream = Mixture([1000], [Stage(0, ("0.3",))], 0)
    assert stream.samples_at(np.arange(12)).tolist() == [
        373,
        487,
        167,
        609,
        264,
        871,
        226,
        229,
        660,
        950,
        300,
        816,
    ]
    assert stream.counts(1234) == [1234] and stream.end() == 1000


def test_version_1_of_mixtures_stays_as_it_is():
    """Runs in the field stand on these numbers: a new order is a new version."""
    stream = Mixture([1000, 500], [Stage(0, ("3", "1")), Stage(5000, ("1", "1"))], 1)
    places = np.array([0, 1, 2, 3, 4095, 4096, 4999, 5000, 5001, 10**12])
    assert stream.samples_at(places).tolist() == [1447, 734, 1262, 1027, 1183, 255, 133, 1381, 138, 224]

"""Mixtures: which sample of which source stands at which place of the global stream.

The stream of several sources is cut into blocks of BLOCK places. Each block holds a whole number of samples
of each source, so that after any block every source has had its exact share to within one sample; inside a
block a keyed permutation decides who comes when. A source's own samples come one after the other in the order
of `order.py`, epoch after epoch. Everything is computed from the place alone: nothing is materialised, any
place is reached at once. Weights may change at given places (stages); the blocks of a stage begin with it.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b

import numpy as np

from minititan.data.order import ORDER_VERSION, ROUNDS, Indices, permute, samples_at

BLOCK = 4096
"""Places of a block; a weight below 1 / BLOCK of the whole would leave blocks without its source."""


@dataclass(frozen=True)
class Stage:
    """The weights [sources] of the stream from the place `start` on; as written, and summing to anything."""

    start: int
    weights: tuple[str, ...]

    def bounds(self) -> tuple[Fraction, ...]:
        """The running sums of the weights' shares: the last is 1."""
        weights = [Fraction(weight) for weight in self.weights]
        total = sum(weights)
        return tuple(sum(weights[: i + 1], Fraction(0)) / total for i in range(len(weights)))


class Mixture:
    """The stream over sources of `sizes` samples each. Samples are numbered through all sources: those of
    source i begin at the sum of the sizes before it.
    """

    def __init__(self, sizes: Sequence[int], stages: Sequence[Stage], seed: int) -> None:
        assert stages[0].start == 0 and all(len(stage.weights) == len(sizes) for stage in stages)
        self.sizes, self.stages, self._seed = tuple(sizes), tuple(stages), seed
        self._firsts = [sum(sizes[:i]) for i in range(len(sizes))]
        self._starts = [stage.start for stage in stages]
        self._bounds = [stage.bounds() for stage in stages]
        self._blocks: dict[
            tuple[int, int], tuple[np.ndarray, np.ndarray]
        ] = {}  # the last that were asked for
        self._before = [np.zeros(len(sizes), dtype=np.int64)]  # samples of each source before a stage
        for number, stage in enumerate(stages[1:]):
            self._before.append(self._counts_in(number, stage.start))

    def samples_at(self, places: Indices) -> Indices:
        """The numbers of the samples at `places`, of any shape."""
        if len(self.sizes) == 1:
            return samples_at(places, self.sizes[0], self._seed)
        out = np.empty_like(places)
        stages = np.searchsorted(self._starts, places, side="right") - 1
        for number in np.unique(stages).tolist():
            blocks = np.where(stages == number, (places - self._starts[number]) // BLOCK, -1)
            for block in np.unique(blocks[blocks >= 0]).tolist():
                here = blocks == block
                inside = places[here] - self._starts[number] - block * BLOCK
                sources, own = self._block(number, block)
                out[here] = self._numbered(sources[inside], own[inside])
        return out

    def counts(self, place: int) -> list[int]:
        """How many samples of each source stand before `place`."""
        if len(self.sizes) == 1:
            return [place]
        return self._counts_in(bisect_right(self._starts, place) - 1, place).tolist()

    def end(self) -> int:
        """The first place at which a source would begin its second epoch."""
        low, high = 0, sum(self.sizes) + 1  # by then one of them must
        while low < high:
            middle = (low + high) // 2
            if all(count <= size for count, size in zip(self.counts(middle + 1), self.sizes, strict=True)):
                low = middle + 1
            else:
                high = middle
        return low

    def _counts_in(self, number: int, place: int) -> np.ndarray:
        block, inside = divmod(place - self._starts[number], BLOCK)
        whole = self._before[number] + self._quotas(number, 0, block)
        return whole + np.bincount(self._block(number, block)[0][:inside], minlength=len(self.sizes))

    def _quotas(self, number: int, begin: int, end: int) -> np.ndarray:
        """Samples of each source in the blocks [begin, end) of a stage."""
        upto = [
            [round_half_up(bound * BLOCK * block) for bound in self._bounds[number]] for block in (begin, end)
        ]
        return np.diff(np.array(upto[1]) - np.array(upto[0]), prepend=0)

    def _block(self, number: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        """For each place [BLOCK] of a block its source, and which of the source's own samples it takes."""
        if (number, block) not in self._blocks:
            key = _block_key(self._seed, self._starts[number] + block * BLOCK)
            ranked = permute(np.arange(BLOCK), BLOCK, key)
            sources = np.searchsorted(np.cumsum(self._quotas(number, block, block + 1)), ranked, side="right")
            own = np.empty(BLOCK, dtype=np.int64)
            before = self._before[number] + self._quotas(number, 0, block)
            for source in np.unique(sources).tolist():
                own[sources == source] = before[source] + np.arange(np.count_nonzero(sources == source))
            self._blocks = dict(list(self._blocks.items())[-3:]) | {(number, block): (sources, own)}
        return self._blocks[number, block]

    def _numbered(self, sources: np.ndarray, own: np.ndarray) -> np.ndarray:
        out = np.empty_like(own)
        for source in np.unique(sources).tolist():
            here = sources == source
            out[here] = samples_at(own[here], self.sizes[source], self._seed) + self._firsts[source]
        return out


def round_half_up(number: Fraction) -> int:
    return (2 * number.numerator + number.denominator) // (2 * number.denominator)


def _block_key(seed: int, start: int) -> np.ndarray:
    text = f"minititan order {ORDER_VERSION} seed {seed} block {start}"
    digest = blake2b(text.encode(), digest_size=8 * ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)

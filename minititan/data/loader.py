"""Loaders over prepared tokens: the training stream in the order contract's order, and the validation set.

A step takes the next `global_batch_size` samples of the global stream; a data-parallel rank takes its
contiguous share of them, in micro-batches. What a run must remember of its data is one `DataState`, the same
on every rank and for every layout, so a run goes on with the next sample on any number of ranks.
"""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from minititan.config import ConfigError, RankFault
from minititan.config.batches import BatchSizes
from minititan.config.error import literal
from minititan.data.fault import Fault, plain_fault
from minititan.data.mixture import Mixture, Stage
from minititan.data.order import ORDER_VERSION
from minititan.data.samples import NO_SAMPLE, Batch, SampleRows, Samples

SAMPLES_AHEAD = 1024
"""Sample numbers computed at once: numpy's cost is a call's, not a number's."""
AFRESH = 'or set checkpoint.exclude_from_loading = ["dataloader"] to begin the data anew'

Weights = tuple[str, ...]


@dataclass(frozen=True)
class DataState:
    """Where a run is in its data: all that is saved of it.

    `sources` are names and fingerprints; `stages` the places and weights of the mixture's stages that have
    begun. `global_batch_size` is the last one used; `auto_dp_degree` is the data-parallel degree that it
    followed from (`global_batch_size = -1`), else None.
    """

    order_version: int
    samples_consumed: int
    seed: int
    seq_len: int
    samples: str
    sources: tuple[tuple[str, str], ...]
    stages: tuple[tuple[int, tuple[str, ...]], ...]
    global_batch_size: int
    auto_dp_degree: int | None

    def to_json(self) -> str:
        """The canonical form: equal states have equal text."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "DataState":
        """Raises ConfigError for text that `to_json` did not write."""
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"data state: not valid JSON ({error}); take another checkpoint") from None
        names = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or set(values) != names:
            raise ConfigError(
                f"data state: must hold exactly {', '.join(sorted(names))}; take another checkpoint"
            )
        values["sources"] = tuple(map(tuple, values["sources"]))
        values["stages"] = tuple((start, tuple(weights)) for start, weights in values["stages"])
        return cls(**values)


class _Readings(Dataset["Batch | RankFault"]):
    """Batches by samples' numbers. A fault is handed on as a value: of an exception in a worker, torch
    makes one whose text is a traceback.
    """

    def __init__(self, rows: SampleRows) -> None:
        self._rows = rows

    def __getitems__(self, numbers: list[int]) -> Batch | RankFault:
        try:
            return self._rows.__getitems__(numbers)
        except ConfigError as error:
            return RankFault(*error.faults)


def _as_it_is(reading: Batch | RankFault) -> Batch | RankFault:
    return reading


def _batch_of(reading: Batch | RankFault) -> Batch:
    if isinstance(reading, RankFault):
        raise reading
    return reading


def _loading_options(
    num_workers: int, persistent_workers: bool, pin_memory: bool, prefetch_factor: int | None
) -> dict[str, Any]:
    """Options of a DataLoader; those about workers or pinned memory only where there are some."""
    options: dict[str, Any] = {
        "collate_fn": _as_it_is,
        "num_workers": num_workers,
        "pin_memory": pin_memory and torch.accelerator.is_available(),
    }
    if num_workers:
        options |= {"persistent_workers": persistent_workers, "prefetch_factor": prefetch_factor}
    return options


class _GlobalBatches:
    """Yields one rank's micro-batches of sample numbers, for ever, from a step and a place on."""

    def __init__(self, sizes: BatchSizes, micro_batch: int, dp_rank: int, dp_degree: int) -> None:
        self.mixture: Mixture | None = None
        self.step, self.place = 1, 0
        self._sizes, self._micro_batch = sizes, micro_batch
        self._dp_rank, self._dp_degree = dp_rank, dp_degree

    def __iter__(self) -> Iterator[list[int]]:
        assert self.mixture is not None
        step, place = self.step, self.place
        while True:
            size, same = self._sizes.run(step)
            share = size // self._dp_degree
            steps = min(-(-SAMPLES_AHEAD // share), same or SAMPLES_AHEAD)
            own = np.arange(share) + self._dp_rank * share + place
            places = np.arange(steps)[:, None] * size + own
            samples = self.mixture.samples_at(places)  # [steps, share]
            yield from samples.reshape(-1, self._micro_batch).tolist()
            step, place = step + steps, place + steps * size


class TrainLoader:
    """Micro-batches of one data-parallel rank, without end.

    Iterating again goes on after the last step whose micro-batches were all taken. What is saved is a
    DataState, counted here: StatefulDataLoader's own state depends on the number of workers. `stages` are the
    first steps and the weights of the mixture's stages.
    """

    def __init__(
        self,
        sources: Mapping[str, Samples],
        stages: Sequence[tuple[int, Weights]],
        state: DataState,
        batch_sizes: BatchSizes,
        micro_batch_size: int,
        dp_rank: int,
        dp_degree: int,
        document_mask: bool,
        options: dict[str, Any],
    ) -> None:
        self._sources, self._stages, self._state, self._sizes = sources, stages, state, batch_sizes
        self._step = 0  # steps done
        self._samples_a_micro_batch = micro_batch_size * dp_degree
        self._batches = _GlobalBatches(batch_sizes, micro_batch_size, dp_rank, dp_degree)
        self.begin_at(0)
        with warnings.catch_warnings():
            # torchdata 0.11 calls a function that torch 2.13 deprecates; can go with a later torchdata.
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
            rows = SampleRows(list(sources.values()), state.seq_len, document_mask)
            self._loader = StatefulDataLoader(_Readings(rows), batch_sampler=self._batches, **options)

    def begin_at(self, steps_done: int) -> None:
        """Starts at the beginning of the data in a run that has done so many steps: batch sizes and weights
        change at steps.
        """
        active = max(index for index, (step, _) in enumerate(self._stages) if step <= steps_done + 1)
        self._stand(steps_done, [Stage(0, self._stages[active][1])], self._stages[active + 1 :])

    def resume(self, saved: DataState, steps_done: int, fault: Fault = plain_fault) -> None:
        """Goes on where `saved` ends, after `steps_done` steps; takes effect at the next `iter`.

        Raises ConfigError unless this loader's stream is the one that `saved` is a place in.
        """
        labels = {name: samples.tokens.label for name, samples in self._sources.items()}
        faults = _differences(saved, self._state, labels, fault)
        begun = [Stage(start, weights) for start, weights in saved.stages]
        coming = self._stages[len(begun) :]
        if [stage.weights for stage in begun] != [weights for _, weights in self._stages[: len(begun)]]:
            rule = f"the weights up to step {steps_done} are not those of the run to be resumed"
            faults.append(fault("data.sources", rule, f"put them back and change them by a stage; {AFRESH}"))
        elif coming and coming[0][0] <= steps_done:
            rule = f"step {coming[0][0]} has been taken with other weights"
            faults.append(fault("data.stages", rule, f"set it to {steps_done + 1} or more; {AFRESH}"))
        if faults:
            raise ConfigError(*faults)
        self._state = replace(self._state, samples_consumed=saved.samples_consumed)
        self._stand(steps_done, begun, coming)

    def _stand(self, steps_done: int, begun: Sequence[Stage], coming: Sequence[tuple[int, Weights]]) -> None:
        self._step, consumed = steps_done, self._state.samples_consumed
        stages = [
            Stage(consumed + self._sizes.samples(steps_done + 1, step - 1), weights)
            for step, weights in coming
        ]
        sizes = [len(samples) for samples in self._sources.values()]
        self._mixture = Mixture(sizes, [*begun, *stages], self._state.seed)

    def __iter__(self) -> Iterator[Batch]:
        self._batches.step, self._batches.place = self._step + 1, self._state.samples_consumed
        self._batches.mixture = self._mixture
        batches = iter(self._loader)
        while True:
            size = self._sizes.at(self._step + 1)
            for left in reversed(range(size // self._samples_a_micro_batch)):
                batch = _batch_of(next(batches))
                if not left:
                    self._step += 1
                    consumed = self._state.samples_consumed + size
                    self._state = replace(self._state, samples_consumed=consumed, global_batch_size=size)
                yield batch

    def state(self) -> DataState:
        """The state after the last step all of whose micro-batches were taken, whatever was prefetched."""
        consumed = self._state.samples_consumed
        begun = [stage for stage in self._mixture.stages if stage.start < consumed or not stage.start]
        return replace(self._state, stages=tuple((stage.start, stage.weights) for stage in begun))

    def consumed(self) -> dict[str, tuple[int, float]]:
        """For each source, how many samples were taken of it, and how many epochs these are."""
        counts = self._mixture.counts(self._state.samples_consumed)
        return {
            name: (count, count / len(samples))
            for (name, samples), count in zip(self._sources.items(), counts, strict=True)
        }

    def steps_left(self) -> int:
        """How many steps are left before a source would be gone through again."""
        return self._sizes.steps(self._step + 1, self._mixture.end() - self._state.samples_consumed)


def _differences(saved: DataState, now: DataState, labels: Mapping[str, str], fault: Fault) -> list[str]:
    """A line for each thing that makes the stream another one than the saved one."""
    faults: list[str] = []
    if saved.order_version != now.order_version:
        versions = f"order version {saved.order_version}; this release gives version {now.order_version}"
        faults.append(f"data state: the run has {versions}; {AFRESH}")
    for key, was, value in (
        ("debug.seed", saved.seed, now.seed),
        ("training.seq_len", saved.seq_len, now.seq_len),
        ("data.samples", saved.samples, now.samples),
    ):
        if was != value:
            had = literal(was)
            faults.append(fault(key, f"the run to be resumed has {had}", f"set {key} = {had}, {AFRESH}"))
    before, sources = dict(saved.sources), dict(now.sources)
    if list(before) != list(sources):
        rule = f"the run to be resumed has the sources {', '.join(before)}"
        faults.append(fault("data.sources", rule, f"give these in this order, {AFRESH}"))
    for name in before.keys() & sources.keys():
        if before[name] != sources[name]:
            faults.append(
                f"{labels[name]}: gives other tokens (fingerprint {sources[name][:12]}) than the run to be"
                f" resumed has ({before[name][:12]}); give the same text, tokenizer, [data] options"
                f" and validation.holdout, {AFRESH}"
            )
    degrees = (saved.auto_dp_degree, now.auto_dp_degree)
    if None not in degrees and degrees[0] != degrees[1]:
        rule = (
            f"follows the layout: the run to be resumed took {saved.global_batch_size} samples a step on"
            f" {degrees[0]} data-parallel ranks, on {degrees[1]} it would take {now.global_batch_size}"
        )
        faults.append(fault("training.global_batch_size", rule, f"set it to {saved.global_batch_size}"))
    return faults


def build_train_loader(
    sources: Mapping[str, Samples],
    *,
    kind: str,
    seq_len: int,
    seed: int,
    batch_sizes: BatchSizes,
    micro_batch_size: int,
    dp_rank: int,
    dp_degree: int,
    stages: Sequence[tuple[int, Weights]] = ((1, ("1",)),),
    document_mask: bool = False,
    auto_global_batch_size: bool = False,
    num_workers: int = 0,
    persistent_workers: bool = False,
    pin_memory: bool = False,
    prefetch_factor: int | None = None,
) -> TrainLoader:
    """The training loader of one data-parallel rank, at the start of its sources' samples.

    `kind` is the way in which these are cut from documents; `stages` are first steps, ascending from 1, and
    the weights of the sources from there on. `auto_global_batch_size` says that the size followed from the
    layout (`global_batch_size = -1`).
    """
    start = DataState(
        order_version=ORDER_VERSION,
        samples_consumed=0,
        seed=seed,
        seq_len=seq_len,
        samples=kind,
        sources=tuple((name, samples.tokens.fingerprint) for name, samples in sources.items()),
        stages=(),
        global_batch_size=batch_sizes.at(1),
        auto_dp_degree=dp_degree if auto_global_batch_size else None,
    )
    options = _loading_options(num_workers, persistent_workers, pin_memory, prefetch_factor)
    return TrainLoader(
        sources, stages, start, batch_sizes, micro_batch_size, dp_rank, dp_degree, document_mask, options
    )


class _ValidationBatches:
    """One rank's batches of the samples 0 to n - 1: as many for every rank, filled up with NO_SAMPLE."""

    def __init__(self, n: int, batch_size: int, dp_rank: int, dp_degree: int) -> None:
        self._n, self._batch_size, self._stride = n, batch_size, batch_size * dp_degree
        self._offset = dp_rank * batch_size

    def __len__(self) -> int:
        return -(-self._n // self._stride)

    def __iter__(self) -> Iterator[list[int]]:
        for begin in range(self._offset, self._offset + len(self) * self._stride, self._stride):
            yield [k if k < self._n else NO_SAMPLE for k in range(begin, begin + self._batch_size)]


class ValidationLoader:
    """The batches of one rank; can be iterated again and again."""

    def __init__(self, rows: SampleRows, batches: _ValidationBatches, options: dict[str, Any]) -> None:
        self._loader = DataLoader(_Readings(rows), batch_sampler=batches, **options)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        return map(_batch_of, self._loader)


def build_validation_loader(
    sources: Sequence[Samples],
    *,
    seq_len: int,
    batch_size: int,
    num_samples: int = -1,
    dp_rank: int,
    dp_degree: int,
    document_mask: bool = False,
    num_workers: int = 0,
    persistent_workers: bool = False,
    pin_memory: bool = False,
    prefetch_factor: int | None = None,
) -> ValidationLoader:
    """Each of the first `num_samples` samples (-1, or more than there are: all) once, on one of the ranks.

    Every rank gets the same number of batches; rows that have no sample carry labels -100 alone.
    """
    available = sum(map(len, sources))
    n = available if num_samples < 0 else min(num_samples, available)
    batches = _ValidationBatches(n, batch_size, dp_rank, dp_degree)
    options = _loading_options(num_workers, persistent_workers, pin_memory, prefetch_factor)
    return ValidationLoader(SampleRows(sources, seq_len, document_mask), batches, options)

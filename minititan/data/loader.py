"""Loaders over prepared tokens: the training stream in the order contract's order, and the validation set.

A step takes the next `global_batch_size` samples of the global stream; a data-parallel rank takes its
contiguous share of them, in micro-batches. What a run must remember of its data is one `DataState`, the same
on every rank and for every layout, so a run goes on with the next sample on any number of ranks.
"""

import json
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from minititan.config import ConfigError
from minititan.data.fault import Fault, plain_fault
from minititan.data.order import ORDER_VERSION, samples_at
from minititan.data.shards import Tokens

IGNORED_LABEL = -100
NO_SAMPLE = -1
SINGLE_SOURCE = "single"
SAMPLES_AHEAD = 1024
"""Sample numbers computed at once: numpy's cost is a call's, not a number's."""

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class DataState:
    """Where a run is in its data: all that is saved of it.

    `mixture` is a constant while there is one source. `global_batch_size` is the last one used;
    `auto_dp_degree` is the data-parallel degree that it followed from (`global_batch_size = -1`), else None.
    """

    order_version: int
    samples_consumed: int
    seed: int
    seq_len: int
    mixture: str
    fingerprint: str
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
        return cls(**values)


class _Windows(Dataset[Batch]):
    """Micro-batches by their sample numbers; NO_SAMPLE gives a row whose labels are all ignored."""

    def __init__(self, tokens: Tokens, seq_len: int) -> None:
        self._tokens, self._seq_len = tokens, seq_len

    def __getitems__(self, samples: list[int]) -> Batch:
        rows = np.zeros((len(samples), self._seq_len + 1), dtype=np.int64)  # [B, T+1]
        for row, k in zip(rows, samples, strict=True):
            if k != NO_SAMPLE:
                self._tokens.read(k * self._seq_len, k * self._seq_len + self._seq_len + 1, row)
        labels = rows[:, 1:].copy()
        labels[[k == NO_SAMPLE for k in samples]] = IGNORED_LABEL
        return {
            "tokens": torch.from_numpy(rows[:, :-1].copy()),
            "labels": torch.from_numpy(labels),
        }  # [B, T] each


def _as_it_is(batch: Batch) -> Batch:
    return batch


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
    """Yields one rank's micro-batches of sample numbers, for ever, from the global sample `first` on."""

    def __init__(
        self, n: int, seed: int, global_batch: int, micro_batch: int, dp_rank: int, dp_degree: int
    ) -> None:
        self.first = 0
        self._n, self._seed, self._global_batch, self._micro_batch = n, seed, global_batch, micro_batch
        self._share = global_batch // dp_degree
        self._offset = dp_rank * self._share

    def __iter__(self) -> Iterator[list[int]]:
        steps = -(-SAMPLES_AHEAD // self._share)
        within_steps = np.arange(steps)[:, None] * self._global_batch + np.arange(self._share) + self._offset
        begin = self.first
        while True:
            samples = samples_at(begin + within_steps, self._n, self._seed)  # [steps, share]
            yield from samples.reshape(-1, self._micro_batch).tolist()
            begin += steps * self._global_batch


class TrainLoader:
    """Micro-batches `tokens` and `labels` [B, T] of one data-parallel rank, without end.

    Iterating again goes on after the last step whose micro-batches were all taken. What is saved is a
    DataState, counted here: StatefulDataLoader's own state depends on the number of workers.
    """

    def __init__(
        self,
        tokens: Tokens,
        state: DataState,
        micro_batch_size: int,
        dp_rank: int,
        dp_degree: int,
        options: dict[str, Any],
    ) -> None:
        self._state, self._label = state, tokens.label
        self._micro_batches = state.global_batch_size // dp_degree // micro_batch_size
        self._n = tokens.num_samples(state.seq_len)
        self._batches = _GlobalBatches(
            self._n, state.seed, state.global_batch_size, micro_batch_size, dp_rank, dp_degree
        )
        with warnings.catch_warnings():
            # torchdata 0.11 calls a function that torch 2.13 deprecates; can go with a later torchdata.
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
            self._loader = StatefulDataLoader(
                _Windows(tokens, state.seq_len), batch_sampler=self._batches, **options
            )

    def __iter__(self) -> Iterator[Batch]:
        self._batches.first = self._state.samples_consumed
        for taken, batch in enumerate(self._loader, start=1):
            if taken % self._micro_batches == 0:
                consumed = self._state.samples_consumed + self._state.global_batch_size
                self._state = replace(self._state, samples_consumed=consumed)
            yield batch

    def state(self) -> DataState:
        """The state after the last step all of whose micro-batches were taken, whatever was prefetched."""
        return self._state

    def steps_left(self) -> int:
        """How many whole global batches are left of the first time through the data."""
        return max(self._n - self._state.samples_consumed, 0) // self._state.global_batch_size

    def state_dict(self) -> dict[str, Any]:
        return asdict(self._state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.resume(DataState(**state_dict))

    def resume(self, saved: DataState, fault: Fault = plain_fault) -> None:
        """Goes on where `saved` ends; takes effect at the next `iter`.

        Raises ConfigError unless this loader's stream is the one that `saved` is a place in.
        """
        if faults := _differences(saved, self._state, self._label, fault):
            raise ConfigError(*faults)
        self._state = replace(self._state, samples_consumed=saved.samples_consumed)


def _differences(saved: DataState, now: DataState, label: str, fault: Fault) -> list[str]:
    """A line for each thing that makes the stream another one than the saved one."""
    afresh = 'or set checkpoint.exclude_from_loading = ["dataloader"] to begin the data anew'
    faults: list[str] = []
    if saved.order_version != now.order_version or saved.mixture != now.mixture:
        kinds = [f"order version {s.order_version}, mixture {s.mixture}" for s in (saved, now)]
        faults.append(f"data state: the run has {kinds[0]}; this release gives {kinds[1]}; {afresh}")
    for key, was, value in (
        ("debug.seed", saved.seed, now.seed),
        ("training.seq_len", saved.seq_len, now.seq_len),
    ):
        if was != value:
            faults.append(fault(key, f"the run to be resumed has {was}", f"set {key} = {was}, {afresh}"))
    if saved.fingerprint != now.fingerprint:
        faults.append(
            f"{label}: gives other tokens (fingerprint {now.fingerprint[:12]}) than the run to be resumed has"
            f" ({saved.fingerprint[:12]}); give the same text, tokenizer and [data] options, {afresh}"
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
    tokens: Tokens,
    *,
    seq_len: int,
    seed: int,
    global_batch_size: int,
    micro_batch_size: int,
    dp_rank: int,
    dp_degree: int,
    state: DataState | None = None,
    auto_global_batch_size: bool = False,
    num_workers: int = 0,
    persistent_workers: bool = False,
    pin_memory: bool = False,
    prefetch_factor: int | None = None,
    fault: Fault = plain_fault,
) -> TrainLoader:
    """The training loader of one data-parallel rank, at its start or where `state` ends.

    `auto_global_batch_size` says that the size followed from the layout (`global_batch_size = -1`). Raises
    ConfigError for less data than one sample, and for a `state` of another stream.
    """
    assert global_batch_size % (dp_degree * micro_batch_size) == 0, "the configuration's rules ensure this"
    auto_dp_degree = dp_degree if auto_global_batch_size else None
    start = DataState(
        order_version=ORDER_VERSION,
        samples_consumed=0,
        seed=seed,
        seq_len=seq_len,
        mixture=SINGLE_SOURCE,
        fingerprint=tokens.fingerprint,
        global_batch_size=global_batch_size,
        auto_dp_degree=auto_dp_degree,
    )
    options = _loading_options(num_workers, persistent_workers, pin_memory, prefetch_factor)
    loader = TrainLoader(tokens, start, micro_batch_size, dp_rank, dp_degree, options)
    if state is not None:
        loader.resume(state, fault)
    return loader


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


def build_validation_loader(
    tokens: Tokens,
    *,
    seq_len: int,
    batch_size: int,
    num_samples: int = -1,
    dp_rank: int,
    dp_degree: int,
    num_workers: int = 0,
    persistent_workers: bool = False,
    pin_memory: bool = False,
    prefetch_factor: int | None = None,
) -> DataLoader[Batch]:
    """Each of the first `num_samples` samples (-1, or more than there are: all) once, on one of the ranks.

    Every rank gets the same number of batches; rows that have no sample carry labels -100 alone. Can be
    iterated again and again. Raises ConfigError for less data than one sample.
    """
    available = tokens.num_samples(seq_len)
    n = available if num_samples < 0 else min(num_samples, available)
    batches = _ValidationBatches(n, batch_size, dp_rank, dp_degree)
    options = _loading_options(num_workers, persistent_workers, pin_memory, prefetch_factor)
    return DataLoader(_Windows(tokens, seq_len), batch_sampler=batches, **options)

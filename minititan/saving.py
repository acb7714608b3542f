"""When a run saves, whether training goes on meanwhile, and what a save that fails costs."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from minititan.checkpoint.background import BackgroundSaves
from minititan.config import ConfigError
from minititan.resume import Checkpoints, Progress


class Saves:
    """The saves of a run; every rank must call `save` and `finish`. `clock` gives seconds."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        *,
        rank: int,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._checkpoints, self._section, self._say = checkpoints, checkpoints.section, say
        self._rank, self._clock = rank, clock
        self.enabled = self._section.enable and not self._section.load_only
        mode, self._background = self._section.async_mode, None
        if self.enabled and mode != "disabled":
            pinned = mode == "async_with_pinned_mem"
            self._background = BackgroundSaves(checkpoints.checkpointer, pinned=pinned)
        self._last_save = clock()
        self._in_flight = 0  # the step of the last save in the background
        self._failures = 0  # in a row

    def wanted_by_clock(self) -> bool:
        """Whether rank 0 wants a save because of the time since the last one; no other rank ever does."""
        minutes = self._section.interval_minutes
        return self._rank == 0 and minutes > 0 and self._clock() - self._last_save >= 60 * minutes

    def have_failed(self) -> bool:
        """Whether this rank knows of a save in the background that failed, which `finish` raises."""
        return self._background is not None and self._background.has_failed

    def due(self, step: int, last_step: int, asked: bool) -> bool:
        """Whether this step of a run that ends with `last_step` is saved; `asked`: all ranks agree to it."""
        first = step == 1 and self._section.enable_first_step_checkpoint
        regular = step % self._section.interval == 0 or step == last_step
        return self.enabled and (asked or first or regular)

    def save(
        self, progress: Progress, *, last: bool, stopping: bool, validation_loss: float | None = None
    ) -> None:
        """Save a step; the `last` of the run, or of one that is `stopping`, is saved when this returns.

        Raises ConfigError on all ranks alike: of that save, and where no more failures are allowed.
        """
        step = progress.steps_done
        if self._background is not None and self._background.in_flight:
            self._say(f"Step {step}: its save waits for that of step {self._in_flight}")
        self.finish()
        self._last_save = self._clock()
        loss = validation_loss if validation_loss is not None and math.isfinite(validation_loss) else None
        tensors, of = self._checkpoints.to_save(progress, last=last, validation_loss=loss)
        begin = time.perf_counter()
        if self._background is None or last or stopping:
            with self._failure_counts(final=last or stopping):
                self._checkpoints.checkpointer.save(step, tensors, **of)
                self._failures = 0
                self._say(f"Saved step {step} in {time.perf_counter() - begin:.1f} s")
            if last and self._section.last_save_in_hf:
                self._checkpoints.export(step)
            return
        said = f"Saved step {step} in the background in {{:.1f}} s"
        self._background.start(step, tensors, lambda seconds: self._say(said.format(seconds)), **of)
        self._in_flight = step
        waited = time.perf_counter() - begin
        self._say(f"Step {step} is being saved in the background; training waited {waited:.2f} s")

    def finish(self) -> None:
        """Wait for the save in the background, if there is one, and take notice of its failure."""
        if self._background is not None:
            with self._failure_counts():
                if self._background.wait():
                    self._failures = 0

    @contextmanager
    def _failure_counts(self, final: bool = False) -> Iterator[None]:
        try:
            yield
        except ConfigError as error:
            self._failures += 1
            allowed = self._section.save_failures_allowed
            if final or allowed == 0:
                raise
            if self._failures > allowed:
                rule = f"{self._failures} saves in a row have failed"
                fault = self._checkpoints.run.config.fault("checkpoint.save_failures_allowed", rule)
                raise ConfigError(*error.faults, fault) from None
            self._say(f"{error}\n  the run goes on: {self._failures} of {allowed} failures in a row")

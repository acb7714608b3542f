"""How far a preparation is: a bar where there is a terminal, else a line every ten seconds."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

LINE_SECONDS = 10.0


class Progress(Protocol):
    """`begin` with the bytes of the input that are to be read, then `advance`."""

    def begin(self, total_bytes: int) -> None: ...

    def advance(self, read_bytes: int, tokens: int) -> None: ...


class Lines:
    """Lines through `say`."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.begin(0)

    def begin(self, total_bytes: int) -> None:
        self._total, self._read, self._tokens = total_bytes, 0, 0
        self._begun = self._told = time.monotonic()

    def advance(self, read_bytes: int, tokens: int) -> None:
        self._read += read_bytes
        self._tokens += tokens
        now = time.monotonic()
        if now - self._told > LINE_SECONDS:
            self._told = now
            seconds = now - self._begun
            line = f"prepared {self._tokens:,} tokens so far, {self._tokens / seconds:,.0f} tokens/s"
            if self._read:
                left = seconds * (self._total - self._read) / self._read
                line += f", {self._read / self._total:.0%} of the input, about {_in_words(left)} left"
            self._say(line)


def _in_words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


class _Bar:
    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        speed = TextColumn("{task.fields[tokens]:,} tokens, {task.fields[speed]:,.0f} tokens/s")
        columns = (BarColumn(), TaskProgressColumn(), speed, TimeRemainingColumn(), TextColumn("left"))
        self.bar = Bar(*columns, console=Console(stderr=True), transient=True)
        self._task = self.bar.add_task("", total=None, tokens=0, speed=0.0)
        self._tokens, self._begun = 0, time.monotonic()

    def begin(self, total_bytes: int) -> None:
        self._begun = time.monotonic()
        self.bar.reset(self._task, total=total_bytes or None)

    def advance(self, read_bytes: int, tokens: int) -> None:
        self._tokens += tokens
        speed = self._tokens / max(time.monotonic() - self._begun, 1e-3)
        self.bar.update(self._task, advance=read_bytes, tokens=self._tokens, speed=speed)


@contextmanager
def shown(say: Callable[[str], None]) -> Iterator[Progress]:
    """Progress on the terminal, or where there is none by lines through `say`."""
    if sys.stderr.isatty():
        bar = _Bar()
        with bar.bar:
            yield bar
    else:
        yield Lines(say)

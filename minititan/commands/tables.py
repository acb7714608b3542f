"""Tables for a terminal by rich; into a pipe or a file plain lines, with no colors and nothing cut."""

import sys
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDEST = 100_000  # columns; rich cuts what does not fit


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> None:
    """Print rows under their columns; those named in `right` are aligned to the right."""
    terminal = sys.stdout.isatty()
    table = Table(box=box.SIMPLE_HEAD if terminal else None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    if terminal:
        Console().print(table)
        return
    console = Console(width=_WIDEST, color_system=None)
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        print(line.rstrip())


def size_text(count: int) -> str:
    """Bytes in powers of ten: "1.24 GB"."""
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"


def age_text(seconds: float) -> str:
    """How long ago, in the largest unit of which there are two."""
    for name, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {name}"
    return f"{max(seconds, 0):.0f} s"

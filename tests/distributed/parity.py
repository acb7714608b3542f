"""Runs the layout matrix, prints its table and puts it into docs/parity.md: `make parity`."""

import datetime
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from tests.distributed.context_layouts import CONTEXT
from tests.distributed.expert_layouts import EXPERTS
from tests.distributed.layouts import Row, every_row
from tests.distributed.pipeline_layouts import PIPELINES
from tests.distributed.runs import BOUNDS, TENSORS, Numbers, differences, record, too_large

QUANTITIES = ("loss", "grad_norm", *TENSORS)
PAGE = Path(__file__).parents[2] / "docs" / "parity.md"
HEAD = """# One run, any layout: the measured differences

Made by `make parity`; do not edit. The last run: {date}, torch {torch}, Python {python}, {machine}, {cores}
cores; {rows} rows in {minutes:.0f} minutes, {failed} above its bounds. Beside each row is the day of its run.

Each row is a run of 10 steps on real text on {ranks} ranks (gloo), compared with the same run on one
process with nothing turned on. The number is the largest relative difference: of the loss and of the
gradient norm before clipping over all steps; by norm and parameter, of the gradients of step 1 (unclipped),
and of the parameters and both moments after step 10, put together from the ranks' own pieces. In each row
the SHA-256 of every step's tokens, `tokens_seen`, `samples_consumed` and the learning rate are equal, every
rank has the same gradient norm to the bit, and so are copies of a tensor that several ranks hold.

Bounds in float64: {float64}. In float32 (rows that say so): {float32}; there the order in which numbers are
added moves them.

What a row's words mean: dpN: FSDP over N ranks; ddpN: N replicas; hsdpRxS: R replicas of S shards; tpN:
tensor parallelism; cpN: context parallelism, by all_gather and balanced by head and tail, or by a2a
(all_to_all), unbalanced; ppN: a pipeline over N ranks, by the schedule named (else 1F1B), by-name: its
stages listed; ac-full, ac-op, ac-2: activation checkpointing full, selective by operation, every
second layer; moe: a mixture of experts, as Qwen3's, or as that of deepseek or gpt-oss; epN: experts spread
over N ranks; etpN: each split over N as well; by-batch: the balancing loss over the whole micro-batch;
budget-x: by memory budget; aot-eager, inductor: compiled by that backend; no-sp, no-ep,
no-lp: without sequence, embedding, loss parallelism; always, never: `fsdp_reshard_after_forward`; accN: N
micro-batches; foreach, for-loop: the optimizer's implementation (else fused); offload: parameters and
moments offloaded to the CPU; tied: embedding and head are one; mha: as many key/value heads as query
heads (else half of them); documents: attention inside documents, for pack and pad as well; pack, pad:
`data.samples`; growing batch: of twice the size from step 4 on; no-clip: no clipping (else to 0.5); the
others name a size that does not divide evenly.
Rows without such a word have the default.

"""


def compare(rows: Iterable[Row]) -> Iterable[tuple[Row, dict[str, float] | str, float]]:
    """Each row with its differences, or with what was not equal to the bit, and the seconds that it took."""
    references: dict[tuple[tuple[str, str], ...], Numbers] = {}
    with tempfile.TemporaryDirectory(prefix="parity-") as name:
        folder = Path(name)
        for number, row in enumerate(rows):
            key = tuple(sorted(row.same.items()))
            if key not in references:
                references[key] = record(row.reference(), folder / f"reference-{number}", folder / "tokens")
            begin = time.perf_counter()
            try:
                found = differences(record(row, folder / f"row-{number}", folder / "tokens"), references[key])
            except (AssertionError, RuntimeError, TimeoutError) as error:
                yield row, str(error), time.perf_counter() - begin
            else:
                yield row, found, time.perf_counter() - begin


def line(row: Row, found: dict[str, float] | str, day: str) -> tuple[str, bool]:
    """The row's line of the table, and whether it is within its bounds."""
    if isinstance(found, str):
        return f"| {row} | {row.ranks} | {day} | **failed: {found.strip().splitlines()[-1]}** |", False
    broken = too_large(row, found)
    cells = [f"**{found[key]:.0e}**" if key in broken else f"{found[key]:.0e}" for key in QUANTITIES]
    return f"| {row} | {row.ranks} | {day} | {' | '.join(cells)} |", not broken


def written() -> dict[str, str]:
    """The lines of the page by the name of their row."""
    lines = [text for text in PAGE.read_text(encoding="utf-8").splitlines() if text.startswith("| ")]
    return {text.split("|")[1].strip(): text for text in lines[1:]}


def bounds(dtype: str) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {value:.0e}" for key, value in BOUNDS[dtype].items())


def write(table: dict[str, str], every: Sequence[Row], done: int, failed: int, seconds: float) -> int:
    """Write the page; return how many rows it has. The last run did so many rows, in these seconds."""
    head = HEAD.format(
        date=today(),
        torch=torch.__version__,
        python=platform.python_version(),
        machine=platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        rows=done,
        minutes=seconds / 60,
        failed=failed or "none",
        ranks=f"1 to {max(row.ranks for row in every)}",
        float64=bounds("float64"),
        float32=bounds("float32"),
    )
    titles = " | ".join(key.replace("_", " ") for key in QUANTITIES)
    lines = [table[str(row)] for row in every if str(row) in table]
    page = [f"| row | ranks | day | {titles} |", "|---" * (3 + len(QUANTITIES)) + "|", *lines]
    PAGE.write_text(head + "\n".join(page) + "\n", encoding="utf-8")
    return len(lines)


def today() -> str:
    return str(datetime.datetime.now(tz=datetime.timezone.utc).date())


def main(words: list[str]) -> int:
    """Run every row, or those whose name has one of `words`; the page keeps its lines of the others.

    It is written after each row: what was run stands there if the rest is not.
    """
    every = (*every_row(), *EXPERTS, *CONTEXT, *PIPELINES)
    rows = [row for row in every if not words or any(word in str(row) for word in words)]
    begin, table, failed, on_page = time.perf_counter(), written(), 0, 0
    for done, (row, found, seconds) in enumerate(compare(rows), start=1):
        table[str(row)], good = line(row, found, today())
        failed += not good
        print(f"{table[str(row)]} {seconds:.0f} s", flush=True)
        if isinstance(found, str):
            print(found, flush=True)
        on_page = write(table, every, done, failed, time.perf_counter() - begin)
    print(f"Written: {PAGE}: {on_page} of {len(every)} rows")
    print(f"{len(rows)} rows, {failed} above their bounds")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Time and memory of saves and loads against plain files: `python benchmarks/checkpoint.py`.

One process saves a model and Adam's state of a given size. The yardstick is the same number of bytes in one
plain file, hashed by SHA-256 while it is written (and synced) or read. All are repeated in turn, so that a
machine that gets slower is slower for all; medians and ranges are printed, and written as JSON. Reads come
from the page cache. Memory is the rise of the process's resident set, of the repeat where it is largest.
"""

import argparse
import contextlib
import hashlib
import io
import math
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from reports import machine, write_json
from rich.console import Console
from rich.table import Table
from torch import Tensor

from minititan.checkpoint.background import BackgroundSaves
from minititan.checkpoint.checkpointer import Checkpointer

CHUNK_BYTES = 1 << 20


def state_of(gib: float) -> dict[str, Tensor]:
    """Matrices of 2048 x 2048 in threes, a parameter and its two moments, of `gib` together."""
    shape = (2048, 2048)
    count = max(round(gib * 2**30 / (3 * 4 * math.prod(shape))), 1)
    kinds = ("model.{}", "optimizer.{}.exp_avg", "optimizer.{}.exp_avg_sq")
    return {kind.format(f"w{n}"): torch.randn(shape) for n in range(count) for kind in kinds}


def write_plainly(path: Path, tensors: dict[str, Tensor]) -> None:
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        for tensor in tensors.values():
            data = memoryview(tensor.view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]
            digest.update(data)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())


def read_plainly(path: Path) -> None:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def memory_watched(rises: list[float]) -> Iterator[None]:
    """Append how far the resident set rises inside, in bytes."""
    highest, done = [resident_bytes()], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            highest.append(resident_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    done.set()
    thread.join()
    rises.append(max(highest) - highest[0])


class Bench:
    """The measurements of one state in one folder: seconds and rises of memory by name."""

    def __init__(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        self.folder, self.tensors = folder, tensors
        self.target = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
        self.seconds: dict[str, list[float]] = {}
        self.rises: dict[str, list[float]] = {}
        self.checkpointer = Checkpointer(folder / "checkpoint", keep_latest_k=0, rank=0)
        self.background = BackgroundSaves(self.checkpointer, pinned=False)

    def timed(self, name: str, work: Callable[[], object]) -> None:
        with memory_watched(self.rises.setdefault(name, [])):
            begin = time.perf_counter()
            work()
            self.seconds.setdefault(name, []).append(time.perf_counter() - begin)

    def save_in_background(self) -> None:
        whole: list[float] = []
        begin = time.perf_counter()
        with memory_watched(self.rises.setdefault("async save", [])):
            self.background.start(2, self.tensors, whole.append, train_state={})
            self.seconds.setdefault("async stall", []).append(time.perf_counter() - begin)
            self.background.wait()
        self.seconds.setdefault("async save", []).extend(whole)

    def once(self) -> None:
        plain = self.folder / "plain"
        self.timed("plain write", lambda: write_plainly(plain, self.tensors))
        self.timed("save", lambda: self.checkpointer.save(1, self.tensors, {}))
        self.timed("plain read", lambda: read_plainly(plain))
        self.timed("load", lambda: self.checkpointer.load(1, self.target))
        assert all(torch.equal(self.target[key], tensor) for key, tensor in self.tensors.items())
        self.save_in_background()
        shutil.rmtree(self.checkpointer.folder)
        plain.unlink()

    def warm_up(self) -> None:
        """A round that does not count; of memory it does, since the copies of a background save stay."""
        self.once()
        self.seconds.clear()


def report(bench: Bench, size: int) -> dict[str, object]:
    table = Table(title=f"{size / 2**30:.2f} GiB in {len(bench.tensors)} tensors")
    for column in ("", "seconds: median (range)", "GB/s", "against", "memory, of the state's size"):
        table.add_column(column)
    yardsticks = {"save": "plain write", "load": "plain read"}
    medians = {name: statistics.median(times) for name, times in bench.seconds.items()}
    for name, times in bench.seconds.items():
        yardstick = yardsticks.get(name, "save" if name.endswith("stall") else None)
        share = f"{medians[yardstick] / medians[name]:.0%} of the speed of {yardstick}" if yardstick else ""
        if name.endswith("stall"):
            share = f"{medians[name] / medians['save']:.1%} of the time of save"
        rises = bench.rises.get(name)
        table.add_row(
            name,
            f"{medians[name]:.3f} ({min(times):.3f} to {max(times):.3f})",
            "" if name.endswith("stall") else f"{size / medians[name] / 1e9:.2f}",
            share,
            f"{max(rises) / size:.2f}" if rises else "",
        )
    out = io.StringIO()
    Console(file=out, width=130).print(table)
    print(out.getvalue())
    return {
        "bytes": size,
        "seconds": bench.seconds,
        "memory_rise_bytes": bench.rises,
        "save_speed_share": medians["plain write"] / medians["save"],
        "load_speed_share": medians["plain read"] / medians["load"],
        "stall_share": medians["async stall"] / medians["save"],
        "machine": machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; default: a temporary one")
    parser.add_argument("--json", type=Path, default=Path("outputs/checkpoint_benchmark.json"))
    options = parser.parse_args()
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    tensors = state_of(options.gib)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        bench = Bench(Path(folder), tensors)
        bench.warm_up()
        for _ in range(options.repeats):
            bench.once()
    results = report(bench, sum(tensor.nbytes for tensor in tensors.values()))
    write_json(options.json, results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

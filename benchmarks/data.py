"""Speed and memory of the data engine against limits measured in the same run: `python benchmarks/data.py`.

    prepare   `minititan prepare` of JSON lines with a BPE tokenizer, against `encode_batch` alone on texts in
              memory; and with bytes
    memory    peak resident memory of preparing files of several sizes, which must not grow with them
    startup   opening a set of ten thousand shards
    loader    micro-batches from a warm shard, against a copy of the same windows from a bare memory map
    resume    the first micro-batch of a run that goes on at sample 10^9, against that of a run that begins

Words after the name choose among them. Sizes are small by default; `--mib` sets that of the text.
"""

import argparse
import json
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from minititan.data import Tokens, TrainLoader

MIB = 1 << 20
DOCUMENT_CHARACTERS = 4000
REPEATS = 3
PEAK = """
import resource, sys
from minititan.__main__ import main
code = main(sys.argv[1:])
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
sys.exit(code)
"""


def documents() -> list[str]:
    """The standard library's source in pieces of a usual length."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        path
        for path in sorted(root.glob("*.py")) + sorted(root.glob("*/*.py"))
        if "-packages" not in str(path)
    ]
    text = "".join(path.read_text(errors="replace") for path in files)
    return [text[at : at + DOCUMENT_CHARACTERS] for at in range(0, len(text), DOCUMENT_CHARACTERS)]


def texts(size: int) -> Iterator[str]:
    """`size` bytes of documents, repeated with a number so that none is like another."""
    found, number = documents(), 0
    while size > 0:
        text = f"{number}\n{found[number % len(found)]}"
        size, number = size - len(text.encode()), number + 1
        yield text


def write_lines(path: Path, size: int) -> None:
    with path.open("w") as file:
        for text in texts(size):
            file.write(json.dumps({"id": 1, "text": text}) + "\n")


def train_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """A byte-level BPE with 32,000 ids, pre-tokenized as GPT-2's."""
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(documents(), trainers.BpeTrainer(vocab_size=32_000, initial_alphabet=alphabet))
    bpe.save(str(path))
    return bpe


def seconds_of(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def minititan(*words: str | Path) -> str:
    """Runs the command; returns what it says."""
    ended = subprocess.run([sys.executable, "-c", PEAK, *map(str, words)], capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(ended.stderr)
    return ended.stdout


def bench_prepare(folder: Path, mib: int) -> None:
    bpe = train_tokenizer(folder / "tokenizer.json")
    in_memory = list(texts(mib * MIB))
    batches = [in_memory[at : at + 256] for at in range(0, len(in_memory), 256)]
    write_lines(folder / "text.jsonl", mib * MIB)
    words = ["--tokenizer", folder / "tokenizer.json", "--no_add_eos"]
    ratios = []
    for repeat in range(REPEATS):
        alone = seconds_of(
            lambda: [bpe.encode_batch_fast(batch, add_special_tokens=False) for batch in batches]
        )
        command = ["prepare", folder / "text.jsonl", "--output", folder / f"bpe-{repeat}", *words]
        whole = seconds_of(partial(minititan, *command))
        ratios.append(alone / whole)
        print(
            f"encode_batch alone {mib / alone:.2f} MiB/s, prepare {mib / whole:.2f} MiB/s: {ratios[-1]:.0%}"
        )
    print(f"prepare: {sorted(ratios)[len(ratios) // 2]:.0%} of encode_batch alone (at least 85 %)")
    taken = seconds_of(lambda: minititan("prepare", folder / "text.jsonl", "--output", folder / "bytes"))
    print(f"prepare with bytes: {mib / taken:.0f} MiB/s")


def bench_memory(folder: Path, mib: int) -> None:
    for size in (mib // 4, mib):
        path = folder / f"{size}.jsonl"
        write_lines(path, size * MIB)
        said = minititan("prepare", path, "--output", folder / f"set-{size}")
        print(f"memory: {size} MiB of JSON lines, bytes: peak {said.split()[-1][:5]} GiB (at most 1)")


def bench_startup(folder: Path, shards: int = 10_000) -> None:
    from minititan.data.shards import write_manifest, write_shard
    from minititan.data.tokens import open_prepared

    dtype = np.dtype("<u2")
    parts = [(np.arange(1000, dtype=dtype), np.arange(0, 1000, 100))]
    entries = [write_shard(folder, f"{number:05d}-000", dtype, parts) for number in range(shards)]
    write_manifest(folder, entries, dtype, 1000, "")
    opened = seconds_of(lambda: open_prepared(folder, ""))
    tokens = open_prepared(folder, "")
    tokens.window(0, 2048)  # loads torch
    first = seconds_of(lambda: tokens.window(tokens.num_tokens // 4096, 2048))
    print(
        f"startup: {shards:,} shards open in {opened:.2f} s (at most 3), first sample in {first * 1e3:.1f} ms"
    )


def bench_loader(folder: Path, seq_len: int = 2048, micro_batch_size: int = 8) -> None:
    from minititan.data.shards import write_manifest, write_shard
    from minititan.data.tokens import open_prepared

    dtype, count, batches = np.dtype("<u2"), 1 << 26, 200
    tokens = np.random.default_rng(0).integers(0, 50_000, count).astype(dtype)
    entry = write_shard(folder, "00000-000", dtype, [(tokens, np.arange(0, count, 1000))])
    write_manifest(folder, [entry], dtype, 50_000, "")
    bare = np.asarray(np.memmap(folder / "00000-000.bin", dtype, "r"))
    windows = np.random.default_rng(1).permutation(count // seq_len - 1)[: batches * micro_batch_size]

    def copy_windows() -> None:
        for begin in (windows * seq_len).tolist():
            bare[begin : begin + seq_len + 1].astype(np.int64)

    for kind in ("window", "pack"):
        loader = iter(build_loader(open_prepared(folder, ""), folder, kind, seq_len, micro_batch_size))
        for _ in range(count // seq_len // micro_batch_size):  # warm: all of it read once
            next(loader)
        rates = []
        for _ in range(10 * REPEATS):  # short ones, of which the best counts: others may use the cores
            taken = seconds_of(partial(deque, islice(loader, batches), 0))
            rates.append((taken, seconds_of(copy_windows)))
        taken, alone = (len(windows) * seq_len / min(times) / 1e6 for times in zip(*rates, strict=True))
        ratio = f"{taken / alone:.0%} of a bare copy's {alone:.0f}"
        print(f"loader, {kind}: {taken:.0f} M tokens/s (at least 50), {ratio}")


def bench_resume(folder: Path, seq_len: int = 128, place: int = 10**9) -> None:
    """On sparse files, which take no room."""
    import dataclasses

    from minititan.data.shards import edges_of, write_manifest
    from minititan.data.tokens import open_prepared

    dtype, tokens = np.dtype("<u2"), 1 << 31
    entries = []
    for number in range(1 + place * seq_len // tokens):
        name = f"{number:05d}-000"
        np.save(folder / f"{name}.starts.npy", np.zeros(1, dtype="<i8"))
        with (folder / f"{name}.bin").open("wb") as file:
            file.truncate(tokens * dtype.itemsize)
        about = {"hash": "0", "starts_sha256": "", "edges": edges_of(folder / f"{name}.bin")}
        entries.append({"name": name, "tokens": tokens, "documents": 1, **about})
    write_manifest(folder, entries, dtype, 1000, "")

    def first_batch(consumed: int) -> None:
        loader = build_loader(open_prepared(folder, ""), folder, "window", seq_len, 8)
        loader.resume(dataclasses.replace(loader.state(), samples_consumed=consumed), consumed // 8)
        next(iter(loader))

    first_batch(0)  # imports, and the files' pages
    start, resumed = (
        sorted(seconds_of(partial(first_batch, consumed)) for _ in range(4 * REPEATS + 1))[2 * REPEATS]
        for consumed in (0, place)
    )
    print(
        f"resume: first batch at sample {place:,} in {resumed * 1e3:.1f} ms (at most 2,000), "
        f"{resumed / start:.2f} of {start * 1e3:.1f} ms at the start (at most 1.5)"
    )


def build_loader(
    tokens: "Tokens", cache: Path, kind: str, seq_len: int, micro_batch_size: int
) -> "TrainLoader":
    """The loader of a run on one rank."""
    from minititan.config.batches import BatchSizes
    from minititan.data import build_train_loader
    from minititan.data.samples import build_samples

    options = {"cache": cache, "document_mask": kind != "window", "predict_first_token": True}
    return build_train_loader(
        {"": build_samples(tokens, kind, seq_len, say=print, **options)},
        kind=kind,
        seq_len=seq_len,
        seed=0,
        batch_sizes=BatchSizes(((1, micro_batch_size),)),
        micro_batch_size=micro_batch_size,
        dp_rank=0,
        dp_degree=1,
        document_mask=kind != "window",
    )


BENCHES = {
    "prepare": bench_prepare,
    "memory": bench_memory,
    "startup": bench_startup,
    "loader": bench_loader,
    "resume": bench_resume,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", choices=[*BENCHES, []], default=[])
    parser.add_argument("--mib", type=int, default=64)
    options = parser.parse_args()
    for name in options.what or BENCHES:
        with tempfile.TemporaryDirectory() as folder:
            BENCHES[name](Path(folder), *([options.mib] if name in ("prepare", "memory") else []))


if __name__ == "__main__":
    main()

"""How time and memory grow: `python benchmarks/growth.py`, or with some of `size length ranks steps` only
that.

- `size`: one step of models of 1M to 60M parameters, at equal tokens.
- `length`: one step of equal tokens, cut into sequences of 128 to 4,096.
- `ranks`: one step of one batch on 1, 2 and 4 FSDP ranks.
- `steps`: 2,000 steps with logs, validation and saves: memory, Python objects and time of a step stay.

Each point is a process of its own with one thread, so that its peak of memory (the kernel's `VmHWM`, less
what imports take) is its own. A step is the trainer's. Theory is fitted by least squares of relative
residuals.
`--page FILE` writes the parts between their marks in a page, `--plots FOLDER` their pictures; the JSON keeps
the parts of earlier calls.
"""

import argparse
import gc
import json
import re
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from probes import on_ranks
from reports import machine, machine_line, spread, verdict, write_json, write_part
from scaling import begun

Keys = dict[str, str]
MB = 1e6
COMMAND = "python benchmarks/growth.py"
# width, layers
SIZES = ((128, 4), (192, 6), (256, 10), (384, 12), (512, 19))
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
RANKS = (1, 2, 4)
ROUNDS, TIMED_STEPS = 3, 2
# An Adam step's bytes a parameter, float32: itself, its gradient, two moments.
STATE, WITH_GRADIENT = 12, 16


class Point(NamedTuple):
    """What one rank found of a step."""

    seconds: list[float]
    peak: int  # bytes at most in a step, without what imports take
    state: int  # bytes of this rank's parameters and moments
    kept: int  # bytes that autograd keeps for the backward pass
    parameters: int
    flops: float  # of a step of all ranks, as `models/counts.py` counts them


def model(width: int, layers: int, seq_len: int, sequences: int) -> Keys:
    return {
        "model.args.hidden_size": str(width),
        "model.args.num_hidden_layers": str(layers),
        "model.args.num_attention_heads": "8",
        "model.args.num_key_value_heads": "4",
        "model.args.intermediate_size": str(3 * width),
        "training.seq_len": str(seq_len),
        "training.global_batch_size": str(sequences),
        "training.local_batch_size": str(sequences),
        "training.steps": "100",
    }


# ---- one point


def resident(name: str) -> int:
    """The process's memory by a name of /proc: `VmRSS` now, `VmHWM` at its peak; bytes."""
    found = re.search(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


@contextmanager
def counted(found: dict[int, int]) -> Iterator[None]:
    """Put into `found` what autograd keeps by address, parameters left out, gathered ones too."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        base = tensor if tensor._base is None else tensor._base
        if not (base.is_leaf and base.requires_grad):
            found[base.untyped_storage().data_ptr()] = base.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def measure_in_rank(rank: int, world: int, keys: Keys, folder: str) -> Point:
    before = resident("VmRSS")
    trainer, batches = begun(world, keys, folder)
    reset_peak()
    seconds = []
    for _ in range(TIMED_STEPS):
        begin = time.perf_counter()
        trainer.step(batches)
        seconds.append(time.perf_counter() - begin)
    peak = resident("VmHWM") - before
    kept: dict[int, int] = {}
    with counted(kept):
        trainer.step(batches)
    local = [getattr(x, "to_local", lambda x=x: x)() for x in trainer.checkpoints.tensors().values()]
    training, flops = trainer.config.training, trainer.metrics.flops_per_token or 0.0
    return Point(
        seconds,
        peak,
        sum(tensor.nbytes for tensor in local),
        sum(kept.values()),
        sum(p.numel() for p in trainer.parameters.values()),
        flops * training.seq_len * trainer.job.layout.batch_sizes.at(1),
    )


def measured(points: Sequence[tuple[int, Keys]], folder: str) -> list[list[list[Point]]]:
    """Measure points (ranks, keys), all of them in each round; by point, round and rank."""
    found: list[list[list[Point]]] = [[] for _ in points]
    for _ in range(ROUNDS):
        for index, (ranks, keys) in enumerate(points):
            found[index].append(on_ranks(measure_in_rank, ranks, keys, folder))
    return found


def seconds_of(rounds: Sequence[Sequence[Point]]) -> list[float]:
    """The steps' times, each that of the slowest rank."""
    return [max(of) for ranks in rounds for of in zip(*(point.seconds for point in ranks), strict=True)]


def peak_of(rounds: Sequence[Sequence[Point]]) -> float:
    """The median over rounds of the rank that takes most."""
    return statistics.median(max(point.peak for point in ranks) for ranks in rounds)


class Fit(NamedTuple):
    coefficients: list[float]
    values: list[float]
    residuals: list[float]  # relative


def fitted(columns: Sequence[Sequence[float]], y: Sequence[float]) -> Fit:
    """Fit y as a sum of the columns, each times a coefficient that is not negative."""
    x, target = np.array(columns, dtype=float).T, np.array(y)
    scale = np.abs(x).max(axis=0)
    free = list(range(x.shape[1]))
    while True:  # drop the most negative until there is none
        part = (x / scale)[:, free] / target[:, None]
        solution, *_ = np.linalg.lstsq(part, np.ones(len(target)), rcond=None)
        if (solution >= 0).all():
            break
        free.pop(int(solution.argmin()))
    coefficients = np.zeros(x.shape[1])
    coefficients[free] = solution / scale[free]
    values = x @ coefficients
    return Fit(list(coefficients), list(values), list(target / values - 1))


# ---- parts


def size(folder: str) -> tuple[str, Any]:
    """A step of 1,024 tokens against the number of parameters."""
    runs = measured([(1, model(width, layers, 256, 4)) for width, layers in SIZES], folder)
    points = [rounds[0][0] for rounds in runs]
    times = [statistics.median(seconds_of(rounds)) for rounds in runs]
    peaks = [peak_of(rounds) for rounds in runs]
    by_flops = fitted([[1.0] * len(points), [point.flops for point in points]], times)
    memory = fitted(
        [[1.0] * len(points), [p.parameters for p in points], [p.kept for p in points]],
        peaks,
    )
    rows = [
        "| width, layers | parameters | GFLOP a step | time (s, range) | residual | GFLOP/s | peak (MB) "
        "| residual | 16 B a parameter (MB) | kept by autograd (MB) |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for index, (width, layers) in enumerate(SIZES):
        point = points[index]
        rows.append(
            f"| {width}, {layers} | {point.parameters / 1e6:.2f} M | {point.flops / 1e9:.1f} "
            f"| {spread(seconds_of(runs[index]), 3)} | {by_flops.residuals[index]:+.1%} "
            f"| {point.flops / 1e9 / times[index]:.1f} "
            f"| {peaks[index] / MB:.0f} | {memory.residuals[index]:+.1%} "
            f"| {WITH_GRADIENT * point.parameters / MB:.0f} | {point.kept / MB:.0f} |"
        )
    start, rate = by_flops.coefficients
    base, of_parameter, of_kept = memory.coefficients
    rows.append(
        f"\nTime: {1e3 * start:.1f} ms + FLOPs / {1 / rate / 1e9:.1f} GFLOP/s. Peak: {base / MB:.0f} MB "
        f"+ {of_parameter:.1f} B a parameter + {of_kept:.2f} x what autograd keeps (theory: 16 and 1)."
    )
    data = {
        "parameters": [p.parameters for p in points],
        "flops": [p.flops for p in points],
        "seconds": [seconds_of(rounds) for rounds in runs],
        "time": times,
        "time_fit": by_flops._asdict(),
        "peak": peaks,
        "kept": [p.kept for p in points],
        "peak_fit": memory._asdict(),
    }
    return "\n".join(rows), data


def length(folder: str) -> tuple[str, Any]:
    """A step of 4,096 tokens against the length of its sequences."""
    tokens, (width, layers) = max(LENGTHS), SIZES[0]
    runs = measured([(1, model(width, layers, n, tokens // n)) for n in LENGTHS], folder)
    points = [rounds[0][0] for rounds in runs]
    times = [statistics.median(seconds_of(rounds)) for rounds in runs]
    peaks = [peak_of(rounds) for rounds in runs]
    time_fit = fitted([[1.0] * len(LENGTHS), LENGTHS], times)
    peak_fit = fitted([[1.0] * len(LENGTHS)], peaks)
    rows = [
        "| length | sequences | GFLOP a step | time (s, range) | residual | peak (MB) | residual "
        "| kept by autograd (MB) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for index, n in enumerate(LENGTHS):
        point, of_time, of_peak = points[index], time_fit.residuals[index], peak_fit.residuals[index]
        rows.append(
            f"| {n:,} | {tokens // n} | {point.flops / 1e9:.1f} | {spread(seconds_of(runs[index]), 3)} "
            f"| {of_time:+.1%} | {peaks[index] / MB:.0f} | {of_peak:+.1%} | {point.kept / MB:.0f} |"
        )
    start, grows = time_fit.coefficients
    of_scores = 12 * layers * width  # FLOPs of a token for each token of the length; half of them are causal
    expected = of_scores / 2 / (points[0].flops / tokens - of_scores * LENGTHS[0])
    rows.append(
        f"\nTime of a token: {1e6 * start / tokens:.1f} us + {1e9 * grows / tokens:.2f} ns a token of "
        f"length, a ratio of {grows / start:.2e}; by FLOPs it would be {expected:.2e} (half of the scores). "
        f"Peak: {peak_fit.coefficients[0] / MB:.0f} MB, whatever the length."
    )
    data = {
        "lengths": LENGTHS,
        "tokens": tokens,
        "seconds": [seconds_of(rounds) for rounds in runs],
        "time": times,
        "time_fit": time_fit._asdict(),
        "expected_ratio": expected,
        "peak": peaks,
        "kept": [p.kept for p in points],
        "peak_fit": peak_fit._asdict(),
    }
    return "\n".join(rows), data


def ranks(folder: str) -> tuple[str, Any]:
    """A step of 2,048 tokens of the third model against the number of FSDP ranks."""
    (width, layers), sequences = SIZES[2], 8
    keys = model(width, layers, 256, sequences)
    runs = measured(
        [
            (
                n,
                keys
                | {
                    "training.local_batch_size": str(sequences // n),
                    "parallelism.data_parallel_shard_degree": str(n),
                },
            )
            for n in RANKS
        ],
        folder,
    )
    times, peaks = [statistics.median(seconds_of(rounds)) for rounds in runs], [peak_of(r) for r in runs]
    whole = runs[0][0][0].parameters
    block, cores = 12 * width**2, machine()["cores"]
    rows = [
        "| ranks | state of a rank (MB) | 12 B x parameters / ranks (MB) | kept by autograd (MB) "
        "| peak of a rank (MB) | state + gradients + kept + gathered + a constant (MB) | residual "
        "| time (s, range) | ideal on these cores (s) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    theory, states, kepts = [], [], []
    for index, n in enumerate(RANKS):
        first = [max(point) for point in zip(*((p.state, p.kept) for p in runs[index][0]), strict=True)]
        states.append(first[0])
        kepts.append(first[1])
        # Of FSDP: two units' parameters gathered, and one unit's gradients not yet scattered.
        gathered = 0 if n == 1 else 3 * 4 * block
        theory.append(WITH_GRADIENT * whole / n + first[1] + gathered)
    base = statistics.mean(peak - value for peak, value in zip(peaks, theory, strict=True))
    for index, n in enumerate(RANKS):
        ideal, value = times[0] / min(n, cores), theory[index] + base
        rows.append(
            f"| {n} | {states[index] / MB:.1f} | {STATE * whole / n / MB:.1f} | {kepts[index] / MB:.0f} "
            f"| {peaks[index] / MB:.0f} | {value / MB:.0f} | {peaks[index] / value - 1:+.1%} "
            f"| {spread(seconds_of(runs[index]), 3)} | {ideal:.3f} ({times[index] / ideal:.2f} x) |"
        )
    rows.append(f"\nThe constant, a mean: {base / MB:.0f} MB.")
    data = {
        "ranks": RANKS,
        "base": base,
        "cores": cores,
        "parameters": whole,
        "state": states,
        "kept": kepts,
        "peak": peaks,
        "theory": theory,
        "seconds": [seconds_of(rounds) for rounds in runs],
        "time": times,
    }
    return "\n".join(rows), data


# ---- many steps

STEPS, WARM_UP, EVERY = 2_000, 500, 50
BOUNDS = {"resident": 2**20, "objects": 100}  # growth in 1,000 steps
RUNS = (("1 rank", 1, "disabled"), ("2 ranks, saves in the background", 2, "async"))


def watch_in_rank(rank: int, world: int, keys: Keys, folder: str) -> list[tuple[int, float, int, int]]:
    """Train; return for every so many steps the time, the resident set and the number of Python objects."""
    trainer, _ = begun(world, keys, folder)
    samples: list[tuple[int, float, int, int]] = []
    after_step = trainer.after_step

    def sampled() -> None:
        after_step()
        if trainer.steps_done % EVERY == 0:
            now = time.perf_counter()
            samples.append((trainer.steps_done, now, resident("VmRSS"), len(gc.get_objects())))

    trainer.after_step = sampled
    trainer.run()
    return samples


def slope(steps: Sequence[float], values: Sequence[float]) -> float:
    """The growth in 1,000 steps after the warm-up."""
    after = [index for index, step in enumerate(steps) if step >= WARM_UP]
    x, y = np.array(steps)[after], np.array(values, dtype=float)[after]
    return 1_000 * float(np.polyfit(x, y, 1)[0])


def many_steps(folder: str) -> tuple[str, Any]:
    """Runs of 2,000 steps that log, validate and save."""
    rows = [
        "| run | rank | resident after warm-up (MiB) | growth in 1,000 steps (KiB) | at most 1,024 "
        "| objects after warm-up | growth in 1,000 steps | at most 100 | ms a step (growth in 1,000 steps) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    data = {}
    for name, world, mode in RUNS:
        keys = model(64, 1, 32, 4) | {
            "parallelism.fsdp_reshard_after_forward": "never",
            "training.steps": str(STEPS),
            "training.local_batch_size": str(4 // world),
            "parallelism.data_parallel_shard_degree": str(world),
            "metrics.log_freq": "10",
            "metrics.enable_tensorboard": "true",
            "validation.enable": "true",
            "validation.dataset_path": f"{folder}/text.txt",
            "validation.freq": "100",
            "validation.steps": "2",
            "validation.seq_len": "32",
            "validation.local_batch_size": "4",
            "checkpoint.enable": "true",
            "checkpoint.interval": "100",
            "checkpoint.keep_latest_k": "2",
            "checkpoint.async_mode": mode,
            "checkpoint.folder": f"checkpoint {name}",
        }
        found = on_ranks(watch_in_rank, world, keys, folder)
        data[name] = found
        for rank, samples in enumerate(found):
            steps, clock, sizes, objects = (list(column) for column in zip(*samples, strict=True))
            grows = {"resident": slope(steps, sizes), "objects": slope(steps, objects)}
            verdicts = {key: verdict(value, BOUNDS[key], at_most=True) for key, value in grows.items()}
            first = steps.index(WARM_UP)
            times = [1e3 * (b - a) / EVERY for a, b in pairwise(clock)]
            rows.append(
                f"| {name} | {rank} | {sizes[first] / 2**20:.1f} | {grows['resident'] / 1024:+.0f} "
                f"| {verdicts['resident']} | {objects[first]:,} | {grows['objects']:+.1f} "
                f"| {verdicts['objects']} | {statistics.median(times):.1f} ({slope(steps[1:], times):+.2f}) |"
            )
            print(rows[-1], flush=True)
    return "\n".join(rows), data


# ---- the command

PARTS = {"size": size, "length": length, "ranks": ranks, "steps": many_steps}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--page", type=Path, help="such as docs/performance.md")
    parser.add_argument("--plots", type=Path, help="folder for growth_PART.png, such as docs")
    parser.add_argument("--json", type=Path, default=Path("outputs/growth_benchmark.json"))
    options = parser.parse_args()
    chosen = options.parts or list(PARTS)
    if unknown := set(chosen) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are: {', '.join(PARTS)}")
    results: dict[str, Any] = json.loads(options.json.read_text()) if options.json.exists() else {}
    results["machine"] = machine()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "run.toml").touch()
        Path(folder, "text.txt").write_text(" ".join(str(n**2) for n in range(20_000)))
        for part in chosen:
            text, results[part] = PARTS[part](folder)
            text = f"{machine_line(results['machine'])}\n\n{text}"
            print(f"\n{part}\n\n{text}", flush=True)
            if options.page is not None:
                write_part(options.page, COMMAND, part, text)
    write_json(options.json, results)
    if options.plots is not None:
        from growth_plots import PLOTS  # matplotlib is needed for pictures only

        for part in chosen:
            PLOTS[part](results[part], options.plots / f"growth_{part}.png")


if __name__ == "__main__":
    main()

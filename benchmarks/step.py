"""A training step beside its limit: `python benchmarks/step.py`, or with some of `limit phases tp layouts`.

- `limit`: the step's matrix products and attention kernels alone, on copies of their inputs, the trainer's
  step, and a bare loop of the same modules, in turn; eager and compiled.
- `phases`: where the host's time of a step goes.
- `tp`: a step on two tensor-parallel ranks against its computation (collectives left out) and its collectives
  (nothing computed).
- `layouts`: tokens a second and peak memory, by layout.

Each of a part's numbers is taken once a round, so that a machine that gets slower is slower for all; medians,
with the least and the most. `--page FILE` writes the parts between their marks in a page.
"""

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from probes import on_ranks
from reports import machine, machine_line, spread, verdict, write_json, write_part
from scaling import Keys, begun
from step_parts import (
    COLLECTIVES,
    Kernels,
    Phases,
    collectives_as,
    seconds,
    timed_iterator,
    without_ranks,
)
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from minititan import train
from minititan.parallelisms import collectives
from minititan.train import Trainer

TOKENS, SEQ_LEN = 4096, 512
SIZES: dict[str, Keys] = {
    "10M": {"model.args.hidden_size": "256", "model.args.intermediate_size": "832"},
    "40M": {"model.args.hidden_size": "512", "model.args.intermediate_size": "1664"},
}
COMMON: Keys = {
    "model.args.num_hidden_layers": "8",
    "model.args.num_attention_heads": "8",
    "model.args.num_key_value_heads": "4",
    "model.args.vocab_size": "6400",
    "training.seq_len": str(SEQ_LEN),
    "training.global_batch_size": str(TOKENS // SEQ_LEN),
    "training.local_batch_size": str(TOKENS // SEQ_LEN),
    "training.steps": "100000",
}
COMPILED: Keys = {"compile.enable": "true"}
GOALS = {"eager": 0.85, "compiled": 0.90}
TRAINER_GOAL, HOST_GOAL, TP_GOAL = 1.01, 0.005, 1.15


def use_threads(world: int) -> None:
    """Set up a forked rank as a run does."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))


# ---- the limit


class BareLoop:
    """The same modules in the shortest loop: forward, backward, clip, fused AdamW."""

    def __init__(self, trainer: Trainer, batches: Iterator[Any]) -> None:
        self.model, self.batch = trainer.parts[0], next(batches)
        self.parameters = list(trainer.parameters.values())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, fused=True)

    def step(self) -> None:
        labels = self.batch["labels"]
        loss = self.model.lm_head(self.model(self.batch["tokens"]), labels)
        (loss / labels.numel()).backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def limit_in_rank(rank: int, world: int, keys: Keys, folder: str, rounds: int) -> dict[str, Any]:
    use_threads(world)
    trainer, batches = begun(world, keys, folder)
    with Kernels() as kernels, FlopCounterMode(display=False) as flops:
        trainer.step(batches)
    found: dict[str, Any] = defaultdict(list)
    found["flops"], found["peak_flops"] = flops.get_total_flops(), kernels.peak()
    # The compiler's products are the same.
    compiled, compiled_batches = begun(world, keys | COMPILED, folder)
    bare, compiled_bare = BareLoop(trainer, batches), BareLoop(compiled, compiled_batches)
    calls = {
        "eager": lambda: trainer.step(batches),
        "eager bare": bare.step,
        "compiled": lambda: compiled.step(compiled_batches),
        "compiled bare": compiled_bare.step,
    }
    for call in calls.values():
        call()
    for turn in range(rounds):
        # Every second round backwards: what runs after the kernels finds other things in the caches.
        for name, call in list(calls.items())[:: -1 if turn % 2 else 1]:
            found[name].append(seconds(call))
        for kind, spent in kernels.run().items():
            found[kind].append(spent)
    return dict(found)


def limit(folder: str, options: argparse.Namespace) -> tuple[str, Any]:
    results = {}
    lines = [
        "| model | step | tokens/s | of it products | of it attention | together | goal | of the peak "
        "| trainer / bare loop | goal |",
        "|" + "---|" * 10,
    ]
    for size in options.sizes:
        found = on_ranks(limit_in_rank, 1, COMMON | SIZES[size], folder, options.rounds)[0]
        results[size] = found
        for kind, goal in GOALS.items():
            step = statistics.median(found[kind])
            shares = [
                statistics.median([a / b for a, b in zip(found[part], found[kind], strict=True)])
                for part in ("products", "attention")
            ]
            together = [
                (a + b) / c
                for a, b, c in zip(found["products"], found["attention"], found[kind], strict=True)
            ]
            over = [a / b for a, b in zip(found[kind], found[f"{kind} bare"], strict=True)]
            share, ratio = statistics.median(together), statistics.median(over)
            lines.append(
                f"| {size} | {kind} | {TOKENS / step:,.0f} | {shares[0]:.1%} | {shares[1]:.1%} "
                f"| {spread([100 * x for x in together], 1, ' %')} | {verdict(share, goal, at_most=False)} "
                f"| {found['flops'] / step / found['peak_flops']:.0%} "
                f"| {spread(over, 3)} | {verdict(ratio, TRAINER_GOAL, at_most=True)} |"
            )
            results[size][f"{kind} verdicts"] = {"share": share, "trainer": ratio}
    return "\n".join(lines), results


# ---- phases


def phases_in_rank(rank: int, world: int, keys: Keys, folder: str, steps: int) -> list[dict[str, float]]:
    use_threads(world)
    trainer, batches = begun(world, keys, folder)
    trainer.step(batches)
    phases, found = Phases(), []
    with ExitStack() as patches:
        for owner, attribute, name in (
            (trainer, "forward_backward", "forward"),
            (Tensor, "backward", "backward"),
            (train, "finish_gradients", "clip"),
            (train, "gradient_norm", "clip"),
            (train, "clip_gradients", "clip"),
            (trainer.guard, "allows", "guard"),
            (trainer.optimizer, "step", "optimizer"),
            (trainer.optimizer, "zero_grad", "optimizer"),
            (trainer, "log", "log"),
        ):
            timed = phases.around(name, getattr(owner, attribute))
            patches.enter_context(mock.patch.object(owner, attribute, timed))
        loader = timed_iterator(batches, phases)
        for step in range(steps):
            phases.spent.clear()
            begin = time.perf_counter()
            with phases.phase("rest"):
                trainer.step(loader)
            # As a run does every `gc_freq` steps.
            if step % 2:
                with phases.phase("gc"):
                    gc.collect(1)
            found.append(dict(phases.spent) | {"step": time.perf_counter() - begin})
    return found


def phases(folder: str, options: argparse.Namespace) -> tuple[str, Any]:
    """Logging every step, garbage every second; the table takes them as often as a run does."""
    names = ("data", "forward", "backward", "clip", "guard", "optimizer", "rest", "log", "gc")
    every = {"log": 10, "gc": 50}
    lines = [f"| model | {' | '.join(names)} | data, log, gc, rest | goal |", "|" + "---|" * (len(names) + 3)]
    results = {}
    for size in options.sizes:
        keys = COMMON | SIZES[size] | {"metrics.log_freq": "1", "metrics.enable_tensorboard": "true"}
        found = on_ranks(phases_in_rank, 1, keys, folder, 2 * options.rounds)[0]
        medians = {
            name: statistics.median(step[name] for step in found if name in step) / every.get(name, 1)
            for name in names
        }
        whole = sum(medians.values())
        host = sum(medians[name] for name in ("data", "log", "gc", "rest")) / whole
        cells = " | ".join(f"{1000 * medians[name]:,.2f} ms" for name in names)
        lines.append(f"| {size} | {cells} | {host:.2%} | {verdict(host, HOST_GOAL, at_most=True)} |")
        results[size] = {"seconds": medians, "host_share": host}
    return "\n".join(lines), results


# ---- tensor parallelism


def tp_in_rank(rank: int, world: int, keys: Keys, folder: str, rounds: int) -> dict[str, list[float]]:
    use_threads(world)
    trainer, batches = begun(world, keys, folder)
    calls: list[tuple[Callable[..., Tensor], Tensor, tuple[Any, ...]]] = []

    def recorder(name: str) -> Callable[..., Tensor]:
        original = getattr(collectives, name)

        def record(x: Tensor, *rest: Any) -> Tensor:
            calls.append((original, torch.empty_like(x).fill_(1.0), rest))
            return original(x, *rest)

        return record

    with collectives_as({name: recorder(name) for name in COLLECTIVES}):
        trainer.step(batches)
    spent: dict[str, list[float]] = defaultdict(list)

    def communicate() -> None:
        for collective, x, rest in calls:
            collective(x, *rest).sum()  # waits

    def compute() -> None:
        with collectives_as(without_ranks(world)):
            trainer.step(batches)

    for _ in range(rounds):
        for name, call in (
            ("step", lambda: trainer.step(batches)),
            ("computation", compute),
            ("collectives", communicate),
        ):
            dist.barrier()
            begin = time.perf_counter()
            call()
            dist.barrier()  # the step of all ranks
            spent[name].append(time.perf_counter() - begin)
    return dict(spent)


def tp(folder: str, options: argparse.Namespace) -> tuple[str, Any]:
    lines = [
        "| model | step | computation | collectives | step / (computation + collectives) | goal |",
        "|" + "---|" * 6,
    ]
    results = {}
    for size in options.sizes:
        keys = COMMON | SIZES[size] | {"parallelism.tensor_parallel_degree": "2"}
        found = on_ranks(tp_in_rank, 2, keys, folder, options.rounds)[0]
        ratios = [
            step / (computed + sent)
            for step, computed, sent in zip(
                found["step"], found["computation"], found["collectives"], strict=True
            )
        ]
        times = " | ".join(
            spread([1000 * value for value in found[name]], 0, " ms")
            for name in ("step", "computation", "collectives")
        )
        ratio = statistics.median(ratios)
        lines.append(f"| {size} | {times} | {spread(ratios, 3)} | {verdict(ratio, TP_GOAL, at_most=True)} |")
        results[size] = found | {"ratio": ratio}
    return "\n".join(lines), results


# ---- layouts

MOE: Keys = {
    "model.name": "qwen3",
    "model.flavor": "debugmodel_moe",
    "model.args.intermediate_size": "832",
    "model.args.moe_intermediate_size": "208",
    "model.args.num_experts": "16",
    "model.args.num_experts_per_tok": "4",
}
SHARDED, REPLICATED = "parallelism.data_parallel_shard_degree", "parallelism.data_parallel_replicate_degree"
TENSOR, EXPERT = "parallelism.tensor_parallel_degree", "parallelism.expert_parallel_degree"
LAYOUTS: dict[str, tuple[int, Keys]] = {
    "one process": (1, {}),
    "one process, compiled": (1, COMPILED),
    "one process, blocks recomputed": (1, {"activation_checkpoint.mode": "full"}),
    "FSDP 2": (2, {SHARDED: "2"}),
    "FSDP 2, compiled": (2, {SHARDED: "2"} | COMPILED),
    "replicas 2": (2, {REPLICATED: "2", SHARDED: "1"}),
    "TP 2": (2, {TENSOR: "2"}),
    "PP 2": (2, {"parallelism.pipeline_parallel_degree": "2"}),
    "CP 2": (2, {"parallelism.context_parallel_degree": "2"}),
    "FSDP 4": (4, {SHARDED: "4"}),
    "FSDP 2, TP 2": (4, {SHARDED: "2", TENSOR: "2"}),
    "experts, one process": (1, MOE),
    "experts, FSDP 2": (2, MOE | {SHARDED: "2"}),
    "experts, EP 2": (2, MOE | {SHARDED: "2", EXPERT: "2"}),
}


def layout_in_rank(rank: int, world: int, keys: Keys, folder: str, steps: int) -> dict[str, Any]:
    use_threads(world)
    trainer, batches = begun(world, keys, folder)
    trainer.step(batches)
    spent = []
    for _ in range(steps):
        dist.barrier()
        spent.append(seconds(lambda: trainer.step(batches)))
    status = Path("/proc/self/status").read_text()
    peak = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    return {"seconds": spent, "peak_gib": int(peak) / 2**20}


def layouts(folder: str, options: argparse.Namespace) -> tuple[str, Any]:
    """In rounds, each layout in processes of its own, which take two steps after two of warm-up."""
    times: dict[str, list[float]] = defaultdict(list)
    peaks: dict[str, float] = {}
    for turn in range(options.rounds):
        for name, (ranks, keys) in LAYOUTS.items():
            data = int(keys.get(SHARDED, "1")) * int(keys.get(REPLICATED, "1"))
            share = {"training.local_batch_size": str(TOKENS // SEQ_LEN // data)}
            words = COMMON | SIZES["10M"] | keys | share
            found = on_ranks(layout_in_rank, ranks, words, folder, 2)
            times[name] += [max(step) for step in zip(*(rank["seconds"] for rank in found), strict=True)]
            peaks[name] = max(rank["peak_gib"] for rank in found)
            print(f"round {turn + 1}, {name}: {times[name][-1]:.2f} s a step", file=sys.stderr)
    first = statistics.median(times["one process"])
    lines = [
        "| layout | ranks | tokens/s | of one process | peak memory of a rank |",
        "|---|---|---|---|---|",
    ]
    for name, spent in times.items():
        speeds = [TOKENS / value for value in spent]
        against = "" if name.startswith("experts") else f"{first / statistics.median(spent):.2f}"
        lines.append(
            f"| {name} | {LAYOUTS[name][0]} | {spread(speeds, 0)} | {against} | {peaks[name]:.2f} GiB |"
        )
    return "\n".join(lines), {"seconds": dict(times), "peak_gib": peaks}


PARTS: dict[str, Callable[[str, argparse.Namespace], tuple[str, Any]]] = {
    "limit": limit,
    "phases": phases,
    "tp": tp,
    "layouts": layouts,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--page", type=Path, help="such as docs/performance.md")
    parser.add_argument("--json", type=Path, default=Path("outputs/step_benchmark.json"))
    options = parser.parse_args()
    chosen = options.parts or list(PARTS)
    if unknown := set(chosen) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are: {', '.join(PARTS)}")
    results: dict[str, Any] = {"machine": machine()}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "run.toml").touch()
        Path(folder, "text.txt").write_text(" ".join(str(n**2) for n in range(100_000)))
        for part in chosen:
            table, results[part] = PARTS[part](folder, options)
            text = f"{table}\n\n{machine_line(results['machine'])}"
            print(f"\n{part}\n\n{text}", flush=True)
            if options.page is not None:
                write_part(options.page, "python benchmarks/step.py", part, text)
            write_json(options.json, results)


if __name__ == "__main__":
    main()

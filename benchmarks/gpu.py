"""What one GPU does: `python benchmarks/gpu.py`, or with names of rows only those; `--on-cpu` tries it.

Each row is a model in bfloat16, compiled, in a process of its own: tokens/s and MFU (medians of groups of
steps, the host waiting only between groups), memory, what a save in the background costs, and from a trace
of torch.profiler the share of a step in which no kernel runs and the longest such gap. `--page FILE` writes
the table between its marks. A row that fails says why and does not stop the others.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from reports import machine, machine_line, spread, verdict, write_json, write_part
from scaling import begun
from torch.profiler import ProfilerActivity, profile

from minititan.distributed import device_memory, reset_device_memory
from minititan.resume import Progress
from minititan.train import Trainer

Keys = dict[str, str]
MFU_GOAL, GAP_GOAL = 55.0, 2.0  # percent
GROUPS, STEPS, TRACED = 5, 4, 3
EVERY: Keys = {
    "training.steps": "100000",
    "training.mixed_precision_param": "bfloat16",
    "compile.enable": "true",
    "activation_checkpoint.mode": "none",
    "metrics.log_freq": "100000",
    "checkpoint.enable": "true",
    "checkpoint.interval": "100000",
    "checkpoint.async_mode": "async_with_pinned_mem",
    "checkpoint.keep_latest_k": "1",
}


def batch(sequences: int, seq_len: int) -> Keys:
    names = ("training.local_batch_size", "training.global_batch_size")
    return {name: str(sequences) for name in names} | {"training.seq_len": str(seq_len)}


ROWS: dict[str, Keys] = {
    "dense-1B": {"model.name": "llama3", "model.flavor": "1B"} | batch(4, 8192),
    # All in bfloat16, 8 bytes a parameter: in float32 16 x 8.0 billion leave no room for activations.
    "dense-8B": {"model.name": "llama3", "model.flavor": "8B", "training.dtype": "bfloat16"} | batch(1, 8192),
    # The shape of Qwen3 30B-A3B, with 8 of its 48 layers and 32 of its 128 experts.
    "moe": {
        "model.name": "qwen3",
        "model.flavor": "30B-A3B",
        "model.args.num_hidden_layers": "8",
        "model.args.num_experts": "32",
    }
    | batch(4, 4096),
    "dense-1B-cudagraphs": {"model.name": "llama3", "model.flavor": "1B", "compile.backend": "cudagraphs"}
    | batch(4, 8192),
}
NOT_SAVED = ("dense-8B",)  # 48 GB a save
TINY: Keys = {
    "model.args.hidden_size": "64",
    "model.args.num_hidden_layers": "2",
    "model.args.num_attention_heads": "4",
    "model.args.num_key_value_heads": "2",
    "model.args.intermediate_size": "128",
    "model.args.vocab_size": "512",
    "training.mixed_precision_param": "auto",
    "compile.enable": "false",
    "checkpoint.async_mode": "async",
} | batch(2, 64)
TINY_MOE: Keys = {
    "model.args.head_dim": "16",
    "model.args.num_experts": "4",
    "model.args.num_experts_per_tok": "2",
    "model.args.moe_intermediate_size": "64",
}


# ---- one row


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(trainer: Trainer, batches: Iterator[Any], steps: int) -> float:
    """The seconds of a step, over some of them between which the host does not wait."""
    wait(trainer.device)
    begin = time.perf_counter()
    for _ in range(steps):
        trainer.step(batches)
    wait(trainer.device)
    return (time.perf_counter() - begin) / steps


def gaps(busy: list[tuple[float, float]], steps: int) -> dict[str, Any]:
    """Of the intervals in which a kernel ran: the share of the time without one, and the longest gaps, in
    percent of a step.
    """
    merged: list[list[float]] = []
    for begin, end in sorted(busy):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    step = (merged[-1][1] - merged[0][0]) / steps
    between = sorted((100 * (b[0] - a[1]) / step for a, b in pairwise(merged)), reverse=True)
    return {"idle": sum(between) / steps, "longest": between[0] if between else 0.0, "first": between[:10]}


def traced(trainer: Trainer, batches: Iterator[Any], folder: str) -> dict[str, Any]:
    on_gpu = trainer.device.type == "cuda"
    wait(trainer.device)
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu) as recorded:
        for _ in range(TRACED):
            trainer.step(batches)
        wait(trainer.device)
    path = Path(folder, "trace.json")
    recorded.export_chrome_trace(str(path))
    # In the trace's own words: annotations on the device are no kernels.
    kind = "kernel" if on_gpu else "cpu_op"
    events = json.loads(path.read_text())["traceEvents"]
    busy = [(event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") == kind]
    return gaps(busy, TRACED)


def save_in_background(trainer: Trainer, batches: Iterator[Any], step: float) -> dict[str, float]:
    """What a save costs training: the wait for it to begin, and what the steps beside it take longer."""
    background = trainer.saves._background
    assert background is not None
    waited = beside = 0.0
    for _ in range(2):  # the first save takes the memory of the copies, which is kept
        timed(trainer, batches, 1)
        begin, beside = time.perf_counter(), 0.0
        trainer.guard.settle()
        trainer.saves.save(Progress(trainer.steps_done, trainer.tokens_seen), last=False, stopping=False)
        waited = time.perf_counter() - begin
        while background.in_flight:
            beside += timed(trainer, batches, 1) - step
        trainer.saves.finish()
    return {"waited": waited, "beside": beside}


def row_in_process(name: str, on_cpu: bool, folder: str) -> dict[str, Any]:
    keys = EVERY | ROWS[name]
    if on_cpu:
        keys = {key: value for key, value in keys.items() if key != "compile.backend"} | TINY
        keys |= TINY_MOE if name == "moe" else {}
    trainer, batches = begun(1, keys, folder, base={})
    timed(trainer, batches, 3)
    reset_device_memory(trainer.device)
    seconds = [timed(trainer, batches, STEPS) for _ in range(GROUPS)]
    memory = device_memory(trainer.device)
    tokens = trainer.config.training.seq_len * trainer.job.layout.batch_sizes.at(1)
    flops, peak = trainer.metrics.flops_per_token, trainer.metrics.peak_tflops
    mfu = [100 * (flops or 0.0) * tokens / s / (peak * 1e12) for s in seconds] if peak else None
    return {
        "parameters": sum(p.numel() for p in trainer.parameters.values()),
        "tokens": tokens,
        "seconds": seconds,
        "mfu": mfu,
        "active_gib": memory.max_active_gib,
        "reserved_gib": memory.max_reserved_gib,
        "gaps": traced(trainer, batches, folder),
        "save": None
        if name in NOT_SAVED
        else save_in_background(trainer, batches, statistics.median(seconds)),
    }


# ---- all rows


def line(name: str, found: dict[str, Any]) -> str:
    if "error" in found:
        return f"| {name} | failed: {found['error']} |" + " |" * 6
    per_second = [found["tokens"] / seconds for seconds in found["seconds"]]
    mfu, save, gap = found["mfu"], found["save"], found["gaps"]
    reaches = mfu is not None and name.startswith("dense")
    goal = verdict(statistics.median(mfu), MFU_GOAL, at_most=False) if reaches else "-"
    stall = "-" if save is None else f"{save['waited']:.2f} + {save['beside']:.2f}"
    return (
        f"| {name} ({found['parameters'] / 1e9:.2f}B) | {spread(per_second, 0)} "
        f"| {'n/a' if mfu is None else spread(mfu)} | {goal} "
        f"| {found['active_gib']:.1f} of {found['reserved_gib']:.1f} | {stall} "
        f"| {gap['idle']:.1f} % | {gap['longest']:.1f} %: {verdict(gap['longest'], GAP_GOAL, at_most=True)} |"
    )


HEADER = (
    f"| model | tokens/s (range) | MFU % (range) | at least {MFU_GOAL:.0f} % "
    "| memory: active, reserved (GiB) | a save: wait + slower steps (s) | no kernel runs "
    f"| longest gap, at most {GAP_GOAL:.0f} % of a step |\n|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}; default: all")
    parser.add_argument("--on-cpu", action="store_true", help="tiny models, without a GPU")
    parser.add_argument("--page", type=Path, help="such as docs/gpu.md")
    parser.add_argument("--json", type=Path, default=Path("outputs/gpu_benchmark.json"))
    parser.add_argument("--in-process", metavar="FILE", help=argparse.SUPPRESS)  # of one row, its result
    options = parser.parse_args()
    chosen = options.rows or list(ROWS)
    if unknown := set(chosen) - set(ROWS):
        parser.error(f"no such row: {', '.join(sorted(unknown))}; there are: {', '.join(ROWS)}")
    if not options.on_cpu and not torch.cuda.is_available():
        parser.error("no GPU here; --on-cpu tries the script without one")
    if options.in_process:
        result = row_in_process(chosen[0], options.on_cpu, str(Path(options.in_process).parent))
        write_json(Path(options.in_process), result)
        return
    results: dict[str, Any] = {"machine": machine(), "rows": {}}
    for name in chosen:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "run.toml").touch()
            Path(folder, "text.txt").write_text(" ".join(str(n**2) for n in range(200_000)))
            command = [sys.executable, __file__, name, f"--in-process={folder}/result.json"]
            done = subprocess.run([*command, *["--on-cpu"] * options.on_cpu], capture_output=True, text=True)
            if done.returncode:
                lines = done.stderr.strip().splitlines() or ["no output"]
                results["rows"][name] = {"error": lines[-1][:200]}
            else:
                results["rows"][name] = json.loads(Path(folder, "result.json").read_text())
        print(line(name, results["rows"][name]), flush=True)
    table = [HEADER, *(line(*row) for row in results["rows"].items())]
    text = "\n".join([f"{machine_line(results['machine'])}\n", *table])
    print(f"\n{text}")
    write_json(options.json, results)
    if options.page is not None:
        write_part(options.page, "python benchmarks/gpu.py", "table", text)


if __name__ == "__main__":
    main()

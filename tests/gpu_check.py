"""What only a GPU can show, in one command for a machine that has one: `python tests/gpu_check.py`.

Each case trains 10 steps on the machine's GPUs and compares every loss with the same steps on one CPU
process; one case stops and resumes. Then the kernels of attention, each by itself, and steps between logs, in
which the host must not wait for the device. Prints a line a case and ends with 1 if one failed. `--on-cpu`
runs the same cases without a GPU, to try the script itself.
"""

import json
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

import torch

from minititan.config import load
from minititan.distributed import init_distributed
from minititan.models.masks import attend, causal_mask
from minititan.run import check
from minititan.train import Trainer

BASE = {
    "training.steps": "10",
    "training.seq_len": "256",
    "training.local_batch_size": "4",
    "training.global_batch_size": "32",
    "training.mixed_precision_param": "float32",
    "model.args.num_hidden_layers": "2",
    "activation_checkpoint.mode": "none",
    "lr_scheduler.warmup_steps": "2",
    "metrics.log_freq": "1",
}
COMPILE = {"compile.enable": "true"}
BFLOAT16 = {"training.mixed_precision_param": "bfloat16"}
RECOMPUTE = {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}
# name -> overrides, largest relative difference of a loss from the CPU's. TF32 is off by default; bfloat16
# rounds each product to 8 bits.
CASES = {
    "float32": ({}, 1e-4),
    "float32, foreach optimizer": ({"optimizer.implementation": "foreach"}, 1e-4),
    "float32, compiled": (COMPILE, 1e-4),
    "float32, recomputed by operator": (RECOMPUTE, 1e-4),
    "bfloat16": (BFLOAT16, 2e-2),
    "bfloat16, compiled, recomputed by operator": (BFLOAT16 | COMPILE | RECOMPUTE, 2e-2),
    "workers and pinned memory": (
        {"training.dataloader.num_workers": "2", "training.dataloader.pin_memory": "true"},
        1e-4,
    ),
    "attention inside documents": ({"data.document_mask": "true"}, 1e-4),
    "attention inside documents, bfloat16, compiled": (
        BFLOAT16 | COMPILE | {"data.document_mask": "true", "data.samples": "pack"},
        2e-2,
    ),
    "deterministic": ({"debug.deterministic": "true"}, 1e-4),
    "profiled": ({"profiling.enable_profiling": "true", "profiling.profile_freq": "5"}, 1e-4),
}
ON_GPU_ONLY = {
    "memory snapshot": ({"profiling.enable_memory_snapshot": "true", "profiling.profile_freq": "5"}, 1e-4),
}


def losses(folder: Path, overrides: dict[str, str], processes: int, on_cpu: bool) -> list[float]:
    """The losses of the run in `folder`, which goes on if it holds a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "run.toml"
    config.touch()
    words = [f"--{key}={value}" for key, value in (BASE | overrides).items()]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += ["-m", "minititan.train", f"--job.config_file={config}", f"--job.dump_folder={folder / 'out'}"]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {}
    done = subprocess.run([*command, *words], env=os.environ | hidden, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-4000:])
    lines = map(json.loads, (folder / "out" / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def resumed(folder: Path, processes: int, on_cpu: bool) -> list[float]:
    """The losses of a run that stops after 5 steps and goes on."""
    saving = {"checkpoint.enable": "true", "lr_scheduler.total_steps": "10"}
    losses(folder, saving | {"training.steps": "5"}, processes, on_cpu)
    return losses(folder, saving, processes, on_cpu)


def attention(window: int | None, documents: bool, sinks: bool, dtype: torch.dtype, device: str) -> float:
    """The largest relative difference of output and gradients from float64, which has other kernels."""
    length, width, place = 512, 64, torch.device(device)
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((2, 8, length, width), (2, 4, length, width), (2, 4, length, width), (8,))
    values = [torch.randn(shape, generator=generator, device=device) for shape in shapes[: 3 + sinks]]
    ids = (torch.arange(length, device=device) // 100).expand(2, -1) if documents else None
    results: list[list[torch.Tensor]] = []
    for kind in (torch.float64, dtype):
        leaves = [value.to(dtype).to(kind).requires_grad_() for value in values]
        q, k, v, *rest = leaves
        mask = causal_mask(length, window, ids, width, kind, place)
        out = attend(q, k, v, mask, None, rest[0] if rest else None)
        gradients = torch.autograd.grad(out.double().square().sum(), leaves)
        results.append([x.double() for x in (out, *gradients)])
    return max(((a - b).norm() / a.norm()).item() for a, b in zip(*results, strict=True))


def check_attention(device: str) -> int:
    """Print a line a kind of attention; return how many failed."""
    failed = 0
    bounds = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
    for dtype, window, documents, sinks in product(bounds, (None, 100), (False, True), (False, True)):
        worst, bound = attention(window, documents, sinks, dtype, device), bounds[dtype]
        title = f"attention, {dtype}, window {window}, documents {documents}, sinks {sinks}"
        verdict = "ok" if worst <= bound else "FAILED"
        print(f"{verdict:6}  {title}: largest relative difference {worst:.1e}, allowed {bound:.0e}")
        failed += not worst <= bound
    return failed


WITHOUT_WAITS = {
    "dense": {},
    "dense, bfloat16, compiled": BFLOAT16 | COMPILE,
    "dense, Muon, spikes watched": {"optimizer.name": "Muon", "debug.loss_spike_factor": "10.0"},
    "experts, bfloat16": BFLOAT16 | {"model.name": "qwen3", "model.flavor": "debugmodel_moe"},
    "experts and their bias": BFLOAT16 | {"model.name": "deepseek_v3", "model.flavor": "debugmodel"},
}


def check_waits(root: Path, on_cpu: bool) -> int:
    """Take steps between logs with what makes the host wait for one GPU an error; return how many failed."""
    failed = 0
    for index, (title, keys) in enumerate(WITHOUT_WAITS.items()):
        config = root / f"waits-{index}.toml"
        config.touch()
        keys = BASE | {"training.global_batch_size": "4", "metrics.log_freq": "100"} | keys
        words = [f"--{key}={value}" for key, value in keys.items()]
        words += [f"--job.config_file={config}", f"--job.dump_folder={root / f'waits-{index}'}"]
        trainer = Trainer.build(check(load(words), 1), init_distributed(timeout_seconds=300))
        batches = iter(trainer.loader)
        for _ in range(3):
            trainer.step(batches)
        verdict, found = "ok", ""
        try:
            if not on_cpu:
                torch.cuda.set_sync_debug_mode("error")
            for _ in range(4):
                trainer.step(batches)
        except RuntimeError as error:
            verdict, found = "FAILED", f": {error}"
        finally:
            if not on_cpu:
                torch.cuda.set_sync_debug_mode("default")
        print(f"{verdict:6}  the host does not wait, {title}{found}")
        failed += verdict != "ok"
    return failed


def main() -> int:
    on_cpu = "--on-cpu" in sys.argv
    processes = 2 if on_cpu else torch.cuda.device_count()
    if processes == 0:
        print("no GPU here; --on-cpu tries the script without one")
        return 1
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        reference = losses(root / "reference", {}, 1, on_cpu=True)
        cases = CASES | ({} if on_cpu else ON_GPU_ONLY) | {"stopped and resumed": ({}, 1e-4)}
        for index, (title, (overrides, bound)) in enumerate(cases.items()):
            folder = root / str(index)
            try:
                resume = title == "stopped and resumed"
                found = (
                    resumed(folder, processes, on_cpu)
                    if resume
                    else losses(folder, overrides, processes, on_cpu)
                )
                worst = max(abs(a - b) / b for a, b in zip(found, reference, strict=True))
                verdict = "ok" if worst <= bound else "FAILED"
                print(f"{verdict:6}  {title}: largest relative difference {worst:.1e}, allowed {bound:.0e}")
                failed += worst > bound
            except (RuntimeError, ValueError) as error:
                print(f"FAILED  {title}: {error}")
                failed += 1
        failed += check_waits(root, on_cpu)
    failed += check_attention("cpu" if on_cpu else "cuda")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

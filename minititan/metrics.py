"""What a run says about itself, at step 1 and every `log_freq` steps: speeds, the console line, metric names.

Metric names are TorchTitan's, so that dashboards keep working. Values come in already global: nothing is
summed over ranks here. Speeds leave out what is not training (validation, checkpoints).
"""

import contextlib
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from minititan.distributed import DeviceMemory, device_memory, reset_device_memory
from minititan.routing import StepRouting
from minititan.sinks import JsonLines, TensorBoard, Wandb, check_wandb, explained, move_aside

# Dense bfloat16 TFLOP/s of one device, from the makers' data sheets; the first pattern found in its name.
PEAK_TFLOPS = {
    r"A100": 312.0,
    r"H100.*PCIe": 756.0,
    r"H[12]00.*NVL": 835.0,
    r"H[12]00": 989.0,
    r"\bB200": 2250.0,
    r"L40S": 362.0,
    r"MI300X": 1307.0,
}

RESET = "\033[0m"
COLORS = {
    "step": "\033[31m",
    "loss": "\033[32m",
    "grad_norm": "\033[33m",
    "lr": "\033[35m",
    "memory": "\033[36m",
}


@dataclass(frozen=True)
class Step:
    """A step's results: loss and norm of the global batch, counters of the whole run."""

    step: int
    loss: float
    max_loss: float
    grad_norm: float
    lr: float
    tokens_seen: int
    samples_consumed: int
    skipped_steps: int = 0  # whose update was left out
    loss_scale: float | None = None  # after the step; None: not in float16
    batch_sha256: str | None = None
    sources: dict[str, tuple[int, float]] | None = None  # of a mixture: samples taken, and epochs
    routing: StepRouting | None = None  # of a model with experts


@dataclass(frozen=True)
class Rates:
    """Speeds since the last log. TFLOP/s and MFU are per device, None where the model or the device says
    nothing of them.
    """

    tokens_per_second: float
    tokens_per_second_per_device: float
    tflops: float | None
    mfu_percent: float | None
    seconds_per_step: float
    data_loading_seconds: float
    data_loading_percent: float


class Clock:
    """Times the steps since its start and the parts of them that wait for data or are not training."""

    def __init__(self, step: int, tokens_seen: int) -> None:
        self.restart(step, tokens_seen)

    def restart(self, step: int, tokens_seen: int) -> None:
        self.step, self.tokens_seen = step, tokens_seen
        self.paused_seconds = self.data_seconds = 0.0
        self.started = time.perf_counter()

    def rates(
        self,
        step: int,
        tokens_seen: int,
        *,
        world_size: int,
        flops_per_token: float | None,
        peak_tflops: float | None,
    ) -> Rates:
        """The rates from the clock's start to now, the end of `step`."""
        seconds = max(time.perf_counter() - self.started - self.paused_seconds, 1e-9)
        steps = max(step - self.step, 1)
        tokens_per_second = (tokens_seen - self.tokens_seen) / seconds
        tflops = None if flops_per_token is None else flops_per_token * tokens_per_second / world_size / 1e12
        return Rates(
            tokens_per_second=tokens_per_second,
            tokens_per_second_per_device=tokens_per_second / world_size,
            tflops=tflops,
            mfu_percent=None if peak_tflops is None or tflops is None else 100 * tflops / peak_tflops,
            seconds_per_step=seconds / steps,
            data_loading_seconds=self.data_seconds / steps,
            data_loading_percent=100 * self.data_seconds / seconds,
        )


def known_peak_tflops(device: torch.device) -> float | None:
    """The device's dense bfloat16 peak; None where the table does not hold it: never a guess."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for pattern, peak in PEAK_TFLOPS.items() if re.search(pattern, name)), None)


class MetricsLogger:
    """Logs on rank 0 (TensorBoard on every rank with `save_for_all_ranks`); elsewhere its calls do nothing.

    Every rank makes one. A `start_step` of 0 is a fresh start, which moves an earlier run's logs aside.
    `start_tokens` is the run's `tokens_seen` at the start; `flops_per_token` counts forward and backward
    (None: unknown).
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        start_step: int,
        start_tokens: int,
        total_steps: int,
        log_freq: int,
        flops_per_token: float | None,
        peak_tflops: float | None = None,
        enable_tensorboard: bool = False,
        save_tb_folder: str = "tb",
        save_for_all_ranks: bool = False,
        enable_wandb: bool = False,
        run_config: Mapping[str, Any] | None = None,
        disable_color_printing: bool = False,
    ) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self.total_steps, self.log_freq = total_steps, log_freq
        self.flops_per_token = flops_per_token
        self.peak_tflops = peak_tflops if peak_tflops is not None else known_peak_tflops(device)
        self.color = sys.stdout.isatty() and not disable_color_printing
        self._clock = Clock(start_step, start_tokens)
        self._first_log: tuple[int, float] | None = None  # step, time
        self._jsonl: JsonLines | None = None
        self._scalar_sinks: list[TensorBoard | Wandb] = []
        events = folder / save_tb_folder
        if enable_wandb:
            check_wandb()
        if rank == 0:
            if start_step == 0:
                self._start_afresh(folder, events)
            self._jsonl = JsonLines(folder)
            if enable_wandb:
                self._scalar_sinks.append(Wandb(folder, run_config or {}))
        if enable_tensorboard and (rank == 0 or save_for_all_ranks):
            own = events / f"rank_{rank}" if save_for_all_ranks else events
            self._scalar_sinks.append(TensorBoard(own, start_step))

    def _start_afresh(self, folder: Path, events: Path) -> None:
        with explained(folder):
            earlier = move_aside(folder, events)
        if earlier is not None:
            self.say(f"A fresh start: the logs of the earlier run are now in {earlier}")

    def say(self, message: str) -> None:
        """Prints on rank 0, in one write, so that other processes' lines do not cut it."""
        if self.rank == 0:
            sys.stdout.write(f"{message}\n")
            sys.stdout.flush()

    @contextlib.contextmanager
    def data_loading(self) -> Iterator[None]:
        """Counts the time inside as waiting for data."""
        begin = time.perf_counter()
        yield
        self._clock.data_seconds += time.perf_counter() - begin

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves the time inside (a validation, a checkpoint) out of every speed."""
        begin = time.perf_counter()
        yield
        self._clock.paused_seconds += time.perf_counter() - begin

    def due(self, step: int) -> bool:
        """Whether `step` is logged: the first of the run and every `log_freq`-th; the same on every rank."""
        return step == 1 or step % self.log_freq == 0

    def log_step(self, done: Step) -> None:
        """Logs a step with the speeds since the last one logged."""
        rates = self._clock.rates(
            done.step,
            done.tokens_seen,
            world_size=self.world_size,
            flops_per_token=self.flops_per_token,
            peak_tflops=self.peak_tflops,
        )
        memory = device_memory(self.device)
        self._write_scalars(done.step, step_scalars(done, rates, memory))
        if self._jsonl is not None:
            record = {key: value for key, value in asdict(done).items() if value is not None}
            self._jsonl.write({**record, **asdict(rates), "memory_gib": memory.max_reserved_gib})
            self._say_fields(done.step, self._step_fields(done, rates, memory))
        reset_device_memory(self.device)
        self._clock.restart(done.step, done.tokens_seen)

    def log_validation(
        self, step: int, *, loss: float, perplexity: float, tokens: int, seconds: float
    ) -> None:
        """Logs a validation over `tokens` labels, all ranks together, that took `seconds`."""
        per_second = tokens / max(seconds, 1e-9) / self.world_size
        scalars = {"loss": loss, "perplexity": perplexity, "throughput(tps)": per_second}
        scalars |= memory_scalars(device_memory(self.device))
        self._write_scalars(step, {f"validation_metrics/{name}": value for name, value in scalars.items()})
        if self._jsonl is not None:
            record = {"loss": loss, "perplexity": perplexity, "tokens": tokens, "seconds": seconds}
            self._jsonl.write({"step": step, **{f"validation_{key}": value for key, value in record.items()}})
            fields = {"validation loss": f"{loss:.4f}", "perplexity": f"{perplexity:,.2f}"}
            self._say_fields(step, {**fields, "tokens/s/device": f"{per_second:,.0f}"})

    def close(self) -> None:
        """Ends the files; all that was logged is in them."""
        for sink in (self._jsonl, *self._scalar_sinks):
            if sink is not None:
                sink.close()

    def _write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        for sink in self._scalar_sinks:
            sink.write(step, scalars)

    def _step_fields(self, done: Step, rates: Rates, memory: DeviceMemory) -> dict[str, str]:
        loads = [layer.load for layer in done.routing.layers.values()] if done.routing else []
        return {
            "loss": f"{done.loss:.4f}",
            **({"load": f"{max(loads):.2f}"} if loads else {}),
            "grad_norm": f"{done.grad_norm:.4f}",
            "lr": f"{done.lr:.2e}",
            "tokens/s/device": f"{rates.tokens_per_second_per_device:,.0f}",
            "TFLOP/s": "n/a" if rates.tflops is None else f"{rates.tflops:.3g}",
            "MFU": "n/a" if rates.mfu_percent is None else f"{rates.mfu_percent:.1f}%",
            "memory": f"{memory.max_reserved_gib:.2f}GiB({memory.max_reserved_percent:.1f}%)",
            "left": self._time_left(done.step),
        }

    def _say_fields(self, step: int, fields: Mapping[str, str]) -> None:
        width = len(str(self.total_steps))
        named = {"step": f"{step:>{width}}/{self.total_steps}", **fields}
        texts = [f"{name}: {value}" for name, value in named.items()]
        if self.color:
            colors = [COLORS.get(name, "") for name in named]
            texts = [f"{color}{text}{RESET}" for color, text in zip(colors, texts, strict=True)]
        self.say("  ".join(texts))

    def _time_left(self, step: int) -> str:
        """From the wall time since the first log, before which lie start-up costs that would mislead."""
        now = time.perf_counter()
        if self._first_log is None:
            self._first_log = (step, now)
            return "n/a"
        first_step, first_time = self._first_log
        seconds = (now - first_time) / max(step - first_step, 1) * max(self.total_steps - step, 0)
        minutes, seconds = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}"


def step_scalars(done: Step, rates: Rates, memory: DeviceMemory) -> dict[str, float]:
    """A step under TorchTitan's metric names; `tflops` and `mfu(%)` only where they are known."""
    scalars = {
        "loss_metrics/global_avg_loss": done.loss,
        "loss_metrics/global_max_loss": done.max_loss,
        "grad_norm": done.grad_norm,
        "throughput(tps)": rates.tokens_per_second_per_device,
        "time_metrics/end_to_end(s)": rates.seconds_per_step,
        "time_metrics/data_loading(s)": rates.data_loading_seconds,
        "time_metrics/data_loading(%)": rates.data_loading_percent,
        **memory_scalars(memory),
        "n_tokens_seen": done.tokens_seen,
        "skipped_steps": done.skipped_steps,
        "lr": done.lr,
    }
    for name, (samples, epochs) in (done.sources or {}).items():
        scalars |= {f"data/{name}/samples": samples, f"data/{name}/epochs": epochs}
    scalars |= routing_scalars(done.routing) if done.routing else {}
    if done.loss_scale is not None:
        scalars["loss_scale"] = done.loss_scale
    if rates.tflops is not None:
        scalars["tflops"] = rates.tflops
    if rates.mfu_percent is not None:
        scalars["mfu(%)"] = rates.mfu_percent
    return scalars


def routing_scalars(routing: StepRouting) -> dict[str, float]:
    """The routing by layer, and the auxiliary losses beside the loss."""
    scalars = {"loss_metrics/auxiliary_loss": routing.auxiliary_loss}
    for name, layer in routing.layers.items():
        scalars |= {f"routing/layers.{name}/{key}": value for key, value in asdict(layer).items()}
    return scalars


def memory_scalars(memory: DeviceMemory) -> dict[str, float]:
    """Memory under TorchTitan's metric names."""
    return {
        "memory/max_active(GiB)": memory.max_active_gib,
        "memory/max_active(%)": memory.max_active_percent,
        "memory/max_reserved(GiB)": memory.max_reserved_gib,
        "memory/max_reserved(%)": memory.max_reserved_percent,
        "memory/num_alloc_retries": memory.num_alloc_retries,
        "memory/num_ooms": memory.num_ooms,
    }

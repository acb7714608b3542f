"""Processes and devices: the process group, this rank's device, threads and memory, seeds, errors.

Device and backend are picked by what is there: CUDA with NCCL, else the CPU with gloo. Without a launcher the
run is a world of one, with a process group all the same, so that one code path serves every size. What only a
GPU runs is listed in `docs/gpu.md`.
"""

import hashlib
import math
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor

from minititan.config import ConfigError, RankFault
from minititan.cpu import set_up_cpu
from minititan.signals import StopSignals

USER_ERROR_EXIT_CODE = 2
PREEMPTED_EXIT_CODE = 75  # EX_TEMPFAIL: start me again
# How long other ranks leave the word to rank 0, whose exit makes the launcher end them.
FAULT_WAIT_SECONDS = 60.0
# How long a rank holds back an error that another's end may have caused; and rank 0, often the cause itself.
ECHO_WAIT_SECONDS = 5.0
FIRST_RANK_ECHO_WAIT_SECONDS = 2.0
GIB = 1024**3


@dataclass(frozen=True)
class Distributed:
    """This process's place in the run. `owns_group`: the process group is ours to take down."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    owns_group: bool


@dataclass(frozen=True)
class DeviceMemory:
    """Memory since the last reset, in GiB and in percent of the device (on a CPU: of the machine)."""

    max_active_gib: float
    max_active_percent: float
    max_reserved_gib: float
    max_reserved_percent: float
    num_alloc_retries: int
    num_ooms: int


def rank_from_env() -> int:
    """The rank that the launcher gave this process; 0 without one."""
    return int(os.environ.get("RANK", "0"))


def world_size_from_env() -> int:
    """The number of processes that the launcher started; 1 without one. Needs no process group."""
    world_size = os.environ.get("WORLD_SIZE")
    if world_size is None:
        return 1
    missing = [name for name in ("RANK", "LOCAL_RANK") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"environment: WORLD_SIZE = {world_size}: needs {' and '.join(missing)} too; "
            "start with torchrun, or unset WORLD_SIZE to run one process"
        )
    return int(world_size)


def init_distributed(
    *, timeout_seconds: float, trace_buffer: int = 0, trace_prefix: Path | None = None
) -> Distributed:
    """Joins the process group (an existing one is kept); sets this rank's device and threads. Every rank.

    With `trace_buffer` > 0, NCCL keeps that many collectives and writes them to `<trace_prefix><rank>` when
    one times out. Raises ConfigError when this machine has fewer GPUs than processes.
    """
    world_size = world_size_from_env()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = _pick_device(local_rank)
    if dist.is_initialized():
        return Distributed(dist.get_rank(), dist.get_world_size(), local_rank, device, owns_group=False)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        _trace_collectives(trace_buffer, trace_prefix)
        backend = "cpu:gloo,cuda:nccl"
    else:
        threads = thread_share(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        if threads is not None:
            torch.set_num_threads(threads)
        set_up_cpu()
        backend = "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, timeout=timeout, store=store, rank=0, world_size=1)
    return Distributed(dist.get_rank(), world_size, local_rank, device, owns_group=True)


def shutdown(place: Distributed) -> None:
    """Takes the process group down once every rank is here. Every rank."""
    if place.owns_group:
        # Without it a rank that is ahead closes connections that others still use.
        dist.barrier(device_ids=[place.local_rank] if place.device.type == "cuda" else None)
        dist.destroy_process_group()


def set_timeout(seconds: float, groups: Iterable[dist.ProcessGroup | None]) -> None:
    """Changes how long a collective of these groups may take (None: the default group). Every rank."""
    dist.barrier()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    for group in groups:
        _set_pg_timeout(timedelta(seconds=seconds), group)


def _pick_device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"environment: LOCAL_RANK = {local_rank}: this machine has {count} GPUs; "
            f"start at most that many processes on it (torchrun --nproc-per-node {count})"
        )
    return torch.device("cuda", local_rank)


def _trace_collectives(buffer: int, prefix: Path | None) -> None:
    # What the user's environment says wins.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    if buffer > 0 and prefix is not None:
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(buffer))
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(prefix))
        prefix.parent.mkdir(parents=True, exist_ok=True)


def local_part(tensor: Any) -> Any:
    """Return what this rank holds of a tensor, DTensor or not."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def thread_share(local_world_size: int) -> int | None:
    """Threads for this rank's CPU work: its share of the usable cores; None where the user chose a number."""
    if _user_set_threads():
        return None
    return max(1, _usable_cores() // local_world_size)


def _user_set_threads() -> bool:
    """torchrun puts OMP_NUM_THREADS=1 where the user set none; the user's is in torchrun's environment."""
    if "OMP_NUM_THREADS" not in os.environ:
        return False
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return True
    try:
        launcher = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:
        return os.environ["OMP_NUM_THREADS"] != "1"  # no /proc (macOS): 1 is torchrun's doing
    return any(entry.startswith(b"OMP_NUM_THREADS=") for entry in launcher.split(b"\0"))


def _usable_cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except OSError:
        return cores
    return cores if quota == "max" else min(cores, max(1, math.ceil(int(quota) / int(period))))


def to_device(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return tensors of the host on the device, where the host does not wait for them to arrive."""
    if device.type == "cuda":  # for copies from memory that is not pinned it would wait
        tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
    return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}


def computes_bfloat16(device: torch.device) -> bool:
    """Whether the device has bfloat16 instructions; without them bfloat16 is slower than float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # x86: AVX-512 or AMX; Arm: bf16. A torch without this query counts as a CPU without the instructions.
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def set_determinism(seed: int, *, deterministic: bool = False, warn_only: bool = False) -> None:
    """Seeds torch, numpy and random; `deterministic` also refuses (or warns of) kernels that are not."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    if deterministic:
        # cuBLAS reads it when it starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
        torch.use_deterministic_algorithms(True, warn_only=warn_only)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seeds torch, numpy and random for what a model draws in a step, whatever was drawn before.

    So a resume on any layout draws what the run without it would have. `rank` is among those with different
    tokens: the ranks of a tensor-parallel group draw the same.
    """
    derived = int.from_bytes(hashlib.sha256(f"{seed}:{step}:{rank}".encode()).digest()[:8], "big") >> 1
    # Not torch.manual_seed, which asks every kind of device, two milliseconds a step.
    torch.default_generator.manual_seed(derived)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(derived)
    np.random.seed(derived % 2**32)
    random.seed(derived)


def hash_of_ranks(own: Sequence[Tensor], group: dist.ProcessGroup) -> str:
    """Return the SHA-256 of the integers, each [n, ...], of all ranks of the group, in their order, as
    little-endian int64. Every rank of it.
    """
    whole = torch.cat([*own])
    parts = [torch.empty_like(whole) for _ in range(group.size())]
    dist.all_gather(parts, whole, group=group)
    ids = torch.cat(parts).cpu().numpy().astype("<i8")
    return hashlib.sha256(ids.tobytes()).hexdigest()


def device_memory(device: torch.device) -> DeviceMemory:
    """The allocator's peaks on a GPU; on a CPU the resident set, now (active) and at its peak (reserved)."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        total = torch.cuda.get_device_properties(device).total_memory
        active, reserved = stats["active_bytes.all.peak"], stats["reserved_bytes.all.peak"]
        retries, ooms = stats["num_alloc_retries"], stats["num_ooms"]
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        active, reserved = _resident_bytes()
        retries, ooms = 0, 0
    return DeviceMemory(
        active / GIB, 100 * active / total, reserved / GIB, 100 * reserved / total, retries, ooms
    )


def reset_device_memory(device: torch.device) -> None:
    """Starts a new peak on a GPU; a process's peak cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _resident_bytes() -> tuple[int, int]:
    """The process's resident set now and at its peak."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return peak, peak  # no /proc (macOS): only the peak is known
    resident = pages * os.sysconf("SC_PAGE_SIZE")
    return resident, max(resident, peak)  # the kernel's peak lags a little


@contextmanager
def first_error_speaks(
    stop: StopSignals | None = None, tell: Callable[[BaseException], None] = lambda error: None
) -> Iterator[None]:
    """Holds a RuntimeError back a little, since most are echoes, and longer on another rank than 0.

    When a rank ends with an error, the others lose their connections to it, and would add tracebacks of that;
    torchrun ends them before they do. `tell` gets an error that is not held back for good.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and "TORCHELASTIC_RUN_ID" in os.environ:
            seconds = FIRST_RANK_ECHO_WAIT_SECONDS if rank_from_env() == 0 else ECHO_WAIT_SECONDS
            (stop or StopSignals()).wait_to_be_ended(seconds)
        tell(error)
        raise


def report_and_exit(
    error: ConfigError,
    stop: StopSignals | None = None,
    tell: Callable[[BaseException], None] = lambda error: None,
) -> NoReturn:
    """Prints one line a fault, once in the whole run, and exits 2; `tell` gets what is printed.

    Rank 0 prints and exits; its exit makes the launcher end the others, which wait for that: an earlier exit
    of theirs would end rank 0 before it printed. One that nobody ends prints after all; a RankFault is its
    rank's own and printed at once.
    """
    if rank_from_env() != 0 and not isinstance(error, RankFault):
        (stop or StopSignals()).wait_to_be_ended(FAULT_WAIT_SECONDS)
    tell(error)
    print(error, file=sys.stderr, flush=True)
    sys.exit(USER_ERROR_EXIT_CODE)

"""Places, threads, memory, seeds and errors on a CPU; the launcher's part by one real torchrun."""

import mmap
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from minititan import distributed
from minititan.config import ConfigError, RankFault
from minititan.distributed import (
    computes_bfloat16,
    device_memory,
    init_distributed,
    report_and_exit,
    set_determinism,
    shutdown,
    thread_share,
    world_size_from_env,
)
from minititan.signals import StopSignals
from tests.distributed.harness import run_ranks

CPU = torch.device("cpu")
LAUNCHED = """
import sys
import torch, torch.distributed as dist
from minititan import distributed
from minititan.config import ConfigError
from minititan.distributed import init_distributed, report_and_exit
distributed._usable_cores = lambda: 6  # on 2 cores the share would be torchrun's 1
place = init_distributed(timeout_seconds=60)
total = torch.tensor([float(place.rank + 1)])
dist.all_reduce(total)
sys.stdout.write(f"threads {torch.get_num_threads()} world {place.world_size} total {total.item():g}\\n")
report_and_exit(ConfigError("x.toml: first fault", "x.toml: second fault"))
"""


@pytest.fixture
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    return monkeypatch


def test_half_a_launcher_is_an_error(no_launcher):
    no_launcher.setenv("WORLD_SIZE", "4")
    no_launcher.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="WORLD_SIZE = 4: needs LOCAL_RANK too; start with torchrun"):
        world_size_from_env()


def test_more_processes_than_gpus_is_an_error_before_any_group(no_launcher):
    no_launcher.setattr(torch.cuda, "is_available", lambda: True)
    no_launcher.setattr(torch.cuda, "device_count", lambda: 4)
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "5"}.items():
        no_launcher.setenv(name, value)
    with pytest.raises(ConfigError, match=r"LOCAL_RANK = 5: this machine has 4 GPUs;.*--nproc-per-node 4"):
        init_distributed(timeout_seconds=5)
    assert not dist.is_initialized()


def test_rank_zero_prints_each_fault_and_exits_two(no_launcher, capsys):
    with pytest.raises(SystemExit) as caught:
        report_and_exit(ConfigError("a: first", "a: second"))
    assert caught.value.code == 2
    assert capsys.readouterr().err == "a: first\na: second\n"


def test_another_rank_waits_then_prints_if_nobody_ended_it(no_launcher, capsys):
    waited = []
    no_launcher.setenv("RANK", "3")
    no_launcher.setattr(StopSignals, "wait_to_be_ended", lambda self, seconds: waited.append(seconds))
    with pytest.raises(SystemExit) as caught:
        report_and_exit(ConfigError("only rank 3 sees this"))
    assert (caught.value.code, waited) == (2, [60.0])
    assert capsys.readouterr().err == "only rank 3 sees this\n"


def test_what_one_rank_alone_has_met_is_printed_at_once(no_launcher, capsys):
    no_launcher.setenv("RANK", "3")
    no_launcher.setattr(StopSignals, "wait_to_be_ended", lambda self, seconds: pytest.fail("waits"))
    with pytest.raises(SystemExit):
        report_and_exit(RankFault("tokens.npy: token 5 ..."))
    assert capsys.readouterr().err == "tokens.npy: token 5 ...\n"


def test_without_a_launcher_the_world_is_one(no_launcher):
    threads = torch.get_num_threads()
    try:
        place = init_distributed(timeout_seconds=30)
        assert (place.rank, place.world_size, place.device) == (0, 1, CPU)
        value = torch.tensor([3.0])
        dist.all_reduce(value)
        assert value.item() == 3.0
        shutdown(place)
        assert not dist.is_initialized()
    finally:
        torch.set_num_threads(threads)


def keep_group(rank: int, world: int) -> tuple[int, int, bool]:
    place = init_distributed(timeout_seconds=30)
    shutdown(place)
    return place.rank, place.world_size, dist.is_initialized()


def test_an_existing_group_is_kept():
    assert run_ranks(keep_group, 2) == [(0, 2, True), (1, 2, True)]


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_only_a_number_that_the_user_set_is_kept(no_launcher):
    assert thread_share(1) == distributed._usable_cores()
    assert thread_share(10**6) == 1
    no_launcher.setenv("OMP_NUM_THREADS", "1")
    assert thread_share(1) is None  # no torchrun: the user's own
    no_launcher.setenv("TORCHELASTIC_RUN_ID", "x")
    for user, share in ({}, distributed._usable_cores()), ({"OMP_NUM_THREADS": "1"}, None):
        # It prints, so that its environment is surely there to read, and waits for the end of its input.
        with subprocess.Popen(
            ["sh", "-c", "echo ready; read line"],
            env={**user, "PATH": os.environ["PATH"]},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as launcher:
            assert launcher.stdout is not None
            assert launcher.stdout.readline() == b"ready\n"
            no_launcher.setattr(os, "getppid", lambda pid=launcher.pid: pid)
            assert thread_share(1) == share


def test_torchrun_gives_each_rank_its_share_and_prints_a_fault_once(no_launcher, tmp_path):
    script = tmp_path / "launched.py"
    script.write_text(LAUNCHED)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run([*torchrun, str(script)], capture_output=True, text=True, timeout=120)
    assert ended.stdout.count("threads 3 world 2 total 3\n") == 2, ended.stdout + ended.stderr
    assert ended.returncode == 1  # torchrun's own; the rank's is in its summary
    assert ended.stderr.count("x.toml: first fault\nx.toml: second fault\n") == 1
    assert "exitcode  : 2 " in ended.stderr


def test_resident_memory_is_what_the_kernel_says():
    before = device_memory(CPU)
    # From the system: the allocator may have kept as much from tests before.
    block = torch.frombuffer(mmap.mmap(-1, 2**28), dtype=torch.float32).fill_(1.0)  # 0.25 GiB
    memory = device_memory(CPU)
    assert memory.max_active_gib - before.max_active_gib == pytest.approx(0.25, abs=0.05)
    assert memory.max_reserved_gib >= memory.max_active_gib
    total_gib = int(Path("/proc/meminfo").read_text().split()[1]) / 1024**2
    assert memory.max_active_percent == pytest.approx(100 * memory.max_active_gib / total_gib, rel=1e-3)
    assert block.sum() == 64 * 1024**2


def test_a_seed_fixes_every_generator():
    def draw(seed: int) -> tuple[float, float, float]:
        set_determinism(seed)
        return torch.rand(()).item(), float(np.random.rand()), random.random()

    assert draw(7) == draw(7)
    assert all(a != b for a, b in zip(draw(7), draw(8), strict=True))


def test_deterministic_mode_reaches_torch():
    try:
        set_determinism(0, deterministic=True, warn_only=True)
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="needs /proc")
def test_bfloat16_is_native_where_the_kernel_lists_it():
    flags = set(Path("/proc/cpuinfo").read_text().split())
    assert computes_bfloat16(CPU) == bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})

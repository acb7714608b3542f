"""Runs that a signal stops, at any moment and on any rank, against one that nothing stops."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from minititan.run_status import read_status
from tests.distributed.harness import RankError, run_ranks
from tests.distributed.layouts import Overrides
from tests.distributed.runs import arguments, lines
from tests.distributed.small import SMALL, degrees

KEYS = SMALL | {
    "checkpoint.enable": "true",
    "checkpoint.interval": "2",
    "validation.enable": "true",
    "validation.dataset": "stdlib",
    "validation.seq_len": "32",
    "validation.local_batch_size": "2",
    "validation.freq": "3",
    "validation.steps": "2",
}
ASYNC = {"checkpoint.async_mode": "async"}
# Where in the run the signal comes: a function, and at which of its calls.
MOMENTS = {
    "start-up": ("minititan.build.metrics_of", 1),
    "a step": ("minititan.train.gradient_norm", 2),
    "validation": ("minititan.train.run_validation", 1),
    "a save": ("minititan.checkpoint.checkpointer.write_tensors", 1),
}


@contextlib.contextmanager
def signal_in(moment: str, number: int) -> Iterator[None]:
    """This process gets the signal when it comes to the moment, and then goes on with what it does."""
    name, at_call = MOMENTS[moment]
    module, _, function = name.rpartition(".")
    plain: Callable[..., Any] = getattr(sys.modules[module], function)
    calls = 0

    def signalled(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at_call:
            os.kill(os.getpid(), number)
            time.sleep(0.1)
        return plain(*args, **options)

    with mock.patch(name, signalled):
        yield


def main_in_rank(rank: int, folder: Path, cache: Path, keys: Overrides) -> tuple[int, str]:
    from minititan.train import main

    words = arguments(KEYS | {"data.cache_folder": str(cache)} | keys, folder)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = main(words)
    return code, said.getvalue()


def stop_and_go_on(
    rank: int, world: int, folder: Path, cache: Path, keys: Overrides, moment: str, number: int, ranks: set
) -> Any:
    """A run that gets the signal on `ranks`, and the same command once more."""
    import minititan.train  # noqa: F401

    with signal_in(moment, number) if rank in ranks else contextlib.nullcontext():
        first = main_in_rank(rank, folder, cache, keys)
    status = read_status(folder / "out")
    return first, status, main_in_rank(rank, folder, cache, keys), read_status(folder / "out")


@pytest.fixture(scope="module")
def straight(tmp_path_factory, token_cache) -> list[dict]:
    """The log of the run that nothing stops."""
    folder = tmp_path_factory.mktemp("straight")
    assert run_ranks(plain_run, 1, folder, token_cache)[0][0] == 0
    return log(folder)


def plain_run(rank: int, world: int, folder: Path, cache: Path) -> tuple[int, str]:
    return main_in_rank(rank, folder, cache, {})


def log(folder: Path) -> list[dict]:
    """What of the log does not depend on time or layout, losses aside."""
    kept = ("step", "batch_sha256", "samples_consumed", "tokens_seen", "lr", "validation_tokens")
    return [{key: line[key] for key in kept if key in line} for line in lines(folder)]


# name: layout's keys, ranks, moment, signal, ranks that get it, the step at which all stop
CASES = {
    "start-up": ({}, 1, "start-up", signal.SIGTERM, {0}, 0),
    "a step, all ranks": (degrees(2), 2, "a step", signal.SIGUSR1, {0, 1}, 2),
    "a step, one of two tensor-parallel ranks": (degrees(1, 2), 2, "a step", signal.SIGTERM, {1}, 2),
    "validation, the last of four ranks": (degrees(2, 2), 4, "validation", signal.SIGTERM, {3}, 4),
    "a save": (degrees(2), 2, "a save", signal.SIGTERM, {0}, 3),
    "a save in the background": (degrees(2) | ASYNC, 2, "a save", signal.SIGUSR1, {1}, None),
}


SLOW_CASES = {"a save", "a step, all ranks"}  # what they show others show too, together


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW_CASES else name for name in CASES]
)
def test_all_ranks_stop_at_one_step_and_the_same_command_goes_on(name, straight, tmp_path, token_cache):
    keys, world, moment, number, ranks, step = CASES[name]
    outcomes = run_ranks(stop_and_go_on, world, tmp_path, token_cache, keys, moment, number, ranks)
    for (code, _), _, (second, _), _ in outcomes:
        assert (code, second) == (75, 0)
    (_, said), status, _, after = outcomes[0]
    signal_name = signal.Signals(number).name
    assert (status["state"], status["reason"]) == ("preempted", signal_name)
    assert step is None or status["step"] == step
    assert f"The run was stopped by {signal_name}: step {status['step']} of 5" in said
    assert (after["state"], after["step"]) == ("finished", 5)
    assert log(tmp_path) == straight
    assert (tmp_path / "out" / "checkpoint" / f"step-{status['step']}").exists() == (status["step"] > 0)


def stop_without_checkpoints(rank: int, world: int, folder: Path, cache: Path) -> tuple[int, str]:
    import minititan.train  # noqa: F401

    with signal_in("a step", signal.SIGTERM):
        return main_in_rank(rank, folder, cache, {"checkpoint.enable": "false"})


def test_a_run_that_saves_nothing_stops_and_says_so(tmp_path, token_cache):
    ((code, said),) = run_ranks(stop_without_checkpoints, 1, tmp_path, token_cache)
    assert code == 75
    assert "Nothing is saved (checkpoint.enable = false): the same command starts where this run did." in said
    assert not (tmp_path / "out" / "checkpoint").exists()
    status = read_status(tmp_path / "out")
    assert (status["state"], status["step"]) == ("preempted", 2)
    assert status["reason"] == "SIGTERM; nothing is saved"


def test_an_error_ends_a_run_whose_workers_block_the_signals(tmp_path, token_cache):
    keys = {"training.dataloader.num_workers": "1", "training.dataloader.persistent_workers": "true"}
    explodes = {"optimizer.lr": "1e30", "checkpoint.enable": "false"}
    words = arguments(KEYS | {"data.cache_folder": str(token_cache)} | keys | explodes, tmp_path)
    ended = subprocess.run(
        [sys.executable, "-m", "minititan.train", *words], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert 'debug.nan_policy = "raise"' in line
    status = read_status(tmp_path / "out")
    assert (status["state"], status["reason"]) == ("failed", line)


def stop_twice(rank: int, world: int, folder: Path, cache: Path) -> None:
    """The second signal comes while the first one's save hangs."""
    from minititan import faults
    from minititan.train import main

    os.environ[faults.VARIABLE] = "checkpoint.before_commit#2=600"
    pid = os.getpid()
    helper = f"sleep 3; kill -TERM {pid}; while ! ls {folder}/out/checkpoint/.tmp-*/train_state.json; do "
    helper += f"sleep 0.1; done; sleep 0.5; kill -TERM {pid}"
    keys = KEYS | {"data.cache_folder": str(cache), "training.steps": "100000", "checkpoint.interval": "1"}
    with contextlib.redirect_stdout(io.StringIO()):
        subprocess.Popen(["sh", "-c", helper], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        main(arguments(keys, folder))


def test_a_second_signal_ends_at_once_and_the_checkpoint_before_is_whole(tmp_path, token_cache):
    begin = time.monotonic()
    with pytest.raises(RankError, match="died with exit code 143"):
        run_ranks(stop_twice, 1, tmp_path, token_cache)
    assert time.monotonic() - begin < 60
    status = read_status(tmp_path / "out")
    assert status["state"] == "preempted"
    assert status["reason"] == "a second signal, SIGTERM: ended at once, without a save"
    code, said = run_ranks(plain_run, 1, tmp_path, token_cache)[0]
    assert code == 0 and "Resumed from step 1, " in said
    assert not list((tmp_path / "out" / "checkpoint").glob(".tmp-*"))


def test_a_whole_process_group_with_workers_is_signalled(tmp_path, token_cache):
    keys = {"training.steps": "100000", "training.dataloader.num_workers": "1", "checkpoint.interval": "5"}
    words = arguments(KEYS | {"data.cache_folder": str(token_cache)} | keys, tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-m", "minititan.train", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("Saved step 5 "):
                break
        os.killpg(process.pid, signal.SIGTERM)
        said = process.communicate(timeout=60)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 75, said
    assert "Traceback" not in said
    status = read_status(tmp_path / "out")
    assert (status["state"], status["pid"]) == ("preempted", process.pid)
    assert (tmp_path / "out" / "checkpoint" / f"step-{status['step']}").exists()


HOLD = """
import sys, time
from pathlib import Path
from minititan.run_status import RunStatus
status = RunStatus()
status.take({"job.dump_folder": Path(sys.argv[1])})
status.write("running", "the first")
print("ready", flush=True)
time.sleep(600)
"""


def refused(rank: int, world: int, folder: Path, cache: Path) -> tuple[Any, str]:
    from minititan.signals import StopSignals

    # Nobody ends rank 1 here, as torchrun would.
    setattr(StopSignals, "wait_to_be_ended", lambda self, seconds: None)  # noqa: B010
    with contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            return main_in_rank(rank, folder, cache, degrees(2))
        except SystemExit as ended:
            return ended.code, err.getvalue()


def test_a_second_job_is_refused_on_all_ranks_and_disturbs_nothing(tmp_path, token_cache):
    out = tmp_path / "out"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(out)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "ready\n"
        before = sorted(os.listdir(out))
        for code, err in run_ranks(refused, 2, tmp_path, token_cache):
            assert code == 2
            assert f'job.dump_folder = "{out}": another run is in it (process {holder.pid} on ' in err
        assert sorted(os.listdir(out)) == before
        assert read_status(out)["reason"] == "the first"
    finally:
        holder.kill()
        holder.communicate()
    code, _ = run_ranks(plain_run, 1, tmp_path, token_cache)[0]
    assert code == 0


def launched(folder: Path, cache: Path, keys: Overrides, *options: str) -> subprocess.Popen[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = arguments(KEYS | degrees(2) | {"data.cache_folder": str(cache)} | keys, folder)
    return subprocess.Popen(
        [*torchrun, *options, "-m", "minititan.train", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_torchrun_passes_a_signal_on_and_hides_the_exit_code(tmp_path, token_cache):
    keys = {"training.steps": "100000", "checkpoint.interval": "5"}
    process = launched(tmp_path, token_cache, keys, "--signals-to-handle", "SIGTERM,SIGUSR1")
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("Saved step 5 "):
                break
        process.send_signal(signal.SIGUSR1)
        said = process.communicate(timeout=60)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 1, said
    status = read_status(tmp_path / "out")
    assert (status["state"], status["reason"]) == ("preempted", "SIGUSR1"), said
    assert said.count("The run was stopped by SIGUSR1: step ") == 1
    code, said = run_ranks(go_on_for_two, 1, tmp_path, token_cache, status["step"])[0]
    assert code == 0 and f"Resumed from step {status['step']}, saved by 2 processes" in said


def go_on_for_two(rank: int, world: int, folder: Path, cache: Path, step: int) -> tuple[int, str]:
    return main_in_rank(rank, folder, cache, {"training.steps": str(step + 2)})

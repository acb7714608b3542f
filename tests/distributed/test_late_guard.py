"""The guard of a GPU, whose host never waits, on a CPU: late, it must make the same run as at once."""

import contextlib
import io
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.distributed.harness import run_ranks
from tests.distributed.layouts import Overrides
from tests.distributed.runs import arguments
from tests.distributed.small import SMALL, build, degrees

# Between logs, and without a save at each step, a late guard stays late.
KEYS: Overrides = {
    "training.steps": "6",
    "lr_scheduler.total_steps": "6",
    "metrics.log_freq": "100",
    "metrics.log_batch_hash": "false",
    "checkpoint.enable": "true",
    "checkpoint.interval": "100",
}
SKIP: Overrides = {"debug.nan_policy": "skip"}
SPIKES: Overrides = SKIP | {"debug.loss_spike_factor": "1.05", "debug.loss_spike_window": "2"}
MUON: Overrides = {"optimizer.name": "Muon"}
BIASED: Overrides = MUON | {  # Muon, AdamW, and biases that routers correct
    "model.name": "deepseek_v3",
    "model.flavor": "debugmodel",
    "model.args.moe_intermediate_size": "32",
    "model.args.router_bias_update_speed": "0.01",
}
TWO: Overrides = degrees(2)


def watched_run(
    rank: int, world: int, folder: Path, cache: Path, keys: Overrides, plan: dict[int, str], late: bool
) -> dict[str, Any]:
    """Train; in the steps of `plan` the last rank's loss or gradient is broken, or its loss is large."""
    from minititan.config import ConfigError

    with contextlib.redirect_stdout(io.StringIO()) as said:
        trainer = build(rank, world, folder, cache, KEYS | keys)
        trainer.guard.late = late
        head, pending = trainer.parts[-1].lm_head.forward, []

        def broken_head(hidden: Tensor, *labels: Tensor) -> Tensor:
            kind = plan.get(trainer.steps_done + 1) if rank == world - 1 else None
            if kind == "loss":
                hidden = hidden * torch.nan
            elif kind == "gradient":
                hidden.register_hook(lambda grad: grad * torch.inf)
            pending.append(trainer.guard._open is not None)
            return head(hidden, *labels) * (3 if kind == "large" else 1)

        trainer.parts[-1].lm_head.forward = broken_head
        error = ""
        try:
            trainer.run()
        except ConfigError as caught:
            error = str(caught)
    tensors = {
        name: getattr(tensor, "to_local", lambda tensor=tensor: tensor)().detach().clone().numpy()
        for name, tensor in trainer.checkpoints.tensors().items()
    }
    lines = [line for line in said.getvalue().splitlines() if "left out" in line]
    return {
        "error": error,
        "said": lines,
        "tensors": tensors,
        "guard": trainer.guard.state(),
        "saved": trainer.checkpoints.checkpointer.steps(),
        "was late": any(pending),
    }


PLANS: dict[str, tuple[Overrides, dict[int, str]]] = {
    "nothing": ({}, {}),
    "raise, loss": ({}, {3: "loss"}),
    "raise, gradient": ({}, {4: "gradient"}),
    "raise, at the last step": ({"checkpoint.enable": "false"}, {6: "gradient"}),
    "skip": (SKIP, {2: "gradient", 3: "loss", 6: "loss"}),
    "skip, bounded": (SKIP | {"debug.max_skipped_in_a_row": "2"}, {2: "loss", 3: "gradient", 4: "loss"}),
    "spike": (SPIKES, {4: "large", 5: "large"}),
    "Muon, skip": (MUON | SKIP, {3: "gradient"}),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("world", [1, 2])
def test_late_is_the_same_run(name, world, tmp_path, token_cache):
    keys, plan = PLANS[name]
    compare(world, keys, plan, tmp_path, token_cache)


def test_biases_of_routers_stay_too(tmp_path, token_cache):
    compare(2, BIASED | SKIP, {3: "gradient", 5: "loss"}, tmp_path, token_cache)


def compare(world: int, keys: Overrides, plan: dict[int, str], tmp_path: Path, token_cache: Path) -> None:
    keys = keys | (TWO if world == 2 else {})
    runs = [
        run_ranks(watched_run, world, tmp_path / str(late), token_cache, keys, plan, late)
        for late in (False, True)
    ]
    for at_once, late in zip(*runs, strict=True):
        assert late.pop("was late") and not at_once.pop("was late")
        ones, others = late.pop("tensors"), at_once.pop("tensors")
        assert late == at_once
        assert bool(plan) == bool(late["error"] or late["said"] or late["guard"]["skipped_steps"])
        for key, tensor in ones.items():
            assert (tensor == others[key]).all(), key


def test_a_late_guard_refuses_a_loss_scale(tmp_path, token_cache):
    from minititan.build import guard_of
    from minititan.config import load

    def late(**keys: str) -> bool:
        words = arguments(SMALL | {key.replace("__", "."): value for key, value in keys.items()}, tmp_path)
        return guard_of(load(words), torch.device("cuda"), print).late

    assert late()
    assert not late(training__mixed_precision_param="float16")
    assert not late(optimizer__implementation="foreach")
    assert not late(training__enable_cpu_offload="true")


# ---- what ranks ask for


def asked_run(
    rank: int, world: int, folder: Path, cache: Path, keys: Overrides, late: bool, stop_in: int
) -> dict[str, Any]:
    """Train; rank 0's clock wants a save in step 2, the last rank gets a signal in step `stop_in`."""
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = build(rank, world, folder, cache, KEYS | keys)
        trainer.guard.late = late
        head, stop = trainer.parts[-1].lm_head.forward, trainer.requests._stop
        begin = trainer.saves._last_save

        def head_of_step(*inputs: Tensor) -> Tensor:
            if trainer.steps_done + 1 == stop_in and rank == world - 1 and stop.first is None:
                stop.note(signal.SIGUSR1)
            return head(*inputs)

        def wanted() -> bool:
            return rank == 0 and trainer.steps_done + 1 >= 2 and trainer.saves._last_save == begin

        trainer.parts[-1].lm_head.forward = head_of_step
        trainer.requests._wants_save = wanted
        finished = trainer.run()
    return {
        "finished": finished,
        "done": trainer.steps_done,
        "stop": trainer.requests.stop,
        "saved": trainer.checkpoints.checkpointer.steps(),
    }


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_requests_come_a_step_late_once_and_on_all_ranks(mode, tmp_path, token_cache):
    keys = TWO | {"checkpoint.async_mode": mode}
    for late in (False, True):
        found = run_ranks(asked_run, 2, tmp_path / str(late), token_cache, keys, late, 4)
        expected = {"finished": False, "done": 4 + late, "stop": "SIGUSR1", "saved": [2 + late, 4 + late]}
        assert found == [expected] * 2
    # At the last step nothing is left to stop; the save of the end is the only one after the clock's.
    found = run_ranks(asked_run, 2, tmp_path / "end", token_cache, keys, True, 6)
    assert [of["finished"] for of in found] == [True, True]
    assert found[0]["saved"] == [3, 6]


# ---- the host


class HostReads(TorchDispatchMode):
    """Fails where an operator would make the host wait for the values of a tensor on a device."""

    ALWAYS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        waits = name in self.ALWAYS
        if name in ("index", "index_put", "index_put_"):
            waits = any(index is not None and index.dtype == torch.bool for index in args[1])
        if name == "repeat_interleave":
            waits = (kwargs or {}).get("output_size") is None
        assert not waits, f"the host waits for {name}"
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def no_host_reads() -> Any:
    def refused(self: Tensor, *args: Any, **options: Any) -> Any:
        raise AssertionError("the host waits for a tensor")

    with contextlib.ExitStack() as stack:
        for name in ("tolist", "numpy", "cpu"):
            stack.enter_context(mock.patch.object(Tensor, name, refused))
        stack.enter_context(HostReads())
        yield


def steps_without_reads(
    rank: int, world: int, folder: Path, cache: Path, keys: Overrides, late: bool
) -> tuple[int, str]:
    """Take steps under `no_host_reads`, all but what a late guard reads of the step before; return how often
    it did, and the first read that was refused.
    """
    from minititan.guard import _Judged

    reads, read = [], _Judged.read

    def allowed_read(judged: Any) -> list[float]:
        reads.append(judged.step)
        assert judged.step == trainer.steps_done, "only the step before may be read"
        with (
            mock.patch.object(Tensor, "tolist", tolist),
            _disable_current_modes(),
        ):
            return read(judged)

    with contextlib.redirect_stdout(io.StringIO()):
        trainer = build(rank, world, folder, cache, KEYS | keys)
    trainer.guard.late, tolist = late, Tensor.tolist
    count = trainer.job.layout.accumulation_steps(1)
    batches = iter(trainer.loader)
    steps = [[next(batches) for _ in range(count)] for _ in range(4)]
    trainer.step(iter(steps[0]))  # is logged
    if late:
        trainer.step(iter(steps[1]))
    refused = ""
    with no_host_reads(), mock.patch.object(_Judged, "read", allowed_read if late else read):
        try:
            for own in steps[2:]:
                trainer.step(iter(own))
        except AssertionError as error:
            refused = str(error)
    return len(reads), refused


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("keys", [{}, SPIKES, BIASED], ids=["dense", "spikes", "experts"])
def test_between_logs_the_host_reads_nothing_of_the_step_it_is_in(world, keys, tmp_path, token_cache):
    keys = keys | (TWO if world == 2 else {})
    assert run_ranks(steps_without_reads, world, tmp_path, token_cache, keys, True) == [(2, "")] * world


def test_a_guard_that_is_not_late_reads_it(tmp_path, token_cache):
    assert run_ranks(steps_without_reads, 1, tmp_path, token_cache, {}, False) == [
        (0, "the host waits for a tensor")
    ]

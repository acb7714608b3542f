"""Makes the faults of `faults.py` happen to two ranks, and starts again after each."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from minititan import faults
from minititan.checkpoint.checkpointer import Checkpointer
from minititan.config import ConfigError
from tests.distributed.faults import (
    AT_REST,
    KILLED,
    SAVING,
    SIZE,
    Outcome,
    Saving,
    read_only,
    without_rights,
)
from tests.distributed.harness import RankError, run_ranks

RANKS = 2
FILES = RANKS + 4  # of a step, with its folder


def tensors(rank: int, world: int, value: float) -> dict[str, Tensor]:
    """A sharded parameter with its state, all of one value."""
    mesh = init_device_mesh("cpu", (world,))
    sharded = {
        key: distribute_tensor(torch.full((4000,), value), mesh, [Shard(0)])
        for key in ("model.w", "optimizer.w.exp_avg")
    }
    return {**sharded, "optimizer.w.step": torch.tensor(value)}


def save_steps(rank: int, world: int, folder: Path, steps: Sequence[int]) -> None:
    there = Checkpointer(folder, keep_latest_k=0, rank=rank)
    for step in steps:
        there.save(step, tensors(rank, world, float(step)), {"step": step})


def save_under_faults(rank: int, world: int, cases: list[tuple[int, Path]]) -> list[str]:
    """Saves step 3 under each fault (by its number); what was said."""
    said = []
    for number, folder in cases:
        fault = SAVING[number]
        there = Checkpointer(folder, keep_latest_k=2, rank=rank)
        state = tensors(rank, world, 3.0)
        faults._passes.clear()
        os.environ[faults.VARIABLE] = fault.asked
        try:
            with fault.around(folder) if rank == fault.rank else nullcontext():
                there.save(3, state, {"step": 3})
            said.append("")
        except ConfigError as error:
            said.append("; ".join(error.faults))
        del os.environ[faults.VARIABLE]
    return said


def restart(rank: int, world: int, cases: list[tuple[Path, int | None]]) -> list[Outcome]:
    """Goes on from each folder, as a run that has `load_step` does, and saves a step more."""
    outcomes = []
    for folder, load_step in cases:
        lines: list[str] = []
        there = Checkpointer(folder, keep_latest_k=0, rank=rank, say=lines.append)
        try:
            found = there.newest() if load_step is None else there.verified(load_step)
            assert found is not None
            step, target = found.manifest.step, tensors(rank, world, 0.0)
            assert there.load(found, target) == {"step": step}
            for tensor in target.values():
                assert getattr(tensor, "to_local", lambda t=tensor: t)().unique().tolist() == [step]
            there.save(9, target, {"step": 9})
            outcomes.append(Outcome("; ".join(lines), step))
        except ConfigError as error:
            outcomes.append(Outcome("; ".join(error.faults), None))
    return outcomes


# ---- All of it


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """The folder is a disk with room for the files of two steps, and a folder.

    PermissionError: no right to one.
    """
    folder.mkdir()
    if refused := _mount("tmpfs", folder, f"nr_inodes={1 + 2 * FILES + 1}"):
        no_right = any(words in refused for words in ("permission denied", "must be superuser", "only root"))
        raise PermissionError(refused) if no_right else RuntimeError(refused)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def _mount(what: str, folder: Path, options: str) -> str:
    """What the system says against it; "" where it does it."""
    command = ["mount", "-t", "tmpfs", "-o", options, what, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"})
    return done.stderr or f"exit code {done.returncode}" if done.returncode else ""


def _possible(fault: Saving, folder: Path, disks: ExitStack) -> bool:
    """Whether this process may make the fault happen; makes the disk that it needs."""
    try:
        if fault.small_disk:
            disks.enter_context(small_disk(folder))
        if fault.around is read_only:
            with without_rights():
                pass
    except PermissionError:
        return False
    return True


def run_faults(root: Path) -> dict[str, Outcome]:
    """The outcome of every fault, by name; fails where ranks are not at one or a whole step was touched.

    `root` must be open to all users. Faults that this process has no right to make are left out.
    """
    folders = {fault.name: root / str(number) for number, fault in enumerate((*SAVING, *AT_REST))}
    with ExitStack() as disks:
        save = [fault for fault in SAVING if _possible(fault, folders[fault.name], disks)]
        names = [fault.name for fault in (*save, *AT_REST)]
        run_ranks(save_steps, RANKS, root / "saved", (1, 2, 3))
        before = {step: snapshot(root / "saved" / f"step-{step}") for step in (1, 2)}
        load_steps = {fault.name: fault.load_step for fault in AT_REST}
        for name in names:
            ignore = (lambda *_: []) if name in load_steps else (lambda *_: ["step-3"])
            shutil.copytree(root / "saved", folders[name], ignore=ignore, dirs_exist_ok=True)
        said = _save_all(save, folders)
        for fault in save:
            if fault.small_disk:  # the user makes room
                _mount("tmpfs", folders[fault.name], "remount,nr_inodes=0")
        for fault in AT_REST:
            fault.spoil(folders[fault.name])
        ranks = run_ranks(restart, RANKS, [(folders[name], load_steps.get(name)) for name in names])
        return {
            name: _checked(folders[name], said.get(name), outcomes, before)
            for name, outcomes in zip(names, zip(*ranks, strict=True), strict=True)
        }


def _save_all(save: list[Saving], folders: dict[str, Path]) -> dict[str, str]:
    """What was said while step 3 was saved under each fault."""

    def killed(fault: Saving) -> str:
        try:
            run_ranks(save_under_faults, RANKS, [(SAVING.index(fault), folders[fault.name])])
        except RankError as error:
            return KILLED if "died with exit code -9" in str(error) else str(error)
        return "not killed"

    killing = [fault for fault in save if fault.expected.said == KILLED]
    with ThreadPoolExecutor(len(killing)) as pool:  # the other rank has seconds to notice: all at once
        said = {fault.name: text for fault, text in zip(killing, pool.map(killed, killing), strict=True)}
    alive = [fault for fault in save if fault not in killing]
    cases = [(SAVING.index(fault), folders[fault.name]) for fault in alive]
    first, other = run_ranks(save_under_faults, RANKS, cases)
    assert first == other
    return said | dict(zip([fault.name for fault in alive], first, strict=True))


def _checked(
    folder: Path, said: str | None, outcomes: tuple[Outcome, ...], before: dict[int, dict[str, bytes]]
) -> Outcome:
    """The outcome, after checking that ranks are at one and that what was whole is as it was.

    `said`: while saving, None for a fault at rest.
    """
    first, other = outcomes
    assert first.restart == other.restart
    if first.restart is None:
        assert first.said == other.said
    else:
        assert not [name for name in os.listdir(folder) if name.startswith(".tmp-")]
        # Once step 3 was saved, step 1 was on its way out.
        for step in before if said is None or first.restart == 2 else (2,):
            assert snapshot(folder / f"step-{step}") == before[step]
    assert not (folder / "evil").exists()
    if said is None:
        said = first.said
    else:
        assert first.said == ""
    text = said.replace(f"{folder}/", "").replace(str(folder), "...")
    return Outcome(re.sub(r"\d+ bytes, must be \d+", SIZE, text), first.restart)

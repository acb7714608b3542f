"""Saving and loading of one run's checkpoints; all ranks must call every method but `steps`."""

import json
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minititan.checkpoint import contents, folder, manifest
from minititan.checkpoint.agreement import RanksFailedError, agreed, first_rank, gather, rank, world_size
from minititan.checkpoint.manifest import COMMIT, TRAIN_STATE, WAY_OUT, Manifest, TensorInfo
from minititan.checkpoint.retention import Keep
from minititan.checkpoint.storage import read_metadata, read_tensors, write_tensors
from minititan.config import ConfigError


@cache
def _own_version() -> str:
    """Looked up once: each look-up leaves ten objects behind (Python 3.11)."""
    return version("minititan")


@dataclass(frozen=True)
class Verified:
    """A checkpoint whose files are all as they were written."""

    path: Path
    manifest: Manifest


class Checkpointer:
    """The checkpoints of a folder, of which those stay that `Keep` wants.

    Loading compares the sizes of all files with what was saved and, with `hashes`, their SHA-256.
    """

    def __init__(
        self,
        path: Path,
        *,
        keep_latest_k: int,
        rank: int,
        say: Callable[[str], None] = print,
        hashes: bool = True,
        keep_every_n_steps: int = 0,
        keep_best_k: int = 0,
    ) -> None:
        self.folder = Path(path)
        self._keep = Keep(keep_latest_k, keep_every_n_steps, keep_best_k)
        self._rank = rank
        self._say = say
        self._hashes = hashes

    def steps(self) -> list[int]:
        """The steps of all committed checkpoints, ascending, as this rank sees them."""
        return folder.committed_steps(self.folder)

    def newest(self) -> Verified | None:
        """The newest checkpoint that is whole, the same on all ranks; None when there is none at all.

        A line is said for each fault of the newer ones. Raises ConfigError when none is whole.
        """
        try:
            steps, links = first_rank(
                lambda: (folder.step_folders(self.folder), folder.step_links(self.folder))
            )
        except RanksFailedError as failed:
            raise failed.explained(f"{self.folder}: could not be read", "give this user access") from None
        faults: list[str] = []
        for step in sorted(steps + links, reverse=True):
            path = folder.step_folder(self.folder, step)
            if step in links:
                faults.append(f"{path}: a link, which is not followed")
                continue
            found = self._verified(path, step)
            if isinstance(found, Verified):
                for fault in faults:
                    self._say_first(f"{fault}; step {step} is used")
                return found
            faults += found
        if faults:
            rule = f"{self.folder}: none of its checkpoints is whole; remove them to start afresh"
            raise ConfigError(*faults, rule)
        return None

    def verified(self, source: int | str | Path) -> Verified:
        """A step of this folder, or another checkpoint's folder; ConfigError when it is not whole."""
        path = folder.step_folder(self.folder, source) if isinstance(source, int) else Path(source)
        try:
            first_rank(
                lambda: (
                    folder.check_step(self.folder, source)
                    if isinstance(source, int)
                    else folder.check_checkpoint(path)
                )
            )
        except RanksFailedError as failed:
            raise failed.explained(f"{path}: could not be read", WAY_OUT) from None
        found = self._verified(path, source if isinstance(source, int) else None)
        if isinstance(found, list):
            raise ConfigError(*(f"{fault}; {WAY_OUT}" for fault in found))
        return found

    def _verified(self, path: Path, step: int | None) -> Verified | list[str]:
        """The checkpoint in a folder (of this step, if given), or its faults; each rank reads its share."""

        def read() -> Manifest | list[str]:
            try:
                return manifest.read(path)
            except ConfigError as error:
                return [fault.removesuffix(f"; {WAY_OUT}") for fault in error.faults]

        found = first_rank(read)
        if isinstance(found, list):
            return found
        if step not in (None, found.step):
            return [f"{path / COMMIT}: is of step {found.step}"]
        share = sorted(found.files)[rank() :: world_size()]
        faults = gather(manifest.file_faults(path, found, share, self._hashes))
        return sorted({line for lines in faults for line in lines}) or Verified(path, found)

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        train_state: Mapping[str, Any],
        *,
        model: Mapping[str, Any] | None = None,
        layout: Mapping[str, Any] | None = None,
        group: ProcessGroup | None = None,
        read: Callable[[str], Tensor] | None = None,
    ) -> None:
        """Saves a step; `train_state` (JSON, the same on all ranks) lies beside the tensors.

        `model` and `layout` say what it is of. On any failure all ranks raise the same error, the folder
        has no `step-N` of this save, and earlier checkpoints are as they were. A `step-N` that is there
        already is moved aside. `group`: of all ranks, for a save beside other communication. With `read`,
        which gives their values when they are written, `tensors` are meta tensors.
        """
        try:
            # With pipeline stages ranks have other tensors, else the same.
            needed = sum(dict(gather(contents.space(tensors), group)).values())
            temporary = first_rank(lambda: folder.begin(self.folder, step, needed), group)
            try:
                infos, own_files = write_tensors(temporary, tensors, group, read)
                files = {name: file for part in gather(own_files, group) for name, file in part.items()}
                written = Manifest(
                    step=step,
                    files=files,
                    tensors=infos,
                    model=dict(model or {}),
                    layout={"world_size": world_size()} | dict(layout or {}),
                    versions={"minititan": _own_version(), "torch": str(torch.__version__)},
                )
                first_rank(lambda: folder.commit(temporary, self.folder, written, train_state), group)
            except BaseException:
                if self._rank == 0:
                    shutil.rmtree(temporary, ignore_errors=True)
                raise
        except RanksFailedError as failed:
            where = f"checkpoint.folder = {json.dumps(str(self.folder))}: step {step} could not be saved"
            raise failed.explained(where, self._what_is_left()) from None
        if self._rank == 0:
            self._retain(step)

    def _what_is_left(self) -> str:
        way_out = "make room or set another job.dump_folder"
        steps = self.steps()
        return f"{way_out}; the newest checkpoint is step {steps[-1]}" if steps else way_out

    def _retain(self, step: int) -> None:
        try:
            folder.retain(self.folder, self._keep, step)
        except (OSError, ConfigError) as error:
            # The step is safe: what could not be removed is tried again after the next save.
            cause = error.strerror if isinstance(error, OSError) else error
            self._say(f"{self.folder}: an old checkpoint could not be removed ({cause})")

    def load(
        self,
        source: Verified | int | str | Path,
        tensors: Mapping[str, Tensor],
        exclude: Sequence[str] = (),
        *,
        strict: bool = True,
        cast: bool = False,
    ) -> dict[str, Any]:
        """Overwrites `tensors` from a checkpoint (see `verified` for what names one).

        Returns the saved `train_state` without the top-level keys in `exclude`. Sections that `tensors` has
        no key of are not loaded; those it has must match key by key, with shapes and (without `cast`) dtypes,
        or ConfigError names the differences before anything is overwritten. Without `strict` those that
        match are loaded, and a line says of each kind of difference what was skipped.
        """
        contents.check_exclude(exclude)
        checkpoint = source if isinstance(source, Verified) else self.verified(source)
        path, saved = checkpoint.path, checkpoint.manifest.tensors
        try:
            state = first_rank(lambda: _read_state(path))
            with agreed():
                metadata = read_metadata(path, checkpoint.manifest)
            selected = contents.wanted(tensors, exclude)
            skipped = self._skipped(path, selected, saved, strict, cast)
            read_tensors(path, metadata, {k: tensor for k, tensor in selected.items() if k not in skipped})
        except RanksFailedError as failed:
            raise failed.explained(f"{path}: could not be read", WAY_OUT) from None
        return {key: value for key, value in state.items() if key not in exclude}

    def _skipped(
        self,
        path: Path,
        selected: Mapping[str, Tensor],
        saved: Mapping[str, TensorInfo],
        strict: bool,
        cast: bool,
    ) -> set[str]:
        """The keys that this rank cannot load, after saying so; with `strict` any difference is an error."""
        found = contents.differences(selected, saved, cast)
        faults = _faults_of_all(selected, found, saved)
        if strict and faults:
            raise ConfigError(*(f"{path}: {what}; {way_out}" for what, way_out in faults))
        skipped = contents.without_halves(selected, found.keys())
        if faults and not any(gather(len(selected) - len(skipped))):
            raise ConfigError(f"{path}: has nothing that this run asks for; {WAY_OUT}")
        lines = [what for what, _ in faults]
        if halves := {key for keys in gather(skipped - found.keys()) for key in keys}:
            lines.append(f"belongs to what differs: {contents.listed(sorted(halves))}")
        for line in lines:
            self._say_first(f"{path}: {line}: skipped, as checkpoint.load_strict = false")
        return skipped

    def _say_first(self, line: str) -> None:
        if self._rank == 0:
            self._say(line)

    def set_newer_aside(self, step: int) -> list[str]:
        """Renames the steps after `step`, damaged ones too, to `abandoned-step-N-k`, so that no restart goes
        on from them.

        Returns the new names.
        """
        try:
            return first_rank(
                lambda: [
                    folder.move_aside(self.folder, newer)
                    for newer in folder.step_folders(self.folder)
                    if newer > step
                ]
            )
        except RanksFailedError as failed:
            where = f"{self.folder}: the steps after {step} could not be moved aside"
            raise failed.explained(where, "move them yourself") from None


def _faults_of_all(
    tensors: Collection[str], own: contents.Differences, saved: Collection[str]
) -> list[tuple[str, str]]:
    """What is different on any rank, and the way out."""
    faults = [fault for faults in gather(contents.faults(own, saved)) for fault in faults]
    # With pipeline stages a rank has some of the keys only: unexpected is what no rank asks for.
    extra = set.intersection(*gather(contents.unexpected(tensors, saved)))
    if extra:
        faults.append(
            (f"has more than this run: {contents.listed(sorted(extra))}", contents.other_part(extra))
        )
    return list(dict.fromkeys(faults))


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads((path / TRAIN_STATE).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path / TRAIN_STATE}: not JSON ({error}); {WAY_OUT}") from None
    if not isinstance(state, dict):
        raise ConfigError(f"{path / TRAIN_STATE}: must be a JSON object; {WAY_OUT}")
    return state

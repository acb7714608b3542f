"""Saving and loading of one run's checkpoints; all ranks must call every method but `steps`."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from minititan.checkpoint import contents, folder, manifest
from minititan.checkpoint.agreement import RanksFailedError, agreed, first_rank, gather, rank, world_size
from minititan.checkpoint.manifest import TRAIN_STATE, WAY_OUT, Manifest
from minititan.checkpoint.storage import check_files, read_metadata, read_tensors, write_tensors
from minititan.config import ConfigError


@dataclass(frozen=True)
class Verified:
    """A checkpoint whose files are all as they were written."""

    path: Path
    manifest: Manifest


class Checkpointer:
    """The checkpoints of a folder, of which the newest `keep_latest_k` stay (0: all).

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
    ) -> None:
        self.folder = Path(path)
        self._keep_latest_k = keep_latest_k
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
            steps = first_rank(lambda: folder.step_folders(self.folder))
        except RanksFailedError as failed:
            raise failed.explained(f"{self.folder}: could not be read", "give this user access") from None
        faults: list[str] = []
        for step in reversed(steps):
            found = self._verified(folder.step_folder(self.folder, step))
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
        found = self._verified(path)
        if isinstance(found, list):
            raise ConfigError(*(f"{fault}; {WAY_OUT}" for fault in found))
        return found

    def _verified(self, path: Path) -> Verified | list[str]:
        """The checkpoint in a folder, or its faults; each rank reads its share of the files."""

        def read() -> Manifest | list[str]:
            try:
                return manifest.read(path)
            except ConfigError as error:
                return [fault.removesuffix(f"; {WAY_OUT}") for fault in error.faults]

        found = first_rank(read)
        if isinstance(found, list):
            return found
        share = sorted(found.files)[rank() :: world_size()]
        faults = gather(manifest.file_faults(path, found, share, self._hashes))
        return [line for lines in faults for line in lines] or Verified(path, found)

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        train_state: Mapping[str, Any],
        *,
        model: Mapping[str, Any] | None = None,
        layout: Mapping[str, Any] | None = None,
        read: Callable[[str], Tensor] | None = None,
    ) -> None:
        """Saves a step; `train_state` (JSON, the same on all ranks) lies beside the tensors.

        `model` and `layout` say what it is of; with `read`, `tensors` are meta tensors whose values it gives
        when they are written. On any failure all ranks raise the same error, the folder
        has no `step-N` of this save, and earlier checkpoints are as they were. A `step-N` that is there
        already is moved aside.
        """
        try:
            temporary = first_rank(lambda: folder.begin(self.folder, step))
            try:
                infos, own_files = write_tensors(temporary, tensors, read)
                files = {name: file for files in gather(own_files) for name, file in files.items()}
                written = Manifest(
                    step=step,
                    files=files,
                    tensors=infos,
                    model=dict(model or {}),
                    layout={"world_size": world_size()} | dict(layout or {}),
                    versions={"minititan": version("minititan"), "torch": str(torch.__version__)},
                )
                first_rank(lambda: folder.commit(temporary, self.folder, written, train_state))
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
            folder.retain(self.folder, self._keep_latest_k, step)
        except OSError as error:
            # The step is safe: what could not be removed is tried again after the next save.
            self._say(f"{self.folder}: an old checkpoint could not be removed ({error.strerror})")

    def load(
        self,
        source: Verified | int | str | Path,
        tensors: dict[str, Tensor],
        exclude: Sequence[str] = (),
        *,
        cast: bool = False,
    ) -> dict[str, Any]:
        """Overwrites `tensors` from a checkpoint (see `verified` for what names one).

        Returns the saved `train_state` without the top-level keys in `exclude`. Sections that `tensors` has
        no key of are not loaded; those it has must match key by key, with shapes and (without `cast`) dtypes,
        or ConfigError names the differences before anything is overwritten.
        """
        contents.check_exclude(exclude)
        found = source if isinstance(source, Verified) else self.verified(source)
        path = found.path
        try:
            state = first_rank(lambda: _read_state(path))
            with agreed():
                metadata = read_metadata(path)
                check_files(path, metadata, found.manifest.files)
            selected = contents.wanted(tensors, exclude)
            self._compare(path, selected, metadata, cast)
            read_tensors(path, metadata, selected)
        except RanksFailedError as failed:
            raise failed.explained(f"{path}: could not be read", WAY_OUT) from None
        return {key: value for key, value in state.items() if key not in exclude}

    def _compare(self, path: Path, selected: dict[str, Tensor], metadata: Metadata, cast: bool) -> None:
        lines = dict.fromkeys(
            line for lines in gather(contents.faults(path, selected, metadata, cast)) for line in lines
        )
        # With pipeline stages a rank has some of the keys only: unexpected is what no rank asks for.
        extra = set.intersection(*gather(contents.unexpected(selected, metadata)))
        if extra:
            more = contents.listed(sorted(extra))
            lines[f"{path}: has more than this run: {more}; {contents.other_part(extra)}"] = None
        if lines:
            raise ConfigError(*lines)

    def _say_first(self, line: str) -> None:
        if self._rank == 0:
            self._say(line)

    def set_newer_aside(self, step: int) -> list[str]:
        """Renames the steps after `step` to `abandoned-step-N-k`, so that no restart goes on from them.

        Returns the new names.
        """
        try:
            return first_rank(
                lambda: [folder.move_aside(self.folder, newer) for newer in self.steps() if newer > step]
            )
        except RanksFailedError as failed:
            where = f"checkpoint.load_step = {step}: newer steps in {self.folder} could not be moved aside"
            raise failed.explained(where, "move them yourself") from None


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads((path / TRAIN_STATE).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path / TRAIN_STATE}: not JSON ({error}); {WAY_OUT}") from None
    if not isinstance(state, dict):
        raise ConfigError(f"{path / TRAIN_STATE}: must be a JSON object; {WAY_OUT}")
    return state

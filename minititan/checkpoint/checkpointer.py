"""Saving and loading of one run's checkpoints; all ranks must call every method but `steps`."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from minititan.checkpoint import contents, folder
from minititan.checkpoint.agreement import RanksFailedError, agreed, first_rank, gather
from minititan.checkpoint.storage import check_files, read_metadata, read_tensors, write_tensors
from minititan.config import ConfigError

FORMAT_VERSION = 1


class Checkpointer:
    """The checkpoints of a folder, of which the newest `keep_latest_k` stay (0: all)."""

    def __init__(
        self, path: Path, *, keep_latest_k: int, rank: int, say: Callable[[str], None] = print
    ) -> None:
        self.folder = Path(path)
        self._keep_latest_k = keep_latest_k
        self._rank = rank
        self._say = say

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, ascending, as this rank sees them."""
        return folder.committed_steps(self.folder)

    def latest(self) -> int | None:
        """The newest step, the same on all ranks."""
        try:
            return first_rank(lambda: max(self.steps(), default=None))
        except RanksFailedError as failed:
            raise failed.explained(f"{self.folder}: could not be read", "give this user access") from None

    def save(self, step: int, tensors: Mapping[str, Tensor], train_state: Mapping[str, Any]) -> None:
        """Saves a step; `train_state` (JSON, the same on all ranks) lies beside the tensors.

        On any failure all ranks raise the same error, the folder has no `step-N` of this save, and earlier
        checkpoints are as they were. A `step-N` that is there already is moved aside.
        """
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        own = {"format_version": FORMAT_VERSION, "step": step, "world_size": world_size}
        assert all(train_state.get(key, value) == value for key, value in own.items())
        state = own | dict(train_state)
        try:
            temporary = first_rank(lambda: folder.begin(self.folder, step))
            try:
                write_tensors(temporary, tensors)
                first_rank(lambda: folder.commit(temporary, self.folder, step, state))
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
        self, source: int | str | Path, tensors: dict[str, Tensor], exclude: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Overwrites `tensors` from a step of this folder, or from another checkpoint's folder.

        Returns the saved `train_state` with `step` and `world_size`, without the top-level keys in `exclude`.
        Sections that `tensors` has no key of are not loaded; those it has must match key by key, with shapes
        and dtypes, or ConfigError names the differences before anything is overwritten. Random states are the
        exception: those that the checkpoint does not have are taken out of `tensors`. Excluding `train_state`
        excludes them too.
        """
        contents.check_exclude(exclude)
        path = folder.step_folder(self.folder, source) if isinstance(source, int) else Path(source)
        try:
            state = first_rank(lambda: self._read_state(source, path))
            with agreed():
                metadata = read_metadata(path)
            first_rank(lambda: check_files(path, metadata))
            selected = contents.wanted(tensors, metadata, exclude)
            self._compare(path, selected, metadata)
            read_tensors(path, metadata, selected)
        except RanksFailedError as failed:
            raise failed.explained(f"{path}: could not be read", "use another checkpoint") from None
        unsaved = [key for key in tensors if contents.section(key) == "rng" and key not in selected]
        for key in unsaved:
            del tensors[key]
        self._tell_unsaved(path, gather(unsaved))
        return {key: value for key, value in state.items() if key not in {*exclude, "format_version"}}

    def _read_state(self, source: int | str | Path, path: Path) -> dict[str, Any]:
        if isinstance(source, int):
            folder.check_step(self.folder, source)
        folder.check_checkpoint(path)
        file = path / folder.TRAIN_STATE
        try:
            state = json.loads(file.read_text(encoding="utf-8"))
            version = state["format_version"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{file}: damaged ({error}); use another checkpoint") from None
        if version != FORMAT_VERSION:
            raise ConfigError(
                f"{file}: format_version = {version}: must be {FORMAT_VERSION}; "
                "use the version of minititan that saved it"
            )
        return state

    def _compare(self, path: Path, selected: dict[str, Tensor], metadata: Metadata) -> None:
        lines = dict.fromkeys(
            line for lines in gather(contents.faults(path, selected, metadata)) for line in lines
        )
        # With pipeline stages a rank has some of the keys only: unexpected is what no rank asks for.
        extra = set.intersection(*gather(contents.unexpected(selected, metadata)))
        if extra:
            more = contents.listed(sorted(extra))
            lines[f"{path}: has more than this run: {more}; {contents.other_part(extra)}"] = None
        if lines:
            raise ConfigError(*lines)

    def _tell_unsaved(self, path: Path, unsaved: list[list[str]]) -> None:
        count = sum(bool(keys) for keys in unsaved)
        if count and self._rank == 0:
            self._say(f"{path}: has no random state for {count} of {len(unsaved)} ranks: they get new ones")

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

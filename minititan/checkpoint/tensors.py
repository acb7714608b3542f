"""The tensors of one checkpoint, read whole and one at a time by a single process."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minititan.checkpoint import manifest
from minititan.checkpoint.agreement import RanksFailedError
from minititan.checkpoint.folder import check_checkpoint
from minititan.checkpoint.manifest import WAY_OUT, Manifest
from minititan.checkpoint.storage import read_metadata, read_tensors
from minititan.config import ConfigError


def verified(path: Path, hashes: bool = True) -> Manifest:
    """The manifest of a checkpoint, all of whose files were found to be as they were written (without
    `hashes`, by their sizes).
    """
    check_checkpoint(path)
    if faults := manifest.verify(path, hashes):
        raise ConfigError(*(f"{fault}; {WAY_OUT}" for fault in faults))
    return manifest.read(path)


class StepTensors:
    """Reads tensors by key; the last one is kept, since a stacked one is asked for again for each row."""

    def __init__(self, path: Path, saved: Manifest) -> None:
        self._path = path
        self._metadata = read_metadata(path, saved)
        self._last: tuple[str, Tensor] | None = None

    def read(self, key: str) -> Tensor:
        if self._last is None or self._last[0] != key:
            self._last = None  # freed before the next is read
            entry: Any = self._metadata.state_dict_metadata[key]
            tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
            try:
                read_tensors(self._path, self._metadata, {key: tensor}, alone=True)
            except RanksFailedError as failed:
                raise failed.explained(f"{self._path}: could not be read", WAY_OUT) from None
            self._last = (key, tensor)
        return self._last[1]

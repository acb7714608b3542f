"""Tensors on disk, by DCP: a file a rank, written by one thread and synced, and `.metadata` that lists them.

Stock DCP with three differences: a file is flushed before it is synced (torch up to 2.13 syncs without a
flush); `.metadata`, a pickle, may name nothing but DCP's own records; and it holds no path, so that it reads
the same in another place and on another Python.
"""

import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from minititan.checkpoint.agreement import RanksFailedError
from minititan.config import ConfigError

METADATA = ".metadata"

_DCP = "torch.distributed.checkpoint"
_RECORDS = {
    (f"{_DCP}.metadata", "ChunkStorageMetadata"),
    (f"{_DCP}.metadata", "Metadata"),
    (f"{_DCP}.metadata", "MetadataIndex"),
    (f"{_DCP}.metadata", "TensorProperties"),
    (f"{_DCP}.metadata", "TensorStorageMetadata"),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}


class _SyncedFile:
    """A file opened for writing that is on the disk when it is closed."""

    def __init__(self, file: BinaryIO, files: "_SyncedFiles"):
        self._file = file
        self._files = files

    def write(self, data: Any) -> int:
        with self._files.noticing():
            return self._file.write(data)

    def flush(self) -> None:
        with self._files.noticing():
            self._file.flush()

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        if not self._file.closed:
            with self._files.noticing():
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()


class _SyncedFiles(FileSystem):
    """Keeps the first refusal of the operating system, which torch's serialiser hides in its own error."""

    def __init__(self) -> None:
        self.refusal: OSError | None = None

    @contextmanager
    def noticing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.refusal = self.refusal or error
            raise

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as file:
            if mode == "wb":
                synced = _SyncedFile(cast(BinaryIO, file), self)
                yield synced
                synced.close()
            else:
                yield file


class _Writer(FileSystemWriter):
    def __init__(self, path: Path):
        # More than one thread can lose the failure of a file.
        super().__init__(path, thread_count=1, sync_files=False, overwrite=False)
        self.fs = _SyncedFiles()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if not Path(self.path).is_dir():
            # Making it here would scatter the checkpoint over the disks of several machines.
            raise ConfigError(
                f"{self.path}: made by rank 0, not seen by others: all ranks must share the storage"
            )
        return super().prepare_local_plan(plan)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise self.fs.refusal or error from error

    def storage_meta(self) -> StorageMeta | None:
        return None


class _Reader(FileSystemReader):
    """Reads what `metadata` lists, without reading the metadata again."""

    def __init__(self, path: Path, metadata: Metadata):
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        try:
            return super().read_data(plan, planner)
        except OSError:
            raise
        except Exception as error:  # torch's deserialiser meets damage with RuntimeError and others
            cause = str(error).partition("\n")[0]
            raise ConfigError(f"{self.path}: damaged ({cause}); use another checkpoint") from error


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if module == "torch" or (module, name) in _RECORDS else None
        if (module, name) in _RECORDS or isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is not a record of tensors")


def read_metadata(path: Path) -> Metadata:
    """What the checkpoint in this folder holds. Raises ConfigError when that cannot be told."""
    try:
        with open(path / METADATA, "rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except OSError as error:
        raise ConfigError(f"{path / METADATA}: cannot be read ({error.strerror})") from error
    except Exception as error:  # a damaged pickle raises almost anything
        raise ConfigError(f"{path / METADATA}: damaged ({error}); use another checkpoint") from error
    if not isinstance(metadata, Metadata) or metadata.storage_data is None:
        raise ConfigError(f"{path / METADATA}: damaged (no list of tensors); use another checkpoint")
    return metadata


def check_files(path: Path, metadata: Metadata) -> None:
    """Raises ConfigError for each file that is missing or shorter than what the metadata says lies in it."""
    needed: dict[str, int] = {}
    for place in metadata.storage_data.values():
        end = place.offset + place.length
        needed[place.relative_path] = max(needed.get(place.relative_path, 0), end)
    faults: list[str] = []
    for name, size in sorted(needed.items()):
        file = path / name
        if not file.is_file():
            faults.append(f"{file}: missing; use another checkpoint")
        elif file.stat().st_size < size:
            faults.append(
                f"{file}: {file.stat().st_size} bytes, must be {size}: cut short; use another checkpoint"
            )
    if faults:
        raise ConfigError(*faults)


class _LatePlanner(DefaultSavePlanner):
    """Asks for each tensor when it is written, so that one is in memory at a time."""

    def __init__(self, read: Callable[[str], Tensor]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._read(index.fqn)


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], read: Callable[[str], Tensor] | None = None
) -> Metadata:
    """Writes the shards of all ranks into an existing folder; all ranks must call it.

    With `read`, which gives the values by key, `tensors` may be meta tensors, on one process. Raises
    RanksFailedError on all ranks when it failed on one.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner = planner if read is None else _LatePlanner(read)
    detached = {key: tensor.detach() for key, tensor in tensors.items()}
    with _dcp():
        return save(detached, storage_writer=_Writer(path), planner=planner)


def read_tensors(
    path: Path, metadata: Metadata, tensors: Mapping[str, Tensor], alone: bool = False
) -> None:
    """Overwrites `tensors`, each rank its own shards; all ranks must call it, unless one reads `alone`.

    Raises RanksFailedError on all ranks when it failed on one.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    detached = {key: tensor.detach() for key, tensor in tensors.items()}
    with _dcp():
        load(detached, storage_reader=_Reader(path, metadata), planner=planner, no_dist=alone)


@contextmanager
def _dcp() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:  # a BaseException: `except Exception` would let it through
            raise RanksFailedError.from_dcp(error) from None

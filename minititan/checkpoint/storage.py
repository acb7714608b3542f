"""Tensors on disk, by DCP: a file a rank, written by one thread and synced, and `.metadata` that lists them.

Stock DCP with these differences: a file is hashed while it is written, and flushed before it is synced
(torch up to 2.13 syncs without a flush); ranks must agree on a tensor that several have whole; `.metadata`, a
pickle, may name nothing but DCP's own records; and it holds no path, so that it reads the same in another
place and on another Python.
"""

import dataclasses
import hashlib
import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, is_initialized
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.serialization import get_crc32_options, set_crc32_options

from minititan import faults
from minititan.checkpoint.agreement import RanksFailedError, world_size
from minititan.checkpoint.manifest import COMMIT, WAY_OUT, File, Manifest, TensorInfo
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
    """A file opened for writing that is on the disk when it is closed, and hashed by then."""

    def __init__(self, file: BinaryIO, files: "_SyncedFiles"):
        self._file = file
        self._files = files
        self._digest = hashlib.sha256()
        self._size = 0

    def write(self, data: Any) -> int:
        self._digest.update(data)
        self._size += memoryview(data).nbytes
        with self._files.noticing():
            faults.point("checkpoint.write")
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

    def record(self) -> File:
        """What was written so far."""
        return File(size=self._size, sha256=self._digest.hexdigest())


class _SyncedFiles(FileSystem):
    """Keeps what was written, by name, and the first refusal of the operating system, which torch's
    serialiser hides in its own error.
    """

    def __init__(self) -> None:
        self.written: dict[str, File] = {}
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
                # DCP renames `.metadata.tmp` once it is whole.
                self.written[Path(path).name.removesuffix(".tmp")] = synced.record()
            else:
                yield file


class _Writer(FileSystemWriter):
    def __init__(self, path: Path, one_by_one: bool):
        # More than one thread can lose the failure of a file.
        super().__init__(path, thread_count=1, sync_files=False, overwrite=False)
        if one_by_one:  # else a tensor may be asked for before the last one is written, where there is a GPU
            self.per_thread_copy_ahead = 0
        self.fs = _SyncedFiles()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if not Path(self.path).is_dir():
            # Making it here would scatter the checkpoint over the disks of several machines.
            raise ConfigError(
                f"{self.path}: made by rank 0, not seen by others: all ranks must share the storage"
            )
        return super().prepare_local_plan(plan)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        checksums = get_crc32_options()
        set_crc32_options(False)  # a tenth of the time, for less than the SHA-256 tells
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise self.fs.refusal or error from error
        finally:
            set_crc32_options(checksums)

    def storage_meta(self) -> StorageMeta | None:
        return None


class _SavePlanner(DefaultSavePlanner):
    """Refuses a plain tensor that ranks have other values of: stock DCP keeps one of them without a word.

    Only plain tensors are compared, by hashes that travel with the plans: on several ranks they are small
    (the step counters of Adam), since parameters and moments are DTensors.
    """

    def __init__(self, read: Callable[[str], Tensor] | None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._read = read
        self._last: Tensor | None = None

    def lookup_object(self, index: MetadataIndex) -> Any:
        if self._read is None:
            return super().lookup_object(index)
        if self._last is not None:  # written by now, but torch up to 2.13 holds it until the file is done
            self._last.untyped_storage().resize_(0)
        self._last = self._read(index.fqn).clone()
        return self._last

    def create_local_plan(self) -> SavePlan:
        plain = {key: tensor for key, tensor in self.state_dict.items() if not isinstance(tensor, DTensor)}
        return dataclasses.replace(
            super().create_local_plan(),
            planner_data={key: _digest(tensor) for key, tensor in plain.items()} if world_size() > 1 else {},
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        first: dict[str, tuple[int, bytes]] = {}
        for rank, plan in enumerate(all_plans):
            for key, digest in plan.planner_data.items():
                other, known = first.setdefault(key, (rank, digest))
                if digest != known:
                    raise RuntimeError(f"{key} has other values on rank {other} than on rank {rank}")
        return super().create_global_plan(
            [dataclasses.replace(plan, planner_data=None) for plan in all_plans]
        )


def _digest(tensor: Tensor) -> bytes:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + content.tobytes()).digest()[:16]


class _Reader(FileSystemReader):
    """Reads what `metadata` lists, without reading the metadata again."""

    def __init__(self, path: Path, metadata: Metadata):
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        """Reads by as many threads as torch has: half of the time is the kernel's, on fresh memory."""
        threads = torch.get_num_threads()
        parts = [dataclasses.replace(plan, items=plan.items[i::threads]) for i in range(threads)]
        try:
            with ThreadPoolExecutor(threads) as pool:
                done, *_ = pool.map(lambda part: FileSystemReader.read_data(self, part, planner), parts)
            return done
        except OSError:
            raise
        except Exception as error:  # torch's deserialiser meets damage with RuntimeError and others
            cause = str(error).partition("\n")[0]
            raise ConfigError(f"{self.path}: damaged ({cause}); {WAY_OUT}") from error


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if module == "torch" or (module, name) in _RECORDS else None
        if (module, name) in _RECORDS or isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is not a record of tensors")


def read_metadata(path: Path, manifest: Manifest) -> Metadata:
    """What lies where in the checkpoint in this folder. Raises ConfigError when it is not what the manifest
    says, or cannot be told.
    """
    where = path / METADATA
    try:
        with open(where, "rb") as file:
            metadata = _MetadataUnpickler(file).load()
        files = {place.relative_path for place in metadata.storage_data.values()}
        infos = _infos(metadata)
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read ({error.strerror})") from error
    except Exception as error:  # a damaged pickle raises almost anything
        raise ConfigError(f"{where}: damaged ({error}); {WAY_OUT}") from error
    if foreign := files - manifest.files.keys():
        raise ConfigError(f"{where}: names {min(foreign)}, which is not in {COMMIT}; {WAY_OUT}")
    if infos != manifest.tensors:
        raise ConfigError(f"{where}: has other tensors than {COMMIT}; {WAY_OUT}")
    return metadata


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    group: ProcessGroup | None = None,
    read: Callable[[str], Tensor] | None = None,
) -> tuple[dict[str, TensorInfo], dict[str, File]]:
    """Writes the shards of all ranks into an existing folder; all ranks must call it.

    With `read`, which gives values by key, `tensors` are meta tensors: one at a time is in memory. Returns
    what the tensors of all ranks are, and the files that this rank wrote, by name. Raises RanksFailedError on
    all ranks when it failed on one.
    """
    detached = {key: tensor.detach() for key, tensor in tensors.items()}
    writer = _Writer(path, one_by_one=read is not None)
    with _dcp():
        metadata = save(detached, storage_writer=writer, planner=_SavePlanner(read), process_group=group)
    return _infos(metadata), writer.fs.written


def _infos(metadata: Metadata) -> dict[str, TensorInfo]:
    infos = {}
    for key, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)  # the reader of metadata lets nothing else in
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        infos[key] = TensorInfo(shape=tuple(entry.size), dtype=dtype)
    return infos


def read_tensors(path: Path, metadata: Metadata, tensors: Mapping[str, Tensor], alone: bool = False) -> None:
    """Overwrites `tensors`, each rank its own shards; all ranks must call it, unless one reads `alone`.

    Raises RanksFailedError on all ranks when it failed on one.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    detached = {key: tensor.detach() for key, tensor in tensors.items()}
    with _dcp(alone):
        load(detached, storage_reader=_Reader(path, metadata), planner=planner, no_dist=alone)


@contextmanager
def _dcp(alone: bool = False) -> Iterator[None]:
    with ExitStack() as stack:
        # Only where DCP warns of it: filters belong to all threads of a run.
        if alone or not is_initialized():
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:  # a BaseException: `except Exception` would let it through
            raise RanksFailedError.from_dcp(error) from None

"""Tensors by name in foreign files: a folder of safetensors, or a plain state dict that `torch.save` wrote.

The files are not trusted: names in an index stay inside the folder, pickles may hold nothing but tensors.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minititan.config import ConfigError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_OTHER_TYPES = "only float64, float32, float16 and bfloat16 are read, no quantised weights"
_AGAIN = "fetch it again"


@dataclass(frozen=True)
class Entry:
    """A tensor in a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | str  # a string: a type that is not read


class Files(Protocol):
    """Tensors in files; `where` has one slice for each of the first dimensions, () for the whole."""

    path: Path

    @property
    def entries(self) -> Mapping[str, Entry]: ...

    def read(self, name: str, where: tuple[slice, ...] = ()) -> Tensor: ...


class SafetensorsFolder:
    """The safetensors of a folder: those that its index names, or the one file that it has."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if (path / SINGLE).is_file():
            self.entries = _entries_of(path / SINGLE)
        elif (path / INDEX).is_file():
            self.entries = _indexed(path)
        else:
            raise ConfigError(f"{path}: has no {SINGLE} and no {INDEX}; {_other_files(path)}")

    def read(self, name: str, where: tuple[slice, ...] = ()) -> Tensor:
        file = self.entries[name].file
        try:
            # Opened for each tensor: pages of a mapped file count as memory of the process until it closes.
            with safe_open(file, "pt") as opened:
                return opened.get_slice(name)[where] if where else opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(_unreadable(file, error)) from None


class StateDictFile:
    """A state dict that `torch.save` wrote, memory-mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            found: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except OSError as error:
            raise ConfigError(_unreadable(path, error)) from None
        except Exception as error:  # a file of another kind raises almost anything
            reason = str(error).strip().partition("\n")[0]
            rule = f"not a state dict that can be read safely ({reason})"
            raise ConfigError(
                f"{path}: {rule}; save a plain one: torch.save(model.state_dict(), FILE)"
            ) from None
        strangers = [name for name, value in _items(found) if not isinstance(value, Tensor)]
        if strangers or not found:
            rule = (
                f"holds more than tensors by name ({', '.join(map(str, strangers[:3]))})" if strangers else ""
            )
            way_out = "save the state dict alone: torch.save(model.state_dict(), FILE)"
            raise ConfigError(f"{path}: {rule or 'holds no tensors by name'}; {way_out}")
        self._tensors: dict[str, Tensor] = found
        self.entries = {
            name: Entry(path, tuple(tensor.shape), _known(tensor.dtype)) for name, tensor in found.items()
        }

    def read(self, name: str, where: tuple[slice, ...] = ()) -> Tensor:
        return self._tensors[name][where]


def open_files(path: Path) -> Files:
    """The tensors of a folder of safetensors or of a `.pth` file. Raises ConfigError."""
    if path.is_dir():
        return SafetensorsFolder(path)
    if path.suffix == ".safetensors" and path.is_file():
        way_out = f"give the folder, {path.parent}, with its config.json"
        raise ConfigError(f"{path}: is one file of a model; {way_out}")
    if not path.exists():
        raise ConfigError(
            f"{path}: no such file or folder; give a folder in Hugging Face's form or a .pth file"
        )
    return StateDictFile(path)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; a name that is in an object twice is an error. Raises ConfigError."""
    try:
        found = json.loads(path.read_bytes(), object_pairs_hook=_no_repeats)
    except OSError as error:
        raise ConfigError(_unreadable(path, error)) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON ({error}); {_AGAIN}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: must hold a JSON object; {_AGAIN}")
    return found


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if (
        repeated := sorted({name for name in names if names.count(name) > 1})
        if len(set(names)) < len(names)
        else []
    ):
        raise ValueError(f"{', '.join(repeated)}: named twice")
    return dict(pairs)


def _indexed(path: Path) -> dict[str, Entry]:
    """The tensors that the index of the folder names, each in the file that it names."""
    index = path / INDEX
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(f, str) for f in places.values()):
        raise ConfigError(f"{index}: weight_map must give each tensor a file; {_AGAIN}")
    files = sorted(set(places.values()))
    for name in files:
        if Path(name).name != name or not name.endswith(".safetensors"):
            rule = "must be the name of a .safetensors file in the same folder"
            raise ConfigError(f"{index}: {json.dumps(name)}: {rule}; do not trust this folder")
    missing = [name for name in files if not (path / name).is_file()]
    if missing:
        raise ConfigError(*(f"{path / name}: missing, {INDEX} names it; {_AGAIN}" for name in missing))
    entries: dict[str, Entry] = {}
    faults: list[str] = []
    for name in files:
        for tensor, entry in _entries_of(path / name).items():
            if places.get(tensor) == name:
                entries[tensor] = entry
            else:
                said = f"{INDEX} says {places[tensor]}" if tensor in places else f"{INDEX} does not name it"
                faults.append(f"{path / name}: has {tensor}, and {said}; {_AGAIN}")
    lacking = [
        f"{path / places[t]}: has no {t}, which {INDEX} says; {_AGAIN}" for t in places.keys() - entries
    ]
    if faults or lacking:
        raise ConfigError(*_few(sorted(lacking) + faults))
    return entries


def _entries_of(file: Path) -> dict[str, Entry]:
    try:
        with safe_open(file, "pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {
                name: Entry(file, tuple(s.get_shape()), DTYPES.get(s.get_dtype()) or s.get_dtype())
                for name, s in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise ConfigError(_unreadable(file, error)) from None


def type_faults(files: Files) -> list[str]:
    """One line where tensors are of a type that is not read (8 bits and less: quantised weights)."""
    others = {name: entry for name, entry in files.entries.items() if isinstance(entry.dtype, str)}
    if not others:
        return []
    name, entry = next(iter(others.items()))
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    return [f"{entry.file}: {name} is {entry.dtype}{more}: {_OTHER_TYPES}; use a checkpoint in bfloat16"]


def _known(dtype: torch.dtype) -> torch.dtype | str:
    return dtype if dtype in DTYPES.values() else str(dtype).removeprefix("torch.")


def _items(found: Any) -> Iterable[tuple[Any, Any]]:
    return found.items() if isinstance(found, dict) else [(type(found).__name__, found)]


def _few(lines: list[str], shown: int = 5) -> list[str]:
    return lines[:shown] + (
        [f"... and {len(lines) - shown} more faults of this kind"] if len(lines) > shown else []
    )


def _other_files(path: Path) -> str:
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in (".bin", ".pth", ".pt"))
    if pickles:
        return f"convert {pickles[0]} to safetensors, or import it: minititan import {path / pickles[0]}"
    return "give a folder with config.json and safetensors"


def _unreadable(file: Path, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{file}: missing; {_AGAIN}"
    if isinstance(error, OSError):
        return f"{file}: cannot be read ({error.strerror or error})"
    return f"{file}: damaged ({error}); {_AGAIN}"

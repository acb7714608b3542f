"""What a checkpoint holds against what a run asks for: sections, and the strict comparison of tensors.

Keys are `model.<name>` and `optimizer.<name>.<state>`: the first word is the section.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from minititan.config import ConfigError

EXCLUDABLE = ("model", "optimizer", "lr_scheduler", "dataloader", "train_state")
OTHER_MODEL = "use the model and arguments that it was saved with"
OTHER_OPTIMIZER = (
    'use the optimizer that it was saved with, or checkpoint.exclude_from_loading = ["optimizer"]'
)
_NAMES_SHOWN = 5


def section(key: str) -> str:
    """The section that a tensor's key belongs to."""
    return key.partition(".")[0]


def check_exclude(exclude: Collection[str]) -> None:
    """Raises ConfigError for names that cannot be left out of loading."""
    unknown = [name for name in exclude if name not in EXCLUDABLE]
    if unknown:
        raise ConfigError(
            f"checkpoint.exclude_from_loading = {', '.join(unknown)}: must be among {', '.join(EXCLUDABLE)}"
        )


def wanted(tensors: Mapping[str, Tensor], exclude: Collection[str]) -> dict[str, Tensor]:
    """The tensors to load: without excluded sections."""
    return {key: tensor for key, tensor in tensors.items() if section(key) not in exclude}


def unexpected(tensors: Mapping[str, Tensor], metadata: Metadata) -> set[str]:
    """Saved keys of the sections that `tensors` has, which this rank does not ask for."""
    sections = {section(key) for key in tensors}
    return {key for key in metadata.state_dict_metadata if section(key) in sections} - tensors.keys()


def faults(path: object, tensors: Mapping[str, Tensor], metadata: Metadata, cast: bool) -> list[str]:
    """One line for each kind of difference: keys the checkpoint lacks, other shapes, and, where tensors are
    not `cast`, other dtypes.
    """
    saved = metadata.state_dict_metadata
    missing = [key for key in tensors if key not in saved]
    shapes: list[str] = []
    dtypes: list[str] = []
    for key, tensor in tensors.items():
        entry = saved.get(key)
        if entry is None:
            continue
        assert isinstance(entry, TensorStorageMetadata)  # the reader of metadata lets nothing else in
        if entry.size != tensor.shape:
            shapes.append(f"{key} {list(entry.size)}, here {list(tensor.shape)}")
        elif entry.properties.dtype != tensor.dtype and not cast:
            dtypes.append(f"{key} {_short(entry.properties.dtype)}, here {_short(tensor.dtype)}")
    lines: list[str] = []
    if missing:
        lines.append(f"{path}: lacks {listed(missing)}; {_way_out(missing, saved)}")
    if shapes:
        lines.append(f"{path}: other shapes: {listed(shapes)}; {OTHER_MODEL}")
    if dtypes:
        lines.append(f"{path}: other dtypes: {listed(dtypes)}; use the training.dtype that it was saved with")
    return lines


def listed(names: Sequence[str]) -> str:
    """The first few names and how many more there are."""
    more = len(names) - _NAMES_SHOWN
    return "; ".join(names[:_NAMES_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def other_part(keys: Iterable[str]) -> str:
    """The way out where keys differ between run and checkpoint."""
    return OTHER_OPTIMIZER if {section(key) for key in keys} == {"optimizer"} else OTHER_MODEL


def _way_out(missing: Iterable[str], saved: Iterable[str]) -> str:
    gone = {section(key) for key in missing} - {section(key) for key in saved}
    if gone == {"optimizer"}:
        return (
            "it holds a model only: set checkpoint.initial_load_path to start from it, "
            'or checkpoint.exclude_from_loading = ["optimizer"]'
        )
    return other_part(missing)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

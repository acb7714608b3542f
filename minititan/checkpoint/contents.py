"""What a checkpoint holds against what a run asks for: sections, and the comparison of tensors.

Keys are `model.<parameter>` and `optimizer.<parameter>.<state>`: the first word is the section.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from minititan.checkpoint.manifest import TensorInfo
from minititan.config import ConfigError

EXCLUDABLE = ("model", "optimizer", "lr_scheduler", "dataloader", "train_state")
OTHER_MODEL = "use the model and arguments that it was saved with"
OTHER_OPTIMIZER = (
    'use the optimizer that it was saved with, or checkpoint.exclude_from_loading = ["optimizer"]'
)
OTHER_DTYPE = "use the training.dtype that it was saved with"
_NAMES_SHOWN = 5
_RECORD_BYTES = 2048  # of a tensor beside its values, in a shard and in the metadata; about


@dataclass
class Differences:
    """What keeps tensors from being loaded: keys of each kind, and what to say of them."""

    missing: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, str] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)

    def keys(self) -> set[str]:
        return {*self.missing, *self.shapes, *self.dtypes}


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


def info_of(tensor: Tensor) -> TensorInfo:
    """What the manifest says of such a tensor."""
    return TensorInfo(shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def unexpected(tensors: Collection[str], saved: Collection[str]) -> set[str]:
    """Saved keys of the sections that `tensors` has, which this rank does not ask for."""
    sections = {section(key) for key in tensors}
    return {key for key in saved if section(key) in sections} - set(tensors)


def differences(
    tensors: Mapping[str, Tensor], saved: Mapping[str, TensorInfo], cast: bool = False
) -> Differences:
    """The keys that the checkpoint lacks, or has in another shape or, where values are not cast, dtype."""
    found = Differences()
    for key, tensor in tensors.items():
        here, there = info_of(tensor), saved.get(key)
        if there is None:
            found.missing[key] = key
        elif there.shape != here.shape:
            found.shapes[key] = f"{key} {list(there.shape)}, here {list(here.shape)}"
        elif there.dtype != here.dtype and not cast:
            found.dtypes[key] = f"{key} {there.dtype}, here {here.dtype}"
    return found


def faults(found: Differences, saved: Collection[str]) -> list[tuple[str, str]]:
    """What is different and the way out, for each kind of difference."""
    kinds = (
        ("lacks", found.missing, _way_out(found.missing, saved)),
        ("other shapes:", found.shapes, OTHER_MODEL),
        ("other dtypes:", found.dtypes, OTHER_DTYPE),
    )
    return [(f"{what} {listed([*keys.values()])}", way_out) for what, keys, way_out in kinds if keys]


def without_halves(tensors: Collection[str], skipped: set[str]) -> set[str]:
    """`skipped` and what must not be loaded without it: the optimizer's state of a parameter is taken whole,
    and not beside other values of that parameter.
    """
    parameters = {_parameter(key) for key in skipped}
    states = {key for key in tensors if section(key) == "optimizer"}
    return skipped | {key for key in states if _parameter(key) in parameters}


def _parameter(key: str) -> str:
    name = key.partition(".")[2]
    return name.rpartition(".")[0] if section(key) == "optimizer" else name


def listed(names: Sequence[str]) -> str:
    """The first few names and how many more there are."""
    more = len(names) - _NAMES_SHOWN
    return "; ".join(names[:_NAMES_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def other_part(keys: Iterable[str]) -> str:
    """The way out where keys differ between run and checkpoint."""
    return OTHER_OPTIMIZER if {section(key) for key in keys} == {"optimizer"} else OTHER_MODEL


def _way_out(missing: Iterable[str], saved: Collection[str]) -> str:
    gone = {section(key) for key in missing} - {section(key) for key in saved}
    if gone == {"optimizer"}:
        return (
            "it holds a model only: set checkpoint.initial_load_path to start from it in another "
            "job.dump_folder, checkpoint.load_step to go on from an earlier step, "
            'or checkpoint.exclude_from_loading = ["optimizer"]'
        )
    return other_part(missing)


def space(tensors: Mapping[str, Tensor]) -> tuple[str, int]:
    """The bytes that these tensors, whole, take on the disk, under a name that depends on their keys."""
    needed = sum(tensor.numel() * tensor.itemsize + _RECORD_BYTES for tensor in tensors.values())
    return f"{min(tensors, default='')} and {len(tensors)} more", needed

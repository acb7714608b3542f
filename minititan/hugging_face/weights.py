"""The parameters of a model and the tensors of Hugging Face's form that hold them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from minititan.config import ConfigError
from minititan.hugging_face.reading import Files, type_faults
from minititan.init import located_part
from minititan.models.hugging_face import HuggingFaceForm, matched, tensor_name

_NAMES_SHOWN = 5


@dataclass(frozen=True)
class Parameter:
    """A parameter of the plain model and its tensors: one of its shape, or those stacked to it."""

    shape: tuple[int, ...]
    tensors: tuple[str, ...]
    stacked: bool
    tied: tuple[str, ...] = ()  # names under which files may have its tensor too

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        return self.shape[1:] if self.stacked else self.shape


def parameters_of(form: HuggingFaceForm, shapes: Mapping[str, Sequence[int]]) -> dict[str, Parameter]:
    """The parameters of these names and shapes, with their tensors."""
    found = {}
    for name, shape in shapes.items():
        template = tensor_name(form, name)
        stacked = "#" in template
        numbers = range(shape[0]) if stacked else (0,)
        found[name] = Parameter(tuple(shape), tuple(template.replace("#", str(i)) for i in numbers), stacked)
    return found


def parameters_of_model(form: HuggingFaceForm, model: nn.Module) -> dict[str, Parameter]:
    """The same for a model; a tied weight has the names of its others in `tied`."""
    named = dict(model.named_parameters())
    parameters = parameters_of(form, {name: tuple(p.shape) for name, p in named.items()})
    for other, parameter in model.named_parameters(remove_duplicate=False):
        if other not in named:
            name = next(name for name, first in named.items() if first is parameter)
            tied = (*parameters[name].tied, tensor_name(form, other))
            parameters[name] = replace(parameters[name], tied=tied)
    return parameters


def matched_to(
    files: Files, form: HuggingFaceForm, parameters: Mapping[str, Parameter]
) -> dict[str, Parameter]:
    """The parameters with the names under which the files have their tensors.

    Raises ConfigError with what is missing, left over, or of another shape or type.
    """
    there = files.entries
    found = {}
    for name, parameter in parameters.items():
        names = (*parameter.tensors, *parameter.tied)
        if parameter.tied and (present := [tensor for tensor in names if tensor in there]):
            # Writers keep any one of the names of a tied weight, or all.
            parameter = replace(parameter, tensors=(present[0],), tied=tuple(present[1:]))
        found[name] = parameter
    used = {tensor for parameter in found.values() for tensor in (*parameter.tensors, *parameter.tied)}
    left = [n for n in there if n not in used and not any(matched(p, n) for p in form.ignored)]
    missing = [n for parameter in found.values() for n in parameter.tensors if n not in there]
    shapes = [
        f"{tensor} {list(there[tensor].shape)}, here {list(parameter.tensor_shape)}"
        for parameter in found.values()
        for tensor in (*parameter.tensors, *parameter.tied)
        if tensor in there and there[tensor].shape != parameter.tensor_shape
    ]
    way_out = "use the model and arguments that the files are of"
    lines = [
        f"{files.path}: {rule}: {_listed(names)}; {way_out}"
        for rule, names in (("lacks", missing), ("has more than the model", left), ("other shapes", shapes))
        if names
    ]
    if lines := type_faults(files) or lines:
        raise ConfigError(*lines)
    return found


def check_tied(files: Files, parameters: Mapping[str, Parameter]) -> None:
    """Raises ConfigError where the files have other values under the names of a tied weight."""
    for parameter in parameters.values():
        for other in parameter.tied:
            if not torch.equal(files.read(other), files.read(parameter.tensors[0])):
                rule = f"{other} differs from {parameter.tensors[0]}, with which the model ties it"
                raise ConfigError(f"{files.path}: {rule}; set tie_word_embeddings to false")


def dtype_of(files: Files, parameter: Parameter) -> torch.dtype:
    """The type of a parameter in the files: the widest of its tensors'."""
    dtypes = (files.entries[tensor].dtype for tensor in parameter.tensors)
    # Others were refused when the names were matched.
    return max((each for each in dtypes if isinstance(each, torch.dtype)), key=lambda each: each.itemsize)


def fill(local: Tensor, offset: Sequence[int], files: Files, parameter: Parameter) -> None:
    """Set a part of a parameter, which begins at `offset`, reading no more than that part."""
    if not local.numel():
        return
    where = tuple(slice(start, start + size) for start, size in zip(offset, local.shape, strict=True))
    if not parameter.stacked:
        local.copy_(files.read(parameter.tensors[0], where))
        return
    for row, tensor in zip(local, parameter.tensors[where[0]], strict=True):
        row.copy_(files.read(tensor, where[1:]))


def read_whole(files: Files, parameter: Parameter) -> Tensor:
    """A parameter's values in the type of the files."""
    if not parameter.stacked:
        return files.read(parameter.tensors[0])
    whole = torch.empty(parameter.shape, dtype=dtype_of(files, parameter))
    fill(whole, (0,) * whole.ndim, files, parameter)
    return whole


@torch.no_grad()
def load_into(
    model_parameters: Mapping[str, Tensor], files: Files, parameters: Mapping[str, Parameter]
) -> None:
    """Set this rank's parts of the parameters, cast to their types."""
    for name, tensor in model_parameters.items():
        local, offset = located_part(tensor)
        fill(local, offset, files, parameters[name])


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f", and {more} more" if more > 0 else "")

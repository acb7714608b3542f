"""Models on the meta device: names and shapes, no numbers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@contextmanager
def on_meta() -> Iterator[None]:
    """Make modules on the meta device."""
    with torch.device("meta"), _WithoutValues():
        yield


class _WithoutValues(TorchFunctionMode):
    """Leaves `torch.nn.init` out for tensors without numbers.

    It would do nothing to them, but take a third of the time, and once for all load torch's compiler: the
    meta device has `uniform_` from there (torch 2.13; 1.3 s).
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)

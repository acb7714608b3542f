"""A unit: a module whose computation the parallelisms wrap one after another, without wrapper modules.

Module and parameter names stay those of the plain model, and what each parallelism does is one assignment.
"""

from collections.abc import Callable
from typing import Any

from torch import nn


class Unit:
    """The named module, the function that computes its forward, and what that takes before the module's
    inputs.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self.compute: Callable[..., Any] = module.forward  # checkpointing and compile wrap this
        self.first_inputs: Callable[[], tuple[Any, ...]] = tuple  # evaluated outside of what they wrap

    def install(self) -> None:
        """Make the wrapped computation the module's forward."""
        compute, first_inputs = self.compute, self.first_inputs

        def forward(*inputs: Any) -> Any:
            return compute(*first_inputs(), *inputs)

        self.module.forward = forward

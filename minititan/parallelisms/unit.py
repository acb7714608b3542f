"""A unit: a module whose computation the parallelisms wrap one after another, without wrapper modules.

Module and parameter names stay those of the plain model, and what each parallelism does is one assignment.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Unwrap = Callable[[DTensor], Tensor]  # a parameter -> what this rank computes with


class Unit:
    """The named module, the function that computes its forward, and what that takes before the module's
    inputs.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self.compute: Callable[..., Any] = module.forward  # checkpointing and compile wrap this
        self.first_inputs: Callable[[], tuple[Any, ...]] = tuple  # evaluated outside of what they wrap

    def localize(self, unwraps: Mapping[str, Unwrap]) -> None:
        """Make the unit compute on the local tensors of its DTensors, unwrapped anew in each forward.

        `unwraps` are by the name of the parameter in the model.
        """
        module = self.module
        own = {name: unwraps.get(f"{self.name}.{name}") for name, _ in module.named_parameters()}
        if not any(own.values()):
            return
        # A second view of the module with hooks of its own: sharing them would run FSDP's hooks twice.
        view = object.__new__(type(module))
        view.__dict__.update(module.__dict__)
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            view.__dict__[hooks] = type(module.__dict__[hooks])()

        def compute(parameters: dict[str, Tensor], *inputs: Any) -> Any:
            return torch.func.functional_call(view, parameters, inputs)

        def parameters() -> tuple[dict[str, Tensor]]:
            named: Any = module.named_parameters()
            return ({name: unwrap(p) for name, p in named if (unwrap := own[name]) is not None},)

        self.compute, self.first_inputs = compute, parameters

    def install(self) -> None:
        """Make the wrapped computation the module's forward."""
        compute, first_inputs = self.compute, self.first_inputs

        def forward(*inputs: Any) -> Any:
            return compute(*first_inputs(), *inputs)

        self.module.forward = forward

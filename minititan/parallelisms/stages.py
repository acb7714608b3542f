"""Stages of a pipeline as parts of the model: the model with modules left out.

Apart from `pipeline.py`, which brings torch's schedules and with them its compiler: every run checks its
model's stages, few have a pipeline.
"""

from collections.abc import Sequence
from typing import Any

import torch


def keep_modules(model: Any, names: Sequence[str]) -> None:
    """Leave those modules of `model`, such as `norm` and `layers.3`, and take the others out."""
    for name, _ in list(model.named_children()):
        if name != "layers" and name not in names:
            setattr(model, name, None)
    for name in list(model.layers):
        if f"layers.{name}" not in names:
            del model.layers[name]


@torch.no_grad()
def stage_fault(part: Any, width: int) -> str | None:
    """Return why a model cannot be cut into stages; `part` is one without any of its modules."""
    keep_modules(part, ())
    x, positions = torch.ones(1, 4, width), torch.arange(4).expand(1, 4)
    try:
        same = torch.equal(part(x, positions=positions), x)
    except Exception as error:  # whatever the model's own code meets
        return f"its forward does not go on without absent parts ({type(error).__name__}: {error})"
    return None if same else "its forward changes the stream where all parts are absent"

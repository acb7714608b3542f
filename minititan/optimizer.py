"""Adam and AdamW over named parameters, their state as named tensors, and the schedule as a pure function.

The state of every trainable parameter exists from the start (step 0, zero moments), so that what is saved and
what is loaded is always complete. Hyper-parameters are not state: they come from the config at every start.
The schedule is the warm-up, stable, decay one of TorchTitan 0.2.2.
"""

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor, nn

from minititan.config import ConfigError

OptimizerName = Literal["AdamW", "Adam"]
Implementation = Literal["for-loop", "foreach", "fused"]
DecayType = Literal["linear", "sqrt", "cosine"]

_CLASSES: dict[str, type[torch.optim.Adam]] = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}


def build_optimizer(
    named_parameters: Mapping[str, nn.Parameter],
    *,
    name: OptimizerName,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    implementation: Implementation,
    no_decay: Sequence[str] = (),
) -> torch.optim.Optimizer:
    """An optimizer of the trainable parameters, its state already there.

    Parameters whose name matches one of the `no_decay` patterns (`*`, `?`, `[...]`, over the whole name)
    get no weight decay. Raises ConfigError for a pattern that matches no parameter.
    """
    undecayed = without_decay(no_decay, list(named_parameters))
    trainable = {key: p for key, p in named_parameters.items() if p.requires_grad}
    groups = [
        {"params": [p for key, p in trainable.items() if key not in undecayed], "weight_decay": weight_decay},
        {"params": [p for key, p in trainable.items() if key in undecayed], "weight_decay": 0.0},
    ]
    optimizer = _CLASSES[name](
        [group for group in groups if group["params"]],
        lr=lr,
        betas=betas,
        eps=eps,
        foreach=implementation == "foreach",
        fused=implementation == "fused",
    )
    for parameter in trainable.values():
        optimizer.state[parameter] = _initial_state(parameter, fused=implementation == "fused")
    return optimizer


def without_decay(patterns: Sequence[str], names: Sequence[str]) -> set[str]:
    """The names that a `no_decay` pattern matches. Raises ConfigError for a pattern that matches none."""
    matched: set[str] = set()
    faults: list[str] = []
    for pattern in patterns:
        found = {name for name in names if fnmatchcase(name, pattern)}
        if not found:
            near = ", ".join(difflib.get_close_matches(pattern, names, n=1, cutoff=0.0))
            rule = f"must match a parameter's name; nearest: {near}"
            faults.append(f'optimizer.no_decay = ["{pattern}"]: {rule}')
        matched |= found
    if faults:
        raise ConfigError(*faults)
    return matched


def _initial_state(parameter: nn.Parameter, *, fused: bool) -> dict[str, Tensor]:
    # As torch.optim.Adam makes it at its first step: `step` is on the host unless the fused kernel reads it.
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu"),
        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
    }


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, named_parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """The live state as `<parameter name>.exp_avg`, `.exp_avg_sq`, `.step`, to be loaded in place."""
    return {
        f"{name}.{key}": tensor
        for name, parameter in named_parameters.items()
        if parameter.requires_grad
        for key, tensor in optimizer.state[parameter].items()
    }


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


@dataclass(frozen=True)
class LRPhases:
    """Lengths in steps, after clamping; they add up to `total_steps` + 1 (see `lr_at`)."""

    warmup: int
    stable: int
    decay: int


def lr_phases(*, total_steps: int, warmup_steps: int, decay_ratio: float | None) -> LRPhases:
    """The phases of a schedule: warm-up clamped to its length, decay to the rest (all of it when unset)."""
    warmup = min(warmup_steps, total_steps)
    rest = total_steps - warmup
    decay = rest if decay_ratio is None else min(round(total_steps * decay_ratio), rest)
    return LRPhases(warmup, total_steps + 1 - warmup - decay, decay)


def lr_at(
    step: int,
    *,
    total_steps: int,
    warmup_steps: int,
    decay_ratio: float | None = None,
    decay_type: DecayType = "linear",
    min_lr_factor: float = 0.0,
) -> float:
    """The factor on `optimizer.lr` for the update after `step` complete ones (the first step of a run is 0).

    One virtual step is appended to the stable phase, so that the rate is above its minimum inside the run;
    past the end it stays at the minimum.
    """
    phases = lr_phases(total_steps=total_steps, warmup_steps=warmup_steps, decay_ratio=decay_ratio)
    before_decay = phases.warmup + phases.stable
    if step < phases.warmup:
        return (step + 1) / phases.warmup
    if step < before_decay or phases.decay == 0:
        return 1.0
    progress = min((step + 1 - before_decay) / phases.decay, 1.0)
    if decay_type == "linear":
        factor = 1 - progress
    elif decay_type == "sqrt":
        factor = 1 - math.sqrt(progress)
    else:
        factor = (1 + math.cos(math.pi * progress)) / 2
    return min_lr_factor + (1 - min_lr_factor) * factor

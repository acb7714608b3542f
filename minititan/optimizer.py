"""Adam, AdamW and Muon over named parameters, their state as named tensors, and the schedule as a pure
function.

Each parameter has a rule (algorithm, peak learning rate, weight decay) by its name. The state of every
trainable parameter exists from the start (step 0, zero moments), so that what is saved and what is loaded is
always complete. Hyper-parameters are not state: they come from the config at every start. The schedule is the
warm-up, stable, decay one of TorchTitan 0.2.2.
"""

import difflib
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from minititan.config import ConfigError
from minititan.distributed import local_part
from minititan.muon import AdjustLR, muon

OptimizerName = Literal["AdamW", "Adam", "Muon"]
Implementation = Literal["for-loop", "foreach", "fused"]
DecayType = Literal["linear", "sqrt", "cosine"]


@dataclass(frozen=True)
class ParamGroup:
    """What differs for parameters whose whole name matches `pattern` (`*`, `?`, `[...]`); None: nothing."""

    pattern: str
    name: OptimizerName | None = None
    lr: float | None = None
    weight_decay: float | None = None


@dataclass(frozen=True)
class Rule:
    """How a parameter is updated; `lr` is the peak of the schedule."""

    name: OptimizerName
    lr: float
    weight_decay: float


def rules_of(
    named_parameters: Mapping[str, Tensor],
    *,
    name: OptimizerName,
    lr: float,
    weight_decay: float,
    no_decay: Sequence[str] = (),
    param_groups: Sequence[ParamGroup] = (),
) -> dict[str, Rule]:
    """The rule of every parameter.

    The first group whose pattern matches counts, and its weight decay wins over `no_decay`. An overall "Muon"
    is for the matrices of `layers`; the others get AdamW. Raises ConfigError for a pattern that matches no
    parameter, and where a group asks for Muon for what is no matrix.
    """
    undecayed = without_decay(no_decay, list(named_parameters))
    faults = [
        f"optimizer.param_groups = {_nearest(group.pattern, named_parameters)}"
        for group in param_groups
        if not any(fnmatchcase(key, group.pattern) for key in named_parameters)
    ]
    rules: dict[str, Rule] = {}
    for key, parameter in named_parameters.items():
        hidden = _is_matrix(key, parameter) and key.startswith("layers.")
        overall: OptimizerName = "AdamW" if name == "Muon" and not hidden else name
        rule = Rule(overall, lr, 0.0 if key in undecayed else weight_decay)
        group = next((group for group in param_groups if fnmatchcase(key, group.pattern)), None)
        if group is not None:
            changes = {"name": group.name, "lr": group.lr, "weight_decay": group.weight_decay}
            rule = replace(rule, **{field: value for field, value in changes.items() if value is not None})
            if group.name == "Muon" and not _is_matrix(key, parameter):
                text = (
                    f"Muon is for matrices, {key} has the shape {list(parameter.shape)}; narrow the pattern"
                )
                faults.append(f'optimizer.param_groups = ["{group.pattern}"]: {text}')
        rules[key] = rule
    if faults:
        raise ConfigError(*faults)
    return rules


def _is_matrix(key: str, parameter: Tensor) -> bool:
    """Whether a parameter is a matrix or, of experts, a stack of them; their biases are none."""
    return parameter.ndim in (2, 3) and not key.endswith("bias")


class GroupedOptimizer(torch.optim.Optimizer):
    """Groups of parameters, each with the algorithm of its rule."""

    # On the device, 1 where `step` is to change nothing, which the host need not know; Adam must be fused.
    left_out: Tensor | None = None

    # Without wrappers that only the compiler needs and that load it: 0.7 s of a start.
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient; every rank must call it, without a closure."""
        assert closure is None
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            states = [self.state[p] for p in parameters]
            if group["name"] == "Muon":
                momenta = [state["momentum_buffer"] for state in states]
                shared = {key: group[key] for key in ("lr", "weight_decay")}
                muon(parameters, momenta, **shared, **group["muon"], left_out=self.left_out)
            elif parameters:
                _adam(parameters, states, group, self.left_out)


def build_optimizer(
    named_parameters: Mapping[str, nn.Parameter],
    *,
    whole: Mapping[str, Tensor] | None = None,
    name: OptimizerName,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    implementation: Implementation,
    no_decay: Sequence[str] = (),
    param_groups: Sequence[ParamGroup] = (),
    state_dtype: torch.dtype | None = None,
    muon_momentum: float = 0.95,
    muon_ns_steps: int = 5,
    muon_adjust_lr: AdjustLR = "match_rms_adamw",
    muon_dtype: torch.dtype = torch.bfloat16,
) -> GroupedOptimizer:
    """An optimizer of the trainable parameters by their rules (see `rules_of`), its state already there.

    `whole`: all parameters of the model, where these are some, for patterns must match one. `implementation`
    is Adam's. `state_dtype` is that of the moments; None: the parameter's.
    """
    rules = rules_of(
        named_parameters if whole is None else whole,
        name=name,
        lr=lr,
        weight_decay=weight_decay,
        no_decay=no_decay,
        param_groups=param_groups,
    )
    trainable = {key: p for key, p in named_parameters.items() if p.requires_grad}
    groups: dict[Rule, list[nn.Parameter]] = {}
    for key, parameter in trainable.items():
        groups.setdefault(rules[key], []).append(parameter)
    constants = {
        "betas": betas,
        "eps": eps,
        "fused": implementation == "fused",
        "foreach": implementation == "foreach",
        "muon": {
            "momentum": muon_momentum,
            "steps": muon_ns_steps,
            "adjust": muon_adjust_lr,
            "dtype": muon_dtype,
        },
    }
    optimizer = GroupedOptimizer(
        [{"params": members, "peak_lr": rule.lr, **vars(rule)} for rule, members in groups.items()], constants
    )
    for key, parameter in trainable.items():
        fused = implementation == "fused"
        optimizer.state[parameter] = _initial_state(parameter, rules[key].name, state_dtype, fused=fused)
    return optimizer


def without_decay(patterns: Sequence[str], names: Sequence[str]) -> set[str]:
    """The names that a `no_decay` pattern matches. Raises ConfigError for a pattern that matches none."""
    matched: set[str] = set()
    faults: list[str] = []
    for pattern in patterns:
        found = {name for name in names if fnmatchcase(name, pattern)}
        if not found:
            faults.append(f"optimizer.no_decay = {_nearest(pattern, names)}")
        matched |= found
    if faults:
        raise ConfigError(*faults)
    return matched


def _nearest(pattern: str, names: Sequence[str] | Mapping[str, Any]) -> str:
    near = ", ".join(difflib.get_close_matches(pattern, list(names), n=1, cutoff=0.0))
    return f'["{pattern}"]: must match a parameter\'s name; nearest: {near}'


def _adam(
    parameters: Sequence[Any],
    states: Sequence[dict[str, Any]],
    group: Mapping[str, Any],
    left_out: Tensor | None,
) -> None:
    """Adam or AdamW by torch's functional form, on local tensors: the parameters may be on several meshes."""
    values, gradients = [local_part(p) for p in parameters], [local_part(p.grad) for p in parameters]
    moments = [[local_part(state[key]) for state in states] for key in ("exp_avg", "exp_avg_sq")]
    wide = moments[0][0].dtype != values[0].dtype
    if wide:  # moments in float32 beside bfloat16 parameters: all of the update is computed in float32
        gradients = [gradient.to(moments[0][0].dtype) for gradient in gradients]
        values = [value.to(moments[0][0].dtype) for value in values]
    adam(
        values,
        gradients,
        moments[0],
        moments[1],
        [],
        [state["step"] for state in states],
        foreach=group["foreach"],
        fused=group["fused"],
        decoupled_weight_decay=group["name"] == "AdamW",
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
        found_inf=left_out,
    )
    if wide:
        for parameter, value in zip(parameters, values, strict=True):
            local_part(parameter).copy_(value)


def _initial_state(
    parameter: nn.Parameter, name: OptimizerName, dtype: torch.dtype | None, *, fused: bool
) -> dict[str, Tensor]:
    def zeros() -> Tensor:
        return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)

    if name == "Muon":
        return {"momentum_buffer": zeros()}
    # As torch.optim.Adam makes it at its first step: `step` is on the host unless the fused kernel reads it.
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu"),
        "exp_avg": zeros(),
        "exp_avg_sq": zeros(),
    }


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, named_parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """The live state as `<parameter name>.exp_avg`, `.exp_avg_sq`, `.step` (Muon: `.momentum_buffer`), to be
    loaded in place.
    """
    return {
        f"{name}.{key}": tensor
        for name, parameter in named_parameters.items()
        if parameter.requires_grad
        for key, tensor in optimizer.state[parameter].items()
    }


def set_lr_factor(optimizer: GroupedOptimizer, factor: float) -> None:
    """Sets the learning rate of every parameter group to this part of its peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor


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

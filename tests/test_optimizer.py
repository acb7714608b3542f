"""Optimizers against the published rule and torch's own state; the schedule against a table."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from minititan.config import ConfigError
from minititan.optimizer import build_optimizer, lr_at, lr_phases, optimizer_tensors, set_lr_factor

SETTINGS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def parameters(dtype=torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "embed.weight": (7, 4),
        "layers.0.proj.weight": (4, 3),
        "layers.0.proj.bias": (4,),
        "norm.weight": (4,),
    }
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in shapes.items()
    }


def gradients(named: dict[str, nn.Parameter], step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(p.shape, generator=generator).to(p.dtype) for name, p in named.items()}


def run(optimizer, named: dict[str, nn.Parameter], steps: range) -> None:
    for step in steps:
        for name, gradient in gradients(named, step).items():
            named[name].grad = gradient
        optimizer.step()


def reference(name: str, steps: int, undecayed: set[str]) -> dict[str, torch.Tensor]:
    """Adam (Kingma and Ba, algorithm 1), AdamW (Loshchilov and Hutter, algorithm 2), in float64."""
    values = {key: p.detach().double() for key, p in parameters().items()}
    first = {key: torch.zeros_like(v) for key, v in values.items()}
    second = {key: torch.zeros_like(v) for key, v in values.items()}
    (b1, b2), lr = SETTINGS["betas"], SETTINGS["lr"]
    for t in range(1, steps + 1):
        for key, gradient in gradients(parameters(), t - 1).items():
            decay = 0.0 if key in undecayed else SETTINGS["weight_decay"]
            g = gradient.double() + (decay * values[key] if name == "Adam" else 0.0)
            first[key] = b1 * first[key] + (1 - b1) * g
            second[key] = b2 * second[key] + (1 - b2) * g * g
            update = first[key] / (1 - b1**t) / ((second[key] / (1 - b2**t)).sqrt() + SETTINGS["eps"])
            values[key] = values[key] - lr * update - (lr * decay * values[key] if name == "AdamW" else 0.0)
    return values


def test_a_no_decay_pattern_that_matches_nothing_is_an_error_for_each_pattern():
    with pytest.raises(ConfigError) as caught:
        build_optimizer(
            parameters(),
            name="AdamW",
            implementation="foreach",
            no_decay=["*.bias", "nrom.weight", "head*"],
            **SETTINGS,
        )
    first, second = caught.value.faults
    assert (
        first == 'optimizer.no_decay = ["nrom.weight"]: must match a parameter\'s name; nearest: norm.weight'
    )
    assert '"head*"' in second


@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_updates_follow_the_published_rule(name, implementation):
    named = parameters()
    optimizer = build_optimizer(
        named, name=name, implementation=implementation, no_decay=["norm.*", "*.bias"], **SETTINGS
    )
    run(optimizer, named, range(5))
    expected = reference(name, 5, {"norm.weight", "layers.0.proj.bias"})
    for key, value in expected.items():
        torch.testing.assert_close(named[key].detach().double(), value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_first_state_is_the_one_that_torch_makes(dtype, implementation):
    named, plain = parameters(dtype), parameters(dtype)
    optimizer = build_optimizer(named, name="AdamW", implementation=implementation, **SETTINGS)
    torchs = torch.optim.AdamW(
        plain.values(), foreach=implementation == "foreach", fused=implementation == "fused", **SETTINGS
    )
    run(optimizer, named, range(3))
    run(torchs, plain, range(3))
    ours, theirs = optimizer_tensors(optimizer, named), optimizer_tensors(torchs, plain)
    assert list(ours) == list(theirs)
    for key, tensor in ours.items():
        assert tensor.dtype == theirs[key].dtype and torch.equal(tensor, theirs[key]), key
    for key, parameter in named.items():
        assert torch.equal(parameter, plain[key]), key


def test_state_is_complete_before_the_first_step_and_leaves_out_frozen_parameters():
    named = parameters()
    named["embed.weight"].requires_grad_(False)
    optimizer = build_optimizer(named, name="AdamW", implementation="fused", **SETTINGS)
    tensors = optimizer_tensors(optimizer, named)
    trainable = ["layers.0.proj.weight", "layers.0.proj.bias", "norm.weight"]
    assert set(tensors) == {
        f"{name}.{key}" for name in trainable for key in ("step", "exp_avg", "exp_avg_sq")
    }
    assert all(not tensor.any() for tensor in tensors.values())


def test_state_loaded_in_place_continues_bitwise():
    straight, first, second = parameters(), parameters(), parameters()
    build = {"name": "AdamW", "no_decay": ["*.bias"], **SETTINGS}
    run(build_optimizer(straight, implementation="fused", **build), straight, range(6))

    before = build_optimizer(first, implementation="fused", **build)
    run(before, first, range(3))
    after = build_optimizer(second, implementation="fused", **build)
    saved = optimizer_tensors(before, first)
    with torch.no_grad():
        for key, tensor in optimizer_tensors(after, second).items():
            tensor.copy_(saved[key])
        for key, parameter in second.items():
            parameter.copy_(first[key])
    run(after, second, range(3, 6))
    assert all(torch.equal(second[key], straight[key]) for key in straight)


def test_the_factor_reaches_every_group():
    named = parameters()
    optimizer = build_optimizer(
        named, name="AdamW", implementation="foreach", no_decay=["*.bias"], **SETTINGS
    )
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    set_lr_factor(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.005, 0.005]


# 10 steps: 2 of warm-up, 0.4 x 10 = 4 of decay, so 10 + 1 - 2 - 4 = 5 stable ones. Worked out by hand.
TABLE = {
    "linear": [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25],
    "sqrt": [0.5, 1, 1, 1, 1, 1, 1, 0.5, 0.2928932188134524, 0.1339745962155613],
    "cosine": [0.5, 1, 1, 1, 1, 1, 1, 0.8535533905932737, 0.5, 0.14644660940672627],
}


@pytest.mark.parametrize("decay_type", list(TABLE))
@pytest.mark.parametrize("minimum", [0.0, 0.1])
def test_schedule_is_the_table(decay_type, minimum):
    for step, factor in enumerate(TABLE[decay_type]):
        expected = factor if step < 7 else minimum + (1 - minimum) * factor
        got = lr_at(
            step,
            total_steps=10,
            warmup_steps=2,
            decay_ratio=0.4,
            decay_type=decay_type,
            min_lr_factor=minimum,
        )
        assert got == pytest.approx(expected, rel=1e-12), step


def test_without_a_decay_ratio_everything_after_warm_up_decays():
    factors = [lr_at(step, total_steps=4, warmup_steps=1) for step in range(6)]
    assert factors == pytest.approx([1, 1, 2 / 3, 1 / 3, 0, 0])


@given(
    total=st.integers(1, 300),
    warmup=st.integers(0, 400),
    ratio=st.none() | st.floats(0, 1),
    decay_type=st.sampled_from(["linear", "sqrt", "cosine"]),
    minimum=st.floats(0, 1),
    beyond=st.integers(0, 50),
)
def test_schedule_is_bounded_monotone_and_above_the_minimum_inside_the_run(
    total, warmup, ratio, decay_type, minimum, beyond
):
    phases = lr_phases(total_steps=total, warmup_steps=warmup, decay_ratio=ratio)
    assert phases.warmup + phases.stable + phases.decay == total + 1
    assert min(phases.warmup, phases.decay) >= 0 and phases.stable >= 1
    schedule = {
        "total_steps": total,
        "warmup_steps": warmup,
        "decay_ratio": ratio,
        "decay_type": decay_type,
        "min_lr_factor": minimum,
    }
    factors = [lr_at(step, **schedule) for step in range(total + beyond)]
    assert all(0 <= factor <= 1 + 1e-12 and math.isfinite(factor) for factor in factors)
    assert all(factor > 0 for factor in factors[:total])
    assert all(factor >= minimum - 1e-12 for factor in factors[phases.warmup :])
    rising, falling = factors[: phases.warmup], factors[phases.warmup :]
    assert rising == sorted(rising) and all(a >= b - 1e-12 for a, b in itertools.pairwise(falling))

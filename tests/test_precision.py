"""Loss scaling against torch's, the factor inside the head against plain autograd, moments in float32 beside
bfloat16 parameters against a plain computation.
"""

import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from minititan.config import ConfigError, load
from minititan.gradients import gradient_norm
from minititan.loss import install_loss
from minititan.loss_scale import LossScale
from minititan.optimizer import build_optimizer, optimizer_tensors


@pytest.mark.parametrize(
    "keys, fault",
    [
        (
            ["training.dtype=float64", "training.mixed_precision_param=float16"],
            'training.mixed_precision_param = "float16": needs training.dtype = "float32", not "float64"',
        ),
        (
            ["optimizer.state_dtype=bfloat16"],
            'optimizer.state_dtype = "bfloat16": must be unset or "float32" with training.dtype = "float32"',
        ),
        (
            ["training.dtype=float64", "optimizer.state_dtype=float32"],
            'optimizer.state_dtype = "float32": must be unset with training.dtype = "float64"',
        ),
    ],
)
def test_types_that_do_not_fit(keys: list[str], fault: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").touch()
    with pytest.raises(ConfigError) as caught:
        load([f"--job.config_file={tmp_path}/run.toml", *(f"--{key}" for key in keys)])
    assert caught.value.faults == (f"command line: {fault}",)


@pytest.mark.parametrize("seed", range(3))
def test_the_scale_goes_as_torchs_does(seed: int) -> None:
    random_ = random.Random(seed)
    ours = LossScale(2.0**10, growth_interval=4)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for step in range(60):
        overflow = random_.random() < 0.15
        theirs.scale(torch.ones(()))
        parameter.grad = torch.full((1,), torch.inf if overflow else 1.0)
        theirs.step(optimizer)
        theirs.update()
        if overflow:
            ours.shrink()
        else:
            ours.note_good_step()
        assert ours.value == theirs.get_scale(), step


def head(dtype: torch.dtype) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(16, 40, bias=False, dtype=dtype)
    linear.weight.data = torch.randn(40, 16, generator=generator).to(dtype)
    hidden = torch.randn(2, 12, 16, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, 40, (2, 12), generator=generator)
    labels[0, :5] = -100
    return linear, hidden, labels


def gradients(dtype: torch.dtype, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    linear, hidden, labels = head(dtype)
    install_loss(linear, None, None)
    linear(hidden, labels, torch.tensor(factor)).backward()
    assert linear.weight.grad is not None and hidden.grad is not None
    return linear.weight.grad.double(), hidden.grad.double()


def test_the_factor_is_on_the_gradients_and_not_on_the_sum() -> None:
    linear, hidden, labels = head(torch.float64)
    plain = F.cross_entropy(linear(hidden).flatten(0, 1), labels.flatten(), reduction="sum")
    expected = torch.autograd.grad(plain, (linear.weight, hidden))
    install_loss(linear, None, None)
    torch.testing.assert_close(linear(hidden, labels, torch.tensor(3.0)), plain)
    for found, reference in zip(gradients(torch.float64, 3.0), expected, strict=True):
        torch.testing.assert_close(found, 3.0 * reference)


def test_float16_keeps_with_the_scale_what_it_loses_without() -> None:
    small = 1e-7  # one over the labels of a large batch
    exact = gradients(torch.float64, small)
    for scale, kept in ((1.0, False), (2.0**16, True)):
        for found, reference in zip(gradients(torch.float16, scale * small), exact, strict=True):
            error = ((found / scale - reference).norm() / reference.norm()).item()
            assert (error < 1e-2) == kept, (scale, error)


@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
def test_float32_moments_beside_bfloat16_parameters(implementation) -> None:
    """The update is AdamW's in float32 on the parameter's value, rounded to bfloat16 once."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(30, 20, generator=generator).bfloat16()
    settings = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    named = {"w": nn.Parameter(start.clone())}
    optimizer = build_optimizer(
        named, name="AdamW", implementation=implementation, state_dtype=torch.float32, **settings
    )
    value, first, second = start.double(), torch.zeros(30, 20).double(), torch.zeros(30, 20).double()
    for t in range(1, 6):
        named["w"].grad = torch.randn(30, 20, generator=generator).bfloat16()
        gradient = named["w"].grad.double()
        optimizer.step()
        first = 0.9 * first + 0.1 * gradient
        second = 0.95 * second + 0.05 * gradient**2
        update = first / (1 - 0.9**t) / ((second / (1 - 0.95**t)).sqrt() + 1e-8)
        exact = value - 0.01 * update - 0.01 * 0.1 * value
        value = named["w"].detach().double()  # rounding is no part of the reference
        assert ((value - exact).abs() <= exact.abs() * 2.0**-8).all()
    state = optimizer_tensors(optimizer, named)
    assert state["w.exp_avg"].dtype == state["w.exp_avg_sq"].dtype == torch.float32
    torch.testing.assert_close(state["w.exp_avg_sq"].double(), second, rtol=1e-5, atol=0)


def test_the_norm_of_bfloat16_gradients_is_computed_in_float32() -> None:
    parameter = nn.Parameter(torch.zeros(3000, dtype=torch.bfloat16))
    parameter.grad = torch.randn(3000, generator=torch.Generator().manual_seed(0)).bfloat16()
    norm = gradient_norm([parameter])
    assert norm.item() == pytest.approx(parameter.grad.double().norm().item(), rel=1e-6)

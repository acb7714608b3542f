"""Muon against torch's and against the singular values; groups of parameters against torch's optimizers."""

import pytest
import torch
from torch import nn

from minititan.config import ConfigError
from minititan.muon import COEFFICIENTS, orthogonalize
from minititan.optimizer import (
    GroupedOptimizer,
    ParamGroup,
    Rule,
    build_optimizer,
    optimizer_tensors,
    rules_of,
    set_lr_factor,
)

SETTINGS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SHAPES = {
    "embed_tokens.weight": (7, 4),
    "layers.0.wide.weight": (4, 6),
    "layers.0.tall.weight": (6, 4),
    "layers.0.norm.weight": (4,),
    "lm_head.weight": (7, 4),
}
OTHERS = ["embed_tokens.weight", "layers.0.norm.weight", "lm_head.weight"]
HIDDEN = ["layers.0.wide.weight", "layers.0.tall.weight"]


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def run(optimizers: list[torch.optim.Optimizer], named: dict[str, nn.Parameter], steps: int = 4) -> None:
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        for parameter in named.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        for optimizer in optimizers:
            factor = (step + 1) / steps
            if isinstance(optimizer, GroupedOptimizer):
                set_lr_factor(optimizer, factor)
            else:
                for group in optimizer.param_groups:
                    group["lr"] = group["initial"] * factor
            optimizer.step()


def torchs(kind: type, members: list[nn.Parameter], lr: float, **settings) -> torch.optim.Optimizer:
    return kind([{"params": members, "initial": lr}], lr=lr, **settings)


def test_muon_for_what_is_no_matrix_and_patterns_without_a_match_are_errors():
    groups = [ParamGroup("layers.*", name="Muon"), ParamGroup("nrom", lr=1.0)]
    with pytest.raises(ConfigError) as caught:
        rules_of(parameters(), name="AdamW", lr=1.0, weight_decay=0.1, param_groups=groups)
    assert caught.value.faults == (
        'optimizer.param_groups = ["nrom"]: must match a parameter\'s name; nearest: layers.0.norm.weight',
        'optimizer.param_groups = ["layers.*"]: Muon is for matrices, layers.0.norm.weight has the shape '
        "[4]; narrow the pattern",
    )


def test_the_first_group_that_matches_counts():
    groups = [
        ParamGroup("*.norm.weight", lr=0.5),
        ParamGroup("layers.0.*", weight_decay=0.3),
        ParamGroup("lm_head.weight", name="Adam", lr=0.0),
    ]
    rules = rules_of(
        parameters(),
        name="Muon",
        lr=1.0,
        weight_decay=0.1,
        no_decay=["*norm*", "*.tall.weight", "embed*"],
        param_groups=groups,
    )
    assert rules == {
        "embed_tokens.weight": Rule("AdamW", 1.0, 0.0),
        "layers.0.wide.weight": Rule("Muon", 1.0, 0.3),
        "layers.0.tall.weight": Rule("Muon", 1.0, 0.3),
        "layers.0.norm.weight": Rule("AdamW", 0.5, 0.0),
        "lm_head.weight": Rule("Adam", 0.0, 0.1),
    }


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_hidden_matrices_get_torchs_muon_and_the_rest_adamw(adjust):
    named, plain = parameters(), parameters()
    ours = build_optimizer(
        named, name="Muon", implementation="foreach", muon_adjust_lr=adjust, muon_momentum=0.9, **SETTINGS
    )
    hidden, others = [[plain[name] for name in names] for names in (HIDDEN, OTHERS)]
    muon = torchs(torch.optim.Muon, hidden, 0.01, weight_decay=0.1, momentum=0.9, adjust_lr_fn=adjust)
    adamw = torchs(torch.optim.AdamW, others, foreach=True, **SETTINGS)
    run([ours], named)
    run([muon, adamw], plain)
    for name, parameter in named.items():
        assert torch.equal(parameter, plain[name]), name
    state = optimizer_tensors(ours, named)
    for name in HIDDEN:
        assert torch.equal(state[f"{name}.momentum_buffer"], muon.state[plain[name]]["momentum_buffer"])
    assert len(state) == len(HIDDEN) + 3 * len(OTHERS)


def test_groups_are_optimizers_of_their_own():
    named, plain = parameters(), parameters()
    groups = [ParamGroup("layers.0.tall.weight", "Adam", 0.03), ParamGroup("embed*", weight_decay=0.0)]
    ours = build_optimizer(named, name="AdamW", implementation="fused", param_groups=groups, **SETTINGS)
    theirs = [
        torchs(torch.optim.Adam, [plain["layers.0.tall.weight"]], fused=True, **SETTINGS | {"lr": 0.03}),
        torchs(
            torch.optim.AdamW, [plain["embed_tokens.weight"]], fused=True, **SETTINGS | {"weight_decay": 0}
        ),
        torchs(
            torch.optim.AdamW,
            [plain[name] for name in ("layers.0.wide.weight", "layers.0.norm.weight", "lm_head.weight")],
            fused=True,
            **SETTINGS,
        ),
    ]
    run([ours], named)
    run(theirs, plain)
    for name, parameter in named.items():
        assert torch.equal(parameter, plain[name]), name


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6)])
def test_the_iteration_acts_on_singular_values(shape):
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm()
    a, b, c = COEFFICIENTS
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    torch.testing.assert_close(
        orthogonalize(matrix, 5, torch.float64), left * values @ right, rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("shape", [(3, 5, 9), (3, 9, 5)])
def test_a_stack_is_updated_matrix_by_matrix(shape):
    generator = torch.Generator().manual_seed(4)
    values, *gradients = torch.randn(4, *shape, dtype=torch.float64, generator=generator)
    stack = {"layers.0.mlp.experts.up_proj": nn.Parameter(values.clone())}
    apart = {f"layers.{i}.up_proj.weight": nn.Parameter(v.clone()) for i, v in enumerate(values)}
    for named in (stack, apart):
        optimizer = build_optimizer(
            named, name="Muon", implementation="fused", muon_dtype=torch.float64, **SETTINGS
        )
        for gradient in gradients:
            for parameter, grad in zip(
                named.values(), [gradient] if named is stack else gradient, strict=True
            ):
                parameter.grad = grad.clone()
            optimizer.step()
    found = stack["layers.0.mlp.experts.up_proj"]
    torch.testing.assert_close(found, torch.stack([*apart.values()]), rtol=1e-12, atol=1e-14)


def test_biases_of_experts_are_no_matrices():
    named = {"layers.0.mlp.experts.down_proj_bias": nn.Parameter(torch.ones(4, 6))}
    assert [rule.name for rule in rules_of(named, name="Muon", lr=1.0, weight_decay=0.1).values()] == [
        "AdamW"
    ]
    with pytest.raises(ConfigError, match="Muon is for matrices"):
        groups = [ParamGroup("*", name="Muon")]
        rules_of(named, name="AdamW", lr=1.0, weight_decay=0.1, param_groups=groups)

"""A decoder with experts: auxiliary losses, what evaluation leaves alone, recomputation, arguments."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from minititan.init import init_parameters
from minititan.models.arguments import MoEArgs
from minititan.models.decoder import Decoder, init_parameter
from minititan.models.moe import Router

ARGS = MoEArgs(
    24,
    2,
    4,
    2,
    intermediate_size=40,
    vocab_size=50,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    router_aux_loss_coef=0.02,
    router_z_loss_coef=0.001,
)
DEEPSEEK = replace(
    ARGS,
    first_k_dense_replace=1,
    n_shared_experts=2,
    scoring_func="sigmoid",
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    score_correction=True,
    router_bias_update_speed=0.01,
)


def decoder(args: MoEArgs, dtype: torch.dtype = torch.float64) -> Any:
    model = Decoder(args).to(dtype)
    init_parameters(
        dict(model.named_parameters()),
        lambda n, t, g: init_parameter(n, t, g, replace(args, initializer_range=0.3)),
        1,
    )
    return model


TOKENS = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("args", [ARGS, DEEPSEEK], ids=["softmax", "deepseek"])
def test_auxiliary_losses_are_in_the_gradients_alone(args):
    model, plain = decoder(args), decoder(args)
    model.routing.loss_weight, plain.routing.loss_weight = 0.25, 0.0
    out = model(TOKENS)
    out.square().sum().backward()
    losses: list[Tensor] = []
    for module in plain.modules():
        if isinstance(module, Router):
            module.register_forward_hook(lambda _, __, result: losses.append(result[2].loss))
    expected = plain(TOKENS)
    assert torch.equal(out, expected)
    (expected.square().sum() + 0.25 * sum(losses)).backward()
    assert len(losses) == len(model.routing.layers) == (2 if args is ARGS else 1)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        if one.requires_grad:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-12)


def test_evaluation_leaves_the_record_alone():
    model = decoder(ARGS)
    model(TOKENS)
    before = {name: routing.counts.clone() for name, routing in model.routing.layers.items()}
    with torch.no_grad():
        model.eval()(TOKENS)
    assert all(torch.equal(model.routing.layers[name].counts, counts) for name, counts in before.items())
    assert [counts.sum() for counts in before.values()] == [2 * 16 * 2] * 2
    model.train()(TOKENS)
    assert all(torch.equal(model.routing.layers[n].counts, 2 * counts) for n, counts in before.items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_recomputation_routes_the_same(dtype, monkeypatch):
    model, plain = decoder(DEEPSEEK, dtype), decoder(DEEPSEEK, dtype)
    seen: list[Tensor] = []
    choose = Router.choose
    monkeypatch.setattr(Router, "choose", lambda self, scores: seen.append(choose(self, scores)) or seen[-1])
    for block in model.layers.values():
        block.forward = lambda *inputs, forward=block.forward: checkpoint(
            forward, *inputs, use_reentrant=False
        )
    model(TOKENS).float().square().sum().backward()
    assert len(seen) == 2 and torch.equal(*seen)
    plain(TOKENS).float().square().sum().backward()
    assert torch.equal(model.routing.layers["1"].counts, plain.routing.layers["1"].counts)  # not twice
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is other.grad is None or torch.equal(one.grad, other.grad)


@pytest.mark.parametrize(
    "fields, fault",
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok (9) must be between 1 and num_experts (8)"),
        ({"n_group": 3}, "n_group (3) must divide num_experts (8)"),
        ({"n_group": 4, "topk_group": 5}, "topk_group (5) must be between 1 and n_group (4)"),
        (
            {"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3},
            "num_experts_per_tok (3) must be at most the 2 experts of topk_group groups",
        ),
        (
            {"n_group": 8, "topk_group": 4, "score_correction": True},
            "n_group (8) must leave two of num_experts (8) in a group",
        ),
        ({"router_bias_update_speed": 0.1}, "router_bias_update_speed needs score_correction = true"),
        ({"router_z_loss_coef": -0.1}, "router_z_loss_coef (-0.1) must not be negative"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size (0) must be at least 1"),
    ],
)
def test_arguments_that_do_not_fit(fields, fault):
    with pytest.raises(ValueError) as caught:
        replace(ARGS, **fields)
    assert str(caught.value) == fault
    replace(ARGS, num_experts=0, **fields)  # a dense model has no use for them

"""Routers and experts against plain formulas, one token at a time in float64, and in the cases that break
others: experts without a token, all tokens to one expert, no token at all, recomputation.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from minititan.init import init_parameters
from minititan.models.arguments import MoEArgs
from minititan.models.decoder import Decoder, init_parameter
from minititan.models.moe import ClampedExperts, Experts, Router, SwiGLUExperts, grouped_product

EXPERTS, WIDTH, HIDDEN, TOP_K = 8, 12, 20, 3


def filled(module: Any, scale: float = 0.5, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = scale * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return module


def router(**options: Any) -> Router:
    return filled(Router(WIDTH, EXPERTS, TOP_K, **options).double())


def stream(batch: int = 2, length: int = 9, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()


# ---- the reference: one token, lists of floats


def probabilities(module: Router, token: Tensor) -> Tensor:
    """Of the experts, as scores [E]."""
    logits = torch.stack([row @ token for row in module.weight])
    logits = logits if module.bias is None else logits + module.bias
    if module.scoring == "sigmoid":
        return 1 / (1 + (-logits).exp())
    return logits.exp() / logits.exp().sum()


def reference_choice(module: Router, scores: list[float]) -> list[int]:
    """The experts of a token, the best first."""
    correction = module.e_score_correction_bias
    if correction is not None:
        scores = [score + change for score, change in zip(scores, correction.tolist(), strict=True)]
    size = EXPERTS // module.groups
    groups = [list(range(first, first + size)) for first in range(0, EXPERTS, size)]
    best = 1 if correction is None else 2

    def worth(group: list[int]) -> float:
        return sum(sorted((scores[expert] for expert in group), reverse=True)[:best])

    allowed = [i for group in sorted(groups, key=worth, reverse=True)[: module.chosen_groups] for i in group]
    return sorted(allowed, key=lambda expert: scores[expert], reverse=True)[:TOP_K]


def reference_weights(module: Router, token: Tensor) -> dict[int, Tensor]:
    scores = probabilities(module, token)
    chosen = {expert: scores[expert] for expert in reference_choice(module, scores.tolist())}
    total = sum(chosen.values()) if module.normalise else 1.0
    return {expert: module.scale * score / total for expert, score in chosen.items()}


ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "not-normalised": {"normalise": False, "scale": 2.5},
    "biased": {"bias": True},  # gpt-oss: the softmax of the chosen logits alone is the same
    "groups": {"groups": 4, "chosen_groups": 2, "normalise": False, "scale": 16.0},  # DeepSeek-V2
    "sigmoid": {"scoring": "sigmoid"},
    "corrected": {"scoring": "sigmoid", "correction": True, "scale": 2.5, "groups": 4, "chosen_groups": 2},
}


@pytest.mark.parametrize("options", ROUTERS.values(), ids=ROUTERS)
def test_routers_against_plain_formulas(options):
    module, x = router(**options), stream()
    weights, indices, routing = module(x)
    expected = [reference_weights(module, token) for token in x.flatten(0, 1)]
    assert [set(row) for row in indices.tolist()] == [set(row) for row in expected]
    plain = torch.stack(
        [torch.stack([row[i] for i in ids.tolist()]) for row, ids in zip(expected, indices, strict=True)]
    )
    torch.testing.assert_close(weights, plain, rtol=1e-12, atol=0)

    parameters = [x, *(p for p in module.parameters() if p.requires_grad)]
    direction = torch.randn(weights.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for one, other in zip(
        torch.autograd.grad(weights, parameters, direction),
        torch.autograd.grad(plain, parameters, direction),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)

    assert routing.counts.tolist() == [sum(i in row for row in expected) for i in range(EXPERTS)]
    assert routing.counts.sum() == len(expected) * TOP_K
    shares = torch.stack([probabilities(module, token) for token in x.flatten(0, 1)])
    shares = shares / shares.sum(-1, keepdim=True)
    assert routing.entropy.item() == pytest.approx(-(shares * shares.log()).sum().item())
    assert routing.loss == 0


def test_the_correction_changes_the_choice_and_not_the_weights():
    module, x = router(scoring="sigmoid", correction=True, normalise=False), stream()
    assert module.e_score_correction_bias is not None
    module.e_score_correction_bias.data.zero_()
    module.e_score_correction_bias.data[5] = 10.0
    weights, indices, routing = module(x)
    assert routing.counts[5] == 18
    scores = (x.flatten(0, 1) @ module.weight.T).sigmoid()
    torch.testing.assert_close(weights, scores.gather(1, indices))
    weights.sum().backward()
    assert module.e_score_correction_bias.grad is None


def test_sigmoids_that_are_all_zero_give_no_nan():
    module = router(scoring="sigmoid", balance_coef=1.0).float()
    module.weight.data = torch.full_like(module.weight, -1e4)
    weights, _, routing = module(torch.ones(1, 4, WIDTH))
    assert weights.isfinite().all() and routing.loss.isfinite() and routing.entropy.isfinite()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_are_computed_in_float32(dtype):
    module, x = router().to(dtype), stream().detach().to(dtype)
    weights, indices, _ = module(x)
    exact = router().float()
    exact.weight.data = module.weight.float().detach()
    expected, same, _ = exact(x.float())
    assert weights.dtype == torch.float32 and torch.equal(weights, expected) and torch.equal(indices, same)


def test_the_correction_bias_keeps_its_type_when_a_model_is_cast():
    module = Router(WIDTH, EXPERTS, TOP_K, correction=True)
    values = filled(module).e_score_correction_bias.clone()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        module.to(dtype)
        assert module.weight.dtype == dtype and module.e_score_correction_bias is not None
        assert torch.equal(module.e_score_correction_bias, values)
        assert not module.e_score_correction_bias.requires_grad
    with torch.device("meta"):
        bias = Router(WIDTH, EXPERTS, TOP_K, correction=True).bfloat16().e_score_correction_bias
    assert bias is not None and bias.is_meta and bias.dtype == torch.float32


def test_forced_routing_is_even():
    module = router()
    module.forced = True
    weights, indices, routing = module(stream(2, 8))
    assert routing.counts.tolist() == [6] * 8
    assert all(len(set(row)) == TOP_K for row in indices.tolist())
    torch.testing.assert_close(weights.sum(-1), torch.ones(16).double())


# ---- auxiliary losses


def reference_balance(module: Router, sequences: Tensor) -> Tensor:
    """Over all tokens of x [..., D] together."""
    tokens = sequences.reshape(-1, WIDTH)
    shares = torch.stack([probabilities(module, token) for token in tokens])
    shares = shares / shares.sum(-1, keepdim=True)
    chosen = [reference_choice(module, probabilities(module, token).tolist()) for token in tokens]
    counts = torch.tensor([sum(i in row for row in chosen) for i in range(EXPERTS)]).double()
    return EXPERTS * (counts / (TOP_K * len(tokens)) * shares.mean(0)).sum()


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("scope", ["sequence", "batch"])
def test_auxiliary_losses_against_plain_formulas(scope, scoring):
    module = router(balance_coef=0.3, balance_scope=scope, z_coef=0.05, scoring=scoring)
    x = stream(3, 7)
    found = module(x)[2].loss
    parts = [reference_balance(module, row) for row in x]
    balance = sum(parts) if scope == "sequence" else 3 * reference_balance(module, x)
    squares = (x @ module.weight.T).exp().sum(-1).log().square()  # [B, T]
    expected = 0.3 * balance + 0.05 * squares.mean(-1).sum()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    for one, other in zip(
        torch.autograd.grad(found, [x, module.weight]),
        torch.autograd.grad(expected, [x, module.weight]),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_the_balancing_loss_is_one_for_even_loads_and_the_most_for_one_choice():
    module = router(balance_coef=1.0)
    module.weight.data.zero_()
    module.forced = True
    assert module(stream(1, 8))[2].loss.item() == pytest.approx(1.0)
    module.forced = False
    module.weight.data[:TOP_K] = 50.0
    x = torch.ones(1, 8, WIDTH, dtype=torch.float64)
    assert module(x)[2].loss.item() == pytest.approx(EXPERTS / TOP_K)


@pytest.mark.parametrize("scope", ["sequence", "batch"])
def test_losses_of_parts_of_a_batch_add_up(scope):
    """Ranks that share sequences (dimension 1) or a micro-batch (dimension 0), or both."""
    module = router(balance_coef=0.3, balance_scope=scope, z_coef=0.05)
    x = stream(4, 6)
    whole = module(x)[2]
    counts = torch.stack([module(row.unsqueeze(0))[2].counts for row in x])  # [B, E]
    parts = []
    for rows in (slice(0, 1), slice(1, 4)):
        module.sum_over_sequence = lambda _, rows=rows: counts[rows]
        module.sum_over_batch = lambda _: counts.sum(0, keepdim=True)
        parts += [module(x[rows, columns])[2] for columns in (slice(0, 3), slice(3, 6))]
    total: list[Any] = [sum(values) for values in zip(*parts, strict=True)]
    assert total[0].tolist() == whole.counts.tolist()
    torch.testing.assert_close(total[1:], list(whole[1:]), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        torch.autograd.grad(total[1], module.weight), torch.autograd.grad(whole.loss, module.weight)
    )


# ---- experts


def swiglu(experts: Any, expert: int, token: Tensor) -> Tensor:
    gate, up = experts.gate_proj[expert] @ token, experts.up_proj[expert] @ token
    return experts.down_proj[expert] @ (gate * gate.sigmoid() * up)


def clamped(experts: Any, expert: int, token: Tensor) -> Tensor:
    both = token @ experts.gate_up_proj[expert] + experts.gate_up_proj_bias[expert]
    gate, up = both[0::2].clamp(max=7), both[1::2].clamp(-7, 7)
    hidden = gate * (1.702 * gate).sigmoid() * (up + 1)
    return hidden @ experts.down_proj[expert] + experts.down_proj_bias[expert]


KINDS: dict[str, tuple[type[Experts], Callable[..., Tensor]]] = {
    "swiglu": (SwiGLUExperts, swiglu),
    "clamped": (ClampedExperts, clamped),
}
CHOICES = {
    "spread": [[0, 1, 2], [5, 0, 3], [2, 7, 6], [4, 3, 0], [7, 5, 1]],
    "some-without-a-token": [[0, 7, 3], [3, 0, 7], [0, 3, 7]],
    "one-token": [[7, 6, 5]],
    "none": [],
}


@pytest.mark.parametrize("width", [WIDTH, 7])  # 7: rows that no grouped product takes
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("kind", KINDS)
def test_experts_against_plain_formulas(kind, choice, dtype, width):
    make, reference = KINDS[kind]
    # Large enough to be clamped in some places.
    experts = filled(make(EXPERTS, width, HIDDEN).to(dtype), scale=1.5)  # pyright: ignore[reportCallIssue]
    generator = torch.Generator().manual_seed(3)
    indices = torch.tensor(choice, dtype=torch.int64).view(-1, TOP_K)
    x = torch.randn(len(indices), width, generator=generator, dtype=dtype, requires_grad=True)
    weights = torch.rand(len(indices), TOP_K, generator=generator, dtype=dtype, requires_grad=True)
    counts = torch.bincount(indices.flatten(), minlength=EXPERTS)
    found = experts(x, weights, indices, counts)
    exact = make(EXPERTS, width, HIDDEN).double()  # pyright: ignore[reportCallIssue]
    exact.load_state_dict(experts.state_dict())
    wide_x, wide_weights = (t.detach().double().requires_grad_() for t in (x, weights))
    rows = [
        sum(w * reference(exact, expert, token) for w, expert in zip(ws, row, strict=True))
        for token, ws, row in zip(wide_x, wide_weights, choice, strict=True)
    ]
    expected: Any = torch.stack(rows) if rows else wide_x * 0  # pyright: ignore[reportArgumentType]
    bound = 1e-11 if dtype == torch.float64 else 1e-4
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=bound, atol=bound)

    found.backward(torch.ones_like(found))
    expected.backward(torch.ones_like(expected))
    for one, other in zip(
        (x, weights, *experts.parameters()), (wide_x, wide_weights, *exact.parameters()), strict=True
    ):
        zero = torch.zeros_like(other)
        assert one.grad is not None  # zero for experts without a token, never missing
        there = zero if other.grad is None else other.grad
        largest = max([1.0, *there.abs().flatten().tolist()])
        torch.testing.assert_close(one.grad.double(), there, rtol=bound, atol=bound * largest)
    if kind == "clamped" and choice is CHOICES["spread"] and width == WIDTH:
        assert (x @ experts.gate_up_proj[0]).abs().max() > 7  # the clamp is met


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_operator_is_the_loop(dtype):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(21, 16, generator=generator).to(dtype).requires_grad_()
    weights = torch.randn(5, 16, 24, generator=generator).to(dtype).requires_grad_()
    counts = torch.tensor([0, 13, 0, 8, 0])
    found = grouped_product(rows, weights, counts)
    assert "GroupedMm" in type(found.grad_fn).__name__
    expected = torch.cat([p @ w for p, w in zip(rows.split(counts.tolist()), weights, strict=True)])
    direction = torch.randn(found.shape, generator=generator).to(dtype)
    bound = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)
    for one, other in zip(
        torch.autograd.grad(found, [rows, weights], direction),
        torch.autograd.grad(expected, [rows, weights], direction),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=bound, atol=10 * bound)


# ---- a model


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
        assert one.grad is other.grad is None or torch.equal(one.grad, other.grad)  # pyright: ignore


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

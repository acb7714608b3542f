"""Each kind of attention against its formula, written plainly in float64, head by head."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from minititan.init import init_parameters
from minititan.models.arguments import DecoderArgs
from minititan.models.attention import Attention
from minititan.models.decoder import Decoder, init_parameter
from minititan.models.deepseek_v3 import DeepseekV3Args
from minititan.models.gpt_oss import GptOssArgs
from minititan.models.latent_attention import LatentAttention
from minititan.models.masks import attend, cached_mask, causal_mask
from minititan.models.rotary import RopeScaling, YarnScaling, inverse_frequencies, rotary_tables
from minititan.registry import families

CPU = torch.device("cpu")
B, H, K, T, C = 2, 6, 2, 21, 8
DOCUMENTS = [[0] * 4 + [1] * 11 + [2] * 6, [5] * 21]
LATENT = DeepseekV3Args(
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    intermediate_size=40,
    vocab_size=50,
    q_lora_rank=12,
    kv_lora_rank=10,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
    rope_theta=100.0,
    initializer_range=0.3,
)
SINKS = GptOssArgs(
    hidden_size=24,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=40,
    vocab_size=50,
    sliding_window=5,
    initializer_range=0.3,
)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sees(query: int, key: int, window: int | None, documents: list[int] | None) -> bool:
    near = window is None or key > query - window
    return key <= query and near and (documents is None or documents[query] == documents[key])


def formula(
    q: Tensor, k: Tensor, v: Tensor, scale: float, sinks: Tensor | None, seen: list[list[bool]]
) -> Tensor:
    """One sequence: q [H, T, C], k [K, keys, C], v [K, keys, V] -> [H, T, V]; seen [T][keys]."""
    heads = []
    for head, queries in enumerate(q):
        shared = head * len(k) // len(q)
        rows = []
        for query, visible in zip(queries, seen, strict=True):
            weights = (k[shared] @ query * scale).exp() * torch.tensor(visible)
            rest = 0.0 if sinks is None else sinks[head].exp()
            rows.append((weights / (weights.sum() + rest)) @ v[shared])
        heads.append(torch.stack(rows))
    return torch.stack(heads)


# ---- masks, windows, sinks


@pytest.mark.parametrize("value_dim", [C, 5, 11])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("documents, window", list(product([None, DOCUMENTS], [None, 1, 4, T - 1, T, 99])))
def test_attention_is_its_formula(documents, window, sinks, value_dim):
    leaves = [random(B, H, T, C), random(B, K, T, C, seed=1), random(B, K, T, value_dim, seed=2)]
    leaves += [random(H, seed=3)] if sinks else []
    for leaf in leaves:
        leaf.requires_grad_()
    q, k, v = leaves[:3]
    ids = None if documents is None else torch.tensor(documents)
    mask = causal_mask(T, window, ids, C, torch.float64, CPU)
    found = attend(q, k, v, mask, 0.7, *leaves[3:])
    rows = [
        formula(
            q[b],
            k[b],
            v[b],
            0.7,
            leaves[3] if sinks else None,
            [[sees(i, j, window, documents and documents[b]) for j in range(T)] for i in range(T)],
        )
        for b in range(B)
    ]
    expected = torch.stack(rows)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    direction = random(*found.shape, seed=4)
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves, direction),
        torch.autograd.grad(expected, leaves, direction),
        rtol=1e-8,
        atol=1e-11,
    )


def test_plain_causal_attention_has_no_mask():
    for window in (None, T, 99):
        assert causal_mask(T, window, None, C, torch.float32, CPU) is None
        assert cached_mask(T, T, window, CPU) is None
    assert causal_mask(T, T - 1, None, C, torch.float32, CPU).shape == (1, 1, T, T)
    assert cached_mask(1, T, None, CPU).all()


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_sinks_in_other_types(dtype, bound):
    q, k, v, sinks = (
        random(B, H, T, C),
        random(B, K, T, C, seed=1),
        random(B, K, T, C, seed=2),
        random(H, seed=3),
    )
    expected = attend(q, k, v, None, None, sinks)
    found = attend(q.to(dtype), k.to(dtype), v.to(dtype), None, None, sinks.to(dtype))
    assert found.dtype == dtype
    assert (found - expected).norm() < bound * expected.norm()


def test_a_sink_far_above_all_scores_takes_everything_and_far_below_nothing():
    q, k, v = random(B, H, T, C), random(B, K, T, C, seed=1), random(B, K, T, C, seed=2)
    assert attend(q, k, v, None, None, torch.full((H,), 800.0).double()).abs().max() < 1e-300
    none = attend(q, k, v, None, None, torch.full((H,), -800.0).double())
    torch.testing.assert_close(none, attend(q, k, v, None), rtol=1e-12, atol=1e-14)


# ---- latent attention


def turned(x: Tensor, theta: float) -> Tensor:
    """x [T, C], channels 2i and 2i+1 as one complex number."""
    length, width = x.shape
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    angles = torch.arange(length)[:, None] * theta ** (-torch.arange(0, width, 2).double() / width)
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def latent_formula(p: dict[str, Tensor], x: Tensor, args: DeepseekV3Args, scale: float) -> Tensor:
    """The equations of arXiv:2405.04434, 2.1, for one sequence x [T, D]."""
    plain, rotary, value = args.qk_nope_head_dim, args.qk_rope_head_dim, args.v_head_dim
    if args.q_lora_rank is None:
        q = x @ p["q_proj.weight"].T
    else:
        q = normed(x @ p["q_a_proj.weight"].T, p["q_a_layernorm.weight"]) @ p["q_b_proj.weight"].T
    down = x @ p["kv_a_proj_with_mqa.weight"].T
    up = normed(down[:, : args.kv_lora_rank], p["kv_a_layernorm.weight"]) @ p["kv_b_proj.weight"].T
    shared = turned(down[:, args.kv_lora_rank :], args.rope_theta)
    seen = [[j <= i for j in range(len(x))] for i in range(len(x))]
    outs = []
    for head in range(args.num_attention_heads):
        own_q = q[:, head * (plain + rotary) : (head + 1) * (plain + rotary)]
        own_kv = up[:, head * (plain + value) : (head + 1) * (plain + value)]
        query = torch.cat((own_q[:, :plain], turned(own_q[:, plain:], args.rope_theta)), -1)
        key = torch.cat((own_kv[:, :plain], shared), -1)
        outs.append(formula(query[None], key[None], own_kv[None, :, plain:], scale, None, seen)[0])
    return torch.cat(outs, -1) @ p["o_proj.weight"].T


def filled(module: torch.nn.Module) -> torch.nn.Module:
    module = module.double()
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(random(*parameter.shape, seed=seed) * 0.4 + (parameter.ndim == 1))
    return module


MSCALED = YarnScaling(factor=40.0, mscale=1.0, mscale_all_dim=1.0)


@pytest.mark.parametrize("q_lora_rank", [None, 12])
@pytest.mark.parametrize("scaling, factor", [(None, 1.0), (MSCALED, (0.1 * math.log(40) + 1) ** 2)])
def test_latent_attention_is_its_formula(q_lora_rank, scaling, factor):
    args = replace(LATENT, q_lora_rank=q_lora_rank, rope_scaling=scaling)
    module, x = filled(args.attention(0)), random(B, T, args.hidden_size)
    assert isinstance(module, LatentAttention)
    # Tables in float64 and without the scaling of frequencies, which is shown on its own.
    frequencies = inverse_frequencies(args.rotary_channels, args.rope_theta, None).double()
    angles = torch.arange(T)[:, None] * args.rope_theta ** (
        -torch.arange(0, args.rotary_channels, 2).double() / args.rotary_channels
    )
    assert torch.allclose(frequencies, angles[1], rtol=1e-6)
    angles = torch.cat((angles, angles), -1)
    found = module(x, angles.cos(), angles.sin(), None)
    p: dict[str, Tensor] = dict(module.named_parameters())
    scale = factor / math.sqrt(args.qk_nope_head_dim + args.qk_rope_head_dim)
    expected = torch.stack([latent_formula(p, row, args, scale) for row in x])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    direction = random(*found.shape, seed=9)
    leaves = list(module.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves, direction),
        torch.autograd.grad(expected, leaves, direction),
        rtol=1e-8,
        atol=1e-10,
    )


# ---- decoders of each kind


class Kept:
    """The least cache: all of each kind in one tensor."""

    def __init__(self) -> None:
        self.kept: tuple[Tensor, ...] = ()

    @property
    def length(self) -> int:
        return self.kept[0].shape[2] if self.kept else 0

    def extend(self, *new: Tensor) -> tuple[Tensor, ...]:
        kept = self.kept or tuple(x[:, :, :0] for x in new)
        self.kept = tuple(torch.cat(pair, dim=2) for pair in zip(kept, new, strict=True))
        return self.kept


def decoder(args: DecoderArgs) -> Decoder:
    model = Decoder(args).double()
    parameters = dict(model.named_parameters())
    init_parameters(parameters, lambda name, t, generator: init_parameter(name, t, generator, args), seed=1)
    with torch.no_grad():
        for parameter in parameters.values():
            if parameter.ndim == 1:
                parameter += torch.linspace(-0.5, 0.5, len(parameter))
    return model


KINDS = {
    "grouped": DecoderArgs(
        24, 2, 6, 2, head_dim=8, intermediate_size=40, vocab_size=50, initializer_range=0.3
    ),
    "sinks": SINKS,
    "latent": LATENT,
    "latent, plain queries": replace(LATENT, q_lora_rank=None),
}


@pytest.mark.parametrize("args", KINDS.values(), ids=list(KINDS))
@pytest.mark.parametrize("pieces", [(1,) * 14, (14,), (6, 1, 4, 3)], ids=str)
def test_with_a_cache_pieces_are_the_whole(args, pieces):
    model = decoder(args)
    tokens = torch.randint(50, (1, 14), generator=torch.Generator().manual_seed(0))
    whole, caches = model(tokens), {name: Kept() for name in model.layers}
    parts, start = [], 0
    for size in pieces:
        positions = torch.arange(start, start + size)
        parts.append(model(tokens[:, start : start + size], positions, None, caches))
        start += size
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-10, atol=1e-11)
    narrow = args.kv_lora_rank + args.qk_rope_head_dim if isinstance(args, DeepseekV3Args) else None
    kept = sum(x.shape[1] * x.shape[3] for x in caches["0"].kept)
    assert kept == (narrow or 2 * args.num_key_value_heads * args.channels)


def test_what_a_token_of_each_layer_sees():
    """One layer each: the output at a place moves with exactly the tokens in its window."""
    for kinds, reach in ((("sliding_attention",), 5), (("full_attention",), T)):
        model = decoder(replace(SINKS, num_hidden_layers=1, layer_types=kinds))
        tokens = torch.randint(50, (1, T), generator=torch.Generator().manual_seed(0))
        before = model(tokens)
        moved = []
        for place in range(T):
            changed = tokens.clone()
            changed[0, place] = (tokens[0, place] + 1) % 50
            moved.append((model(changed) != before).any(-1)[0].nonzero().flatten().tolist())
        assert moved == [list(range(place, min(T, place + reach))) for place in range(T)]


def test_sliding_and_full_layers_by_turns_or_as_told():
    assert [SINKS.window(layer) for layer in range(3)] == [5, None, 5]
    told = replace(SINKS, layer_types=("full_attention", "full_attention", "sliding_attention"))
    assert [told.window(layer) for layer in range(3)] == [None, None, 5]
    assert [LATENT.window(layer) for layer in range(2)] == [None, None]


def test_sinks_are_initialised_and_trained():
    model = decoder(SINKS)
    attention = model.layers["0"].self_attn
    assert isinstance(attention, Attention) and attention.sinks is not None
    assert attention.sinks.shape == (6,) and attention.sinks.std() > 0.05
    model(torch.arange(9)[None]).square().sum().backward()
    assert attention.sinks.grad is not None and (attention.sinks.grad != 0).all()


# ---- rotary scalings


def yarn_by_the_paper(args: YarnScaling, width: int, theta: float, pair: int) -> float:
    """Sections 3.2 and 3.4 of arXiv:2309.00071, in pairs of channels as the published code has them."""

    def pair_of(turns: float) -> float:
        wavelength = args.original_max_position_embeddings / turns
        return width / 2 * math.log(wavelength / (2 * math.pi), theta)

    low, high = pair_of(args.beta_fast), pair_of(args.beta_slow)
    if args.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    stretched = min(1.0, max(0.0, (pair - low) / (high - low)))
    frequency = theta ** (-2 * pair / width)
    return frequency * (1 - stretched) + frequency / args.factor * stretched


@pytest.mark.parametrize(
    "scaling, width, theta",
    [
        (YarnScaling(40.0, 32.0, 1.0, 4096), 64, 10_000.0),  # DeepSeek-V3
        (YarnScaling(32.0, 32.0, 1.0, 4096, truncate=False), 64, 150_000.0),  # gpt-oss
        (YarnScaling(4.0, 8.0, 2.0, 256), 32, 500.0),
    ],
)
def test_frequencies_of_yarn(scaling, width, theta):
    found = inverse_frequencies(width, theta, scaling)
    expected = [yarn_by_the_paper(scaling, width, theta, pair) for pair in range(width // 2)]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=2e-6, atol=0)
    ratios = [theta ** (-2 * pair / width) / value for pair, value in enumerate(expected)]
    assert ratios[0] == 1.0 and ratios[-1] == pytest.approx(scaling.factor)
    assert sum(1.001 < ratio < 0.999 * scaling.factor for ratio in ratios) >= 3


@pytest.mark.parametrize(
    "scaling, on_tables, on_scores",
    [
        (YarnScaling(32.0), 0.1 * math.log(32) + 1, 1.0),
        (MSCALED, 1.0, (0.1 * math.log(40) + 1) ** 2),
        (replace(MSCALED, mscale=0.707), (0.0707 * math.log(40) + 1) / (0.1 * math.log(40) + 1), 1.8738),
        (replace(MSCALED, attention_factor=1.5), 1.5, 1.8738),
        (YarnScaling(1.0), 1.0, 1.0),
    ],
)
def test_factors_of_yarn(scaling, on_tables, on_scores):
    assert scaling.table_factor == pytest.approx(on_tables)
    assert scaling.score_factor == pytest.approx(on_scores, rel=1e-4)
    cos, sin = rotary_tables(torch.arange(5), torch.ones(2), torch.float32, scaling.table_factor)
    torch.testing.assert_close(cos.square() + sin.square(), torch.full((1, 5, 4), on_tables**2))
    assert RopeScaling().table_factor == 1.0


# ---- bad numbers


@pytest.mark.parametrize(
    "args, changes, rule",
    [
        (LATENT, {"kv_lora_rank": 0}, r"kv_lora_rank \(0\) must be at least 1"),
        (LATENT, {"q_lora_rank": 0}, r"q_lora_rank \(0\) must be at least 1"),
        (LATENT, {"qk_rope_head_dim": 5, "qk_nope_head_dim": 7}, r"qk_rope_head_dim \(5\) must be even"),
        (
            LATENT,
            {"num_key_value_heads": 2},
            r"num_key_value_heads \(2\) must be num_attention_heads \(4\): latent attention has no groups",
        ),
        (LATENT, {"head_dim": 64}, "head_dim is no part of latent attention"),
        (LATENT, {"qk_norm": True}, "qk_norm is no part of latent attention"),
        (SINKS, {"sliding_window": 0}, r"sliding_window \(0\) must be at least 1"),
        (SINKS, {"swiglu_limit": -7.0}, r"swiglu_limit \(-7.0\) must be above 0"),
        (SINKS, {"layer_types": ("full_attention",)}, r"layer_types \(1 of them\) must have one for each of"),
    ],
)
def test_numbers_that_make_no_attention(args, changes, rule):
    with pytest.raises(ValueError, match=rule):
        replace(args, **changes)


def test_every_registered_flavor_makes_an_attention():
    for spec in families().values():
        for args in spec.flavors.values():
            if isinstance(args, DecoderArgs):
                with torch.device("meta"):
                    assert {type(args.attention(0))} <= {Attention, LatentAttention}

"""The decoder against a plain reference of its own, in float64, and the numbers of published models."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from minititan.init import init_parameters
from minititan.models.arguments import DecoderArgs
from minititan.models.counts import flops_per_token
from minititan.models.decoder import Decoder, init_parameter
from minititan.models.llama3 import FLAVORS
from minititan.models.rotary import RopeScaling, inverse_frequencies

SMALL = DecoderArgs(
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,  # H*C = 48, not D
    intermediate_size=40,
    vocab_size=50,
)
# Frequencies of all three kinds: kept, stretched, in between.
SCALING = RopeScaling(
    factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
# Angles are float32 in the decoder, in every dtype; the reference's are not. Positions are below 100.
ANGLE_BOUND = 1e-5


def decoder(args: DecoderArgs) -> Decoder:
    model = Decoder(args).double()
    # Larger than for training, so that attention is far from uniform.
    args = replace(args, initializer_range=0.3)
    init_parameters(
        dict(model.named_parameters()),
        lambda name, tensor, generator: init_parameter(name, tensor, generator, args),
        seed=1,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter += torch.linspace(-0.5, 0.5, len(parameter))
    return model


def tokens_of(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(50, (batch, length), generator=torch.Generator().manual_seed(seed))


# ---- the reference: one sequence at a time, one head at a time, rotation by complex numbers


def reference_frequency(args: DecoderArgs, pair: int) -> float:
    """The equations of Llama 3.1's scaling, by wavelength."""
    frequency = args.rope_theta ** (-2 * pair / args.channels)
    scaling = args.rope_scaling
    if scaling is None:
        return frequency
    assert isinstance(scaling, RopeScaling)
    wavelength = 2 * math.pi / frequency
    context = scaling.original_max_position_embeddings
    if wavelength < context / scaling.high_freq_factor:
        return frequency
    if wavelength > context / scaling.low_freq_factor:
        return frequency / scaling.factor
    smooth = (context / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def reference_rotate(x: Tensor, positions: list[int], args: DecoderArgs) -> Tensor:
    """x [T, C]; channel i and channel i + C/2 are one complex number."""
    frequencies = torch.tensor([reference_frequency(args, i) for i in range(args.channels // 2)]).double()
    angles = torch.tensor(positions).double()[:, None] * frequencies
    first, second = x.chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


def reference_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def reference_logits(
    model: Decoder, tokens: Tensor, positions: list[int], documents: list[int] | None = None
) -> Tensor:
    """Logits [T, V] of one sequence, tokens [T]."""
    p, args = dict(model.named_parameters()), model.args
    length, width = len(tokens), args.channels
    seen = torch.ones(length, length).tril().bool()
    if documents is not None:
        seen &= torch.tensor([[a == b for a in documents] for b in documents])
    x = p["embed_tokens.weight"][tokens]
    for i in range(args.num_hidden_layers):
        layer = {k.removeprefix(f"layers.{i}."): v for k, v in p.items() if k.startswith(f"layers.{i}.")}
        h = reference_norm(x, layer["input_layernorm.weight"], args.rms_norm_eps)
        q, k, v = (h @ layer[f"self_attn.{name}_proj.weight"].T for name in "qkv")
        outs = []
        for head in range(args.num_attention_heads):
            kv_head = head * args.num_key_value_heads // args.num_attention_heads
            own, shared = (
                slice(head * width, (head + 1) * width),
                slice(kv_head * width, (kv_head + 1) * width),
            )
            query, key = (reference_rotate(part, positions, args) for part in (q[:, own], k[:, shared]))
            scores = (query @ key.T / math.sqrt(width)).masked_fill(~seen, -math.inf)
            outs.append(scores.softmax(-1) @ v[:, shared])
        x = x + torch.cat(outs, -1) @ layer["self_attn.o_proj.weight"].T
        h = reference_norm(x, layer["post_attention_layernorm.weight"], args.rms_norm_eps)
        gate, up = (h @ layer[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ layer["mlp.down_proj.weight"].T
    head = p.get("lm_head.weight", p["embed_tokens.weight"])
    return reference_norm(x, p["norm.weight"], args.rms_norm_eps) @ head.T


def logits_of(model: Decoder, tokens: Tensor, *inputs: Tensor | None) -> Tensor:
    return model.lm_head(model(tokens, *inputs))


# ---- the decoder


@pytest.mark.parametrize(
    "args",
    [
        SMALL,
        replace(SMALL, num_key_value_heads=6),
        replace(SMALL, num_key_value_heads=1, head_dim=None),
        replace(SMALL, tie_word_embeddings=True, rms_norm_eps=0.1),
        replace(SMALL, rope_scaling=SCALING, rope_theta=100.0),
    ],
    ids=["grouped", "multi-head", "multi-query", "tied", "scaled"],
)
def test_logits_and_gradients_against_the_reference(args):
    model, tokens = decoder(args), tokens_of(2, 40)
    parameters = list(model.parameters())
    found = logits_of(model, tokens)
    expected = torch.stack([reference_logits(model, row, list(range(40))) for row in tokens])
    assert expected.std() > 0.5  # not all the same
    torch.testing.assert_close(found, expected, rtol=0, atol=ANGLE_BOUND)

    direction = torch.randn(found.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    gradients = torch.autograd.grad(found, parameters, direction)
    for (name, _), one, other in zip(
        model.named_parameters(), gradients, torch.autograd.grad(expected, parameters, direction), strict=True
    ):
        assert (one - other).norm() < ANGLE_BOUND * other.norm(), name


def test_frequencies_of_llama_3_1():
    args = replace(FLAVORS["8B"], hidden_size=4096)
    frequencies = inverse_frequencies(args.channels, args.rope_theta, args.rope_scaling)
    expected = [reference_frequency(args, pair) for pair in range(64)]
    torch.testing.assert_close(frequencies, torch.tensor(expected), rtol=1e-6, atol=0)
    plain = [args.rope_theta ** (-2 * pair / 128) for pair in range(64)]
    ratios = [b / a for a, b in zip(expected, plain, strict=True)]
    assert ratios[0] == 1.0 and ratios[-1] == pytest.approx(8.0)
    assert sum(1.001 < ratio < 7.999 for ratio in ratios) >= 5  # the band in between is met


def test_positions_turn_queries_and_keys_by_their_difference_only():
    model, tokens = decoder(SMALL), tokens_of(2, 20)
    plain = logits_of(model, tokens)
    shifted = logits_of(model, tokens, torch.arange(20) + 60)
    torch.testing.assert_close(shifted, plain, rtol=0, atol=ANGLE_BOUND)
    stretched = logits_of(model, tokens, torch.arange(20) * 3)
    assert (stretched - plain).abs().max() > 0.1


def test_each_sequence_has_its_own_positions():
    model, tokens = decoder(SMALL), tokens_of(2, 12)
    positions = [[3, 4, 5, 9, 10, 11, 40, 41, 42, 43, 60, 61], [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]]
    found = logits_of(model, tokens, torch.tensor(positions))
    for row, own, logits in zip(tokens, positions, found, strict=True):
        torch.testing.assert_close(logits, reference_logits(model, row, own), rtol=0, atol=ANGLE_BOUND)


def test_a_document_knows_nothing_of_the_others():
    model, tokens = decoder(SMALL), tokens_of(2, 16)
    # An id that comes again belongs to the same document.
    documents = [[0] * 5 + [1] * 4 + [2] * 7, [7] * 3 + [5] * 10 + [7] * 3]
    ids = torch.tensor(documents)
    found = logits_of(model, tokens, None, ids)
    for row, own, logits in zip(tokens, documents, found, strict=True):
        expected = reference_logits(model, row, list(range(16)), own)
        torch.testing.assert_close(logits, expected, rtol=0, atol=ANGLE_BOUND)
    assert (found - logits_of(model, tokens)).abs().max() > 0.1

    for document in (0, 1, 2):
        changed = torch.where(ids == document, (tokens + 1) % 50, tokens)
        other = logits_of(model, changed, None, ids)
        assert torch.equal(other[ids != document], found[ids != document])
        assert (other[ids == document] != found[ids == document]).any(-1).all()


def test_a_token_knows_nothing_of_later_ones():
    model, tokens = decoder(SMALL), tokens_of(1, 16)
    changed = tokens.clone()
    changed[:, 9] = (tokens[:, 9] + 1) % 50
    found, other = logits_of(model, tokens), logits_of(model, changed)
    assert torch.equal(found[:, :9], other[:, :9])
    assert (found[:, 9:] != other[:, 9:]).any(-1).all()


def test_absent_parts_pass_through():
    model, tokens = decoder(SMALL), tokens_of(2, 8)
    expected = model(tokens)
    first, last = decoder(SMALL), decoder(SMALL)
    del first.layers["1"], last.layers["0"]
    first.norm, last.embed_tokens = None, None  # pyright: ignore[reportAttributeAccessIssue]
    assert torch.equal(last(first(tokens)), expected)


# ---- numbers


@pytest.mark.parametrize(
    "flavor, count",
    [("1B", 1_235_814_400), ("8B", 8_030_261_248), ("70B", 70_553_706_496), ("405B", 405_853_388_800)],
)
def test_parameters_of_published_models(flavor, count):
    with torch.device("meta"):
        model = Decoder(FLAVORS[flavor])
    assert sum(parameter.numel() for parameter in model.parameters()) == count


@pytest.mark.parametrize("flavor, millions", [("10M", 10), ("40M", 40)])
def test_parameters_of_our_flavors(flavor, millions):
    with torch.device("meta"):
        model = Decoder(replace(FLAVORS[flavor], vocab_size=6400))
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(
        millions * 1e6, rel=0.02
    )


@pytest.mark.parametrize("name", FLAVORS)
def test_flavors_fit_tensor_parallelism(name):
    args = FLAVORS[name]
    assert args.num_attention_heads % 4 == 0 and args.num_key_value_heads % 4 == 0


def test_floating_point_operations_by_hand():
    # A layer: q and o 24 x 48 each, k and v 24 x 16 each, three of 24 x 40: 5,952 weights; the head 24 x 50.
    # Attention: two products of T x C for each of 6 heads, 2 x 2 x 6 x 8 x 100 forward, twice that backward.
    weights = 2 * (2 * 24 * 48 + 2 * 24 * 16 + 3 * 24 * 40) + 24 * 50
    assert weights == 13_104
    assert flops_per_token(SMALL, 100) == 6 * 13_104 + 2 * 3 * (2 * 2 * 6 * 8 * 100)
    # Llama 3.1 8B: all parameters but the embedding, 128,256 x 4,096, and 65 norms; 12 x 32 x 4,096 x 8,192.
    assert flops_per_token(FLAVORS["8B"], 8192) == 6 * 7_504_658_432 + 12_884_901_888

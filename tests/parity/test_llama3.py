"""The decoder and `transformers`' Llama from one state dict: the same logits and the same gradients."""

import warnings
from dataclasses import replace

import pytest
import torch

from minititan.init import init_parameters
from minititan.models.arguments import DecoderArgs
from minititan.models.decoder import Decoder, init_parameter
from minititan.models.rotary import RopeScaling

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import LlamaConfig, LlamaForCausalLM

ARGS = DecoderArgs(
    hidden_size=48,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    intermediate_size=80,
    vocab_size=97,
    rope_theta=1000.0,
    initializer_range=0.2,  # large, so that attention is far from uniform
)
# With this context some frequencies are kept, some stretched, some in between.
SCALED = replace(ARGS, rope_scaling=RopeScaling(original_max_position_embeddings=64))
VARIANTS = {
    "grouped": ARGS,
    "multi-head": replace(ARGS, num_key_value_heads=6),
    "head-dim": replace(ARGS, head_dim=16, rms_norm_eps=1e-3),
    "tied": replace(ARGS, tie_word_embeddings=True),
    "scaled": SCALED,
    "scaled-tied": replace(SCALED, tie_word_embeddings=True),
}
# Relative. Rotation angles, and the norms of transformers, are float32 in a float64 model too.
BOUNDS = {torch.float32: 2e-5, torch.float64: 3e-6}


def theirs(args: DecoderArgs) -> LlamaForCausalLM:
    rope = {"rope_type": "default", "rope_theta": args.rope_theta}
    if args.rope_scaling is not None:
        rope |= vars(args.rope_scaling) | {"rope_type": "llama3"}
    config = LlamaConfig(
        vocab_size=args.vocab_size or 0,
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.num_hidden_layers,
        num_attention_heads=args.num_attention_heads,
        num_key_value_heads=args.num_key_value_heads,
        head_dim=args.head_dim,
        max_position_embeddings=args.max_position_embeddings,
        rms_norm_eps=args.rms_norm_eps,
        tie_word_embeddings=args.tie_word_embeddings,
        rope_parameters=rope,
    )
    config._attn_implementation = "eager"
    return LlamaForCausalLM(config)


def ours(args: DecoderArgs) -> Decoder:
    model = Decoder(args)
    init_parameters(
        dict(model.named_parameters()),
        lambda name, tensor, generator: init_parameter(name, tensor, generator, args),
        seed=5,
    )
    return model


def their_name(name: str) -> str:
    return name if name.startswith("lm_head.") else f"model.{name}"


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("args", VARIANTS.values(), ids=list(VARIANTS))
def test_same_weights_same_logits_and_gradients(args, dtype):
    model, reference = ours(args).to(dtype), theirs(args).to(dtype)
    state = {their_name(name): tensor for name, tensor in model.state_dict().items()}
    reference.load_state_dict(state, strict=True)
    tokens = torch.randint(97, (2, 48), generator=torch.Generator().manual_seed(2))

    logits, expected = model.lm_head(model(tokens)), reference(input_ids=tokens).logits
    bound = BOUNDS[dtype]
    assert (logits - expected).abs().max() < bound * expected.abs().max()

    labels = tokens.roll(-1, 1).flatten()
    for output in (logits, expected):
        torch.nn.functional.cross_entropy(output.flatten(0, 1), labels).backward()
    own, their = dict(model.named_parameters()), dict(reference.named_parameters())
    assert {their_name(name) for name in own} == set(their)
    for name, parameter in own.items():
        gradient, other = parameter.grad, their[their_name(name)].grad
        assert gradient is not None and other is not None
        assert (gradient - other).norm() < bound * other.norm(), name


def test_given_positions():
    model, reference = ours(SCALED).double(), theirs(SCALED).double()
    reference.load_state_dict({their_name(name): tensor for name, tensor in model.state_dict().items()})
    tokens = torch.randint(97, (2, 20), generator=torch.Generator().manual_seed(2))
    positions = torch.stack([torch.arange(20) * 2, torch.arange(20) + 70])
    expected = reference(input_ids=tokens, position_ids=positions, attention_mask=torch.ones(2, 20)).logits
    found = model.lm_head(model(tokens, positions))
    assert (found - expected).abs().max() < BOUNDS[torch.float64] * expected.abs().max()

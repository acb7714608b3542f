"""Each kind of attention and `transformers`' from one state dict: the same logits and the same gradients.

The feed-forwards are dense on both sides: the mixtures have tests of their own.
"""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from minititan.init import init_parameters
from minititan.models.arguments import DecoderArgs
from minititan.models.decoder import Decoder, init_parameter
from minititan.models.deepseek_v3 import DeepseekV3Args
from minititan.models.gpt_oss import GptOssArgs
from minititan.models.rotary import YarnScaling

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

transformers.logging.set_verbosity_error()

SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "vocab_size": 97,
    "rope_theta": 1000.0,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.2,  # large, so that attention is far from uniform
}
LATENT: dict[str, Any] = {"num_key_value_heads": 6, "kv_lora_rank": 16, "v_head_dim": 10}
LATENT |= {"qk_nope_head_dim": 12, "qk_rope_head_dim": 8}
YARN = YarnScaling(factor=8.0, original_max_position_embeddings=32)
MSCALED = replace(YARN, mscale=1.0, mscale_all_dim=0.7)
ALL = 99  # more than there are layers

VARIANTS: dict[str, tuple[str, DecoderArgs, dict[str, Any]]] = {
    "qwen2": ("Qwen2", DecoderArgs(**SHAPE, attention_bias=True), {}),
    "qwen2 yarn": ("Qwen2", DecoderArgs(**SHAPE, attention_bias=True, rope_scaling=YARN), {}),
    "qwen3": ("Qwen3", DecoderArgs(**SHAPE, head_dim=12, qk_norm=True), {}),
    "deepseek": (
        "DeepseekV3",
        DeepseekV3Args(**SHAPE | LATENT, q_lora_rank=20, rope_scaling=MSCALED),
        {"first_k_dense_replace": ALL},
    ),
    "deepseek plain queries": (
        "DeepseekV3",
        DeepseekV3Args(**SHAPE | LATENT, rope_scaling=replace(MSCALED, mscale=None, mscale_all_dim=None)),
        {"first_k_dense_replace": ALL, "q_lora_rank": None},
    ),
    "deepseek biases": (
        "DeepseekV3",
        DeepseekV3Args(**SHAPE | LATENT, q_lora_rank=20, attention_bias=True),
        {"first_k_dense_replace": ALL},
    ),
    "gpt_oss": (
        "GptOss",
        GptOssArgs(**SHAPE, head_dim=12, sliding_window=7, rope_scaling=replace(YARN, truncate=False)),
        {"num_local_experts": 1, "num_experts_per_tok": 1},
    ),
    "gpt_oss told layers": (
        "GptOss",
        GptOssArgs(
            **SHAPE,
            head_dim=8,
            sliding_window=4,
            layer_types=("full_attention", "sliding_attention", "sliding_attention"),
        ),
        {"num_local_experts": 1, "num_experts_per_tok": 1},
    ),
}
# Relative. Rotation angles, and the norms of transformers, are float32 in a float64 model too.
BOUNDS = {torch.float32: 1e-5, torch.float64: 3e-6}
GRADIENT_BOUNDS = {torch.float32: 1e-4, torch.float64: 1e-5}


class Dense(nn.Module):
    """A dense feed-forward where gpt-oss has its experts."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)), None


def theirs(family: str, args: DecoderArgs, more: dict[str, Any]) -> Any:
    known = {name: value for name, value in vars(args).items() if value is not None}
    scaling = known.pop("rope_scaling", None)
    rope = {"rope_type": "default", "rope_theta": known.pop("rope_theta")}
    rope |= {} if scaling is None else {k: v for k, v in vars(scaling).items() if v is not None}
    config_class = getattr(transformers, f"{family}Config")
    fields = {name: value for name, value in known.items() if hasattr(config_class, name)}
    if "layer_types" in fields:
        fields["layer_types"] = list(fields["layer_types"])
    config = config_class(**fields | more, rope_parameters=rope)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    if isinstance(args, GptOssArgs):
        for layer in model.model.layers:
            layer.mlp = Dense(args.hidden_size, args.intermediate_size)
    return model


def ours(args: DecoderArgs) -> Decoder:
    model = Decoder(args)
    parameters = dict(model.named_parameters())
    init_parameters(parameters, lambda name, t, generator: init_parameter(name, t, generator, args), seed=5)
    with torch.no_grad():
        for number, parameter in enumerate(parameters.values()):
            if parameter.ndim == 1:  # norms, biases and sinks, each with numbers of its own
                generator = torch.Generator().manual_seed(number)
                parameter += torch.randn(parameter.shape, generator=generator) * 0.3
    return model


def their_name(name: str) -> str:
    return name if name.startswith("lm_head.") else f"model.{name}"


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("family, args, more", VARIANTS.values(), ids=list(VARIANTS))
def test_same_weights_same_logits_and_gradients(family, args, more, dtype):
    model, reference = ours(args).to(dtype), theirs(family, args, more).to(dtype)
    state = {their_name(name): tensor for name, tensor in model.state_dict().items()}
    reference.load_state_dict(state, strict=True)
    tokens = torch.randint(97, (2, 40), generator=torch.Generator().manual_seed(2))

    logits, expected = model.lm_head(model(tokens)), reference(input_ids=tokens).logits
    assert (logits - expected).abs().max() < BOUNDS[dtype] * expected.abs().max()

    labels = tokens.roll(-1, 1).flatten()
    for output in (logits, expected):
        nn.functional.cross_entropy(output.flatten(0, 1), labels).backward()
    own, their = dict(model.named_parameters()), dict(reference.named_parameters())
    assert {their_name(name) for name in own} == set(their)
    for name, parameter in own.items():
        gradient, other = parameter.grad, their[their_name(name)].grad
        assert gradient is not None
        assert (gradient - other).norm() < GRADIENT_BOUNDS[dtype] * other.norm(), name

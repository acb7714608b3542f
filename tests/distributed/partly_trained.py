"""A user's model with parameters that are frozen, and trainable ones that no forward uses: they get no
gradient.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minititan.models.arguments import DecoderArgs
from minititan.models.decoder import Decoder, DecoderBlock, init_parameter, tensor_parallel_plan
from minititan.registry import ModelSpec, register


@dataclass(frozen=True)
class Args(DecoderArgs):
    frozen: tuple[str, ...] = ()  # ends of parameter names


class UnusedParts(DecoderBlock):
    """A block with a projection and a norm that its forward leaves out."""

    def __init__(self, args: DecoderArgs, layer: int) -> None:
        super().__init__(args, layer)
        self.unused_proj = nn.Linear(args.hidden_size, args.hidden_size, bias=False)
        self.unused_norm = nn.RMSNorm(args.hidden_size)


class PartlyTrained(Decoder):
    def __init__(self, args: Args) -> None:
        super().__init__(args)
        self.layers["1"] = UnusedParts(args, 1)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not name.endswith(args.frozen or ("no parameter",)))


def init_(name: str, tensor: Tensor, generator: torch.Generator, args: Args) -> None:
    init_parameter(name, tensor, generator, args)


def small(*frozen: str) -> Args:
    return Args(64, 2, 8, 4, intermediate_size=96, frozen=frozen)


register(
    "partly_trained",
    ModelSpec(
        flavors={
            "unused": small(),
            "frozen": small("embed_tokens.weight", "0.self_attn.q_proj.weight", "1.input_layernorm.weight"),
            "head_only": small("proj.weight", "norm.weight", "tokens.weight"),
        },
        build=PartlyTrained,
        init_=init_,
        tensor_parallel_plan=lambda args: (
            tensor_parallel_plan(args) | {"layers.*.unused_proj": "column", "layers.*.unused_norm": "norm"}
        ),
    ),
)

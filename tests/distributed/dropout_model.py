"""A user's model with dropout on the residual branches, for `experimental.custom_import`.

`draws` has one random number for each forward in training, as a model would draw it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minititan.models import counts, decoder
from minititan.models.arguments import DecoderArgs
from minititan.models.attention import KeyValueCache
from minititan.registry import ModelSpec, register

draws: list[float] = []


class Block(decoder.DecoderBlock):
    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: KeyValueCache | None = None
    ) -> tuple[Tensor, None]:
        branch = self.self_attn(self.input_layernorm(x), cos, sin, mask)
        x = x + F.dropout(branch, 0.2, self.training)
        return x + F.dropout(self.mlp(self.post_attention_layernorm(x))[0], 0.2, self.training), None


class Model(decoder.Decoder):
    def __init__(self, args: DecoderArgs) -> None:
        super().__init__(args)
        self.layers = nn.ModuleDict({str(i): Block(args, i) for i in range(args.num_hidden_layers)})

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        if self.training:
            draws.append(torch.rand(()).item())
        return super().forward(*inputs, **named)


register(
    "dropout",
    ModelSpec(
        flavors={"small": DecoderArgs(64, 2, 8, 4, intermediate_size=96)},
        build=Model,
        init_=decoder.init_parameter,
        flops_per_token=counts.flops_per_token,
        tensor_parallel_plan=decoder.tensor_parallel_plan,
    ),
)

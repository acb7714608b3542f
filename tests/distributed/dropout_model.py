"""A user's model with dropout on the residual branches, for `experimental.custom_import`.

`draws` has one random number for each forward in training, as a model would draw it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minititan.models import decoder
from minititan.registry import ModelSpec, register

draws: list[float] = []


class Block(decoder.DecoderBlock):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        branch = self.self_attn(self.input_layernorm(x), cos, sin, mask)
        x = x + F.dropout(branch, 0.2, self.training)
        return x + F.dropout(self.mlp(self.post_attention_layernorm(x)), 0.2, self.training)


class Model(decoder.Decoder):
    def __init__(self, args: decoder.DecoderArgs) -> None:
        super().__init__(args)
        self.layers = nn.ModuleDict({str(i): Block(args) for i in range(args.num_hidden_layers)})

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Tensor:
        if self.training:
            draws.append(torch.rand(()).item())
        return super().forward(tokens, positions, document_ids)


register(
    "dropout",
    ModelSpec(
        flavors={"small": decoder.DecoderArgs(64, 2, 8, 4, intermediate_size=96)},
        build=Model,
        init_=decoder.init_parameter,
        flops_per_token=decoder.flops_per_token,
        tensor_parallel_plan=decoder.TENSOR_PARALLEL_PLAN,
    ),
)

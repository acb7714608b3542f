"""A family of a user with experts, of which files have numbered tensors: its form is a table, no code.

It only has the names and shapes of such a model; the experts are added up without a router.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minititan.models.hugging_face import Field, HuggingFaceForm
from minititan.registry import ModelSpec, register


@dataclass(frozen=True)
class Args:
    width: int = 8  # D
    depth: int = 2
    experts: int = 12  # E
    hidden: int = 6  # F
    vocab_size: int | None = None  # V


class Block(nn.Module):
    def __init__(self, args: Args) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(args.experts, args.hidden, args.width))  # [E, F, D]
        self.down = nn.Parameter(torch.empty(args.experts, args.width, args.hidden))  # [E, D, F]

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.einsum("btd,efd,edf->btd", x, self.up, self.down)


class Model(nn.Module):
    def __init__(self, args: Args) -> None:
        super().__init__()
        assert args.vocab_size is not None
        self.embed_tokens = nn.Embedding(args.vocab_size, args.width)
        self.layers = nn.ModuleDict({str(i): Block(args) for i in range(args.depth)})
        self.norm = nn.RMSNorm(args.width)
        self.lm_head = nn.Linear(args.width, args.vocab_size, bias=False)

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Tensor:
        x = self.embed_tokens(tokens)
        for block in self.layers.values():
            x = block(x)
        return self.norm(x)


def init_(name: str, tensor: Tensor, generator: torch.Generator, args: Args) -> None:
    tensor.normal_(std=0.02, generator=generator)


FORM = HuggingFaceForm(
    model_type="numbered",
    architecture="NumberedForCausalLM",
    fields=(
        Field("width", name="hidden_size"),
        Field("depth", name="num_hidden_layers"),
        Field("experts", name="num_local_experts"),
        Field("hidden", name="moe_intermediate_size"),
        Field("vocab_size"),
    ),
    tensors={
        "lm_head.*": "lm_head.*",
        "layers.*.up": "model.layers.*.block_sparse_moe.experts.#.w3.weight",
        "layers.*.down": "model.layers.*.block_sparse_moe.experts.#.w2.weight",
        "*": "model.*",
    },
)

register("numbered", ModelSpec(flavors={"small": Args()}, build=Model, init_=init_, hugging_face=FORM))

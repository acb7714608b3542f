"""A family of a user with experts, of which files have numbered tensors: its form is a table, no code.

It only has the names and shapes of such a model; the experts are added up without a router.
"""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
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

register("numbered", ModelSpec(flavors={"small": Args()}, build=Model, init_=init_, hugging_face=(FORM,)))


def numbered(folder: Path) -> dict[str, Tensor]:
    """A folder of the family with 12 experts a layer, each tensor full of its own number."""
    tensors = {"model.embed_tokens.weight": (264, 8), "lm_head.weight": (264, 8), "model.norm.weight": (8,)}
    for layer, expert in itertools.product(range(2), range(12)):
        name = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
        tensors |= {f"{name}.w3.weight": (6, 8), f"{name}.w2.weight": (8, 6)}
    found = {name: torch.full(shape, float(i)) for i, (name, shape) in enumerate(tensors.items())}
    folder.mkdir()
    save_file(found, folder / "model.safetensors")
    config = {"model_type": "numbered", "hidden_size": 8, "num_hidden_layers": 2, "num_local_experts": 12}
    config |= {"moe_intermediate_size": 6, "vocab_size": 264, "router_jitter_noise": 0.5}
    (folder / "config.json").write_text(json.dumps(config))
    return found

"""Every family beside its reference in `transformers`, at toy size: by how much they differ.

Weights that neither side would initialise go from there to here as files, and back; then logits and the
gradients of all parameters are compared. `make families` writes the table of docs/models.md.
"""

import copy
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from minititan.__main__ import main
from minititan.checkpoint.checkpointer import Checkpointer
from minititan.config import load
from minititan.hugging_face import weights
from minititan.hugging_face.reading import open_files
from minititan.run import Run, check
from tests.toy_llama import read, same_bits, save

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

# Small, of widths that differ from each other; grouped products take rows of 16 bytes.
_SIZES: dict[str, Any] = {
    "vocab_size": 300,  # more than the byte tokenizer's ids
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}
_LLAMA_3_1 = {"rope_type": "llama3", "rope_theta": 1000.0, "factor": 4.0, "low_freq_factor": 1.0}
_LLAMA_3_1 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0}
_YARN |= {"original_max_position_embeddings": 32}
_EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 24}  # of 12: sorted as text, 10 is before 2
_LATENT = {
    "num_key_value_heads": 6,
    "n_routed_experts": 12,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    **_EXPERTS,
}
_GROUPS = {"n_group": 4, "topk_group": 2, "n_shared_experts": 2, "q_lora_rank": 28}
_MSCALES = {"mscale": 0.7, "mscale_all_dim": 0.7}

# Family -> name of the variant -> kind of the reference, and its fields.
VARIANTS: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {
    ("llama3", "dense"): ("Llama", {}),
    ("llama3", "scaled, tied"): ("Llama", {"rope_parameters": _LLAMA_3_1, "tie_word_embeddings": True}),
    ("qwen2", "dense"): ("Qwen2", {}),
    ("qwen2", "tied, yarn"): ("Qwen2", {"rope_parameters": _YARN, "tie_word_embeddings": True}),
    ("qwen3", "dense"): ("Qwen3", {"head_dim": 16}),
    ("qwen3", "experts"): (
        "Qwen3Moe",
        {"num_experts": 12, "norm_topk_prob": True, "head_dim": 16, **_EXPERTS},
    ),
    ("mixtral", "experts"): ("Mixtral", {"num_local_experts": 12, "num_experts_per_tok": 3}),
    ("deepseek_v3", "sigmoid, groups"): (
        "DeepseekV3",
        {**_LATENT, **_GROUPS, "rope_parameters": _YARN | _MSCALES},
    ),
    ("deepseek_v3", "queries not compressed"): (
        "DeepseekV3",
        {**_LATENT, **_GROUPS, "q_lora_rank": None, "n_group": 1, "topk_group": 1},
    ),
    ("deepseek_v3", "softmax"): (
        "DeepseekV2",
        {**_LATENT, "q_lora_rank": None, "rope_parameters": _YARN | _MSCALES},
    ),
    ("deepseek_v3", "softmax, groups"): (
        "DeepseekV2",
        {**_LATENT, **_GROUPS, "topk_method": "group_limited_greedy", "routed_scaling_factor": 3.0},
    ),
    ("gpt_oss", "experts"): (
        "GptOss",
        {
            "num_local_experts": 12,
            "num_experts_per_tok": 3,
            "head_dim": 16,
            "sliding_window": 9,
            "rope_parameters": _YARN | {"truncate": False},
        },
    ),
    ("minimind", "dense"): ("Qwen3", {"tie_word_embeddings": True, "head_dim": 8}),
    ("minimind", "experts"): (
        "Qwen3Moe",
        {"num_experts": 4, "norm_topk_prob": True, "tie_word_embeddings": True}
        | _EXPERTS
        | {"num_experts_per_tok": 1},
    ),
}


@dataclass(frozen=True)
class Difference:
    """Largest differences, relative to the largest logit and to the norm of each gradient.

    Gradients of less than 1e-4 of the norm of all are compared with that.
    """

    logits: float
    gradients: float
    worst_gradient: str


def theirs(kind: str, fields: Mapping[str, Any], seed: int = 3) -> Any:
    """A model of `transformers`; its buffers (biases of routers) are set too."""
    config = getattr(transformers, f"{kind}Config")(**(_SIZES | dict(fields)))
    config._attn_implementation = config._experts_implementation = "eager"
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.normal_(float("norm" in name), 0.1, generator=generator)
    return model.eval()


def imported(model: Any, family: str, folder: Path) -> tuple[Run, Any]:
    """The run and the model that `minititan import` makes of it, in `folder`/run."""
    save(model, folder / "source")
    words = ["--model.name", family, "--job.dump_folder", str(folder / "run")]
    with redirect_stdout(StringIO()):
        assert main(["import", str(folder / "source"), *words]) == 0
    run = check(load(["--job.config_file", str(folder / "run" / "run.toml")]), 1)
    ours = run.spec.build(run.args)
    target = {f"model.{name}": parameter for name, parameter in ours.named_parameters()}
    Checkpointer(run.checkpoint_folder, keep_latest_k=0, rank=0).load(0, target)
    return run, ours.eval()


def same_parameters(source: Path, run: Run, ours: Any) -> bool:
    """Whether a model has the bits of the tensors in files, those of experts stacked by number."""
    files: dict[str, Tensor] = {}
    for file in source.glob("*.safetensors"):
        files |= load_file(file)
    form = run.spec.form_of(run.args)
    assert form is not None
    used: set[str] = set()
    for name, parameter in weights.parameters_of_model(form, ours).items():
        tensors = [files[tensor] for tensor in parameter.tensors]
        used |= set(parameter.tensors)
        whole = torch.stack(tensors) if parameter.stacked else tensors[0]
        if not torch.equal(whole, ours.get_parameter(name)):
            return False
    return used == files.keys()


def exported(step: Path, folder: Path) -> Any:
    """What `transformers` makes of the folder that `minititan export` makes of a checkpoint."""
    with redirect_stdout(StringIO()):
        assert main(["export", str(step), str(folder)]) == 0
    return read(folder)


def tokens_of(vocabulary: int, length: int = 48) -> Tensor:
    return torch.randint(vocabulary, (2, length), generator=torch.Generator().manual_seed(2))


def difference(model: Any, run: Run, ours: Any, folder: Path) -> Difference:
    """Compare logits and gradients of one loss; theirs go through files, which have them by our names."""
    tokens = tokens_of(run.args.vocab_size)
    labels = tokens.roll(-1, 1).flatten()
    expected, found = model(input_ids=tokens).logits, ours.lm_head(ours(tokens))
    for logits in (expected, found):
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels).backward()
    form = run.spec.form_of(run.args)
    assert form is not None
    gradients = copy.deepcopy(model)
    with torch.no_grad():
        for parameter, other in zip(model.parameters(), gradients.parameters(), strict=True):
            other.copy_(parameter.grad)
    files = open_files(save(gradients, folder / "gradients"))
    apart = {}
    # The gradient of a router that chooses one expert is zero, but for rounding.
    least = 1e-4 * torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    for name, parameter in weights.matched_to(files, form, weights.parameters_of_model(form, ours)).items():
        gradient = ours.get_parameter(name).grad
        if gradient is not None:  # a bias that steps move, and no gradient, has none
            theirs = weights.read_whole(files, parameter)
            apart[name] = ((gradient - theirs).norm() / theirs.norm().clamp(min=least)).item()
    logits = (found - expected).abs().max() / expected.abs().max()
    worst = max(apart, key=lambda name: apart[name])
    return Difference(logits.item(), apart[worst], worst)


def table() -> str:
    """The table of docs/models.md."""
    lines = [
        "| family | variant | reference | forward | backward | import | export |",
        "|---|---|---|---|---|---|---|",
    ]
    for (family, variant), (kind, fields) in VARIANTS.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            model = theirs(kind, fields)
            run, ours = imported(model, family, folder)
            found = difference(model, run, ours, folder)
            back = exported(run.checkpoint_folder / "step-0", folder / "folder")
            there = same_parameters(folder / "source", run, ours)
            again = same_bits(back.state_dict(), model.state_dict())
        files = " | ".join("same bits" if same else "DIFFERS" for same in (there, again))
        reference = f"`{kind}ForCausalLM`"
        numbers = f"{found.logits:.1e} | {found.gradients:.1e}"
        lines.append(f"| `{family}` | {variant} | {reference} | {numbers} | {files} |")
    return "\n".join(lines)


BEGIN, END = "<!-- make families -->", "<!-- end of make families -->"


def write_table(page: Path) -> None:
    """Put the table between its marks in a page."""
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    write_table(Path(__file__).parents[2] / "docs" / "models.md")

"""A small Llama of `transformers`, saved as a folder like the published ones."""

import json
import warnings
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

logging.disable_progress_bar()

VOCABULARY = 300  # more than the byte tokenizer's ids
SCALING = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALING["original_max_position_embeddings"] = 64


def toy(dtype: torch.dtype = torch.float32, seed: int = 3, **fields: Any) -> Any:
    """Weights that are not what either side would initialise."""
    fields = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 80,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        "rms_norm_eps": 1e-5,
    } | fields
    model: Any = LlamaForCausalLM(LlamaConfig(**fields))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(float("norm" in name), 0.1, generator=generator)
    return model.to(dtype).eval()


def save(model: Any, folder: Path, shard: str = "60KB", old: bool = False) -> Path:
    """The folder; `old`: with a config.json as transformers 4 writes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder, max_shard_size=shard)
    if old:
        config = json.loads((folder / "config.json").read_text())
        rope = config.pop("rope_parameters")
        theta, kind = rope.pop("rope_theta"), rope["rope_type"]
        config |= {"rope_theta": theta, "rope_scaling": None if kind == "default" else rope}
        config |= {"torch_dtype": config.pop("dtype"), "transformers_version": "4.46.0"}
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def read(folder: Path) -> Any:
    """The model that `transformers` makes of a folder, in the type that it is stored in."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        model, found = loaded
    assert not any(found.values()), found
    return model.eval()


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        value.dtype == other[name].dtype and torch.equal(value, other[name]) for name, value in one.items()
    )


def tokenizer_files(folder: Path) -> None:
    """Add a tokenizer of letters, and what lies beside one."""
    words = {"<s>": 0, "</s>": 1, "<unk>": 2} | {chr(97 + i): 3 + i for i in range(26)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.save(str(folder / "tokenizer.json"))
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')

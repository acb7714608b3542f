"""Text on a tensor-parallel mesh is that of one process, token by token, for every family."""

import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from minititan import registry
from minititan.__main__ import main
from minititan.data.tokenizer import ByteTokenizer
from minititan.decoding import Sampling, tokens_after
from minititan.distributed import init_distributed
from minititan.init import init_parameters
from minititan.model_source import Source, load_model, split_rules
from tests.distributed.harness import run_ranks
from tests.toy_llama import save, toy

SAMPLINGS = (Sampling(temperature=0), Sampling(temperature=1.2, top_p=0.95, seed=7))
PROMPT = list(b"import os\n\ndef main(argv):\n    for i in")  # longer than gpt_oss's window


def source_of(name: str, flavor: str) -> Source:
    """A family's smallest model, with weights that make attention and routing far from even."""
    spec = registry.families()[name]
    # 270: ranks have uneven parts of the vocabulary.
    args = replace(spec.flavors[flavor], vocab_size=270, initializer_range=0.2)

    def init_(name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        spec.init_(name, tensor, generator, args)
        if name.endswith("bias"):
            tensor.normal_(std=0.2, generator=generator)

    def load(parameters: Any) -> None:
        init_parameters(parameters, init_, seed=5)

    return Source(Path(name), spec, args, ByteTokenizer(), False, torch.float64, load)


def texts_in_rank(rank: int, world: int, models: list[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    """The tokens of each model for each of the ways to choose."""
    place, found = init_distributed(timeout_seconds=60), {}
    for name, flavor in models:
        model = load_model(source_of(name, flavor), torch.float64, place)
        if world > 1:
            local: Any = model.layers["0"].self_attn.o_proj.weight
            assert local.to_local().shape[1] * world == local.shape[1], "attention is not split"
        texts = [list(islice(tokens_after(PROMPT, model, sampling), 16)) for sampling in SAMPLINGS]
        found[name, flavor] = texts
    return found


def test_the_same_tokens_as_one_process() -> None:
    models = [
        (name, flavor)
        for name, spec in registry.families().items()
        for flavor in spec.flavors
        if flavor.startswith("debugmodel")
    ]
    (alone,) = run_ranks(texts_in_rank, 1, models)
    for texts in alone.values():
        assert all(len(set(text)) > 2 for text in texts), "a model that says one thing shows nothing"
    for found in run_ranks(texts_in_rank, 2, models):
        assert found == alone


def test_ranks_that_heads_cannot_be_divided_by() -> None:
    source = source_of("llama3", "debugmodel")
    with torch.device("meta"):
        model = source.spec.build(source.args)
    assert split_rules(model, source, 2) == []
    assert split_rules(model, source, 3) == ["must divide num_key_value_heads (4); allowed: 1, 2, 4"]
    spec = replace(source.spec, tensor_parallel_plan=None)
    assert (
        "no tensor-parallel plan; start one process" in split_rules(model, replace(source, spec=spec), 2)[0]
    )


def test_with_torchrun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(save(toy(torch.float64, vocab_size=264), tmp_path / "folder"))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [*launch, "-m", "minititan.generate", folder, "--max_new_tokens", "15"]
    done = subprocess.run(words, input="Hällo\n", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr.count("15 new ones") == 1
    assert main(["generate", folder, "--prompt", "Hällo", "--max_new_tokens", "15"]) == 0
    assert done.stdout == capsys.readouterr().out

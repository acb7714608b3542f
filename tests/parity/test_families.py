"""Every family against its reference in `transformers`: logits, gradients, and files in both directions."""

from dataclasses import asdict, replace

import pytest
import torch

from minititan import registry
from minititan.checkpoint.checkpointer import Checkpointer
from minititan.init import init_parameters
from tests.parity.families import VARIANTS, difference, exported, imported, same_parameters, theirs, tokens_of
from tests.toy_llama import same_bits


@pytest.mark.parametrize("family, variant", VARIANTS, ids=str)
def test_same_weights_same_logits_and_gradients_and_files(family, variant, tmp_path):
    model = theirs(*VARIANTS[family, variant])
    run, ours = imported(model, family, tmp_path)
    assert same_parameters(tmp_path / "source", run, ours)
    back = exported(run.checkpoint_folder / "step-0", tmp_path / "folder")
    assert same_bits(back.state_dict(), model.state_dict())

    found = difference(model, run, ours, tmp_path)
    assert found.logits < 1e-5
    assert found.gradients < 1e-4, found.worst_gradient


@pytest.mark.parametrize(
    "family, flavor",
    [
        (name, flavor)
        for name, spec in registry.families().items()
        for flavor in spec.flavors
        if "debug" in flavor
    ],
)
def test_a_model_made_here_is_loaded_there(family, flavor, tmp_path):
    spec = registry.families()[family]
    args = replace(spec.flavors[flavor], vocab_size=300, initializer_range=0.1)
    model = spec.build(args)
    init_parameters(
        dict(model.named_parameters()),
        lambda name, tensor, generator: spec.init_(name, tensor, generator, args),
        1,
    )
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    named = {"name": family, "flavor": flavor, "args": asdict(args)}
    Checkpointer(tmp_path / "checkpoint", keep_latest_k=0, rank=0).save(3, tensors, {}, model=named)
    there = exported(tmp_path / "checkpoint" / "step-3", tmp_path / "folder")

    tokens = tokens_of(300)
    expected, found = there(input_ids=tokens).logits, model.eval().lm_head(model(tokens))
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    assert torch.equal(found.argmax(-1), expected.argmax(-1))

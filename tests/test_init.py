"""Initial weights: the same bits on every layout, of the distribution that the model asks for."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minititan import init
from minititan.build import model_of
from minititan.config import Config
from minititan.init import init_parameters, materialize
from minititan.models.arguments import DecoderArgs
from minititan.models.decoder import Decoder, init_parameter
from minititan.parallelisms import build_meshes
from minititan.run import check
from tests.distributed.harness import run_ranks

ARGS = DecoderArgs(
    hidden_size=20,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=6,
    intermediate_size=34,
    vocab_size=265,  # divided by no layout
)


def initial(args: DecoderArgs, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The weights of a plain model on one process."""
    model = Decoder(args).to(dtype)
    parameters = dict(model.named_parameters())
    init_parameters(parameters, lambda name, *rows: init_parameter(name, *rows, args=args), seed)
    return {name: parameter.detach() for name, parameter in parameters.items()}


# ---- layouts

LAYOUTS = {  # replicate, shard, tp
    "fsdp": (1, 4, 1),
    "tp": (1, 1, 4),
    "fsdp-tp": (1, 2, 2),
    "hsdp": (2, 2, 1),
}


def on_ranks(rank: int, world: int, folder: str) -> dict[Any, Any]:
    init.BLOCK_ELEMENTS = 128  # many blocks, that shards cut
    results = {}
    for layout, (replicate, shard, tp) in LAYOUTS.items():
        meshes = build_meshes("cpu", dp_replicate=replicate, dp_shard=shard, tp=tp)
        for tied in (False, True):
            tables = {
                "job": {"dump_folder": folder},
                "model": {"args": vars(replace(ARGS, tie_word_embeddings=tied)) | {"rope_scaling": None}},
                "training": {"mixed_precision_param": "float32", "seq_len": 8},
                "parallelism": {
                    "data_parallel_replicate_degree": replicate,
                    "data_parallel_shard_degree": shard,
                    "tensor_parallel_degree": tp,
                },
                "debug": {"seed": 3},
            }
            run = check(Config.model_validate(tables), world)
            model = model_of(run, meshes, torch.device("cpu"))
            assert (model.lm_head.weight is model.embed_tokens.weight) == tied
            full = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
            results[layout, tied] = {name: tensor.detach() for name, tensor in full.items()}
    return results


@pytest.fixture(scope="module")
def gathered(tmp_path_factory):
    return run_ranks(on_ranks, 4, str(tmp_path_factory.mktemp("init")))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_same_bits(layout, tied, gathered, monkeypatch):
    monkeypatch.setattr(init, "BLOCK_ELEMENTS", 128)
    expected = initial(replace(ARGS, tie_word_embeddings=tied), seed=3)
    for result in gathered:
        found = result[layout, tied]
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name


# ---- one process


def counting(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    tensor.copy_(torch.rand(tensor.shape, generator=generator))


def test_a_slice_is_the_same_whatever_else_was_read(monkeypatch):
    monkeypatch.setattr(init, "BLOCK_ELEMENTS", 30)
    shape = torch.Size((50, 7))
    whole = torch.empty(shape)
    init._fill("w", whole, shape, (0, 0), counting, seed=1)
    for first, rows, column, columns in [(49, 1, 0, 7), (13, 20, 3, 2), (0, 50, 6, 1), (12, 4, 0, 7)]:
        part = torch.empty(rows, columns)
        init._fill("w", part, shape, (first, column), counting, seed=1)
        assert torch.equal(part, whole[first : first + rows, column : column + columns])


def test_seed_name_and_block_make_the_values(monkeypatch):
    monkeypatch.setattr(init, "BLOCK_ELEMENTS", 64)
    parameters = {name: nn.Parameter(torch.empty(32, 8)) for name in ("a", "b")}
    init_parameters(parameters, counting, seed=0)
    first = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    blocks = [*first["a"].split(8), *first["b"].split(8)]
    assert len({tuple(block.flatten().tolist()) for block in blocks}) == 8
    init_parameters(dict(reversed(parameters.items())), counting, seed=0)
    assert all(torch.equal(parameters[name], first[name]) for name in first)
    init_parameters(parameters, counting, seed=1)
    assert not any(torch.equal(parameters[name], first[name]) for name in first)


def test_the_distribution_is_the_models():
    args = replace(ARGS, hidden_size=512, intermediate_size=512, num_hidden_layers=3, initializer_range=0.05)
    for name, tensor in initial(args).items():
        if tensor.ndim == 1:
            assert (tensor == 1).all(), name
            continue
        std = 0.05
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            std /= (2, 4, 6)[int(name.split(".")[1])] ** 0.5
        # A normal distribution cut at three standard deviations has 0.9866 of its own.
        assert tensor.std().item() == pytest.approx(0.9866 * std, rel=0.02), name
        assert abs(tensor.mean().item()) < 5 * std / tensor.numel() ** 0.5, name
        assert 2.8 * std < tensor.abs().max().item() <= 3 * std, name


def test_float64_has_the_values_of_float32():
    single, double = initial(ARGS), initial(ARGS, dtype=torch.float64)
    assert all(torch.equal(double[name], single[name].double()) for name in single)


def test_tied_parameters_stay_tied():
    with torch.device("meta"):
        model = Decoder(replace(ARGS, tie_word_embeddings=True))
    materialize(model, torch.device("cpu"))
    assert model.lm_head.weight is model.embed_tokens.weight
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    model.embed_tokens.weight.requires_grad_(False)
    materialize(model, torch.device("meta"))
    assert not model.lm_head.weight.requires_grad and model.norm.weight.requires_grad


def test_values_that_a_model_leaves_unset_are_an_error():
    def forgets(name: str, tensor: Tensor, generator: torch.Generator) -> None:
        if name != "b":
            tensor.zero_()

    parameters = {name: nn.Parameter(torch.empty(3)) for name in ("a", "b")}
    with pytest.raises(ValueError, match="init_ leaves values of b unset"):
        init_parameters(parameters, forgets, seed=0)

"""Models without numbers: everything else of them is there."""

import torch
from torch import nn

from minititan import registry
from minititan.models.meta import on_meta


def described(model: nn.Module) -> dict[str, object]:
    return {name: (p.shape, p.dtype, p.device, p.requires_grad) for name, p in model.named_parameters()}


def test_a_model_on_meta_is_as_torch_makes_it() -> None:
    for name in ("llama3", "deepseek_v3", "gpt_oss"):
        spec, args = registry.resolve(name, "debugmodel", {}, 264, lambda key, rule, way_out: rule)
        with torch.device("meta"):
            model = spec.build(args)
        assert described(spec.on_meta(args)) == described(model)
        assert {p.device.type for p in spec.on_meta(args).parameters()} == {"meta"}


def test_what_has_numbers_is_initialised() -> None:
    with on_meta():
        weight = nn.Linear(2, 2).weight
        real = torch.full((8,), 5.0, device="cpu")
        assert nn.init.uniform_(real, 1.0, 2.0) is real and real.min() >= 1 and real.max() < 2
        assert nn.init.kaiming_uniform_(weight) is weight and weight.is_meta
    assert not nn.Linear(2, 2).weight.is_meta

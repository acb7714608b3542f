"""What follows from the routing of a step: loads, correction biases, the names of metrics."""

from typing import Any

import pytest
import torch

from minititan.metrics import routing_scalars
from minititan.models.arguments import MoEArgs
from minititan.models.decoder import Decoder
from minititan.models.moe import Routing
from minititan.routing import LayerLoad, StepRouters

ARGS = MoEArgs(
    16,
    3,
    2,
    2,
    intermediate_size=16,
    vocab_size=20,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    first_k_dense_replace=1,
    score_correction=True,
    router_bias_update_speed=0.25,
)


def routing(*counts: int, loss: float = 0.0, entropy: float = 0.0) -> Routing:
    return Routing(torch.tensor(counts), torch.tensor(loss), torch.tensor(entropy))


def model() -> Any:
    made = Decoder(ARGS)
    for parameter in made.parameters():
        parameter.data.fill_(0.5)
    return made


def test_loads_by_hand():
    routers = StepRouters([made := model()], [])
    routers.begin(0.5)
    assert made.routing.loss_weight == 0.5
    for counts in ((5, 1, 0, 2), (4, 2, 0, 2)):  # two micro-batches of four tokens
        made.routing.add("1", routing(*counts, loss=0.5, entropy=4.0), torch.zeros(1))
    made.routing.add("2", routing(8, 6, 0, 0, loss=2.0, entropy=1.0), torch.zeros(1))  # two are missing
    result = routers.result(sequences=4, tokens=8)
    assert result is not None and result.auxiliary_loss == (0.5 + 0.5 + 2.0) / 4
    assert result.layers == {"1": LayerLoad(9 / 4, 1.0, 1, 0), "2": LayerLoad(8 / 3.5, 1 / 8, 2, 2)}
    names = routing_scalars(result)
    assert names["loss_metrics/auxiliary_loss"] == 0.75 and names["routing/layers.2/dropped_tokens"] == 2
    assert len(names) == 1 + 2 * 4

    routers.begin(1.0)
    assert made.routing.layers == {} and routers.result(4, 8) is None


def test_biases_move_towards_even_loads_in_place():
    routers = StepRouters([made := model()], [])
    biases = [made.layers[name].mlp.gate.e_score_correction_bias for name in "12"]
    before = [bias.data_ptr() for bias in biases]
    for counts in ((5, 1, 3, 3), (3, 3, 3, 3)):
        routers.begin(1.0)
        for name in "12":
            made.routing.add(name, routing(*counts), torch.zeros(1))
        routers.correct()
    assert [bias.tolist() for bias in biases] == [[0.25, 0.75, 0.5, 0.5]] * 2
    assert [bias.data_ptr() for bias in biases] == before


@pytest.mark.parametrize("layers", [["0"], []], ids=["dense", "none"])
def test_a_range_of_layers_without_experts(layers):
    """As of a pipeline stage."""
    made = model()
    for name in set(made.layers) - set(layers):
        del made.layers[name]
    routers = StepRouters([made], [])
    routers.begin(1.0)
    made(torch.zeros(1, 4, dtype=torch.int64))
    routers.correct()
    assert routers.result(1, 4) is None


def test_models_of_users_need_no_record():
    made = model()
    del made.routing
    routers = StepRouters([made], [])
    routers.begin(1.0)
    routers.correct()
    assert routers.result(1, 4) is None

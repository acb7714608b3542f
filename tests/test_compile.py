"""Equal layers are compiled once, whatever the parallelisms did to their modules."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from minititan import registry
from minititan.models.arguments import DecoderArgs
from minititan.init import materialize
from minititan.parallelisms.activation_checkpoint import apply_activation_checkpoint
from minititan.parallelisms.compile import apply_compile
from minititan.parallelisms.context_parallel import apply_context_parallel, build_split
from minititan.parallelisms.tensor_parallel import apply_tensor_parallel
from minititan.parallelisms.unit import Unit

dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())  # sends nothing
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
spec, args = registry.families()["llama3"], DecoderArgs(32, 10, 4, 2, intermediate_size=48, vocab_size=64)
model = spec.on_meta(args)
units = [Unit(f"layers.{name}", block) for name, block in model.layers.named_children()]
edges = [Unit(name, part) for name, part in model.named_children() if name != "layers"]
unwraps = apply_tensor_parallel(model, mesh["tp"], spec.plan_of(args)) if "tp" in sys.argv else {}
if "cp" in sys.argv:
    apply_context_parallel(model, build_split(mesh["cp"], "headtail"), "all_gather")
for unit in units + edges:
    unit.localize(unwraps)
if "ac" in sys.argv:
    settings = {"preserve_rng_state": True, "early_stop": False}
    apply_activation_checkpoint(units, "selective", "op" if "op" in sys.argv else "1", settings)
graphs = []
def backend(graph, inputs):
    graphs.append(graph)
    return graph
for unit in units:
    apply_compile(unit, backend)
for unit in units + edges:
    unit.install()
materialize(model, torch.device("cpu"))
tokens = torch.zeros(2, 16, dtype=torch.int64)
model(tokens, torch.arange(16)).sum().backward()
print(len(graphs))
"""


@pytest.mark.parametrize("parallelisms", ["", "tp", "cp", "tp cp", "ac", "tp ac op"])
def test_ten_layers_are_one_graph(parallelisms: str) -> None:
    command = [sys.executable, "-c", PROGRAM, *parallelisms.split()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["1"]

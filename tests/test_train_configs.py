"""Every shipped TOML loads, and fits the number of processes that it is meant for."""

import re
from pathlib import Path

import pytest

from minititan.config import load, validate
from minititan.models.decoder import Decoder
from minititan.registry import families, resolve

FOLDER = Path(__file__).parent.parent / "train_configs"
BYTES = 264  # ids of the tokenizer of runs without one
# World sizes beside the one of the command in the file.
ALSO = {
    "debug.toml": (1, 2, 3, 4, 6, 8),
    "llama3_10m.toml": (1, 2, 3, 4, 6, 12),
    "llama3_8b.toml": (8, 64, 512),
}
NAMES = sorted(path.name for path in FOLDER.iterdir())


def world_size_of(text: str, name: str) -> int:
    """The processes that the command in the head of a file starts."""
    head = " ".join(line.removeprefix("#").strip(" \\") for line in text.split("\n\n")[0].splitlines())
    command = re.search(rf"torchrun(.*?)train_configs/{re.escape(name)}", head)
    if command is None:
        return 2  # `make train`
    nodes = re.search(r"--nnodes (\d+)", command[1])
    each = re.search(r"--nproc-per-node (\d+)", command[1])
    assert each is not None, command[1]
    return int(nodes[1] if nodes else 1) * int(each[1])


@pytest.mark.parametrize("name", NAMES)
def test_loads_and_fits(name):
    text = (FOLDER / name).read_text()
    config = load(["--job.config_file", str(FOLDER / name)])
    model = config.model
    spec, args = resolve(model.name, model.flavor, model.args, BYTES, config.fault)
    for world_size in (world_size_of(text, name), *ALSO.get(name, ())):
        layout = validate(
            config,
            args,
            world_size,
            tensor_parallel_plan=spec.tensor_parallel_plan is not None,
            vocab_size=args.vocab_size,
        )
        ranks_of_a_step = layout.dp * layout.accumulation_steps(1) * config.training.local_batch_size
        assert layout.dp * layout.tp == world_size
        assert ranks_of_a_step == config.training.global_batch_size


@pytest.mark.parametrize("name", NAMES)
def test_the_head_says_what_it_is_for(name):
    text = (FOLDER / name).read_text()
    if gpus := re.search(r"on (\d+) GPUs", text):
        assert world_size_of(text, name) == int(gpus[1])
        assert "Not run at this size" in text
        assert f'dump_folder = "./outputs/{name.removesuffix(".toml")}"' in text


def test_every_family_has_one_to_try_and_one_to_train():
    found = {}
    for name in NAMES:
        model = load(["--job.config_file", str(FOLDER / name)]).model
        found.setdefault(model.name, []).append(model.flavor)
    ours = {name for name, spec in families().items() if spec.build is Decoder}
    assert found.keys() == ours
    for name, flavors in found.items():
        assert any("debug" in flavor for flavor in flavors), name
        assert any("debug" not in flavor for flavor in flavors), name

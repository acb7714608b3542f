"""Every shipped TOML loads, and fits the number of processes that it is meant for."""

from pathlib import Path

import pytest

from minititan.config import load, validate
from minititan.registry import resolve

FOLDER = Path(__file__).parent.parent / "train_configs"
# Tokenizer sizes and world sizes; the bytes have 264 ids.
MEANT_FOR = {
    "debug.toml": (264, (1, 2, 3, 4, 6, 8)),
    "llama3_10m.toml": (264, (1, 2, 3, 4, 6, 12)),
    "llama3_8b.toml": (128_256, (8, 64, 512)),
    "llama3_70b.toml": (128_256, (256,)),
}


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.iterdir()))
def test_loads_and_fits(name):
    config = load(["--job.config_file", str(FOLDER / name)])
    vocab_size, world_sizes = MEANT_FOR[name]
    model = config.model
    spec, args = resolve(model.name, model.flavor, model.args, vocab_size, config.fault)
    for world_size in world_sizes:
        layout = validate(
            config,
            args,
            world_size,
            tensor_parallel_plan=spec.tensor_parallel_plan is not None,
            vocab_size=vocab_size,
        )
        ranks_of_a_step = layout.dp * layout.accumulation_steps(1) * config.training.local_batch_size
        assert layout.dp * layout.tp == world_size
        assert ranks_of_a_step == config.training.global_batch_size

"""Import, export and conversion stream: their memory does not grow with the model."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from minititan.hugging_face.writing import Layout, Shard, write_shard

FIELDS: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 8,
}
LARGEST = 4 * FIELDS["hidden_size"] * FIELDS["intermediate_size"]  # bytes of a tensor
PEAK = """
import sys
from minititan.__main__ import main
code = main(sys.argv[1:])
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")))
sys.exit(code)
"""


def peak_bytes(*words: object) -> int:
    """The largest resident memory of a command."""
    program = [sys.executable, "-c", PEAK, *map(str, words)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return 1024 * int(done.stdout.split()[-2])  # not ru_maxrss, which begins with the parent's


def write_llama(folder: Path, layers: int) -> int:
    """Write a Llama of that many layers as one file; return its size."""
    from minititan.models.arguments import DecoderArgs
    from minititan.models.decoder import Decoder

    with torch.device("meta"):
        model = Decoder(DecoderArgs(**FIELDS, num_key_value_heads=8, num_hidden_layers=layers))
    shapes = {("" if "lm_head" in n else "model.") + n: tuple(p.shape) for n, p in model.named_parameters()}
    folder.mkdir(parents=True)
    tensors = tuple(Layout(name, shape, torch.float32) for name, shape in shapes.items())
    write_shard(folder, Shard("model.safetensors", tensors), lambda name: torch.full(shapes[name], 0.5))
    config = FIELDS | {"model_type": "llama", "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    return (folder / "model.safetensors").stat().st_size


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("many", [5, pytest.param(16, marks=pytest.mark.slow)])
def test_memory_is_that_of_a_few_tensors_whatever_the_size_of_the_model(tmp_path: Path, many: int) -> None:
    """16 layers are 1.1 GB."""
    peaks: dict[int, list[int]] = {}
    sizes: dict[int, int] = {}
    for layers in (1, many):
        at = tmp_path / str(layers)
        sizes[layers] = write_llama(at / "source", layers)
        step = at / "run" / "checkpoint" / "step-0"
        peaks[layers] = [
            peak_bytes("import", at / "source", "--job.dump_folder", at / "run"),
            peak_bytes("export", step, at / "folder"),
            peak_bytes("checkpoint", "convert", step, at / "one.safetensors"),
        ]
        shutil.rmtree(at)
    assert sizes[many] - sizes[1] > (many - 1) * 4 * LARGEST
    growth = [large - small for small, large in zip(peaks[1], peaks[many], strict=True)]
    assert max(growth) < 3 * LARGEST, peaks

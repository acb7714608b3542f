"""A training run that writes down how long each phase of its start took: `benchmarks/startup.py` starts it.

`python benchmarks/startup_phases.py FOLDER BEGIN [WORDS of minititan.train]...`, with torchrun or without;
BEGIN is `time.monotonic()` when the process was asked for. Each rank writes `FOLDER/rank-N.json`. Functions
of the trainer are wrapped, nothing of it changes; time inside a nested phase is not counted in the outer one.
"""

import time

LOADED = time.monotonic()  # before any other import: the interpreter is up

import gc  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

WATCHED = (
    *("sympy", "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp"),
    *("torch.distributed.pipelining", "torch.distributed.checkpoint", "torch.testing", "torch.profiler"),
    *("torchdata", "tokenizers", "rich", "pydantic", "safetensors", "tensorboard"),
)


class Phases:
    """Seconds by phase, and what was loaded when each ended."""

    def __init__(self, begin: float) -> None:
        self.seconds: dict[str, float] = {"interpreter": LOADED - begin}
        self.loaded: dict[str, str] = {}  # module -> the phase that imported it
        self.last, self.open = LOADED, ["other"]

    def end(self, phase: str) -> None:
        """Count the time since the last mark to `phase`."""
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.last
        for module in WATCHED:
            if module in sys.modules:
                self.loaded.setdefault(module, phase)
        self.last = now

    def wrap(self, owner: Any, name: str, phase: str | Callable[[], str]) -> None:
        """Count the time in the function `name` of `owner` to a phase."""
        function = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            self.end(self.open[-1])
            self.open.append(phase if isinstance(phase, str) else phase())
            try:
                return function(*args, **options)
            finally:
                self.end(self.open.pop())

        setattr(owner, name, timed)


def wrap_trainer(phases: Phases) -> None:
    from minititan import build, train

    for owner, name, phase in (
        (train, "load", "config"),
        (train, "check", "check"),
        (train, "init_distributed", "process group"),
        (train, "build_meshes", "process group"),
        (train.build, "train_loader_of", "data"),
        (train.build, "validation_loader_of", "data"),
        (train.build, "parts_of", "model"),
        (build, "parallelize", "parallelisms"),
        (build, "materialize", "initial values"),
        (build, "init_parameters", "initial values"),
        (train.build, "optimizer_of", "optimizer"),
        (train, "take_folders", "checkpoint look-up"),
        (train.Checkpoints, "load", "checkpoint look-up"),
        (train, "shutdown", "end"),
    ):
        phases.wrap(owner, name, phase)
    steps = iter(["first step"])
    phases.wrap(train.Trainer, "step", lambda: next(steps, "later step"))


def compiler_counts() -> dict[str, int]:
    """Return how many graphs the compiler made, and how many it found in its caches."""
    if "torch._dynamo" not in sys.modules:
        return {}
    from torch._dynamo.utils import counters

    return {
        f"{group}.{name}": count
        for group, names in counters.items()
        for name, count in names.items()
        if group in ("stats", "aot_autograd", "inductor") and ("cache" in name or "unique_graphs" in name)
    }


def main() -> int:
    folder, begin, *words = sys.argv[1:]
    phases = Phases(float(begin))
    gc.disable()  # as minititan.train does where it is the program
    import torch  # noqa: F401

    phases.end("import of torch")
    from minititan.train import main as train

    wrap_trainer(phases)
    gc.freeze()
    gc.enable()
    phases.end("import of minititan")
    code = train(words)
    phases.end("other")
    result = {
        "seconds": phases.seconds,
        "loaded": phases.loaded,
        "compiler": compiler_counts(),
        "ended": time.monotonic(),
    }
    (Path(folder) / f"rank-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(result))
    return code


if __name__ == "__main__":
    sys.exit(main())

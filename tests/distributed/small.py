"""A small run on real text, about a second for 5 steps, and the keys of its layouts."""

from pathlib import Path
from typing import Any

from tests.distributed.layouts import Overrides
from tests.distributed.runs import arguments

SMALL: Overrides = {
    "training.dataset": "stdlib",
    "training.steps": "5",
    "training.seq_len": "32",
    "training.local_batch_size": "2",
    "training.global_batch_size": "8",
    "training.mixed_precision_param": "float32",
    "model.args.hidden_size": "64",
    "model.args.num_hidden_layers": "2",
    "model.args.intermediate_size": "96",
    "optimizer.lr": "1e-3",
    "lr_scheduler.warmup_steps": "2",
    "metrics.log_freq": "1",
    "metrics.log_batch_hash": "true",
    "activation_checkpoint.mode": "none",
}
FLOAT64: Overrides = {"training.dtype": "float64", "training.mixed_precision_param": "auto"}
EVERY_STEP: Overrides = {
    "checkpoint.enable": "true",
    "checkpoint.interval": "1",
    "checkpoint.keep_latest_k": "0",
}


def degrees(shard: int = 1, tp: int = 1) -> Overrides:
    """The keys of `shard` x `tp` ranks."""
    return {
        "parallelism.data_parallel_shard_degree": str(shard),
        "parallelism.tensor_parallel_degree": str(tp),
    }


def build(rank: int, world: int, folder: Path, cache: Path, keys: Overrides) -> Any:
    """A trainer of the small run, on a rank of the harness."""
    from minititan.config import load
    from minititan.distributed import init_distributed
    from minititan.run import check
    from minititan.train import Trainer

    place = init_distributed(timeout_seconds=60)
    words = arguments(SMALL | {"data.cache_folder": str(cache)} | keys, folder)
    return Trainer.build(check(load(words), world), place)

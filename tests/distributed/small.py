"""A small run on real text, about a second for 5 steps, and the keys of its layouts."""

from pathlib import Path
from typing import Any

Keys = dict[str, str]

SMALL: Keys = {
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
FLOAT64: Keys = {"training.dtype": "float64", "training.mixed_precision_param": "auto"}
EVERY_STEP: Keys = {
    "checkpoint.enable": "true",
    "checkpoint.interval": "1",
    "checkpoint.keep_latest_k": "0",
}


def degrees(shard: int = 1, tp: int = 1) -> Keys:
    """The keys of `shard` x `tp` ranks."""
    return {
        "parallelism.data_parallel_shard_degree": str(shard),
        "parallelism.tensor_parallel_degree": str(tp),
    }


def words(folder: Path, cache: Path, keys: Keys) -> list[str]:
    """The command line of the small run with `keys`; it writes below `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.toml").touch()
    all_keys = SMALL | {"job.dump_folder": f"{folder}/out", "data.cache_folder": str(cache)} | keys
    return [f"--job.config_file={folder}/run.toml", *(f"--{key}={value}" for key, value in all_keys.items())]


def build(rank: int, world: int, folder: Path, cache: Path, keys: Keys) -> Any:
    """A trainer of the small run, on a rank of the harness."""
    from minititan.config import load
    from minititan.distributed import init_distributed
    from minititan.run import check
    from minititan.train import Trainer

    place = init_distributed(timeout_seconds=60)
    return Trainer.build(check(load(words(folder, cache, keys)), world), place)


def lines(folder: Path) -> list[dict]:
    """The lines of the run's `metrics.jsonl`."""
    import json

    return [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]

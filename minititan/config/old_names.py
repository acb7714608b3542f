"""Names of TorchTitan 0.1.0 that moved or went since; a file that uses them loads with one warning line."""

from __future__ import annotations

from typing import Any, NamedTuple

from minititan.config.error import fault_line
from minititan.config.fields import describe, fits

MOVED = {
    "job.print_args": "job.print_config",
    "model.tokenizer_path": "model.hf_assets_path",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "training.compile": "compile.enable",
    "training.seed": "debug.seed",
    "training.deterministic": "debug.deterministic",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.initial_load_model_weights_only": "checkpoint.initial_load_model_only",
    "checkpoint.last_save_model_weights_only": "checkpoint.last_save_model_only",
    "memory_estimation.enabled": "memory_estimation.enable",
}
MOVED_TABLES = {"float8": "quantize.linear.float8", "mx": "quantize.linear.mx"}
MOVED_CONVERTERS = {"float8": "quantize.linear.float8", "mx": "quantize.linear.mx"}


class Dropped(NamedTuple):
    """A key without effect: `off` is the one value that it may have, None any value of its type."""

    annotation: Any
    off: Any
    way_out: str


DROPPED = {
    "job.use_for_integration_test": Dropped(bool, None, ""),
    "parallelism.enable_compiled_autograd": Dropped(
        bool, False, "compiled autograd is not there; leave it out"
    ),
    "parallelism.pipeline_parallel_split_points": Dropped(
        tuple[str, ...], (), "use parallelism.module_fqns_per_model_part"
    ),
    "checkpoint.model_weights_only": Dropped(bool, False, "use checkpoint.last_save_model_only"),
    "fault_tolerance.sync_steps": Dropped(int, None, ""),
    "fault_tolerance.num_fragments": Dropped(int, None, ""),
}


def present_name(key: str) -> str:
    """Today's name of `key`."""
    table, _, rest = key.partition(".")
    if table in MOVED_TABLES:
        return MOVED_TABLES[table] + (f".{rest}" if rest else "")
    return MOVED.get(key, key)


def translate(entries: dict[str, Any], where: str) -> tuple[dict[str, Any], list[str], list[str]]:
    """The entries under today's names, the old names that were met ("old -> new"), and the faults."""
    translated: dict[str, Any] = {}
    met: list[str] = []
    faults: list[str] = []
    for key, value in entries.items():
        if key in DROPPED:
            faults += _dropped_faults(key, value, where)
            met.append(f"{key} (no effect)")
            continue
        name = present_name(key)
        if name != key:
            table = key.partition(".")[0]
            moved = f"[{table}] -> [{MOVED_TABLES[table]}]" if table in MOVED_TABLES else f"{key} -> {name}"
            met += [moved] if moved not in met else []
            if name in entries:
                faults.append(
                    fault_line(where, key, value, f"old name of {name}, which is set too", "keep one")
                )
                continue
        if name == "model.converters" and isinstance(value, (list, tuple)):
            met += [
                f"converter {word} -> {MOVED_CONVERTERS[word]}" for word in value if word in MOVED_CONVERTERS
            ]
            value = tuple(
                MOVED_CONVERTERS.get(word, word) if isinstance(word, str) else word for word in value
            )
        translated[name] = value
    return translated, met, faults


def _dropped_faults(key: str, value: Any, where: str) -> list[str]:
    dropped = DROPPED[key]
    value = tuple(value) if isinstance(value, list) else value
    if not fits(value, dropped.annotation):
        return [fault_line(where, key, value, f"must be {describe(dropped.annotation)}")]
    if dropped.off is not None and value != dropped.off:
        return [fault_line(where, key, value, "this key is gone", dropped.way_out)]
    return []

"""The rules that need no layout: ranges and choices of keys whose feature is on, features that are still to
come, and keys that must agree with each other.

A feature has one switch. While it is off, its other keys may have any value of their type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from typing import NamedTuple

from minititan.config.error import closest, literal
from minititan.config.fields import INT64_MAX, Choices, Mark, Section, marks
from minititan.config.schema import Config, all_keys
from minititan.config.stages import pipeline_faults


class Feature(NamedTuple):
    """Keys that count only while `on`: those that begin with one of `prefixes`, without the `switches`."""

    prefixes: tuple[str, ...]
    switches: tuple[str, ...]
    on: Callable[[Config], bool]


FEATURES = (
    Feature(
        ("profiling.",),
        ("profiling.enable_profiling", "profiling.enable_memory_snapshot"),
        lambda c: c.profiling.enable_profiling or c.profiling.enable_memory_snapshot,
    ),
    Feature(
        ("training.dataloader.",),
        ("training.dataloader.num_workers",),
        lambda c: c.training.dataloader.num_workers > 0,
    ),
    Feature(
        ("parallelism.pipeline_parallel_", "parallelism.module_fqns_per_model_part"),
        ("parallelism.pipeline_parallel_degree",),
        lambda c: c.parallelism.pipeline_parallel_degree > 1,
    ),
    Feature(
        ("parallelism.context_parallel_",),
        ("parallelism.context_parallel_degree",),
        lambda c: c.parallelism.context_parallel_degree > 1,
    ),
    Feature(
        ("parallelism.expert_",),
        ("parallelism.expert_parallel_degree",),
        lambda c: c.parallelism.expert_parallel_degree > 1,
    ),
    Feature(("checkpoint.",), ("checkpoint.enable",), lambda c: c.checkpoint.enable),
    Feature(
        ("activation_checkpoint.",),
        ("activation_checkpoint.mode",),
        lambda c: c.activation_checkpoint.mode != "none",
    ),
    Feature(
        ("activation_checkpoint.memory_budget",),
        (),
        lambda c: c.activation_checkpoint.mode == "memory_budget",
    ),
    Feature(("compile.",), ("compile.enable",), lambda c: c.compile.enable),
    Feature(("memory_estimation.",), ("memory_estimation.enable",), lambda c: c.memory_estimation.enable),
    Feature(("fault_tolerance.",), ("fault_tolerance.enable",), lambda c: c.fault_tolerance.enable),
    Feature(
        ("optimizer.muon_",),
        (),
        lambda c: "Muon" in (c.optimizer.name, *(group.name for group in c.optimizer.param_groups)),
    ),
    Feature(("validation.",), ("validation.enable",), lambda c: c.validation.enable),
    Feature(("training.loss_scale_",), (), lambda c: c.training.mixed_precision_param == "float16"),
    Feature(("debug.max_skipped_in_a_row",), (), lambda c: c.debug.nan_policy == "skip"),
    Feature(("debug.loss_spike_window",), (), lambda c: c.debug.loss_spike_factor is not None),
    Feature(
        ("validation.dataloader.",),
        ("validation.dataloader.num_workers",),
        lambda c: c.validation.enable and c.validation.dataloader.num_workers > 0,
    ),
)


class Refusal(NamedTuple):
    """A feature that is not there: refused when `asked`."""

    key: str
    asked: Callable[[Config], bool]
    rule: str
    way_out: str


def _not_yet(
    key: str, feature: str, off: object, condition: Callable[[Config], bool] = lambda c: True
) -> Refusal:
    """A refusal of every value of `key` but `off`, while `condition` holds."""
    rule = f"{feature} is not there yet"
    return Refusal(key, lambda c: condition(c) and c.value(key) != off, rule, f"only {literal(off)} so far")


def _checkpoints(config: Config) -> bool:
    return config.checkpoint.enable


def _op_selective(config: Config) -> bool:
    return (
        config.activation_checkpoint.mode == "selective"
        and config.activation_checkpoint.selective_ac_option == "op"
    )


CONVERTERS = {
    "quantize.linear.float8": "linear layers in float8",
    "quantize.linear.mx": "linear layers in MX formats",
    "quantize.grouped_mm.float8": "experts in float8",
    "quantize.grouped_mm.mx": "experts in MX formats",
}

REFUSALS = (
    _not_yet("job.custom_config_module", "extending the config by a module", ""),
    _not_yet("experimental.custom_args_module", "extending the config by a module", ""),
    *(
        Refusal(
            "model.converters",
            lambda c, name=name: name in c.model.converters,
            f"{feature} are not there yet",
            f'take "{name}" out',
        )
        for name, feature in CONVERTERS.items()
    ),
    _not_yet("optimizer.early_step_in_backward", "the optimizer step inside the backward pass", False),
    _not_yet("training.gc_debug", "debugging of the garbage collector", False),
    _not_yet("parallelism.enable_async_tensor_parallel", "asynchronous tensor parallelism", False),
    _not_yet(
        "parallelism.pipeline_parallel_schedule_csv",
        "a schedule from a file",
        None,
        lambda c: c.parallelism.pipeline_parallel_degree > 1,
    ),
    _not_yet(
        "parallelism.expert_parallel_comm_backend",
        "DeepEP",
        "standard",
        lambda c: c.parallelism.expert_parallel_degree > 1,
    ),
    Refusal(
        "checkpoint.initial_load_in_hf_quantized",
        lambda c: c.checkpoint.enable and c.checkpoint.initial_load_in_hf_quantized,
        "quantised weights are not read",
        "load a checkpoint in bfloat16",
    ),
    Refusal(
        "checkpoint.create_seed_checkpoint",
        lambda c: c.checkpoint.enable and c.checkpoint.create_seed_checkpoint,
        "not needed: with one seed every layout starts from the same weights",
        "leave it out",
    ),
    Refusal(
        "activation_checkpoint.visualize_memory_budget_pareto",
        lambda c: (
            c.activation_checkpoint.mode == "memory_budget"
            and c.activation_checkpoint.visualize_memory_budget_pareto
        ),
        "the curve of memory against time is not there yet",
        "only false so far",
    ),
    Refusal(
        "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns",
        lambda c: (
            _op_selective(c)
            and c.activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns
            not in ((), ("moe.router.gate",))
        ),
        "forced recomputation by module is not there yet",
        "leave it out",
    ),
    _not_yet("comm.mode", "training without real processes", "default"),
    _not_yet("memory_estimation.enable", "memory estimation", False),
    _not_yet("fault_tolerance.enable", "fault tolerance by torchft", False),
)


def is_on(config: Config, key: str) -> bool:
    """Whether the feature that `key` belongs to is switched on."""
    return all(
        feature.on(config)
        for feature in FEATURES
        if key.startswith(feature.prefixes) and key not in feature.switches
    )


def key_faults(config: Config) -> list[str]:
    """The faults of single keys: out of range, no such choice, or a feature that is not there."""
    faults: dict[str, list[str]] = {}
    for key, field in all_keys().items():
        value = config.value(key)
        if value is not None and is_on(config, key):
            broken = [mark for mark in marks(field) if not mark.allows(value)]
            faults[key] = [
                config.fault(key, _rule(value, mark), _nearest_choice(value, mark)) for mark in broken
            ]
        if isinstance(value, tuple):
            tables = (table for table in value if isinstance(table, Section))
            faults[key] = [*faults.get(key, ()), *(f for t in tables for f in _table_faults(config, key, t))]
    option = config.activation_checkpoint.selective_ac_option
    if config.activation_checkpoint.mode == "selective" and option != "op" and not _is_positive(option):
        rule = 'must be "op", or a positive integer N for every N-th block'
        key = "activation_checkpoint.selective_ac_option"
        faults[key] = [config.fault(key, rule)]
    sound = [refusal for refusal in REFUSALS if not faults.get(refusal.key)]
    refused = [config.fault(r.key, r.rule, r.way_out) for r in sound if r.asked(config)]
    return [fault for found in faults.values() for fault in found] + refused


def _table_faults(config: Config, key: str, table: Section) -> Iterator[str]:
    """The faults of single keys inside a table of a list, such as `[[optimizer.param_groups]]`."""
    for name, field in type(table).model_fields.items():
        if (value := getattr(table, name)) is not None:
            for broken in (mark for mark in marks(field) if not mark.allows(value)):
                yield config.fault(key, f"{name} {broken.rule()}")


def _is_positive(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) > 0


def _rule(value: object, mark: Mark) -> str:
    return "must fit in 64 bits" if isinstance(value, int) and abs(value) > INT64_MAX else mark.rule()


def _nearest_choice(value: object, mark: object) -> str:
    if not isinstance(mark, Choices):
        return ""
    for word in (value,) if isinstance(value, str) else value if isinstance(value, tuple) else ():
        if word not in mark.words and (close := closest(word, mark.words)):
            return f"nearest: {literal(close)}"
    return ""


def relation_faults(config: Config) -> list[str]:
    """The faults of keys that must agree with each other whatever the layout."""
    faults = []
    profiling = config.profiling
    if (
        profiling.enable_profiling
        and profiling.profile_freq < profiling.profiler_warmup + profiling.profiler_active
    ):
        least = profiling.profiler_warmup + profiling.profiler_active
        rule = f"must be at least profiler_warmup + profiler_active ({least})"
        faults.append(config.fault("profiling.profile_freq", rule))
    compiled = config.compile.enable and "model" in config.compile.components
    if config.activation_checkpoint.mode == "memory_budget" and not compiled:
        rule = "only compiled blocks keep to a memory budget"
        way_out = 'set compile.enable with "model" among compile.components, or use "selective"'
        faults.append(config.fault("activation_checkpoint.mode", rule, way_out))
    if config.checkpoint.enable and config.checkpoint.keep_best_k > 0 and not config.validation.enable:
        rule = "the best checkpoints are those of lowest validation loss"
        faults.append(config.fault("checkpoint.keep_best_k", rule, "set validation.enable, or 0"))
    dtype, state = config.training.dtype, config.optimizer.state_dtype
    if config.training.mixed_precision_param == "float16" and dtype != "float32":
        rule = f'needs training.dtype = "float32", not "{dtype}"'
        faults.append(config.fault("training.mixed_precision_param", rule))
    if state is not None and state != dtype and dtype != "bfloat16":
        rule = f'must be unset or "float32" with training.dtype = "{dtype}"'
        rule = rule if dtype == "float32" else f'must be unset with training.dtype = "{dtype}"'
        faults.append(config.fault("optimizer.state_dtype", rule))
    faults += _hugging_face_faults(config)
    faults += pipeline_faults(config)
    total_steps = config.lr_scheduler.total_steps
    if total_steps is not None and total_steps < config.training.steps:
        rule = f"must be at least training.steps ({config.training.steps})"
        faults.append(config.fault("lr_scheduler.total_steps", rule, "raise it or leave it out"))
    return [*faults, *data_faults(config)]


def data_faults(config: Config) -> Iterator[str]:
    """The faults of a mixture and of what changes at a step."""
    data, names = config.data, [source.name for source in config.data.sources]
    if len(set(names)) < len(names):
        yield config.fault("data.sources", "each name must be there once")
    for source in data.sources:
        if bool(source.path) == bool(source.dataset):
            yield config.fault("data.sources", f"{source.name} must have a path or a dataset, not both")
    for key in ("training.dataset", "training.dataset_path"):
        if data.sources and config.value(key) and config.where(key) != "default":
            yield config.fault(key, "[[data.sources]] says what is read", "leave one of the two out")
    for key in ("validation.dataset", "validation.dataset_path"):
        held_out = config.validation.enable and config.validation.holdout
        if held_out and config.value(key) and config.where(key) != "default":
            rule = "validation.holdout takes the validation set from the training data"
            yield config.fault(key, rule, "leave one of the two out")
    if data.stages and not data.sources:
        yield config.fault("data.stages", "weights need [[data.sources]]")
    mixtures = [("data.sources", {source.name: source.weight for source in data.sources})]
    mixtures += [("data.stages", stage.weights) for stage in data.stages]
    for key, weights in mixtures:
        if data.sources and set(weights) != set(names):
            yield config.fault(key, f"must have a weight for each of {', '.join(names)}, and for no other")
        elif data.sources and not _mixable(weights.values()):
            rule = f"weights must be 0, or at least 1/{SMALLEST_SHARE} of their sum, and not all 0"
            yield config.fault(key, rule)
    for key, tables in (
        ("data.stages", data.stages),
        ("training.global_batch_size_schedule", config.training.global_batch_size_schedule),
    ):
        steps = [table.step for table in tables]
        if steps != sorted(set(steps)):
            yield config.fault(key, "steps must ascend")
    if config.training.global_batch_size_schedule and config.training.global_batch_size == -1:
        rule = "must be set, to the size before the first change of the schedule"
        yield config.fault("training.global_batch_size", rule)
    if not data.predict_first_token and data.samples != "window":
        rule = f'needs data.samples = "window": "{data.samples}" never predicts it'
        yield config.fault("data.predict_first_token", rule, "leave it out")


SMALLEST_SHARE = 4096  # the mixture's block


def _mixable(weights: Iterable[float]) -> bool:
    fractions = [Fraction(str(weight)) for weight in weights]
    total = sum(fractions)
    return total > 0 and all(w == 0 or w * SMALLEST_SHARE >= total for w in fractions) and min(fractions) >= 0


def _hugging_face_faults(config: Config) -> Iterator[str]:
    """The faults of keys about files in Hugging Face's form, which hold weights alone."""
    section = config.checkpoint
    if section.enable and section.initial_load_in_hf:
        if section.initial_load_path is None and not config.model.hf_assets_path:
            rule = "needs checkpoint.initial_load_path, or model.hf_assets_path with weights"
            yield config.fault("checkpoint.initial_load_in_hf", rule, "name the folder, or set it to false")
        if not section.initial_load_model_only:
            rule = "files in Hugging Face's form hold weights only"
            yield config.fault("checkpoint.initial_load_model_only", rule, "set it to true")
        if "model" in section.exclude_from_loading:
            rule = "leaves out all that checkpoint.initial_load_in_hf loads"
            yield config.fault("checkpoint.exclude_from_loading", rule, 'take "model" out')
    if section.enable and section.last_save_in_hf and not section.last_save_model_only:
        rule = "needs checkpoint.last_save_model_only = true"
        way_out = "set it, or keep the whole step and run minititan export"
        yield config.fault("checkpoint.last_save_in_hf", rule, way_out)


def schedule_notes(config: Config) -> list[str]:
    """A warning line for each value the user set that is clamped to the schedule's length."""
    schedule = config.lr_scheduler
    total = schedule.total_steps or config.training.steps
    notes = []
    if schedule.warmup_steps > total and config.where("lr_scheduler.warmup_steps") != "default":
        key = "lr_scheduler.warmup_steps"
        notes.append(config.fault(key, f"longer than the schedule; {total} steps are used"))
    warmup = min(schedule.warmup_steps, total)
    if schedule.decay_ratio is not None and round(total * schedule.decay_ratio) > total - warmup:
        rule = f"warm-up and decay are longer than the schedule; {total - warmup} steps of decay are used"
        notes.append(config.fault("lr_scheduler.decay_ratio", rule))
    return notes

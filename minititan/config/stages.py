"""The stages of a pipeline: which schedules there are, the modules of each stage, and the rules of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minititan.config.error import closest
from minititan.config.schema import Config

PP = "parallelism.pipeline_parallel_degree"
SCHEDULE = "parallelism.pipeline_parallel_schedule"
MICRO_BATCH = "parallelism.pipeline_parallel_microbatch_size"
PER_STAGE = "parallelism.pipeline_parallel_layers_per_stage"
FIRST_LESS = "parallelism.pipeline_parallel_first_stage_less_layers"
LAST_LESS = "parallelism.pipeline_parallel_last_stage_less_layers"
MODULES = "parallelism.module_fqns_per_model_part"

FIRST, LAST = ("embed_tokens",), ("norm", "lm_head")
ALIASES = {"tok_embeddings": "embed_tokens", "output": "lm_head"}  # TorchTitan's names


@dataclass(frozen=True)
class Schedule:
    """What a schedule asks for."""

    name: str
    stages: int | None  # of a rank; None: two or more
    v_shaped: bool = False  # a rank has one of the first stages and one of the last
    splits_backward: bool = False  # gradients of inputs first, those of weights later
    rounds: bool = False  # micro-batches go in rounds of the same size

    def default_stages(self, ranks: int) -> int:
        """How many stages there are where nothing else is asked for."""
        return ranks * (self.stages or 2)

    def fits(self, stages: int, ranks: int) -> bool:
        """Whether so many stages can be dealt out to so many ranks."""
        of_rank = stages // ranks
        return stages % ranks == 0 and (of_rank > 1 if self.stages is None else of_rank == self.stages)

    def takes(self, micro_batches: int, stages: int, ranks: int) -> bool:
        """Whether so many micro-batches can go through."""
        if self.name in ("1F1B", "DualPipeV"):
            return micro_batches >= stages
        return not self.rounds or micro_batches % max(1, micro_batches // ranks) == 0

    def ranks_of(self, stages: int, ranks: int) -> list[int]:
        """The rank that has each stage."""
        if self.v_shaped:
            return [*range(ranks), *reversed(range(ranks))]
        return [stage % ranks for stage in range(stages)]


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule("GPipe", 1),
        Schedule("1F1B", 1),
        Schedule("Interleaved1F1B", None, rounds=True),
        Schedule("LoopedBFS", None),
        Schedule("InterleavedZeroBubble", None, splits_backward=True, rounds=True),
        Schedule("ZBVZeroBubble", 2, v_shaped=True, splits_backward=True),
        Schedule("DualPipeV", 2, v_shaped=True, splits_backward=True),
    )
}


def schedule_of(config: Config) -> Schedule | None:
    """The run's schedule, whatever the case of its name; None: there is none of that name."""
    name = config.parallelism.pipeline_parallel_schedule.lower()
    return next((schedule for known, schedule in SCHEDULES.items() if known.lower() == name), None)


def stages_of(config: Config, layers: Sequence[str], others: Sequence[str] = ()) -> list[list[str]]:
    """The names of the modules of each stage, where `stage_faults` finds nothing.

    `layers` are the names in the model's `layers`; `others` are modules beside those of every model, which
    belong to the first stage.
    """
    section = config.parallelism
    if section.module_fqns_per_model_part:
        named = [[ALIASES.get(name, name) for name in names] for names in section.module_fqns_per_model_part]
        return [[*(others if index == 0 else ()), *names] for index, names in enumerate(named)]
    counts = _layer_counts(config, len(layers), _stage_count(config, len(layers)))
    stages, left = [], [f"layers.{name}" for name in layers]
    for count in counts:
        stages.append(left[:count])
        left = left[count:]
    stages[0] = [*FIRST, *others, *stages[0]]
    stages[-1] += LAST
    return stages


def _stage_count(config: Config, layers: int) -> int:
    section, schedule = config.parallelism, schedule_of(config)
    assert schedule is not None
    if section.pipeline_parallel_layers_per_stage is None:
        return schedule.default_stages(section.pipeline_parallel_degree)
    return -(-_weight(config, layers) // section.pipeline_parallel_layers_per_stage)


def _weight(config: Config, layers: int) -> int:
    """The layers, and embedding and head at what they cost in layers."""
    section = config.parallelism
    first, last = (
        section.pipeline_parallel_first_stage_less_layers,
        section.pipeline_parallel_last_stage_less_layers,
    )
    return layers + first + last


def _layer_counts(config: Config, layers: int, stages: int) -> list[int]:
    """How many layers each stage gets: all the same with embedding and head counted, the first ones more."""
    section = config.parallelism
    each, more = divmod(_weight(config, layers), stages)
    counts = [each + (stage < more) for stage in range(stages)]
    counts[0] -= section.pipeline_parallel_first_stage_less_layers
    counts[-1] -= section.pipeline_parallel_last_stage_less_layers
    return counts


def pipeline_faults(config: Config) -> list[str]:
    """The faults of a pipeline's schedule, whatever the model."""
    section = config.parallelism
    if section.pipeline_parallel_degree == 1:
        return []
    schedule = schedule_of(config)
    if schedule is None:
        near = closest(section.pipeline_parallel_schedule, SCHEDULES)
        way_out = (f"nearest: {near}; " if near else "") + f"there are: {', '.join(SCHEDULES)}"
        return [config.fault(SCHEDULE, "no such schedule", way_out)]
    faults = []
    if schedule.splits_backward:
        whole = ", ".join(name for name, other in SCHEDULES.items() if not other.splits_backward)
        rule = "splits the backward pass"
        if config.compile.enable and "model" in config.compile.components:
            fault = config.fault(SCHEDULE, f"{rule}, which compiled blocks cannot", f"allowed: {whole}")
            faults.append(fault)
        recompute = config.activation_checkpoint
        if recompute.mode == "selective" and recompute.selective_ac_option == "op":
            fault = config.fault(
                "activation_checkpoint.selective_ac_option",
                f"{schedule.name} {rule}, and what is kept by operator can be used once only",
                'use a number of layers, or mode = "full"',
            )
            faults.append(fault)
        if section.fsdp_reshard_after_forward == "always":
            key = "parallelism.fsdp_reshard_after_forward"
            rule = f"{schedule.name} {rule}: parameters must stay gathered between its halves"
            faults.append(config.fault(key, rule, 'use "default" or "never"'))
    local, size = config.training.local_batch_size, section.pipeline_parallel_microbatch_size
    if local % size:
        allowed = ", ".join(str(d) for d in range(1, local + 1) if local % d == 0)
        rule = f"must divide training.local_batch_size ({local})"
        faults.append(config.fault(MICRO_BATCH, rule, f"allowed: {allowed}"))
    return faults


def stage_faults(config: Config, layers: Sequence[str], others: Sequence[str] = ()) -> list[str]:
    """The faults of how a model's layers are dealt out to stages, and of the micro-batches for these."""
    section, schedule = config.parallelism, schedule_of(config)
    ranks = section.pipeline_parallel_degree
    if ranks == 1 or schedule is None:
        return []
    named = section.module_fqns_per_model_part
    if named:
        faults = _named_faults(config, layers, others)
        count, key = len(named), MODULES
    else:
        faults, count, key = [], _stage_count(config, len(layers)), PER_STAGE
    if not schedule.fits(count, ranks):
        rule = f"makes {count} stages; {schedule.name} needs {_needed(schedule, ranks)}"
        return [*faults, config.fault(key, rule, "" if named else _allowed_per_stage(config, len(layers)))]
    if not named and not faults:
        faults += _balance_faults(config, len(layers), count)
    micro_batches = config.training.local_batch_size // section.pipeline_parallel_microbatch_size
    if not schedule.takes(micro_batches, count, ranks):
        faults.append(_micro_batch_fault(config, schedule, micro_batches, count))
    return faults


def _needed(schedule: Schedule, ranks: int) -> str:
    if schedule.stages is None:
        return f"a multiple of pipeline_parallel_degree ({ranks}), at least {2 * ranks}"
    return f"{schedule.stages * ranks}: {schedule.stages} on each of {ranks} ranks"


def _allowed_per_stage(config: Config, layers: int) -> str:
    schedule, ranks = schedule_of(config), config.parallelism.pipeline_parallel_degree
    assert schedule is not None
    weight = _weight(config, layers)
    allowed = [str(n) for n in range(1, weight + 1) if schedule.fits(-(-weight // n), ranks)]
    return f"allowed: {', '.join(allowed)}, or leave it out" if allowed else "leave it out"


def _balance_faults(config: Config, layers: int, stages: int) -> list[str]:
    weight, each = _weight(config, layers), _weight(config, layers) // stages
    if each == 0:
        rule = f"{layers} layers ({weight} with embedding and head) are fewer than {stages} stages"
        return [config.fault(PP, rule, "use fewer stages or more layers")]
    counts = _layer_counts(config, layers, stages)
    ends = ((FIRST_LESS, counts[0]), (LAST_LESS, counts[-1]))
    rule = f"is more than the layers of a stage ({each})"
    return [config.fault(key, rule, f"allowed: 0 to {each}") for key, count in ends if count < 0]


def _named_faults(config: Config, layers: Sequence[str], others: Sequence[str]) -> list[str]:
    """The faults of a list of modules: each must be there once, in the model's order."""
    named = config.parallelism.module_fqns_per_model_part or ()
    stages = [[ALIASES.get(name, name) for name in names if name not in others] for names in named]
    given = [name for names in stages for name in names]
    wanted = [*FIRST, *(f"layers.{name}" for name in layers), *LAST]
    faults = []
    for name in dict.fromkeys(given):
        if name not in wanted:
            near = closest(name, wanted)
            way_out = f"nearest: {near}" if near else f"there are: {', '.join(wanted)}"
            faults.append(config.fault(MODULES, f"the model has no {name}", way_out))
        elif given.count(name) > 1:
            faults.append(config.fault(MODULES, f"{name} is there {given.count(name)} times"))
    faults += [config.fault(MODULES, f"lacks {name}") for name in wanted if name not in given]
    if not faults and given != wanted:
        rule = f"must go through the model in its order: {', '.join(wanted)}"
        faults.append(config.fault(MODULES, rule))
    if not faults and (not all(stages) or "norm" not in stages[-1]):
        rule = "must leave no stage empty, and norm with lm_head in the last"
        faults.append(config.fault(MODULES, rule))
    return faults


def _micro_batch_fault(config: Config, schedule: Schedule, given: int, stages: int) -> str:
    ranks, local = config.parallelism.pipeline_parallel_degree, config.training.local_batch_size
    if schedule.rounds:
        rule = f"{given} micro-batches do not go in even rounds: must be a multiple of {given // ranks}"
    else:
        rule = f"{given} micro-batches are fewer than the {stages} stages of {schedule.name}"
    rule = f"of training.local_batch_size = {local} {rule}"
    sizes = [size for size in range(1, local + 1) if local % size == 0]
    allowed = [str(size) for size in sizes if schedule.takes(local // size, stages, ranks)]
    way_out = f"allowed: {', '.join(allowed)}" if allowed else "raise training.local_batch_size"
    return config.fault(MICRO_BATCH, rule, way_out)

"""The rules that need the number of processes and the model: does this config fit, and which layout follows?

All faults are reported at once, before any process group exists. Nothing here touches a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from minititan.config.batches import BatchSizes
from minititan.config.contexts import heads_faults, length_faults
from minititan.config.error import ConfigError
from minititan.config.experts import expert_faults
from minititan.config.rules import key_faults, relation_faults
from minititan.config.schema import Config

TP = "parallelism.tensor_parallel_degree"
REPLICATE = "parallelism.data_parallel_replicate_degree"
SHARD = "parallelism.data_parallel_shard_degree"


@dataclass(frozen=True)
class Layout:
    """The degrees of a run with nothing left open, and the batch that follows from them."""

    world_size: int
    dp_replicate: int
    dp_shard: int
    tp: int
    batch_sizes: BatchSizes
    micro_batch_size: int
    ep: int = 1  # ways that experts are spread over ranks of dp_shard x cp x tp
    etp: int = 1  # with ep above 1: ways that an expert is split
    cp: int = 1  # ways that a sequence is split
    pp: int = 1  # groups of layers

    @property
    def dp(self) -> int:
        """The data-parallel degree: how many ranks read different samples."""
        return self.dp_replicate * self.dp_shard

    def accumulation_steps(self, step: int) -> int:
        """Micro-batches of a rank in a step."""
        return self.batch_sizes.at(step) // (self.dp * self.micro_batch_size)


def validate(
    config: Config, args: Any, world_size: int, *, tensor_parallel_plan: bool, vocab_size: int
) -> Layout:
    """The layout on `world_size` processes; every fault in one `ConfigError`.

    `args` are the model's arguments, any of whose fields may be missing; `vocab_size` is the tokenizer's.
    `tensor_parallel_plan` says whether the model has one.
    """
    if key_level := key_faults(config):
        raise ConfigError(*key_level)
    faults = relation_faults(config)
    faults += _tensor_parallel_faults(config, args, tensor_parallel_plan)
    faults += heads_faults(config, args)
    faults += length_faults(config, args)
    faults += _vocabulary_faults(config, args, vocab_size)
    dp_shard, degree_faults = _shard_degree(config, args, world_size)
    faults += degree_faults
    faults += expert_faults(config, args, dp_shard)
    dp = config.parallelism.data_parallel_replicate_degree * dp_shard
    batch = config.training.local_batch_size * dp
    training = config.training
    sizes = [(1, batch if training.global_batch_size == -1 else training.global_batch_size)]
    sizes += [(change.step, change.size) for change in training.global_batch_size_schedule]
    if dp > 0:
        faults += [_batch_fault(config, dp, *pair) for pair in sizes if pair[1] % batch]
    if faults:
        raise ConfigError(*faults)
    ep = config.parallelism.expert_parallel_degree
    return Layout(
        world_size=world_size,
        dp_replicate=config.parallelism.data_parallel_replicate_degree,
        dp_shard=dp_shard,
        tp=config.parallelism.tensor_parallel_degree,
        batch_sizes=BatchSizes(tuple(sizes)),
        micro_batch_size=training.local_batch_size,
        ep=ep,
        etp=config.parallelism.expert_tensor_parallel_degree if ep > 1 else 1,
        cp=config.parallelism.context_parallel_degree,
        pp=config.parallelism.pipeline_parallel_degree,
    )


def divisors(number: int) -> list[int]:
    """The divisors of a positive number, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _head_counts(args: Any) -> dict[str, int]:
    counts = {name: getattr(args, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
    return {name: count for name, count in counts.items() if count}


def undivided_heads(args: Any, tp: int) -> list[str]:
    """The rule, with its way out, for heads that a tensor-parallel degree does not divide."""
    undivided = [f"{name} ({count})" for name, count in _head_counts(args).items() if count % tp]
    # Fewer kv heads than heads: dividing the last is the sharper rule.
    return [f"must divide {undivided[-1]}; {_listed(_allowed_tp(args))}"] if undivided else []


def _allowed_tp(args: Any, limit: int | None = None) -> list[int]:
    """Degrees that divide every head count and, where it is given, `limit`."""
    counts = [*_head_counts(args).values(), *([limit] if limit else [])]
    return [d for d in divisors(min(counts)) if all(count % d == 0 for count in counts)] if counts else []


def _listed(numbers: list[int]) -> str:
    return "allowed: " + ", ".join(str(number) for number in numbers)


def _shard_degree(config: Config, args: Any, world_size: int) -> tuple[int, list[str]]:
    """The sharding degree, 0 where the degrees do not multiply to the number of processes, and the faults."""
    section = config.parallelism
    replicate, shard = section.data_parallel_replicate_degree, section.data_parallel_shard_degree
    tp = section.tensor_parallel_degree
    others = {
        "tensor_parallel_degree": tp,
        "context_parallel_degree": section.context_parallel_degree,
        "pipeline_parallel_degree": section.pipeline_parallel_degree,
    }
    inner = prod(others.values())
    times_others = " times ".join(f"{k} ({d})" for k, d in others.items() if d > 1 or k.startswith("t"))
    left = world_size // (replicate * inner)
    if left * replicate * inner == world_size:
        if shard in (-1, left):
            return left, []
        rule = (
            f"times data_parallel_replicate_degree ({replicate}) times {times_others} is "
            f"{replicate * shard * inner} and must be the world size ({world_size})"
        )
        return 0, [config.fault(SHARD, rule, f"allowed: {left}, or -1")]
    if world_size % inner == 0:
        rule = f"times {times_others} must divide the world size ({world_size})"
        return 0, [config.fault(REPLICATE, rule, _listed(divisors(world_size // inner)))]
    faults = []
    if world_size % replicate:
        rule = f"must divide the world size ({world_size})"
        faults.append(config.fault(REPLICATE, rule, _listed(divisors(world_size))))
        replicate = 1
    if inner > tp:
        key = "parallelism." + next(k for k, d in others.items() if d > 1)
        rest = " times ".join(f"{k} ({d})" for k, d in others.items() if d > 1 and not key.endswith(k))
        rule = " times ".join(
            ["", *([rest] if rest else []), f"data_parallel_replicate_degree ({replicate})"]
        )
        return 0, [*faults, config.fault(key, f"{rule.strip()} must divide the world size ({world_size})")]
    times = f"times data_parallel_replicate_degree ({replicate}) must divide"
    rule = f"{times} the world size ({world_size})"
    return 0, [*faults, config.fault(TP, rule, _listed(_allowed_tp(args, world_size // replicate)))]


def _tensor_parallel_faults(config: Config, args: Any, has_plan: bool) -> list[str]:
    tp = config.parallelism.tensor_parallel_degree
    if tp == 1:
        return []
    faults = []
    if not has_plan:
        rule = f'the model "{config.model.name}" has no tensor-parallel plan'
        faults.append(config.fault(TP, rule, "give its spec one, or use 1"))
    faults += [config.fault(TP, rule) for rule in undivided_heads(args, tp)]
    if config.parallelism.disable_embedding_parallel and getattr(args, "tie_word_embeddings", False):
        rule = "a tied embedding and head are split together under tensor parallelism"
        faults.append(
            config.fault("parallelism.disable_embedding_parallel", rule, "use false, or untie them")
        )
    return faults


def _vocabulary_faults(config: Config, args: Any, vocab_size: int) -> list[str]:
    model_vocab = getattr(args, "vocab_size", None)
    if not model_vocab or vocab_size <= model_vocab:
        return []
    rule = f"the tokenizer has {vocab_size} ids, the model's vocabulary only {model_vocab}"
    way_out = f"set model.args.vocab_size = {vocab_size}, or use the model's tokenizer"
    return [config.fault("model.hf_assets_path", rule, way_out)]


def _batch_fault(config: Config, dp: int, step: int, given: int) -> str:
    local = config.training.local_batch_size
    batch = local * dp
    rule = f"must be a multiple of local_batch_size ({local}) x data-parallel degree ({dp}) = {batch}"
    near = [size for size in (given // batch * batch, (given // batch + 1) * batch) if size]
    nearest = f"nearest: {' or '.join(map(str, near))}"
    if step == 1:
        return config.fault("training.global_batch_size", rule, f"{nearest}, or -1")
    return config.fault("training.global_batch_size_schedule", f"size {given} {rule}", nearest)

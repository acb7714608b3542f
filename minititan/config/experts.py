"""The rules of expert parallelism, which need the model's arguments and the number of processes."""

from __future__ import annotations

from typing import Any

from minititan.config.schema import Config

EP = "parallelism.expert_parallel_degree"
ETP = "parallelism.expert_tensor_parallel_degree"


def expert_faults(config: Config, args: Any, dp_shard: int) -> list[str]:
    """The faults of how experts are spread; `dp_shard` is 0 where the degrees do not fit.

    `args` are the model's arguments, any of whose fields may be missing.
    """
    section, experts = config.parallelism, getattr(args, "num_experts", None)
    ep, etp = section.expert_parallel_degree, section.expert_tensor_parallel_degree
    cp, tp = section.context_parallel_degree, section.tensor_parallel_degree
    faults = []
    if experts and tp > 1 and section.disable_sequence_parallel:
        rule = "a mixture of experts needs the sequence split under tensor parallelism"
        faults.append(config.fault("parallelism.disable_sequence_parallel", rule, "set it to false"))
    if ep == 1:
        return faults
    if not experts:
        rule = f'the model "{config.model.name}" {config.model.flavor} has no experts'
        return [*faults, config.fault(EP, rule, "use 1")]
    if etp not in (1, tp):
        rule = f"must be 1 or tensor_parallel_degree ({tp})"
        return [*faults, config.fault(ETP, rule, "with 1, experts are spread over those ranks too")]
    ranks = dp_shard * cp * tp // etp
    if ranks % ep:
        names = ["data_parallel_shard_degree", *(["context_parallel_degree"] if cp > 1 else [])]
        product = " x ".join([*names, *(["tensor_parallel_degree"] if etp == 1 else [])])
        faults.append(config.fault(EP, f"must divide {product} ({ranks})", _divisors(ranks, experts)))
    elif experts % ep:
        allowed = _divisors(ranks, experts) if ranks else ""
        faults.append(config.fault(EP, f"must divide num_experts ({experts})", allowed))
    return faults


def _divisors(*counts: int) -> str:
    """The degrees that divide all of the counts."""
    allowed = [d for d in range(1, min(counts) + 1) if not any(count % d for count in counts)]
    return "allowed: " + ", ".join(map(str, allowed))

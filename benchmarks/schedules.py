"""The order of a pipeline's computations by each schedule: how long it takes at least, and a drawing of it.

The order is torch's own (`torch.distributed.pipelining`), asked for without any process group. `replay` lets
every rank go through its computations as early as the other ranks allow, sending being free: what is left
idle then is the bubble that the order has whatever machine runs it.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.pipelining.schedules import get_schedule_class

from minititan.config.stages import SCHEDULES

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"  # torch's; the backward whole, or its two parts
COSTS = {FORWARD: 1.0, BACKWARD: 2.0, INPUT: 1.0, WEIGHT: 1.0}


class Action(NamedTuple):
    """A computation: of which kind, of which stage, for which micro-batch."""

    kind: str
    stage: int
    micro_batch: int


class Span(NamedTuple):
    """When a computation ran."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Plan:
    """What every rank computes, one after another."""

    schedule: str
    stages: int
    micro_batches: int
    of_rank: Sequence[Sequence[Action]]

    @property
    def ranks(self) -> int:
        return len(self.of_rank)

    @property
    def stages_of_rank(self) -> int:
        return self.stages // self.ranks


def plan_of(name: str, ranks: int, micro_batches: int, stages: int = 0) -> Plan:
    """Return the order of a schedule; `stages` of all ranks together, 0: as few as it takes."""
    schedule = SCHEDULES[name]
    count = stages or schedule.default_stages(ranks)
    place = schedule.ranks_of(count, ranks)
    if name in ("GPipe", "1F1B"):
        ahead = [micro_batches if name == "GPipe" else ranks - 1 - rank for rank in range(ranks)]
        orders = [_one_stage(rank, micro_batches, ahead[rank]) for rank in range(ranks)]
        return Plan(name, count, micro_batches, orders)
    own: Any = [_stage(index, count, ranks) for index in range(count) if place[index] == 0]
    order = get_schedule_class(name)(own, micro_batches, loss_fn=len).pipeline_order  # of all ranks
    return Plan(name, count, micro_batches, [list(_actions(order[rank])) for rank in range(ranks)])


def _one_stage(stage: int, micro_batches: int, ahead: int) -> list[Action]:
    """The order of GPipe and 1F1B, which torch has as a loop only (for 1F1B, torch 2.13's
    `_get_pipeline_order` leaves micro-batch 0 out on the last rank): so many forwards first, then in turn.
    """
    forward = [Action(FORWARD, stage, n) for n in range(micro_batches)]
    backward = [Action(BACKWARD, stage, n) for n in range(micro_batches)]
    rest = micro_batches - ahead
    turns = [action for pair in zip(forward[ahead:], backward, strict=False) for action in pair]
    return [*forward[:ahead], *turns, *backward[rest:]]


def _stage(index: int, stages: int, ranks: int) -> SimpleNamespace:
    """What schedules ask a stage of rank 0 for when they make their order."""
    return SimpleNamespace(
        stage_index=index,
        num_stages=stages,
        group_size=ranks,
        group_rank=0,
        submod=nn.Identity(),
        has_backward=True,
        device="cpu",
    )


def _actions(order: Iterable[Any]) -> Iterable[Action]:
    for action in order:
        if action is None:
            continue
        for part in getattr(action, "sub_actions", None) or (action,):
            if (kind := part.computation_type.value) in COSTS:
                yield Action(kind, part.stage_index, part.microbatch_index)


def replay(plan: Plan, costs: Mapping[str, float] = COSTS) -> list[list[Span]]:
    """Return when each rank computes what, if each goes on as soon as it has what it needs."""
    ends: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in plan.of_rank]
    left = [list(reversed(actions)) for actions in plan.of_rank]
    while any(left):
        before = len(ends)
        for rank, actions in enumerate(left):
            while actions and (ready := _ready(actions[-1], plan.stages, ends)) is not None:
                action = actions.pop()
                begin = max(ready, spans[rank][-1].end if spans[rank] else 0.0)
                ends[action] = begin + costs[action.kind]
                spans[rank].append(Span(action, begin, ends[action]))
        assert len(ends) > before, f"{plan.schedule} waits for ever"
    return spans


def _ready(action: Action, stages: int, ends: Mapping[Action, float]) -> float | None:
    """When what the computation needs is there; None: not yet."""
    kind, stage, micro_batch = action
    if kind == WEIGHT:
        return ends.get(Action(INPUT, stage, micro_batch))
    if kind == FORWARD:
        return 0.0 if stage == 0 else ends.get(Action(FORWARD, stage - 1, micro_batch))
    own = ends.get(Action(FORWARD, stage, micro_batch))
    if stage == stages - 1 or own is None:
        return own
    later = (ends.get(Action(kind, stage + 1, micro_batch)) for kind in (BACKWARD, INPUT))
    return next((max(own, end) for end in later if end is not None), None)


def bubble(spans: Sequence[Sequence[Span]]) -> float:
    """Return the share of the ranks' time, from the first computation to the last, in which they are idle."""
    every = [span for rank in spans for span in rank]
    whole = max(span.end for span in every) - min(span.begin for span in every)
    return 1 - sum(span.end - span.begin for span in every) / (whole * len(spans))


def bubble_by_formula(plan: Plan) -> float:
    """Return the bubble in closed form, of stages that all take the same time, with the backward twice as
    long as the forward: (p - 1) stages wait for the first forward and the last backward, or, where weights'
    gradients fill the end, for a third of these (arXiv:2104.04473, arXiv:2401.10241).
    """
    waits = (plan.ranks - 1) / (3 if SCHEDULES[plan.schedule].splits_backward else 1)
    return waits / (plan.stages_of_rank * plan.micro_batches + waits)


def in_flight(actions: Sequence[Action]) -> dict[int, int]:
    """Return, by stage, how many micro-batches at most have gone forward and not all the way back."""
    now: dict[int, int] = defaultdict(int)
    most: dict[int, int] = defaultdict(int)
    for kind, stage, _ in actions:
        now[stage] += {FORWARD: 1, BACKWARD: -1, INPUT: 0, WEIGHT: -1}[kind]
        most[stage] = max(most[stage], now[stage])
    return dict(most)


def drawing(plan: Plan) -> str:
    """Return a line a stage, a character a unit of time: 1, 2, ... micro-batches forward, a, b, ... back,
    A, B, ... the part of the backward that is left for later.
    """
    spans = replay(plan)
    length = int(max(rank[-1].end for rank in spans))
    lines = []
    for rank, own in enumerate(spans):
        for stage in sorted({span.action.stage for span in own}):
            cells = ["."] * length
            for (kind, of, micro_batch), begin, end in own:
                if of == stage:
                    sign = {FORWARD: "1", WEIGHT: "A"}.get(kind, "a")
                    cells[int(begin) : int(end)] = chr(ord(sign) + micro_batch) * int(end - begin)
            lines.append(f"rank {rank} stage {stage}  {''.join(cells)}")
    return "\n".join(lines)


def drawings(ranks: int = 4, micro_batches: int = 8) -> str:
    """Return the drawings of all schedules, with the bubble of each."""
    pages = []
    for name in SCHEDULES:
        plan = plan_of(name, ranks, micro_batches)
        pages.append(f"{name}: {bubble(replay(plan)):.1%} idle\n{drawing(plan)}")
    return "\n\n".join(pages)

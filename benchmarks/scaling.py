"""What parallelism costs beside computing: `python benchmarks/scaling.py`, or with some of
`schedules bubble traffic memory` only that. Small models on CPU ranks.

- `schedules`: drawings of the order of computations (benchmarks/schedules.py).
- `bubble`: the share of time that stages are idle, by formula, by the schedule's own order, and by the clock
  in a run whose computations are stretched to fixed lengths, since cores are fewer than ranks.
- `traffic`: bytes that a rank sends in a step, against what the method takes and the least that is possible.
- `memory`: parameters of the stages, and what autograd keeps at most, against the plan.

Counts are exact whatever the machine does. `--page FILE` writes the parts between their marks in a page.
"""

import argparse
import contextlib
import gc
import io
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from probes import Stages, Traffic, on_ranks
from reports import write_json, write_part
from schedules import (
    COSTS,
    Span,
    bubble,
    bubble_by_formula,
    drawings,
    in_flight,
    plan_of,
    replay,
)

from minititan import build
from minititan.config import load
from minititan.config.stages import SCHEDULES
from minititan.distributed import init_distributed
from minititan.run import check
from minititan.train import Trainer

Keys = dict[str, str]

LAYERS, WIDTH, HEADS, KV_HEADS, SEQ_LEN, BATCH, EXPERTS, TOP_K = 6, 64, 8, 4, 64, 8, 8, 2
UNIT_SECONDS = 0.04
KEYS: Keys = {
    "model.args.hidden_size": str(WIDTH),
    "model.args.num_hidden_layers": str(LAYERS),
    "model.args.num_attention_heads": str(HEADS),
    "model.args.num_key_value_heads": str(KV_HEADS),
    "model.args.intermediate_size": "160",
    "training.seq_len": str(SEQ_LEN),
    "training.global_batch_size": str(BATCH),
    "training.mixed_precision_param": "float32",
    "training.steps": "9",
    "metrics.log_freq": "100",
    "activation_checkpoint.mode": "none",
}
MOE: Keys = {
    "model.name": "qwen3",
    "model.flavor": "debugmodel_moe",
    "model.args.num_experts": str(EXPERTS),
    "model.args.num_experts_per_tok": str(TOP_K),
    "debug.moe_force_load_balance": "true",
}


def degrees(**values: int) -> Keys:
    """The keys of a layout; degrees by their short names."""
    names = {
        "pp": "pipeline_parallel",
        "ddp": "data_parallel_replicate",
        "dp": "data_parallel_shard",
        "cp": "context_parallel",
        "tp": "tensor_parallel",
        "ep": "expert_parallel",
    }
    of_data = values.get("dp", 1) * values.get("ddp", 1)
    keys = {f"parallelism.{names[name]}_degree": str(value) for name, value in values.items()}
    return keys | {"training.local_batch_size": str(BATCH // of_data)}


def begun(world: int, keys: Keys, folder: str, base: Keys = KEYS) -> tuple[Trainer, Iterator[Any]]:
    """The trainer of a run after its first step, and its batches; every rank must call it."""
    file = Path(folder, "run.toml")
    words = {"job.dump_folder": f"{folder}/out", "data.cache_folder": f"{folder}/tokens"} | base | keys
    words |= {"training.dataset_path": f"{folder}/text.txt"}
    arguments = [f"--job.config_file={file}", *(f"--{key}={value}" for key, value in words.items())]
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = Trainer.build(check(load(arguments), world), init_distributed(timeout_seconds=300))
        batches = iter(trainer.loader)
        trainer.step(batches)
    gc.collect()
    gc.disable()  # as in a run
    return trainer, batches


# ---- traffic


class Row(NamedTuple):
    """A layout, which of its bytes are meant, what its method takes and the least that is possible."""

    name: str
    ranks: int
    keys: Keys
    axis: str
    method: float
    least: float


def count_in_rank(rank: int, world: int, keys: Keys, folder: str) -> dict[str, int]:
    """Count the second step of a run, by axis; parameters and their gradients apart."""
    trainer, batches = begun(world, keys, folder)
    with Traffic() as traffic:
        trainer.step(batches)
    meshes = trainer.meshes
    parameters = [meshes.fsdp.get_group(axis) for axis in range(meshes.fsdp.ndim)]
    # Meshes over the same ranks have one group: FSDP's collectives are told apart by their operators.
    found = {"dp": sum(traffic.over(group, "base", "allreduce") for group in parameters)}
    own = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single", "send")
    for axis, mesh in (("cp", meshes.cp), ("tp", meshes.tp), ("pp", meshes.pp), ("ep", meshes.experts)):
        if mesh is not None:
            names = ("all_to_all_single",) if axis == "ep" else own
            found[axis] = traffic.over(mesh.get_group(mesh.ndim - 1), *names)
    return found | {"parameters": sum(p.numel() for p in trainer.job.model.parameters())}


def rows(parameters: int) -> list[Row]:
    """The layouts; `parameters`: of the dense model."""
    stream = 4 * BATCH * SEQ_LEN * WIDTH  # bytes of the residual stream of a step
    heads = stream / HEADS  # of one head's queries, keys or values, in one layer
    share = {n: (n - 1) / n for n in (2, 4)}
    dense = 4 * parameters
    found = [
        Row("dp 2, replicated", 2, degrees(ddp=2, dp=1), "dp", 2 * dense * share[2], 2 * dense * share[2]),
        Row(
            "dp 2, sharded, `never`",
            2,
            degrees(dp=2) | {"parallelism.fsdp_reshard_after_forward": "never"},
            "dp",
            2 * dense * share[2],
            2 * dense * share[2],
        ),
        Row(
            "dp 2, sharded, `always`",
            2,
            degrees(dp=2) | {"parallelism.fsdp_reshard_after_forward": "always"},
            "dp",
            3 * dense * share[2],
            2 * dense * share[2],
        ),
    ]
    for n in (2, 4):
        # Around attention and feed-forward, forward and backward, and once for embedding and last norm each.
        tp = (8 * LAYERS + 4) * stream * share[n]
        found.append(Row(f"tp {n}", n, degrees(tp=n), "tp", tp, tp))
    for n in (2, 4):
        kv = LAYERS * 2 * KV_HEADS * heads * share[n]
        # A causal query needs no keys after it: with head and tail, rank r needs 2n - r - 2 chunks of others.
        needed = sum(2 * n - r - 2 for r in range(n)) / n / (2 * n - 2)
        by_heads = LAYERS * 2 * (2 * HEADS + 2 * KV_HEADS) * heads / n * share[n]
        least = min(2 * kv * needed, by_heads)
        for method, taken in (("all_gather", 2 * kv), ("all_to_all", by_heads)):
            keys = degrees(cp=n) | {"parallelism.context_parallel_method": method}
            found.append(Row(f"cp {n}, `{method}`", n, keys, "cp", taken, least))
    for name in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble"):
        plan = plan_of(name, 2, BATCH)
        cuts = plan.stages - 1 - (1 if SCHEDULES[name].v_shaped else 0)
        keys = degrees(pp=2) | {"parallelism.pipeline_parallel_schedule": name}
        found.append(Row(f"pp 2, {name}", 2, keys, "pp", 2 * cuts * stream / 2, 2 * stream / 2))
    # Each token goes to the ranks of its experts and back, and so do the gradients. Forced to take turns, the
    # experts of a token are neighbours on one rank: one copy of it would do.
    rows_of_rank = stream / 2 * TOP_K * share[2]
    ep = 4 * LAYERS * rows_of_rank
    found.append(Row("ep 2", 2, MOE | degrees(dp=2, ep=2), "ep", ep, ep / TOP_K))
    return found


def traffic(folder: str) -> tuple[str, Any]:
    """Count all layouts."""
    parameters = on_ranks(count_in_rank, 1, degrees(), folder)[0]["parameters"]
    table = [
        f"{LAYERS} layers of width {WIDTH}, {HEADS} heads, {KV_HEADS} key/value heads, {parameters:,} "
        f"parameters; {BATCH} sequences of {SEQ_LEN} tokens a step, float32. KB that a rank sends in a step, "
        "the mean over ranks.\n",
        "| layout | sent | its method | sent / method | least possible | sent / least |",
        "|---|---|---|---|---|---|",
    ]
    found = {}
    for row in rows(parameters):
        counts = on_ranks(count_in_rank, row.ranks, row.keys, folder)
        sent = statistics.mean(count[row.axis] for count in counts)
        found[row.name] = {"sent": sent, "method": row.method, "least": row.least, "ranks": counts}
        table.append(
            f"| {row.name} | {sent / 1e3:,.1f} | {row.method / 1e3:,.1f} | {sent / row.method:.3f} "
            f"| {row.least / 1e3:,.1f} | {sent / row.least:.2f} |"
        )
        print(table[-1], flush=True)
    return "\n".join(table), found


# ---- pipelines


class Watched(NamedTuple):
    """What a rank of a pipeline did: the spans of each step, and of its stages by number the parameters and
    what autograd kept, of one micro-batch and at most.
    """

    steps: list[list[Span]]
    parameters: dict[int, tuple[int, int]]  # found, planned
    of_one: dict[int, int]
    most: dict[int, int]


def watch_in_rank(rank: int, world: int, keys: Keys, folder: str, steps: int) -> Watched:
    trainer, batches = begun(world, keys, folder)
    pipeline = trainer.pipeline
    assert pipeline is not None
    stages = Stages(pipeline, {kind: UNIT_SECONDS * cost for kind, cost in COSTS.items()})
    spans = []
    for _ in range(steps):
        stages.begin_step()
        with stages.hooks():
            trainer.step(batches)
        spans.append(stages.spans)
    modules, _ = build.stages_of(trainer.job, trainer.meshes)
    whole = dict(trainer.job.model.named_parameters())
    planned = [
        sum(
            p.numel() for name, p in whole.items() if name.startswith(tuple(f"{module}." for module in stage))
        )
        for stage in modules
    ]
    parameters = {
        index: (sum(p.numel() for p in part.parameters()), planned[index])
        for index, part in pipeline.parts.items()
    }
    return Watched(spans, parameters, stages.of_one, stages.most)


def watch(folder: str, ranks: int, steps: int) -> dict[str, list[Watched]]:
    """Run every schedule on so many ranks; fails where a rank computes in another order than the plan's."""
    found = {}
    for name in SCHEDULES:
        keys = degrees(pp=ranks) | {"parallelism.pipeline_parallel_schedule": name}
        found[name] = on_ranks(watch_in_rank, ranks, keys, folder, steps)
        for rank, actions in enumerate(plan_of(name, ranks, BATCH).of_rank):
            done = [span.action for span in found[name][rank].steps[-1]]
            assert done == list(actions), f"{name}, rank {rank}: {done} instead of {actions}"
    return found


def bubbles(watched: Mapping[str, list[Watched]]) -> tuple[str, Any]:
    """The idle share of every schedule."""
    ranks = len(watched["GPipe"])
    table = [
        f"{ranks} ranks, {BATCH} micro-batches, a whole backward twice as long as a forward.\n",
        "| schedule | stages | by formula | by its order | by the clock (range) |",
        "|---|---|---|---|---|",
    ]
    found = {}
    for name, of_ranks in watched.items():
        plan = plan_of(name, ranks, BATCH)
        clock = [bubble(step) for step in zip(*(rank.steps for rank in of_ranks), strict=True)]
        formula, order = bubble_by_formula(plan), bubble(replay(plan))
        found[name] = {"formula": formula, "order": order, "clock": clock}
        table.append(
            f"| {name} | {plan.stages} | {formula:.1%} | {order:.1%} "
            f"| {statistics.median(clock):.1%} ({min(clock):.1%} to {max(clock):.1%}) |"
        )
    return "\n".join(table), found


def memory(watched: Mapping[str, list[Watched]]) -> tuple[str, Any]:
    """Parameters and kept bytes of the ranks of every schedule."""
    ranks = len(watched["GPipe"])
    table = [
        f"{ranks} ranks, {BATCH} micro-batches of one sequence. In flight: micro-batches that have gone "
        "forward and not all the way back, at most at once, of each stage of the rank.\n",
        "| schedule | rank | stages | parameters (planned) | in flight | KB kept: at most (planned) |",
        "|---|---|---|---|---|---|",
    ]
    found: dict[str, Any] = {}
    for name, of_ranks in watched.items():
        plan = plan_of(name, ranks, BATCH)
        for rank, own in enumerate(of_ranks):
            flying = in_flight(plan.of_rank[rank])
            planned = {stage: flying[stage] * own.of_one[stage] for stage in flying}
            has, wanted = (sum(counts) for counts in zip(*own.parameters.values(), strict=True))
            found[f"{name} {rank}"] = {"parameters": own.parameters, "kept": own.most, "planned": planned}
            table.append(
                f"| {name} | {rank} | {', '.join(map(str, flying))} | {has:,} ({wanted:,}) "
                f"| {' + '.join(map(str, flying.values()))} "
                f"| {sum(own.most.values()) / 1e3:,.1f} ({sum(planned.values()) / 1e3:,.1f}) |"
            )
    return "\n".join(table), found


# ---- the command

PARTS = ("schedules", "bubble", "traffic", "memory")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--ranks", type=int, default=4, help="stages' ranks for bubble and memory")
    parser.add_argument("--steps", type=int, default=5, help="steps for the clock")
    parser.add_argument("--page", type=Path, help="such as docs/parallelism.md")
    parser.add_argument("--json", type=Path, default=Path("outputs/scaling_benchmark.json"))
    options = parser.parse_args()
    chosen = options.parts or list(PARTS)
    if unknown := set(chosen) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are: {', '.join(PARTS)}")
    texts: dict[str, str] = {}
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "run.toml").touch()
        Path(folder, "text.txt").write_text(" ".join(str(n**2) for n in range(20_000)))
        if "schedules" in chosen:
            texts["schedules"] = f"```text\n{drawings()}\n```"
        if {"bubble", "memory"} & set(chosen):
            watched = watch(folder, options.ranks, options.steps)
            for part, table in (("bubble", bubbles), ("memory", memory)):
                if part in chosen:
                    texts[part], results[part] = table(watched)
        if "traffic" in chosen:
            texts["traffic"], results["traffic"] = traffic(folder)
    for part, text in texts.items():
        print(f"\n{part}\n\n{text}")
        if options.page is not None:
            write_part(options.page, "python benchmarks/scaling.py", part, text)
    if results:
        write_json(options.json, results)


if __name__ == "__main__":
    main()

"""Rows of the layout matrix with a pipeline."""

from tests.distributed.expert_layouts import AC_FULL, AC_OP, AOT_EAGER, DEEPSEEK, GPT_OSS, MOE
from tests.distributed.layouts import (
    DOCUMENTS,
    FACTORS,
    FLOAT32,
    NO_LOSS,
    NO_SEQUENCE,
    OFFLOAD,
    SAME,
    TIED,
    Degrees,
    Overrides,
    Row,
)

LAYOUTS = {
    "pp2": Degrees(pp=2),
    "pp4": Degrees(pp=4),
    "pp2-dp2": Degrees(pp=2, shard=2),
    "pp2-dp4": Degrees(pp=2, shard=4),
    "pp4-dp2": Degrees(pp=4, shard=2),
    "pp2-ddp2": Degrees(pp=2, replicate=2),
    "pp2-hsdp2x2": Degrees(pp=2, replicate=2, shard=2),
    "pp2-tp2": Degrees(pp=2, tp=2),
    "pp2-tp4": Degrees(pp=2, tp=4),
    "pp2-dp2-tp2": Degrees(pp=2, shard=2, tp=2),
    "pp2-dp2-ep2": Degrees(pp=2, shard=2, ep=2),
    "pp2-tp2-ep2": Degrees(pp=2, tp=2, ep=2),
    "pp2-dp2-tp2-ep4": Degrees(pp=2, shard=2, tp=2, ep=4),
    "pp2-cp2": Degrees(pp=2, cp=2),
    "pp2-cp2-tp2": Degrees(pp=2, cp=2, tp=2),
}
SCHEDULES = (
    *("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS"),
    *("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"),
)
NEVER, ALWAYS = FACTORS["reshard"]["never"], FACTORS["reshard"]["always"]
PACK: Overrides = DOCUMENTS | {"data.samples": "pack"}
# Four stages of a rank's two each, with embedding and head counted: 1, 2, 1, 1 layers.
LAYERS = "5"
MODULES: Overrides = {
    "parallelism.module_fqns_per_model_part": '[["tok_embeddings"], ["layers.0", "layers.1", "layers.2"], '
    '["layers.3"], ["layers.4", "norm", "output"]]'
}
SIZE_2: Overrides = {"parallelism.pipeline_parallel_microbatch_size": "2"}
# The first layers are dense: one stage has no experts.
DENSE_STAGE: Overrides = DEEPSEEK | {"model.args.first_k_dense_replace": "3"}


def pipeline_row(
    layout: str, words: str = "", *overrides: Overrides, same: Overrides | None = None, accumulation: int = 1
) -> Row:
    """A row by the schedule that is one of the words, or 1F1B, with four micro-batches."""
    degrees = LAYOUTS[layout]
    keys = degrees.overrides(accumulation)
    size = max(1, int(keys["training.local_batch_size"]) // 4)
    keys |= {"parallelism.pipeline_parallel_microbatch_size": str(size)}
    for schedule in SCHEDULES:
        if schedule in words.split():
            keys |= {"parallelism.pipeline_parallel_schedule": schedule}
    for more in overrides:
        keys |= more
    name = f"{layout} {words}" if words else layout
    layers = {"model.args.num_hidden_layers": LAYERS}
    return Row(name, degrees.ranks, keys, SAME["clipping"][""] | layers | (same or {}))


PIPELINES = (
    *(pipeline_row("pp2", schedule) for schedule in SCHEDULES),
    *(pipeline_row("pp4", schedule, SIZE_2) for schedule in SCHEDULES if schedule in ("GPipe", "1F1B")),
    *(pipeline_row("pp2-dp2", schedule) for schedule in SCHEDULES),
    pipeline_row("pp2-dp4", "InterleavedZeroBubble acc2", accumulation=2),
    pipeline_row("pp4-dp2", "ac-full", AC_FULL),
    pipeline_row("pp2-ddp2", "Interleaved1F1B"),
    pipeline_row("pp2-hsdp2x2"),
    pipeline_row("pp2-hsdp2x2", "ZBVZeroBubble"),
    *(pipeline_row("pp2-tp2", schedule) for schedule in ("1F1B", "LoopedBFS", "ZBVZeroBubble")),
    pipeline_row("pp2-tp2", "no-sp no-lp", NO_SEQUENCE, NO_LOSS),
    pipeline_row("pp2-tp4", "Interleaved1F1B"),
    pipeline_row("pp2-dp2-tp2"),
    pipeline_row("pp2-dp2-tp2", "Interleaved1F1B ac-op", AC_OP),
    pipeline_row("pp2-dp2-tp2", "DualPipeV ac-full", AC_FULL),
    *(
        pipeline_row("pp2", f"{schedule} {kind}", FACTORS["checkpointing"][kind])
        for schedule, kind in (("1F1B", "ac-full"), ("ZBVZeroBubble", "ac-2"), ("GPipe", "ac-op"))
    ),
    pipeline_row("pp2", "aot-eager", AOT_EAGER),
    pipeline_row("pp2", "Interleaved1F1B aot-eager ac-op", AOT_EAGER, AC_OP),
    pipeline_row("pp2-dp2", "acc2 always", ALWAYS, accumulation=2),
    pipeline_row("pp2-dp2", "ZBVZeroBubble acc2 never", NEVER, accumulation=2),
    pipeline_row("pp2", "acc4 Interleaved1F1B", accumulation=4),
    *(
        pipeline_row(layout, f"{schedule} tied acc2", same=TIED, accumulation=2)
        for layout in ("pp2", "pp2-dp2", "pp2-tp2")
        for schedule in ("1F1B", "ZBVZeroBubble")
    ),
    pipeline_row("pp2-dp2", "Interleaved1F1B by-name", MODULES),
    pipeline_row("pp2-dp2", "offload", OFFLOAD),
    pipeline_row("pp2-tp2", "documents", same=DOCUMENTS),
    pipeline_row("pp2-dp2", "Interleaved1F1B pack", same=PACK),
    pipeline_row("pp2-dp2-tp2", "float32", same=FLOAT32),
    *(pipeline_row("pp2-dp2-ep2", f"{s} moe", same=MOE) for s in ("1F1B", "InterleavedZeroBubble")),
    pipeline_row("pp2-tp2-ep2", "moe ac-op", AC_OP, same=MOE),
    pipeline_row("pp2-dp2-tp2-ep4", "Interleaved1F1B moe", same=MOE),
    pipeline_row("pp2-dp2-ep2", "deepseek", same=DEEPSEEK),
    pipeline_row("pp2", "deepseek dense-stage acc2", same=DENSE_STAGE, accumulation=2),
    pipeline_row("pp2-dp2-ep2", "gpt-oss ZBVZeroBubble", same=GPT_OSS),
    pipeline_row("pp2-cp2"),
    pipeline_row("pp2-cp2", "ZBVZeroBubble documents", same=DOCUMENTS),
    pipeline_row("pp2-cp2-tp2", "Interleaved1F1B"),
)
_QUICK = (
    *("pp2 1F1B", "pp2 DualPipeV", "pp2-dp2 ZBVZeroBubble acc2 never", "pp2-tp2 1F1B tied acc2"),
    *("pp2-dp2 Interleaved1F1B pack", "pp2-dp2-ep2 InterleavedZeroBubble moe", "pp2-cp2-tp2 Interleaved1F1B"),
)
QUICK_PIPELINES = tuple(row for row in PIPELINES if row.name in _QUICK)

"""Rows of the layout matrix for mixtures of experts; they are part of it like those of `layouts.py`."""

from tests.distributed.layouts import (
    DOCUMENTS,
    FACTORS,
    FLOAT32,
    LAYOUTS,
    NO_EMBEDDING,
    OFFLOAD,
    SAME,
    Degrees,
    Overrides,
    Row,
    compiled,
    with_batch,
)

# Mixtures of experts: one with auxiliary losses; one with groups, shared experts, a correction bias and a
# dense first layer; and one whose experts and router have biases.
MOE: Overrides = {
    "model.name": "qwen3",
    "model.flavor": "debugmodel_moe",
    "model.args.moe_intermediate_size": "32",
    "model.args.router_aux_loss_coef": "0.01",
    "model.args.router_z_loss_coef": "0.001",
}
DEEPSEEK: Overrides = {
    "model.name": "deepseek_v3",
    "model.args.moe_intermediate_size": "32",
    "model.args.num_hidden_layers": "3",
}
GPT_OSS: Overrides = {
    "model.name": "gpt_oss",
    "model.args.moe_intermediate_size": "32",
    "model.args.sliding_window": "6",
}
BY_BATCH: Overrides = MOE | {"model.args.router_aux_loss_scope": "batch"}
FOUR_EXPERTS: Overrides = MOE | {"model.args.num_experts": "4"}

EXPERT_LAYOUTS = {
    "dp2-ep2": Degrees(shard=2, ep=2),
    "dp4-ep2": Degrees(shard=4, ep=2),
    "dp4-ep4": Degrees(shard=4, ep=4),
    "dp8-ep4": Degrees(shard=8, ep=4),
    "tp2-ep2": Degrees(tp=2, ep=2),
    "tp4-ep2": Degrees(tp=4, ep=2),
    "dp2-tp2-ep2": Degrees(shard=2, tp=2, ep=2),
    "dp2-tp2-ep4": Degrees(shard=2, tp=2, ep=4),
    "dp2-tp2-ep2-etp2": Degrees(shard=2, tp=2, ep=2, etp=2),
    "dp4-tp2-ep2-etp2": Degrees(shard=4, tp=2, ep=2, etp=2),
    "hsdp2x2-ep2": Degrees(replicate=2, shard=2, ep=2),
    "hsdp2x4-ep2": Degrees(replicate=2, shard=4, ep=2),
    "hsdp2x2-tp2-ep2": Degrees(replicate=2, shard=2, tp=2, ep=2),
    "hsdp2x2-tp2-ep2-etp2": Degrees(replicate=2, shard=2, tp=2, ep=2, etp=2),
}


def experts_row(
    layout: str,
    name: str = "",
    overrides: Overrides | None = None,
    same: Overrides = MOE,
    accumulation: int = 1,
) -> Row:
    """A row of a mixture of experts, which clips like the others."""
    degrees = (LAYOUTS | EXPERT_LAYOUTS)[layout]
    words = " ".join(word for word in (layout, "moe", name) if word)
    keys = degrees.overrides(accumulation) | (overrides or {})
    return Row(words, degrees.ranks, keys, same | SAME["clipping"][""])


AC_FULL, AC_OP = FACTORS["checkpointing"]["ac-full"], FACTORS["checkpointing"]["ac-op"]
AOT_EAGER = compiled("aot_eager")
EXPERTS = (
    *(experts_row(layout) for layout in ("dp2", "tp2", "hsdp2x2-tp2", *EXPERT_LAYOUTS)),
    *(
        experts_row(layout, "deepseek", same=DEEPSEEK)
        for layout in ("dp2", "tp2", "dp2-tp2", "dp4-ep2", "dp2-tp2-ep4", "dp2-tp2-ep2-etp2", "hsdp2x2-ep2")
    ),
    *(
        experts_row(layout, "gpt-oss", same=GPT_OSS)
        for layout in ("dp2", "tp2", "dp4-ep2", "dp2-tp2-ep4", "dp2-tp2-ep2-etp2")
    ),
    experts_row("dp2-ep2", "ac-full acc2", AC_FULL, accumulation=2),
    experts_row("dp4-ep2", "ac-op never acc4", AC_OP | FACTORS["reshard"]["never"], accumulation=4),
    experts_row("dp2-tp2-ep2", "ac-op acc2", AC_OP, accumulation=2),
    experts_row("dp2-tp2-ep2-etp2", "ac-op always", AC_OP | FACTORS["reshard"]["always"]),
    experts_row("tp2", "ac-full no-ep", AC_FULL | NO_EMBEDDING),
    experts_row("dp2-tp2-ep4", "deepseek ac-op acc2", AC_OP, DEEPSEEK, accumulation=2),
    experts_row("dp2-tp2-ep2-etp2", "gpt-oss ac-full acc2", AC_FULL, GPT_OSS, accumulation=2),
    experts_row("dp2-ep2", "aot-eager", AOT_EAGER),
    experts_row("dp2-ep2", "aot-eager ac-op", AOT_EAGER | AC_OP),
    experts_row("tp2-ep2", "aot-eager ac-full", AOT_EAGER | AC_FULL),
    experts_row("tp2-ep2", "deepseek aot-eager ac-op acc2", AOT_EAGER | AC_OP, DEEPSEEK, accumulation=2),
    experts_row("dp2-tp2-ep2", "by-batch", same=BY_BATCH),
    experts_row("dp2-ep2", "offload", OFFLOAD),
    experts_row("dp4-ep2", "documents", same=MOE | DOCUMENTS),
    experts_row("dp2-tp2-ep2", "float32", same=MOE | FLOAT32),
    with_batch("dp6-ep2", "moe experts-4", Degrees(shard=6, ep=2), 2).with_("", same=FOUR_EXPERTS),
)

# Those that `make test` runs.
QUICK_EXPERTS = tuple(
    row
    for row in EXPERTS
    if row.name
    in {
        *("dp4-ep2 moe", "hsdp2x2-ep2 moe", "tp2 moe ac-full no-ep", "dp2-ep2 moe aot-eager ac-op"),
        *("dp2-tp2-ep4 moe deepseek ac-op acc2", "dp2-tp2-ep2-etp2 moe gpt-oss ac-full acc2"),
    }
)

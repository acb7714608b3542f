"""Rows of the layout matrix with context parallelism."""

from tests.distributed.expert_layouts import AC_FULL, AC_OP, AOT_EAGER, BY_BATCH, DEEPSEEK, GPT_OSS, MOE
from tests.distributed.layouts import (
    DOCUMENTS,
    FACTORS,
    FLOAT32,
    KINDS,
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
    "cp2": Degrees(cp=2),
    "cp4": Degrees(cp=4),
    "cp8": Degrees(cp=8),
    "dp2-cp2": Degrees(shard=2, cp=2),
    "ddp2-cp2": Degrees(replicate=2, cp=2),
    "hsdp2x2-cp2": Degrees(replicate=2, shard=2, cp=2),
    "dp2-cp4": Degrees(shard=2, cp=4),
    "cp2-tp2": Degrees(cp=2, tp=2),
    "cp4-tp2": Degrees(cp=4, tp=2),
    "cp2-tp4": Degrees(cp=2, tp=4),
    "dp2-cp2-tp2": Degrees(shard=2, cp=2, tp=2),
    "cp2-ep2": Degrees(cp=2, ep=2),
    "cp4-ep4": Degrees(cp=4, ep=4),
    "dp2-cp2-ep2": Degrees(shard=2, cp=2, ep=2),
    "dp2-cp2-ep4": Degrees(shard=2, cp=2, ep=4),
    "cp2-tp2-ep2": Degrees(cp=2, tp=2, ep=2),
    "dp2-cp2-tp2-ep4": Degrees(shard=2, cp=2, tp=2, ep=4),
    "dp2-cp2-tp2-ep2-etp2": Degrees(shard=2, cp=2, tp=2, ep=2, etp=2),
    "hsdp2x2-cp2-ep4": Degrees(replicate=2, shard=2, cp=2, ep=4),
}
METHODS: dict[str, Overrides] = {
    "": {},
    "a2a": {"parallelism.context_parallel_method": "all_to_all"},
}
UNBALANCED: Overrides = {"parallelism.context_parallel_load_balancer": "none"}
ONE_KV_HEAD: Overrides = {"model.args.num_key_value_heads": "1"}
PACK: Overrides = DOCUMENTS | {"data.samples": "pack"}
PAD: Overrides = DOCUMENTS | {"data.samples": "pad"}
NEVER, ALWAYS = FACTORS["reshard"]["never"], FACTORS["reshard"]["always"]


def context_row(
    layout: str, words: str = "", *overrides: Overrides, same: Overrides | None = None, accumulation: int = 1
) -> Row:
    """A row by one of the methods, `all_to_all` if "a2a" is one of its words."""
    degrees = LAYOUTS[layout]
    keys = degrees.overrides(accumulation) | METHODS["a2a" if "a2a" in words.split() else ""]
    for more in overrides:
        keys |= more
    name = f"{layout} {words}" if words else layout
    return Row(name, degrees.ranks, keys, SAME["clipping"][""] | (same or {}))


DENSE = ("cp2", "cp4", "cp8", "dp2-cp2", "ddp2-cp2", "cp2-tp2", "cp4-tp2", "hsdp2x2-cp2", "dp2-cp2-tp2")
SPARSE = ("cp2-ep2", "dp2-cp2-ep4", "cp2-tp2-ep2", "dp2-cp2-tp2-ep4", "dp2-cp2-tp2-ep2-etp2")
CONTEXT = (
    *(context_row(layout, method) for layout in DENSE for method in METHODS),
    context_row("cp2", "unbalanced", UNBALANCED),
    context_row("cp4", "a2a unbalanced", UNBALANCED),
    context_row("dp2-cp4", "a2a kv-1", same=ONE_KV_HEAD),
    context_row("cp2-tp4", "no-lp", NO_LOSS),
    context_row("cp2-tp2", "no-sp", NO_SEQUENCE),
    context_row("cp2-tp2", "a2a no-sp ac-op", NO_SEQUENCE, AC_OP),
    context_row("dp2-cp2", "tied never acc2", NEVER, same=TIED, accumulation=2),
    context_row("dp2-cp2-tp2", "a2a tied always", ALWAYS, same=TIED),
    context_row("dp2-cp2", "offload", OFFLOAD),
    context_row("dp2-cp2-tp2", "float32", same=FLOAT32),
    context_row("dp2-cp2-tp2", "a2a float32", same=FLOAT32),
    *(context_row("cp2", f"{method} documents".strip(), same=DOCUMENTS) for method in METHODS),
    context_row("cp4", "documents unbalanced ac-op", UNBALANCED, AC_OP, same=DOCUMENTS),
    context_row("cp4", "a2a documents ac-full", AC_FULL, same=DOCUMENTS),
    context_row("dp2-cp2", "pack acc2", same=PACK, accumulation=2),
    context_row("dp2-cp2-tp2", "a2a pack", same=PACK),
    context_row("cp2-tp2", "pad ac-full", AC_FULL, same=PAD),
    context_row("cp2", "ac-full acc4", AC_FULL, accumulation=4),
    context_row("cp4", "ac-op acc2", AC_OP, accumulation=2),
    context_row("cp2-tp2", "a2a ac-op acc2", AC_OP, accumulation=2),
    *(context_row("cp2", f"{m} aot-eager".strip(), AOT_EAGER) for m in METHODS),
    context_row("cp2", "aot-eager ac-op documents", AOT_EAGER, AC_OP, same=DOCUMENTS),
    context_row("cp2", "a2a aot-eager ac-full", AOT_EAGER, AC_FULL),
    *(context_row("cp2-tp2", kind, same=KINDS[kind]) for kind in KINDS),
    *(context_row("cp4", f"a2a {kind} documents", same=KINDS[kind] | DOCUMENTS) for kind in KINDS),
    *(context_row(layout, "moe", same=MOE) for layout in (*SPARSE, "cp4-ep4", "dp2-cp2-ep2")),
    context_row("hsdp2x2-cp2-ep4", "a2a moe acc2", same=MOE, accumulation=2),
    context_row("dp2-cp2-tp2", "moe by-batch", same=BY_BATCH),
    context_row("cp2-ep2", "moe aot-eager ac-op", AOT_EAGER, AC_OP, same=MOE),
    context_row("cp2-ep2", "moe documents", same=MOE | DOCUMENTS),
    *(
        context_row(layout, f"{name} {method}".strip(), same=keys)
        for name, keys in {"deepseek": DEEPSEEK, "gpt-oss": GPT_OSS}.items()
        for layout in ("cp2", "dp2-cp2-ep4", "dp2-cp2-tp2-ep4")
        for method in METHODS
    ),
    context_row("cp4", "gpt-oss documents ac-op", AC_OP, same=GPT_OSS | DOCUMENTS),
    context_row("cp2", "deepseek pack ac-full", AC_FULL, same=DEEPSEEK | PACK),
    context_row("cp2", "gpt-oss a2a aot-eager", AOT_EAGER, same=GPT_OSS),
    context_row("cp2", "deepseek aot-eager", AOT_EAGER, same=DEEPSEEK),
)
_NAMES = (
    *("cp2", "cp2 a2a aot-eager", "dp2-cp2-tp2", "dp2-cp2-tp2 a2a pack", "cp4 a2a documents ac-full"),
    *("cp2 deepseek a2a", "cp4 gpt-oss documents ac-op", "dp2-cp2-tp2-ep4 moe"),
)
QUICK_CONTEXT = tuple(row for row in CONTEXT if row.name in _NAMES)

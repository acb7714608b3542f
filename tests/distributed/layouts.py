"""The layout matrix as data: each row is a run that must give the numbers of one process.

Factors are crossed so that every two values that go together meet in a row (a covering choice, not every
product). A later parallelism adds a factor or values here, no tests.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from pathlib import Path

Overrides = dict[str, str]

# The run that every row changes: real text, small enough for 10 steps in about a second.
BASE: Overrides = {
    "training.steps": "10",
    "training.seq_len": "16",
    "training.local_batch_size": "32",
    "training.global_batch_size": "32",
    "training.dtype": "float64",
    "model.args.hidden_size": "64",
    "model.args.num_hidden_layers": "2",
    "model.args.intermediate_size": "96",
    "optimizer.lr": "1e-3",
    "lr_scheduler.warmup_steps": "2",
    "metrics.log_freq": "1",
    "metrics.log_batch_hash": "true",
    "activation_checkpoint.mode": "none",
}
GLOBAL_BATCH = int(BASE["training.global_batch_size"])

FLOAT32: Overrides = {"training.dtype": "float32", "training.mixed_precision_param": "float32"}


@dataclass(frozen=True)
class Row:
    """A run: `overrides` must not change its numbers, `same` may, and the one-process run has them too."""

    name: str
    ranks: int
    overrides: Overrides = field(default_factory=dict)
    same: Overrides = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def float32(self) -> bool:
        return self.same.get("training.dtype") == "float32"

    def with_(self, suffix: str, overrides: Overrides | None = None, same: Overrides | None = None) -> "Row":
        """This row with more keys set."""
        name = f"{self.name} {suffix}".strip()
        return Row(name, self.ranks, self.overrides | (overrides or {}), self.same | (same or {}))

    def reference(self) -> "Row":
        """The run on one process, with nothing but the defaults, that this row must equal."""
        return Row("one process", 1, {}, self.same)


@dataclass(frozen=True)
class Degrees:
    replicate: int = 1
    shard: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1
    pp: int = 1

    @property
    def dp(self) -> int:
        return self.replicate * self.shard

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.cp * self.pp

    def overrides(self, accumulation: int = 1) -> Overrides:
        return {
            "parallelism.data_parallel_replicate_degree": str(self.replicate),
            "parallelism.data_parallel_shard_degree": str(self.shard),
            "parallelism.tensor_parallel_degree": str(self.tp),
            "parallelism.context_parallel_degree": str(self.cp),
            "parallelism.pipeline_parallel_degree": str(self.pp),
            "parallelism.expert_parallel_degree": str(self.ep),
            "parallelism.expert_tensor_parallel_degree": str(self.etp),
            "training.local_batch_size": str(GLOBAL_BATCH // self.dp // accumulation),
        }


LAYOUTS = {
    "one": Degrees(),
    "dp2": Degrees(shard=2),
    "dp4": Degrees(shard=4),
    "dp8": Degrees(shard=8),
    "ddp2": Degrees(replicate=2),
    "ddp4": Degrees(replicate=4),
    "hsdp2x2": Degrees(replicate=2, shard=2),
    "hsdp2x4": Degrees(replicate=2, shard=4),
    "tp2": Degrees(tp=2),
    "tp4": Degrees(tp=4),
    "dp2-tp2": Degrees(shard=2, tp=2),
    "ddp2-tp2": Degrees(replicate=2, tp=2),
    "dp2-tp4": Degrees(shard=2, tp=4),
    "dp4-tp2": Degrees(shard=4, tp=2),
    "hsdp2x2-tp2": Degrees(replicate=2, shard=2, tp=2),
}


def _selective(option: str) -> Overrides:
    return {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": option}


def compiled(backend: str) -> Overrides:
    return {"compile.enable": "true", "compile.backend": backend}


# Each factor's first value is the default, which a row's name leaves out.
FACTORS: dict[str, dict[str, Overrides]] = {
    "checkpointing": {
        "": {},
        "ac-full": {"activation_checkpoint.mode": "full"},
        "ac-op": _selective("op"),
        "ac-2": _selective("2"),
    },
    "compile": {
        "": {},
        "aot-eager": compiled("aot_eager"),
        "inductor": compiled("inductor"),
    },
    "sequence": {"": {}, "no-sp": {"parallelism.disable_sequence_parallel": "true"}},
    "embedding": {"": {}, "no-ep": {"parallelism.disable_embedding_parallel": "true"}},
    "loss": {"": {}, "no-lp": {"parallelism.disable_loss_parallel": "true"}},
    "reshard": {
        "": {},
        "always": {"parallelism.fsdp_reshard_after_forward": "always"},
        "never": {"parallelism.fsdp_reshard_after_forward": "never"},
    },
    "accumulation": {"": {}, "acc2": {}, "acc4": {}},
    "implementation": {
        "": {},
        "foreach": {"optimizer.implementation": "foreach"},
        "for-loop": {"optimizer.implementation": "for-loop"},
    },
}
ACCUMULATION = {"": 1, "acc2": 2, "acc4": 4}

# Factors that make another run, which one process runs too.
SAME: dict[str, dict[str, Overrides]] = {
    "tied": {"": {}, "tied": {"model.args.tie_word_embeddings": "true"}},
    "heads": {"": {}, "mha": {"model.args.num_key_value_heads": "8"}},
    "clipping": {"": {"training.max_norm": "0.5"}, "no-clip": {"training.max_norm": "0"}},
}
COMPILED_RANKS = {"aot-eager": 2, "inductor": 1}  # a compilation takes each rank seconds, or half a minute

Choice = dict[str, str]
Pair = frozenset[tuple[str, str]]


def values() -> dict[str, list[str]]:
    """Every factor of the matrix and its values."""
    return {"layout": list(LAYOUTS)} | {name: list(kinds) for name, kinds in (FACTORS | SAME).items()}


def go_together(choice: Choice) -> bool:
    """Whether the values chosen so far can stand in one row and each of them does something there."""
    if "layout" in choice:
        layout = LAYOUTS[choice["layout"]]
        if layout.tp == 1 and any(choice.get(name) for name in ("sequence", "embedding", "loss")):
            return False
        if layout.dp == 1 and choice.get("reshard"):
            return False
        if layout.ranks > COMPILED_RANKS.get(choice.get("compile", ""), 8):
            return False
    of_ranks = ("sequence", "embedding", "loss", "reshard")
    if choice.get("compile") == "inductor" and any(choice.get(name) for name in of_ranks):
        return False  # it is crossed on one process only
    return not (choice.get("embedding") and choice.get("tied"))


def pairs_of(choice: Choice) -> set[Pair]:
    return {frozenset(pair) for pair in combinations(choice.items(), 2)}


def all_pairs() -> Iterator[Choice]:
    """Every two values of different factors that go together."""
    for (one, ones), (other, others) in combinations(values().items(), 2):
        for a in ones:
            for b in others:
                if go_together({one: a, other: b}):
                    yield {one: a, other: b}


def _completed(pair: Choice, missing: set[Pair], dice: random.Random) -> Choice | None:
    """The pair with a value for each other factor that goes with it: those that meet most missing pairs."""
    choice = dict(pair)
    names = [name for name in values() if name not in choice]
    dice.shuffle(names)
    for name in names:
        fitting = [{**choice, name: value} for value in values()[name]]
        fitting = [c for c in fitting if go_together(c)]
        if not fitting:
            return None
        dice.shuffle(fitting)
        choice = max(fitting, key=lambda c: len(pairs_of(c) & missing))
    return choice


@cache
def choices() -> tuple[Choice, ...]:
    """Values of all factors so that all pairs meet; the same ones on every call and machine."""
    dice = random.Random(0)
    pairs = list(all_pairs())
    missing = {frozenset(pair.items()) for pair in pairs}
    chosen = []
    for pair in pairs:
        if frozenset(pair.items()) in missing:
            tries = [_completed(pair, missing, dice) for _ in range(20)]
            best = max((c for c in tries if c), key=lambda c: len(pairs_of(c) & missing))
            missing -= pairs_of(best)
            chosen.append(best)
    return tuple(chosen)


def row_of(choice: Choice) -> Row:
    layout = LAYOUTS[choice["layout"]]
    overrides = layout.overrides(ACCUMULATION[choice.get("accumulation", "")])
    same: Overrides = {}
    for name in FACTORS:
        overrides |= FACTORS[name][choice.get(name, "")]
    for name in SAME:
        same |= SAME[name][choice.get(name, "")]
    words = [choice.get(name) for name in values()]
    return Row(" ".join(word for word in words if word), layout.ranks, overrides, same)


def _row(
    layout: str, name: str = "", overrides: Overrides | None = None, same: Overrides | None = None
) -> Row:
    """The layout with its defaults and a few keys more."""
    row = row_of({"layout": layout})
    return row.with_(name, overrides, same) if name else row


def _budget(share: str) -> Overrides:
    mode = {"activation_checkpoint.mode": "memory_budget", "activation_checkpoint.memory_budget": share}
    return compiled("aot_eager") | mode


def with_batch(layout: str, name: str, degrees: Degrees, local: int, accumulation: int = 1) -> Row:
    """A layout whose batch is not that of the other rows; one process takes it in one piece."""
    batch = str(local * degrees.dp * accumulation)
    overrides = degrees.overrides() | {"training.local_batch_size": str(local)}
    same = {"training.global_batch_size": batch, "training.local_batch_size": batch}
    return Row(f"{layout} {name}" if name else layout, degrees.ranks, overrides, same)


NO_SEQUENCE = FACTORS["sequence"]["no-sp"]
NO_EMBEDDING = FACTORS["embedding"]["no-ep"]
NO_LOSS = FACTORS["loss"]["no-lp"]
TIED = SAME["tied"]["tied"]
OFFLOAD: Overrides = {"training.enable_cpu_offload": "true"}
ADAM: Overrides = {"optimizer.name": "Adam"}
VOCABULARY_265: Overrides = {"model.args.vocab_size": "265"}
LICENSE = str(Path(__file__).parent / "five_ids" / "license.txt")
# A tokenizer of five characters: on more ranks than rows, the last have none at all.
FIVE_IDS: Overrides = {
    "model.hf_assets_path": str(Path(__file__).parent / "five_ids"),
    "training.dataset_path": LICENSE,
    "data.add_eos": "false",
}
WIDTH_91: Overrides = {"model.args.intermediate_size": "91"}
LAYERS_3: Overrides = {"model.args.num_hidden_layers": "3"}
TWO_OF_SIX: Overrides = {
    "model.args.num_attention_heads": "6",
    "model.args.num_key_value_heads": "2",
    "model.args.head_dim": "10",
}
LENGTH_17: Overrides = {"training.seq_len": "17"}
# Each line is a document, so that many end within a window.
DOCUMENTS: Overrides = {
    "training.dataset_path": LICENSE,
    "data.document_mask": "true",
    "data.txt_lines": "true",
}
# Kinds of attention, with dense feed-forwards.
DENSE: Overrides = {
    "model.args.num_experts": "0",
    "model.args.score_correction": "false",
    "model.args.router_bias_update_speed": "0",
}
YARN: Overrides = {
    "model.args.rope_scaling.rope_type": "yarn",
    "model.args.rope_scaling.factor": "4.0",
    "model.args.rope_scaling.original_max_position_embeddings": "64",
    "model.args.rope_scaling.mscale_all_dim": "0.7",
}
KINDS: dict[str, Overrides] = {
    "biases": {"model.name": "qwen2"},
    "qk-norm": {"model.name": "qwen3"},
    "latent": {"model.name": "deepseek_v3"} | DENSE,
    "latent-queries": {
        "model.name": "deepseek_v3",
        "model.args.q_lora_rank": "20",
        "model.args.attention_bias": "true",
        **YARN,
        **DENSE,
    },
    "sinks": {"model.name": "gpt_oss", "model.args.sliding_window": "5"} | DENSE,
}

IN_FLOAT32 = tuple(
    _row(layout, "float32", same=FLOAT32)
    for layout, degrees in LAYOUTS.items()
    if degrees.ranks <= 4 or layout == "hsdp2x2-tp2"
)
# With the crossed rows of `quick_rows`: five layouts by no, full and selective checkpointing in both types.
FIVE = ("dp2", "tp2", "dp2-tp2", "hsdp2x2", "ddp2")
CHECKPOINTED = (
    *(_row(layout, "float64") for layout in FIVE),
    *(
        _row(layout, f"float32 {kind}", FACTORS["checkpointing"][kind], FLOAT32)
        for layout in FIVE
        for kind in ("ac-full", "ac-op")
    ),
)
COMPILED_IN_FLOAT32 = tuple(
    _row(layout, "inductor float32", compiled("inductor"), FLOAT32) for layout in ("one", "dp2", "tp2")
)
OFFLOADED = (
    *(_row(layout, "offload", OFFLOAD) for layout in ("one", "dp2", "ddp2", "tp2", "hsdp2x2")),
    _row("dp2-tp2", "offload ac-full", OFFLOAD | FACTORS["checkpointing"]["ac-full"]),
)
BUDGETED = (
    _row("one", "budget-0", _budget("0")),
    _row("dp2", "budget-0.5", _budget("0.5")),
    _row("tp2", "budget-0", _budget("0")),
)
ATTENTIONS = (
    *(_row(layout, kind, same=KINDS[kind]) for kind in KINDS for layout in ("tp2", "tp4", "dp2-tp2")),
    *(_row("tp2", f"{kind} no-sp", NO_SEQUENCE, KINDS[kind]) for kind in KINDS),
    *(_row("dp2", f"{kind} aot-eager", compiled("aot_eager"), KINDS[kind]) for kind in KINDS),
    *(
        _row("dp2-tp2", f"{kind} documents ac-op", FACTORS["checkpointing"]["ac-op"], KINDS[kind] | DOCUMENTS)
        for kind in KINDS
    ),
    _row("tp2", "sinks aot-eager", compiled("aot_eager"), KINDS["sinks"]),
    _row("tp2", "latent-queries float32", same=KINDS["latent-queries"] | FLOAT32),
    _row("tp2", "sinks float32 ac-full", FACTORS["checkpointing"]["ac-full"], KINDS["sinks"] | FLOAT32),
)
ODD_SIZES = (
    with_batch("dp3", "", Degrees(shard=3), 2, 2),
    with_batch("ddp3", "", Degrees(replicate=3), 2),
    with_batch("dp5", "", Degrees(shard=5), 1),
    with_batch("dp7", "", Degrees(shard=7), 1, 2),
    with_batch("dp3-tp2", "", Degrees(shard=3, tp=2), 2),
    with_batch("hsdp2x3", "", Degrees(replicate=2, shard=3), 2),
    with_batch("one", "batch-1", Degrees(), 1),
    with_batch("tp2", "batch-1", Degrees(tp=2), 1),
    with_batch("dp2", "batch-1-each", Degrees(shard=2), 1),
    _row("tp2", "vocabulary-265", same=VOCABULARY_265),
    _row("tp4", "vocabulary-265 no-lp", NO_LOSS, VOCABULARY_265),
    _row("dp4-tp2", "vocabulary-265 tied", same=VOCABULARY_265 | TIED),
    _row("dp8", "five-ids", same=FIVE_IDS),
    _row("tp2", "five-ids no-lp no-sp", NO_LOSS | NO_SEQUENCE, FIVE_IDS),
    _row("tp2", "five-ids no-ep", NO_EMBEDDING, FIVE_IDS),
    _row("dp4-tp2", "five-ids tied", same=FIVE_IDS | TIED),
    _row("tp2", "width-91", same=WIDTH_91),
    _row("dp2-tp4", "width-91", same=WIDTH_91),
    _row("dp2-tp2", "layers-3 ac-2", FACTORS["checkpointing"]["ac-2"], LAYERS_3),
    _row("dp4-tp2", "heads-6-2", same=TWO_OF_SIX),
    _row("tp2", "length-17 no-sp", NO_SEQUENCE, LENGTH_17),
    _row("dp2-tp2", "Adam", same=ADAM),
)
SAMPLED = (
    _row("dp2-tp2", "documents ac-op", FACTORS["checkpointing"]["ac-op"], DOCUMENTS),
    _row("tp2", "documents no-sp", NO_SEQUENCE, DOCUMENTS),
    _row("dp2", "documents aot-eager", compiled("aot_eager"), DOCUMENTS),
    _row("hsdp2x2", "pack", same=DOCUMENTS | {"data.samples": "pack"}),
    _row("dp2-tp2", "pad ac-full", FACTORS["checkpointing"]["ac-full"], DOCUMENTS | {"data.samples": "pad"}),
    _row("dp4", "growing batch", same={"training.global_batch_size_schedule": "[{step = 4, size = 64}]"}),
)

EXTRAS = (
    *BUDGETED,
    *OFFLOADED,
    *SAMPLED,
    *ODD_SIZES,
    *ATTENTIONS,
    *IN_FLOAT32,
    *CHECKPOINTED,
    *COMPILED_IN_FLOAT32,
)


def every_row() -> tuple[Row, ...]:
    """All that `make parity` runs."""
    return (*map(row_of, choices()), *EXTRAS)


def quick_rows() -> tuple[Row, ...]:
    """What `make test` runs: five layouts by each kind of checkpointing, and one row or two of the rest."""
    crossed = [
        {"layout": "dp2", "checkpointing": "ac-full", "reshard": "always", "accumulation": "acc2"},
        {"layout": "dp2", "checkpointing": "ac-op", "reshard": "never", "implementation": "foreach"},
        {"layout": "ddp2", "checkpointing": "ac-full", "accumulation": "acc4"},
        {"layout": "ddp2", "checkpointing": "ac-op", "implementation": "for-loop", "tied": "tied"},
        {"layout": "hsdp2x2", "checkpointing": "ac-full", "reshard": "never", "tied": "tied"},
        {"layout": "hsdp2x2", "checkpointing": "ac-op", "accumulation": "acc2", "clipping": "no-clip"},
        {"layout": "tp2", "checkpointing": "ac-full", "accumulation": "acc2", "heads": "mha"},
        {
            "layout": "tp2",
            "checkpointing": "ac-op",
            "sequence": "no-sp",
            "embedding": "no-ep",
            "loss": "no-lp",
        },
        {"layout": "dp2-tp2", "checkpointing": "ac-full", "accumulation": "acc2", "tied": "tied"},
        {"layout": "dp2-tp2", "checkpointing": "ac-op", "sequence": "no-sp", "reshard": "never"},
    ]
    names = {
        *(f"{layout} float32" for layout in FIVE),
        *(row.name for row in CHECKPOINTED),
        *(f"{layout} inductor float32" for layout in ("one", "dp2", "tp2")),
        *("dp3", "dp2 offload", "one budget-0", "tp2 vocabulary-265", "dp4-tp2 vocabulary-265 tied"),
        *("dp2-tp2 layers-3 ac-2", "tp2 documents no-sp", "hsdp2x2 pack", "dp4 growing batch"),
        *("dp2-tp2 latent-queries", "tp2 sinks no-sp"),
    }
    return (*map(row_of, crossed), *(row for row in EXTRAS if row.name in names))

"""The layout matrix as data: each row is a run that must give the numbers of one process.

Later parallelisms add rows, not tests.
"""

from dataclasses import dataclass, field

Overrides = dict[str, str]

# The run that every row changes: real text, small enough for 10 steps in about a second.
BASE: Overrides = {
    "training.dataset": "stdlib",
    "training.steps": "10",
    "training.seq_len": "32",
    "training.local_batch_size": "2",
    "training.global_batch_size": "8",
    "training.mixed_precision_param": "float32",
    "model.args.hidden_size": "64",
    "model.args.num_hidden_layers": "3",
    "model.args.intermediate_size": "96",
    "optimizer.lr": "1e-3",
    "lr_scheduler.warmup_steps": "2",
    "metrics.log_freq": "1",
    "metrics.log_batch_hash": "true",
    "activation_checkpoint.mode": "none",
}


@dataclass(frozen=True)
class Layout:
    """A layout: how many ranks, and which keys make it."""

    name: str
    ranks: int
    overrides: Overrides = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def with_(self, suffix: str, overrides: Overrides) -> "Layout":
        """This layout with more keys set."""
        return Layout(f"{self.name}-{suffix}", self.ranks, self.overrides | overrides)


def _layout(name: str, replicate: int = 1, shard: int = 1, tp: int = 1) -> Layout:
    degrees = {
        "parallelism.data_parallel_replicate_degree": str(replicate),
        "parallelism.data_parallel_shard_degree": str(shard),
        "parallelism.tensor_parallel_degree": str(tp),
    }
    return Layout(name, replicate * shard * tp, degrees)


ONE = _layout("one")
DP2 = _layout("dp2", shard=2)
TP2 = _layout("tp2", tp=2)
DP2_TP2 = _layout("dp2-tp2", shard=2, tp=2)
HSDP = _layout("hsdp2x2", replicate=2, shard=2)
DDP2 = _layout("ddp2", replicate=2)
TP4 = _layout("tp4", tp=4)
DDP2_TP2 = _layout("ddp2-tp2", replicate=2, tp=2)

CHECKPOINTING = {
    "full": {"activation_checkpoint.mode": "full"},
    "selective-op": {
        "activation_checkpoint.mode": "selective",
        "activation_checkpoint.selective_ac_option": "op",
    },
    "selective-2": {
        "activation_checkpoint.mode": "selective",
        "activation_checkpoint.selective_ac_option": "2",
    },
}

CROSSED = [
    layout.with_(kind, keys) if keys else layout
    for layout in (DP2, TP2, DP2_TP2, HSDP, DDP2)
    for kind, keys in {"none": {}, **CHECKPOINTING}.items()
    if kind != "selective-2"
]

NO_SEQUENCE = {"parallelism.disable_sequence_parallel": "true"}
NO_EMBEDDING = {"parallelism.disable_embedding_parallel": "true"}
NO_LOSS = {"parallelism.disable_loss_parallel": "true"}
TIED = {"model.args.tie_word_embeddings": "true"}

# Everything that can be turned on or off, each on a layout where it does something.
OPTIONS = [
    ONE.with_("selective-op", CHECKPOINTING["selective-op"]),
    DP2.with_("selective-2", CHECKPOINTING["selective-2"]),
    TP2.with_("selective-2", CHECKPOINTING["selective-2"]),
    ONE.with_("micro-8", {"training.local_batch_size": "8"}),
    DP2.with_("micro-1", {"training.local_batch_size": "1"}),
    DP2.with_("reshard-always", {"parallelism.fsdp_reshard_after_forward": "always"}),
    DP2.with_("reshard-never", {"parallelism.fsdp_reshard_after_forward": "never"}),
    DP2.with_("foreach", {"optimizer.implementation": "foreach"}),
    DP2_TP2.with_("for-loop", {"optimizer.implementation": "for-loop"}),
    TP2.with_("no-sequence", NO_SEQUENCE),
    TP2.with_("no-embedding", NO_EMBEDDING),
    TP2.with_("no-loss", NO_LOSS),
    DP2_TP2.with_("no-sequence-embedding-loss", NO_SEQUENCE | NO_EMBEDDING | NO_LOSS),
    TP4.with_("full", CHECKPOINTING["full"]),
    DDP2_TP2.with_("selective-op", CHECKPOINTING["selective-op"]),
    TP2.with_("odd-vocabulary", {"model.args.vocab_size": "265"}),
]
TIED_ROWS = [layout.with_("tied", TIED) for layout in (DP2, TP2, DP2_TP2, HSDP)]

COMPILED = [
    layout.with_(
        "compile", {"compile.enable": "true", "model.args.num_hidden_layers": "2", "training.steps": "4"}
    )
    for layout in (ONE, DP2, TP2)
]

"""Runs saved on each of six layouts and taken up on each of the six: everything that a checkpoint holds, and
what the next step would draw, against what it was when it was saved.
"""

import contextlib
import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np

from tests.distributed.context_layouts import context_row
from tests.distributed.expert_layouts import DEEPSEEK, experts_row
from tests.distributed.harness import run_ranks
from tests.distributed.layouts import BASE, FLOAT32, VOCABULARY_265, WIDTH_91, Row, row_of
from tests.distributed.pipeline_layouts import pipeline_row
from tests.distributed.runs import Pieces, arguments, assembled, piece

# Sizes that no layout divides evenly.
UNEVEN = FLOAT32 | VOCABULARY_265 | WIDTH_91
SIX = tuple(
    row_of({"layout": name}).with_("", same=UNEVEN)
    for name in ("one", "dp4", "ddp2", "tp2", "dp2-tp2", "hsdp2x2-tp2")
)
EXPERTS = tuple(
    experts_row(name, same=DEEPSEEK | FLOAT32 | VOCABULARY_265)
    for name in ("one", "dp4-ep2", "dp2-tp2-ep4", "dp2-tp2-ep2-etp2", "hsdp2x2-ep2", "tp2")
)
CONTEXT = (
    context_row("cp2-tp2", same=UNEVEN),
    *(row_of({"layout": name}).with_("", same=UNEVEN) for name in ("one", "dp4", "dp2-tp2")),
)
DEEP = UNEVEN | {"model.args.num_hidden_layers": "5", "model.args.tie_word_embeddings": "true"}
PIPELINE = (
    pipeline_row("pp2-dp2", "Interleaved1F1B", same=DEEP),
    pipeline_row("pp2-tp2", "ZBVZeroBubble", same=DEEP),
    *(row_of({"layout": name}).with_("", same=DEEP) for name in ("one", "dp4", "dp2-tp2")),
)
RUN = BASE | {"training.steps": "3", "checkpoint.enable": "true"}
STEPS_BEFORE, SAMPLES_BEFORE = 3, 3 * 32


@dataclasses.dataclass
class State:
    """What one rank has of a run: its pieces of all tensors, the counters, and what it would draw next."""

    pieces: Pieces
    counters: dict[str, Any]
    dp_rank: int
    draws: list[float]


def state_of(trainer: Any) -> State:
    import torch

    from minititan.distributed import seed_step

    seed_step(0, trainer.steps_done + 1, trainer.meshes.dp_rank)
    counters = {"steps_done": trainer.steps_done, "tokens_seen": trainer.tokens_seen}
    return State(
        {name: piece(tensor) for name, tensor in trainer.checkpoints.tensors().items()},
        counters | dataclasses.asdict(trainer.loader.state()),
        trainer.meshes.dp_rank,
        torch.rand(4).tolist(),
    )


def trainer_of(row: Row, folder: Path, cache: Path, more: dict[str, str]) -> Any:
    from minititan.config import load
    from minititan.distributed import init_distributed
    from minititan.run import check
    from minititan.train import Trainer

    words = arguments(RUN | row.same | row.overrides | {"data.cache_folder": str(cache)} | more, folder)
    with contextlib.redirect_stdout(io.StringIO()):
        return Trainer.build(check(load(words), row.ranks), init_distributed(timeout_seconds=120))


def save(rank: int, world: int, row: Row, folder: Path, cache: Path) -> State:
    """Train three steps, save, and hand back the state."""
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = trainer_of(row, folder, cache, {})
        trainer.run()
    return state_of(trainer)


def load(rank: int, world: int, row: Row, folders: list[Path], cache: Path) -> list[State]:
    """Take up each of the runs, and hand back their states."""
    return [state_of(trainer_of(row, folder, cache, {"checkpoint.load_only": "true"})) for folder in folders]


def differences(before: list[State], after: list[State], rows: tuple[Row, Row]) -> list[str]:
    """What the ranks `after` have otherwise than those `before`; also fails where copies differ."""
    whole, found = (
        assembled(row, "state", [state.pieces for state in states])
        for row, states in zip(rows, (before, after), strict=True)
    )
    wrong = sorted(whole.keys() ^ found.keys())
    wrong += [key for key in whole.keys() & found.keys() if not _same_bits(whole[key], found[key])]
    wrong += ["counters" for state in after if state.counters != before[0].counters]
    drawn = {state.dp_rank: state.draws for state in before}
    wrong += ["draws" for state in after if state.draws != drawn.get(state.dp_rank, state.draws)]
    return wrong


def _same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def reshard_all(root: Path, cache: Path, rows: tuple[Row, ...] = SIX) -> dict[tuple[str, str], list[str]]:
    """For every two rows what was not taken over to the bit."""
    folders = [root / row.name for row in rows]
    saved = [
        run_ranks(save, row.ranks, row, folder, cache) for row, folder in zip(rows, folders, strict=True)
    ]
    for states in saved:
        assert states[0].counters["steps_done"] == STEPS_BEFORE
        assert states[0].counters["samples_consumed"] == SAMPLES_BEFORE
        # No tensor is what it was at the start, or moments could be missed.
        assert all(piece.values.any() for piece in states[0].pieces.values() if piece.values.size)
    found = {}
    for after in rows:
        ranks = run_ranks(load, after.ranks, after, folders, cache, timeout=300)
        for before, own, states in zip(rows, saved, zip(*ranks, strict=True), strict=True):
            found[before.name, after.name] = differences(own, list(states), (before, after))
    return found

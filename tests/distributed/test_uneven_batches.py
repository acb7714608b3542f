"""Labels that are spread unevenly over ranks and micro-batches, frozen and unused parameters: against a plain
training loop in PyTorch, with no library code but the model and its initial values.
"""

import contextlib
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from minititan.config import ConfigError, load
from minititan.init import init_parameters
from minititan.run import check
from tests.distributed.context_layouts import context_row
from tests.distributed.harness import run_ranks
from tests.distributed.layouts import BASE, GLOBAL_BATCH, Overrides, Row, row_of
from tests.distributed.runs import Part, arguments, assembled, lines, piece, recorded

WARM_UP: Overrides = {"lr_scheduler.warmup_steps": "3", "lr_scheduler.decay_ratio": "0"}
T = int(BASE["training.seq_len"])
STEPS = ("uneven", "first half without", "none at all", "a single one", "uneven")


def batch(step: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels [GLOBAL_BATCH, T] of a step, the same on every call."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 256, (GLOBAL_BATCH, T + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    if kind == "uneven":
        for row in range(GLOBAL_BATCH):
            labels[row, row * 7 % (T + 1) :] = -100
    elif kind == "first half without":  # the first rank has none, and whole micro-batches
        labels[: GLOBAL_BATCH // 2] = -100
    else:
        single = labels[5, 3].item()
        labels[:] = -100
        if kind == "a single one":
            labels[5, 3] = single
    return tokens[:, :-1], labels


def train_in_rank(rank: int, world: int, row: Row, folder: str, token_cache: str) -> Part:
    """Train on the batches above; hand back this rank's part of the numbers."""
    from minititan.distributed import init_distributed
    from minititan.train import Trainer

    part = Part()
    keys = BASE | WARM_UP | {"data.cache_folder": token_cache} | row.same | row.overrides
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = Trainer.build(
            check(load(arguments(keys, Path(folder))), world), init_distributed(timeout_seconds=60)
        )
        micro = int(keys["training.local_batch_size"])
        with recorded(part, trainer.parameters):
            for step, kind in enumerate(STEPS):
                own = [
                    whole.chunk(trainer.meshes.dp.size())[trainer.meshes.dp_rank]
                    for whole in batch(step, kind)
                ]
                parts = zip(*(tensor.split(micro) for tensor in own), strict=True)
                trainer.step(iter([{"tokens": tokens, "labels": labels} for tokens, labels in parts]))
    part.tensors["parameters"] = {name: piece(p) for name, p in trainer.parameters.items()}
    part.steps = lines(Path(folder)) if rank == 0 else []
    return part


class Plain:
    """The same training in a few lines of PyTorch."""

    def __init__(self, row: Row, folder: Path) -> None:
        run = check(load(arguments(BASE | WARM_UP | row.same, folder)), 1)
        model: Any = run.spec.build(run.args).to(torch.float64)
        named = dict(model.named_parameters())
        init_parameters(named, lambda n, t, g: run.spec.init_(n, t, g, run.args), 0)
        optimizer = torch.optim.AdamW(
            [p for p in named.values() if p.requires_grad],
            lr=1e-3,
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=0.1,
        )
        self.losses, self.norms = [], []
        for step, kind in enumerate(STEPS):
            tokens, labels = batch(step, kind)
            logits = F.linear(model(tokens), model.lm_head.weight)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            loss = loss / max(int((labels != -100).sum()), 1)
            loss.backward()
            if step == 0:
                self.gradients = {n: p.grad.numpy().copy() for n, p in named.items() if p.grad is not None}
            self.losses.append(loss.item())
            max_norm = float(row.same["training.max_norm"]) or math.inf
            self.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
            optimizer.param_groups[0]["lr"] = 1e-3 * min((step + 1) / 3, 1)
            optimizer.step()
            optimizer.zero_grad()
        self.parameters = {name: p.detach().numpy() for name, p in named.items()}


def row(layout: str, model: str = "", **factors: str) -> Row:
    keys: Overrides = {"optimizer.weight_decay": "0.1"}
    if model:
        keys |= {"model.name": "partly_trained", "model.flavor": model}
        keys |= {"experimental.custom_import": "tests.distributed.partly_trained"}
    plain = row_of({"layout": layout, **factors})
    return Row(f"{plain} {model}".strip(), plain.ranks, plain.overrides, plain.same | keys)


ROWS = (
    row("one", accumulation="acc4"),
    row("dp2", accumulation="acc2"),
    row("ddp4", clipping="no-clip"),
    row("hsdp2x2", accumulation="acc4", checkpointing="ac-op"),
    row("tp2", accumulation="acc2"),
    row("dp2-tp2", accumulation="acc2", loss="no-lp", sequence="no-sp"),
    row("one", "unused"),
    row("dp2", "unused", accumulation="acc2"),
    row("tp2", "unused"),
    row("dp2-tp2", "unused", checkpointing="ac-full"),
    row("one", "frozen"),
    row("ddp2", "frozen", accumulation="acc2"),
    row("dp2-tp2", "frozen"),
    context_row("cp4", "acc2", same={"optimizer.weight_decay": "0.1"}, accumulation=2),
    context_row("cp2-tp2", "a2a", same={"optimizer.weight_decay": "0.1"}),
)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_against_a_plain_loop(row: Row, tmp_path: Path, token_cache: Path) -> None:
    plain = Plain(row, tmp_path / "plain")
    parts = run_ranks(train_in_rank, row.ranks, row, str(tmp_path), str(token_cache), timeout=100)
    for part in parts:
        np.testing.assert_allclose(part.norms, plain.norms, rtol=1e-9, atol=1e-15)
    steps = parts[0].steps
    np.testing.assert_allclose([s["loss"] for s in steps], plain.losses, rtol=1e-9)
    np.testing.assert_allclose([s["grad_norm"] for s in steps], plain.norms, rtol=1e-9)
    assert steps[2]["loss"] == steps[2]["grad_norm"] == 0
    assert [s["tokens_seen"] for s in steps] == [GLOBAL_BATCH * T * n for n in range(1, 6)]
    for kind, expected in (("gradients", plain.gradients), ("parameters", plain.parameters)):
        found = assembled(row, kind, [part.tensors[kind] for part in parts])
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, rtol=1e-7, atol=1e-12, err_msg=name)


def test_a_model_that_trains_its_head_alone_is_refused(tmp_path: Path) -> None:
    """FSDP would leave its gradient out without a word."""
    keys = row("one", "head_only").same
    with pytest.raises(ConfigError, match=r"model.name = .*: its model must train more than its `lm_head`"):
        check(load(arguments(BASE | keys, tmp_path)), 1)

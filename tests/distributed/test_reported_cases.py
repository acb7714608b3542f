"""Faults that users of other trainers reported, each as a test of its kind, as far as no other test has it.

Elsewhere: means over ranks with other numbers of labels, accumulation that divides again and again, norms
off by the replicate degree, clipping that is skipped (test_uneven_batches.py, test_layouts.py); norms that
differ between ranks (`runs.record`); the learning rate and the step after a first and a second resume,
`tokens_seen` on fewer ranks, a line of metrics written twice, resuming a finished run (test_three_legs.py);
phases of length 0 (test_optimizer.py); intervals of 0 (test_config_rules.py).
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from minititan.checkpoint import manifest
from minititan.checkpoint.folder import committed_steps
from minititan.config import load
from minititan.init import init_parameters
from minititan.optimizer import lr_at
from minititan.run import check
from tests.distributed.context_layouts import context_row
from tests.distributed.harness import run_ranks
from tests.distributed.layouts import BASE, Overrides, Row, row_of
from tests.distributed.runs import arguments, lines, train_in_rank

TEXT = Path(__file__).parent / "five_ids" / "license.txt"
VALIDATION: Overrides = {
    "validation.enable": "true",
    "validation.dataset_path": str(TEXT),
    "validation.seq_len": "16",
    "validation.local_batch_size": "8",
}


def train(row: Row, folder: Path, token_cache: Path) -> list[dict[str, Any]]:
    run_ranks(train_in_rank, row.ranks, row, str(folder), str(token_cache), timeout=120)
    return lines(folder)


def steps_of(records: list[dict[str, Any]], key: str = "loss") -> dict[int, dict[str, Any]]:
    return {record["step"]: record for record in records if key in record}


@pytest.mark.parametrize(
    "row",
    [
        row_of({"layout": "one", "accumulation": "acc2"}),
        row_of({"layout": "dp2", "reshard": "never", "tied": "tied", "accumulation": "acc2"}),
        row_of({"layout": "hsdp2x2", "checkpointing": "ac-op"}),
        row_of({"layout": "dp2-tp2", "reshard": "always"}),
        context_row("cp2-tp2", "a2a"),
    ],
    ids=str,
)
def test_validation_changes_nothing(row: Row, tmp_path: Path, token_cache: Path) -> None:
    five = row.with_("five steps", {"training.steps": "5"})
    plain = steps_of(train(five, tmp_path / "plain", token_cache))
    often = five.with_("validating", VALIDATION | {"validation.freq": "2", "validation.steps": "3"})
    records = train(often, tmp_path / "often", token_cache)
    assert list(steps_of(records, "validation_loss")) == [2, 4, 5]
    for step, record in steps_of(records).items():
        for key in ("loss", "grad_norm", "lr", "tokens_seen", "samples_consumed", "batch_sha256"):
            assert record[key] == plain[step][key], (step, key)


def mean_loss_of_the_text(folder: Path) -> tuple[float, int]:
    """The mean over all labels of all windows under the initial weights, and how many labels there are."""
    run = check(load(arguments(BASE, folder)), 1)
    model: Any = run.spec.build(run.args).to(torch.float64)
    init_parameters(dict(model.named_parameters()), lambda n, t, g: run.spec.init_(n, t, g, run.args), 0)
    tokens = torch.tensor([*TEXT.read_bytes(), run.tokenizer.eos_id])
    windows = tokens.unfold(0, 17, 16)
    assert len(windows) % 8  # the last batch is a part of one
    with torch.no_grad():
        logits = F.linear(model(windows[:, :-1]), model.lm_head.weight)
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    return loss.item(), windows[:, 1:].numel()


@pytest.mark.parametrize(
    "row",
    [
        row_of({"layout": "one"}),
        row_of({"layout": "dp2", "accumulation": "acc4"}),
        row_of({"layout": "tp2"}),
        row_of({"layout": "hsdp2x2", "accumulation": "acc2"}),
        context_row("dp2-cp2"),
        context_row("cp2-tp2", "a2a"),
    ],
    ids=str,
)
def test_validation_is_one_mean_over_all_labels(row: Row, tmp_path: Path, token_cache: Path) -> None:
    """Not of batch means, nor divided by the accumulation: a partial last batch, ranks without a sample."""
    keys = {"training.steps": "1", "optimizer.lr": "1e-30", "validation.steps": "-1"}
    record = train(row.with_("", VALIDATION | keys), tmp_path / "run", token_cache)[-1]
    loss, labels = mean_loss_of_the_text(tmp_path / "plain")
    assert record["validation_tokens"] == labels
    assert record["validation_loss"] == pytest.approx(loss, rel=1e-9)


def test_a_changed_rate_and_length_count_on_resume(tmp_path: Path, token_cache: Path) -> None:
    schedule = {"lr_scheduler.warmup_steps": "2", "checkpoint.enable": "true", "checkpoint.interval": "3"}
    first = row_of({"layout": "dp2"}).with_("first", schedule | {"training.steps": "3"})
    train(first, tmp_path, token_cache)
    changed = {"training.steps": "6", "optimizer.lr": "5e-4"}
    records = steps_of(train(first.with_("changed", changed), tmp_path, token_cache))
    assert list(records) == [1, 2, 3, 4, 5, 6]
    for step, record in records.items():
        lr, total = (1e-3, 3) if step <= 3 else (5e-4, 6)
        assert record["lr"] == lr * lr_at(step - 1, total_steps=total, warmup_steps=2)
    saved = tmp_path / "out" / "checkpoint" / "step-6"
    assert manifest.read(saved).step == 6
    assert json.loads((saved / "train_state.json").read_text())["optimizer"]["lr"] == 5e-4


def test_data_that_ends_before_the_run_begins_anew(tmp_path: Path, token_cache: Path) -> None:
    """Each epoch has every sample once, in an order of its own; the run has all of its steps."""
    text = tmp_path / "short.txt"
    text.write_bytes(TEXT.read_bytes()[: 64 * 16])  # with the end of the document, 64 samples: 2 steps
    row = row_of({"layout": "dp2"}).with_(
        "short", {"training.dataset_path": str(text), "training.steps": "7"}
    )
    records = steps_of(train(row, tmp_path / "run", token_cache))
    assert list(records) == [1, 2, 3, 4, 5, 6, 7]
    assert records[7]["samples_consumed"] == 7 * 32
    assert len({record["batch_sha256"] for record in records.values()}) == 7


def test_data_that_is_used_once_ends_the_run(tmp_path: Path, token_cache: Path) -> None:
    """The run ends after the last whole global batch, with a checkpoint of it; a resumed one too."""
    text = tmp_path / "short.txt"
    text.write_bytes(TEXT.read_bytes()[: 80 * 16])  # 80 samples: 2 steps of 32, and 16 samples that are left
    once = {
        "training.dataset_path": str(text),
        "training.steps": "7",
        "data.repeat": "false",
        "checkpoint.enable": "true",
    }
    ended = {}
    for layout in ("one", "dp2"):
        row = row_of({"layout": layout}).with_("once", once)
        ended[layout] = steps_of(train(row, tmp_path / layout, token_cache))
        assert list(ended[layout]) == [1, 2]
        assert committed_steps(tmp_path / layout / "out" / "checkpoint") == [2]
        assert list(steps_of(train(row, tmp_path / layout, token_cache))) == [1, 2]  # nothing is left to do
    row = row_of({"layout": "one"}).with_("model only", once | {"checkpoint.last_save_model_only": "true"})
    for _ in range(2):  # again: it is complete, and there is nothing to go on with
        assert list(steps_of(train(row, tmp_path / "model-only", token_cache))) == [1, 2]
    hashes = [[record["batch_sha256"] for record in steps.values()] for steps in ended.values()]
    assert hashes[0] == hashes[1]

    again = row_of({"layout": "one"}).with_("again", once | {"data.repeat": "true", "training.steps": "4"})
    assert list(steps_of(train(again, tmp_path / "dp2", token_cache))) == [1, 2, 3, 4]

    whole = row_of({"layout": "one"}).with_("4 steps", once | {"training.steps": "2"})
    assert list(steps_of(train(whole, tmp_path / "whole", token_cache))) == [1, 2]
    shorter = row_of({"layout": "dp2"}).with_("none", once | {"training.global_batch_size": "128"})
    with pytest.raises(RuntimeError, match=r"data.repeat = false: the data has fewer samples than one step"):
        train(shorter, tmp_path / "none", token_cache)


def test_metrics_are_of_one_rank_whichever_layout(tmp_path: Path, token_cache: Path) -> None:
    row = row_of({"layout": "dp2-tp2"}).with_(
        "tb", {"metrics.enable_tensorboard": "true", "training.steps": "2"}
    )
    assert [record["step"] for record in train(row, tmp_path, token_cache)] == [1, 2]
    assert len(list((tmp_path / "out" / "tb").rglob("events.*"))) == 1

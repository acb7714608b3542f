"""A run over a mixture, killed and gone on with on other ranks, takes the tokens of one without a stop."""

import json
import os
import signal
from pathlib import Path
from unittest import mock

import pytest

from tests.distributed.harness import run_ranks
from tests.distributed.layouts import Overrides, Row, row_of
from tests.distributed.runs import lines, train_in_rank

MODELS = Path(__file__).parents[2] / "minititan" / "models"
MIXED: Overrides = {
    "data.sources": '[{name = "own", path = "PATH", weight = 0.25}, '
    '{name = "library", dataset = "stdlib", weight = 0.75}]',
    "data.stages": "[{step = 9, weights = {own = 0.5, library = 0.5}}]",
    "training.global_batch_size_schedule": "[{step = 4, size = 48}, {step = 11, size = 16}, "
    "{step = 17, size = 64}]",
    "training.global_batch_size": "32",
    "training.steps": "20",
    "lr_scheduler.warmup_steps": "2",
    "checkpoint.enable": "true",
    "checkpoint.interval": "5",
    "checkpoint.keep_latest_k": "0",
}


def killed_in_rank(rank: int, world: int, row: Row, folder: str, token_cache: str, at: int) -> None:
    """Train, and be killed in the midst of step `at` + 1."""
    from minititan.train import Trainer

    step = Trainer.step

    def deadly(self: Trainer, batches: object) -> None:
        if self.steps_done == at:
            os.kill(os.getpid(), signal.SIGKILL)
        step(self, batches)

    with mock.patch.object(Trainer, "step", deadly):
        train_in_rank(rank, world, row, folder, token_cache)


def layout(name: str, local: int, mixed: Overrides) -> Row:
    return row_of({"layout": name}).with_("mixed", mixed | {"training.local_batch_size": str(local)})


def test_killed_twice_and_resumed_on_other_ranks(tmp_path: Path, token_cache: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in ("rotary", "decoder", "attention"):
        (texts / f"{name}.txt").write_bytes((MODELS / f"{name}.py").read_bytes())
    mixed = MIXED | {"data.sources": MIXED["data.sources"].replace("PATH", str(texts))}
    one = layout("one", 16, mixed)
    run_ranks(train_in_rank, 1, one, str(tmp_path / "whole"), str(token_cache), timeout=200)
    whole = {record["step"]: record for record in lines(tmp_path / "whole")}
    assert list(whole) == list(range(1, 21))
    assert whole[20]["samples_consumed"] == 3 * 32 + 7 * 48 + 6 * 16 + 4 * 64
    before, later = whole[8]["sources"], whole[20]["sources"]
    counts = {name: (before[name][0], later[name][0] - before[name][0]) for name in before}
    assert counts["own"][0] / sum(c[0] for c in counts.values()) == pytest.approx(0.25, abs=0.07)
    assert counts["own"][1] / sum(c[1] for c in counts.values()) == pytest.approx(0.5, abs=0.07)

    folder = tmp_path / "legs"
    for name, local, at in (("dp4", 4, 13), ("dp2", 8, 17)):
        row = layout(name, local, mixed)
        with pytest.raises(RuntimeError, match="exit code -9"):
            run_ranks(killed_in_rank, row.ranks, row, str(folder), str(token_cache), at, timeout=200)
    run_ranks(train_in_rank, 8, layout("dp8", 2, mixed), str(folder), str(token_cache), timeout=200)
    steps = [record["step"] for record in lines(folder)]
    assert steps == [*range(1, 14), *range(11, 18), *range(16, 21)]
    for record in lines(folder):
        for key in ("batch_sha256", "samples_consumed", "tokens_seen", "sources"):
            assert record[key] == whole[record["step"]][key], (record["step"], key)
        assert record["loss"] == pytest.approx(whole[record["step"]]["loss"], rel=1e-9)


def test_a_holdout_is_evaluated_whole_on_every_layout(tmp_path: Path, token_cache: Path) -> None:
    """Of both sources of a mixture, each sample once, whatever the share of a rank."""
    held_out: Overrides = MIXED | {
        "data.samples": "pad",
        "training.steps": "1",
        "training.global_batch_size": "48",
        "training.global_batch_size_schedule": "[]",
        "data.stages": "[]",
        "validation.enable": "true",
        "validation.holdout": "0.1",
        "training.max_norm": "0.5",
        "validation.seq_len": "16",
        "validation.local_batch_size": "7",
        "checkpoint.enable": "false",
    }
    texts = tmp_path / "texts"
    texts.mkdir()
    lines_of = (MODELS / "decoder.py").read_text().splitlines()
    records = (json.dumps({"text": line}) for line in lines_of if line.strip())
    (texts / "lines.jsonl").write_text("\n".join(records))
    held_out["data.sources"] = MIXED["data.sources"].replace("PATH", str(texts))
    found = []
    for name, local in (("one", 16), ("dp3", 16), ("dp2-tp2", 8)):
        row = layout(name, local, held_out) if name != "dp3" else Row("dp3", 3, held_out)
        row = row.with_("", {"training.local_batch_size": str(local)})
        run_ranks(train_in_rank, row.ranks, row, str(tmp_path / name), str(token_cache), timeout=200)
        found.append(next(r for r in lines(tmp_path / name) if "validation_loss" in r))
    assert len({record["validation_tokens"] for record in found}) == 1 and found[0]["validation_tokens"] > 500
    for record in found[1:]:
        assert record["validation_loss"] == pytest.approx(found[0]["validation_loss"], rel=1e-9)

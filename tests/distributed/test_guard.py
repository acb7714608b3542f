"""Steps with broken numbers: planted in one rank, seen by all, against runs that were never broken."""

import contextlib
import io
import json
from pathlib import Path

import torch
import torch.distributed as dist

from tests.distributed.harness import run_ranks
from tests.distributed.layouts import Overrides
from tests.distributed.runs import lines
from tests.distributed.small import EVERY_STEP, build, degrees

SKIP = {"debug.nan_policy": "skip"}
DP2, DP2_TP2 = degrees(2), degrees(2, 2)
TWO = {"training.steps": "2", "lr_scheduler.total_steps": "5"}
Plan = dict[int, str]  # step -> what goes wrong in it, on the last rank


def train_with_plan(rank: int, world: int, folder: Path, cache: Path, keys: Overrides, plan: Plan) -> dict:
    """Train; in the steps of `plan` the last rank's loss or gradient is broken, or no update is made."""
    from minititan.config import ConfigError

    with contextlib.redirect_stdout(io.StringIO()) as said:
        trainer = build(rank, world, folder, cache, EVERY_STEP | keys)
        head, update = trainer.parts[-1].lm_head.forward, trainer.optimizer.step

        def broken_head(hidden: torch.Tensor, *labels: torch.Tensor) -> torch.Tensor:
            kind = plan.get(trainer.steps_done + 1) if rank == world - 1 else None
            if kind == "loss":
                hidden = hidden * torch.nan
            elif kind == "gradient":
                hidden.register_hook(lambda grad: grad * torch.inf)
            return head(hidden, *labels)

        def planned_update(closure: None = None) -> None:
            if plan.get(trainer.steps_done + 1) != "no update":
                update()

        trainer.parts[-1].lm_head.forward, trainer.optimizer.step = broken_head, planned_update
        error = ""
        try:
            trainer.run()
        except ConfigError as caught:
            error = str(caught)
    own = [getattr(p, "to_local", lambda p=p: p)().detach() for p in trainer.parameters.values()]
    return {
        "error": error,
        "said": said.getvalue(),
        "parameters": [p.numpy().copy() for p in own],
        "lines": lines(folder),
        "guard": trainer.guard.state(),
        "saved": trainer.checkpoints.checkpointer.steps(),
    }


def train(world: int, folder: Path, cache: Path, keys: Overrides, plan: Plan) -> list[dict]:
    return run_ranks(train_with_plan, world, folder, cache, keys, plan)


def same(first: dict, second: dict) -> bool:
    pairs = zip(first["parameters"], second["parameters"], strict=True)
    return all((a == b).all() for a, b in pairs)


def test_raise_names_step_and_rank_and_changes_nothing(tmp_path, token_cache):
    ranks = train(2, tmp_path / "broken", token_cache, DP2, {3: "loss"})
    whole = train(2, tmp_path / "whole", token_cache, DP2 | TWO, {})
    for found, expected in zip(ranks, whole, strict=True):
        assert found["error"].startswith(
            'default: debug.nan_policy = "raise": step 3: the loss is nan on rank 1; '
            "its update was not made, nothing of it is saved; "
        )
        assert found["saved"] == [1, 2]
        assert same(found, expected)


def test_a_gradient_is_named_by_its_parameter_on_all_ranks(tmp_path, token_cache):
    ranks = train(4, tmp_path, token_cache, DP2_TP2, {2: "gradient"})
    assert len({found["error"] for found in ranks}) == 1
    # What is broken at the head's input breaks the last norm and everything before it, but not the head.
    assert "step 2: the gradient of norm.weight (and of " in ranks[0]["error"]
    assert "is not finite on rank 0, 1, 2, 3;" in ranks[0]["error"]
    assert ranks[0]["saved"] == [1]


def test_skip_is_a_run_without_that_update(tmp_path, token_cache):
    found = train(2, tmp_path / "skipped", token_cache, DP2 | SKIP, {2: "gradient", 4: "loss"})
    expected = train(2, tmp_path / "whole", token_cache, DP2, {2: "no update", 4: "no update"})
    for here, there in zip(found, expected, strict=True):
        assert not here["error"] and same(here, there)
    records, others = found[0]["lines"], expected[0]["lines"]
    assert [line["skipped_steps"] for line in records] == [0, 1, 1, 2, 2]
    assert [line["loss"] for line in records if line["step"] != 4] == [
        line["loss"] for line in others if line["step"] != 4
    ]
    assert records[3]["loss"] is None  # JSON has no NaN
    for key in ("batch_sha256", "tokens_seen", "samples_consumed", "lr"):
        assert [line[key] for line in records] == [line[key] for line in others]
    assert "Step 4: the loss is nan on rank 1; its update is left out (2 so far)" in found[0]["said"]


def test_skipping_is_bounded_over_a_restart(tmp_path, token_cache):
    keys = SKIP | {"debug.max_skipped_in_a_row": "2"}
    first = train(1, tmp_path, token_cache, keys | TWO, {2: "loss"})
    assert not first[0]["error"]
    second = train(1, tmp_path, token_cache, keys, {3: "gradient", 4: "loss"})
    assert [line["skipped_steps"] for line in second[0]["lines"]] == [0, 1, 2]
    assert second[0]["error"].startswith(
        "command line: debug.max_skipped_in_a_row = 2: step 4 is one more in a row without an update: "
        "the loss is nan on rank 0; "
    )


FLOAT16 = {
    "training.mixed_precision_param": "float16",
    "training.loss_scale_init": "1024",
    "training.loss_scale_growth_interval": "2",
}


def test_an_overflow_in_float16_is_left_out_by_all_ranks_and_survives_a_restart(tmp_path, token_cache):
    keys = DP2 | FLOAT16
    straight = train(2, tmp_path / "straight", token_cache, keys, {2: "gradient"})
    assert [line["loss_scale"] for line in straight[0]["lines"]] == [1024, 512, 512, 1024, 1024]
    assert [line["skipped_steps"] for line in straight[0]["lines"]] == [0, 1, 1, 1, 1]
    three = keys | {"training.steps": "3", "lr_scheduler.total_steps": "5"}
    train(2, tmp_path / "legs", token_cache, three, {2: "gradient"})
    legs = train(2, tmp_path / "legs", token_cache, keys, {})
    for here, there in zip(legs, straight, strict=True):
        assert here["guard"] == there["guard"] == straight[0]["guard"]
        assert not here["error"] and same(here, there)


def test_a_loss_that_overflows_in_float16_is_no_matter_of_the_scale(tmp_path, token_cache):
    ranks = train(1, tmp_path, token_cache, FLOAT16, {2: "loss"})
    assert 'debug.nan_policy = "raise": step 2: the loss is nan on rank 0' in ranks[0]["error"]
    assert ranks[0]["guard"]["loss_scale"]["value"] == 1024


def judged(rank: int, world: int, losses: list[tuple[float, float]], restart_at: int) -> list[bool]:
    """What a guard with a window of 3 and a factor of 2 says to losses of two ranks with 1 and 3 labels."""
    from minititan.guard import Guard

    def guard() -> Guard:
        return Guard("skip", 10, 2.0, 3, lambda key, rule, way_out: rule, lambda line: None)

    answers, judge = [], guard()
    for step, per_rank in enumerate(losses):
        if step == restart_at:
            state = json.loads(json.dumps(judge.state()))
            judge = guard()
            judge.restore(state)
        loss = torch.tensor(per_rank[rank], dtype=torch.float64)
        norm = torch.tensor(1.0)
        group = dist.distributed_c10d._get_default_group()
        answers.append(judge.allows(step, loss, torch.tensor(4), norm, {}, group))
        assert loss.item() == per_rank[rank] or per_rank[rank] != per_rank[rank]
    return answers


def test_loss_spikes_are_judged_by_the_median_of_what_was_finite_and_taken():
    nan = float("nan")
    losses: list = [
        (2, 6),
        (100, 0),
        (1, 7),
        (nan, 8),
        (0, 16.1),
        (0, 16),
        (20, 20),
        (4, 13),
        (20, 12.1),
        (8, 8),
    ]
    # Means: 2, 25 (the window is not full), 2, nan, 4.025 against the median of 2, 25, 2; then 4 is taken;
    # 10 against that of 25, 2, 4; 4.25 is taken; 8.025 against that of 2, 4, 4.25; 4.
    expected = [True, True, True, False, False, True, False, True, False, True]
    for restart_at in (-1, 5):
        assert run_ranks(judged, 2, losses, restart_at) == [expected] * 2

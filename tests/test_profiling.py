"""Profiler traces: which steps they hold and where they are."""

import json
from pathlib import Path

import pytest
import torch

from minititan.config import ConfigError
from minititan.profiling import Profiler


def make_profiler(folder: Path, say=lambda _: None, **changes) -> Profiler:
    settings = {
        "rank": 1,
        "device": torch.device("cpu"),
        "start_step": 10,
        "freq": 4,
        "warmup": 1,
        "active": 2,
    }
    settings |= {"traces": folder / "traces", "snapshots": None, "say": say}
    return Profiler(**(settings | changes))


def run(profiler: Profiler, steps: range) -> None:
    with profiler:
        for step in steps:
            with torch.profiler.record_function(f"the step {step}"):
                torch.ones(2).sum()
            profiler.step()


def test_a_cycle_that_does_not_fit_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"profiling.profile_freq = 2: .*\(3\)"):
        make_profiler(tmp_path, freq=2)


def test_a_trace_holds_the_active_steps_of_each_cycle(tmp_path):
    said = []
    run(make_profiler(tmp_path, say=said.append), range(11, 24))
    files = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.json"))
    assert files == [Path(f"traces/iteration_{step}/rank1_trace.json") for step in (16, 20)]
    for last, file in zip((16, 20), files, strict=True):
        trace = json.loads((tmp_path / file).read_text())
        names = {
            event["name"] for event in trace["traceEvents"] if event.get("name", "").startswith("the step")
        }
        assert names == {f"the step {last - 1}", f"the step {last}"}
        assert str(file) in said[(last - 16) // 4]


def test_a_trace_that_cannot_be_written_is_an_error_not_a_crash(tmp_path):
    (tmp_path / "traces").write_text("a file is in the way")
    with pytest.raises(ConfigError, match=f"^{tmp_path}/traces: a trace cannot be written "):
        run(make_profiler(tmp_path), range(11, 21))


def test_without_folders_nothing_is_recorded(tmp_path):
    run(make_profiler(tmp_path, traces=None), range(11, 21))
    assert not list(tmp_path.iterdir())


def test_off_it_asks_nothing_of_torch(tmp_path, monkeypatch):
    def refused(*args, **options):
        raise AssertionError("nothing was to be recorded")

    monkeypatch.setattr("minititan.profiling.profile", refused)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", refused)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", refused)
    run(make_profiler(tmp_path, traces=None), range(11, 21))
    with pytest.raises(AssertionError, match="nothing was"):
        run(make_profiler(tmp_path, traces=None, snapshots=tmp_path), range(11, 21))

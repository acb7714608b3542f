"""The log of a run: speeds against hand-made times, names against TorchTitan's list, files over restarts."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from minititan import metrics
from minititan.config import ConfigError
from minititan.metrics import MetricsLogger, Step, known_peak_tflops

# As TorchTitan 0.2.2 writes them.
NAMES = {
    "loss_metrics/global_avg_loss",
    "loss_metrics/global_max_loss",
    "grad_norm",
    "throughput(tps)",
    "tflops",
    "mfu(%)",
    "time_metrics/end_to_end(s)",
    "time_metrics/data_loading(s)",
    "time_metrics/data_loading(%)",
    "memory/max_active(GiB)",
    "memory/max_active(%)",
    "memory/max_reserved(GiB)",
    "memory/max_reserved(%)",
    "memory/num_alloc_retries",
    "memory/num_ooms",
    "n_tokens_seen",
    "lr",
}


class FakeTime:
    """A clock that moves only when told."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    fake = FakeTime()
    monkeypatch.setattr(metrics, "time", fake)
    return fake


@pytest.fixture
def make_logger():
    made = []

    def make(folder: Path, **changes) -> MetricsLogger:
        settings: dict[str, Any] = {
            "rank": 0,
            "world_size": 2,
            "device": torch.device("cpu"),
            "start_step": 0,
            "start_tokens": 0,
            "total_steps": 100,
            "log_freq": 10,
            "flops_per_token": 2e9,
        }
        made.append(MetricsLogger(folder, **(settings | changes)))
        return made[-1]

    yield make
    for logger in made:
        logger.close()


def step(number: int, **changes) -> Step:
    values: dict[str, Any] = {"loss": 5.5, "max_loss": 6.5, "grad_norm": 1.25, "lr": 3e-4}
    values |= {"tokens_seen": 1000 * number, "samples_consumed": 8 * number}
    return Step(step=number, **(values | changes))


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def events(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder)).Reload()


def test_a_folder_that_cannot_be_written_is_named(make_logger, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=rf"^{tmp_path}/file: the metrics cannot be written \(.*; make room or set another"
    ):
        make_logger(tmp_path / "file")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_named_and_nothing_is_lost(make_logger, tmp_path):
    logger = make_logger(tmp_path)
    logger.log_step(step(1))
    assert logger._jsonl is not None
    logger._jsonl._file.close()
    logger._jsonl._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    with pytest.raises(ConfigError, match=r"\(No space left on device\); make room"):
        logger.log_step(step(10))
    assert [line["step"] for line in lines(tmp_path)] == [1]


def test_wandb_without_the_package_says_what_to_install(make_logger, tmp_path, monkeypatch):
    monkeypatch.setattr("minititan.sinks.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"metrics.enable_wandb = true: .*'minititan\[wandb\]'"):
        make_logger(tmp_path, enable_wandb=True)


def test_wandb_that_is_off_is_neither_imported_nor_looked_for(make_logger, tmp_path, monkeypatch):
    def refused(name: str) -> None:
        raise AssertionError(f"{name} was to be left alone")

    monkeypatch.setattr("minititan.sinks.importlib.util.find_spec", refused)
    monkeypatch.setattr("minititan.sinks.importlib.import_module", refused)
    logger = make_logger(tmp_path)
    logger.log_step(step(1))
    logger.close()
    with pytest.raises(AssertionError, match="wandb was to be left alone"):
        make_logger(tmp_path, enable_wandb=True)


def test_speeds_follow_from_the_times(make_logger, tmp_path, clock):
    logger = make_logger(tmp_path, start_step=20, start_tokens=20_000, peak_tflops=10.0)
    with logger.data_loading():
        clock.now += 1.0
    clock.now += 3.0
    with logger.paused():
        clock.now += 1000.0
    logger.log_step(step(30))
    (line,) = lines(tmp_path)
    # 10,000 tokens in 4 s on 2 devices at 2 GFLOP a token
    assert line["tokens_per_second"] == pytest.approx(2500)
    assert line["tokens_per_second_per_device"] == pytest.approx(1250)
    assert line["tflops"] == pytest.approx(2.5)
    assert line["mfu_percent"] == pytest.approx(25)
    assert line["seconds_per_step"] == pytest.approx(0.4)
    assert line["data_loading_seconds"] == pytest.approx(0.1)
    assert line["data_loading_percent"] == pytest.approx(25)
    clock.now += 2.0
    logger.log_step(step(31))
    assert lines(tmp_path)[1]["tokens_per_second"] == pytest.approx(500)  # neither the pause nor 1-30 again


def test_the_console_line(make_logger, tmp_path, clock, capsys):
    logger = make_logger(tmp_path)
    clock.now += 1.0
    logger.log_step(step(1))
    clock.now += 9 * 2.0
    logger.log_step(step(10))
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(
        "step:   1/100  loss: 5.5000  grad_norm: 1.2500  lr: 3.00e-04  tokens/s/device: 500"
    )
    assert "MFU: n/a  memory: " in first
    assert first.endswith("  left: n/a")
    assert "tokens/s/device: 250  TFLOP/s: 0.5  " in second
    assert second.endswith("  left: 0:03:00")  # 90 steps of 2 s


def test_colors_only_on_a_terminal_that_wants_them(make_logger, tmp_path, capsys, monkeypatch):
    make_logger(tmp_path).log_step(step(1))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    make_logger(tmp_path).log_step(step(1))
    make_logger(tmp_path, disable_color_printing=True).log_step(step(1))
    output = [line for line in capsys.readouterr().out.splitlines() if "loss" in line]
    assert ["\033[" in line for line in output] == [False, True, False]


def test_what_a_line_holds(make_logger, tmp_path):
    logger = make_logger(tmp_path)
    logger.log_step(step(1, batch_sha256="ab", grad_norm=float("inf")))
    logger.log_validation(1, loss=2.0, perplexity=7.4, tokens=640, seconds=2.0)
    trained, validated = lines(tmp_path)
    expected = {
        "step": 1,
        "loss": 5.5,
        "max_loss": 6.5,
        "lr": 3e-4,
        "tokens_seen": 1000,
        "samples_consumed": 8,
    }
    assert {key: trained[key] for key in expected} == expected
    assert trained["batch_sha256"] == "ab"
    assert trained["grad_norm"] is None  # JSON has no infinity
    assert "tokens_per_second" in trained
    assert validated["step"] == 1
    assert validated["validation_loss"] == 2.0
    assert "loss" not in validated


def test_logged_are_the_first_step_and_every_nth(make_logger, tmp_path):
    logger = make_logger(tmp_path, rank=1)
    assert [n for n in range(1, 31) if logger.due(n)] == [1, 10, 20, 30]


def test_tensorboard_has_the_names_of_torchtitan(make_logger, tmp_path):
    logger = make_logger(tmp_path, enable_tensorboard=True, peak_tflops=1.0)
    logger.log_step(step(1))
    logger.log_validation(1, loss=2.0, perplexity=7.4, tokens=640, seconds=2.0)
    logger.close()
    tags = set(events(tmp_path / "tb").Tags()["scalars"])
    assert {tag for tag in tags if not tag.startswith("validation_metrics/")} == {*NAMES, "skipped_steps"}
    assert {"validation_metrics/loss", "validation_metrics/throughput(tps)"} < tags
    assert "validation_metrics/memory/max_active(GiB)" in tags


def test_a_restart_continues_every_file(make_logger, tmp_path):
    for start, last in (0, 4), (2, 5):  # killed after 4, resumed from 2
        logger = make_logger(tmp_path, start_step=start, enable_tensorboard=True)
        for number in range(start + 1, last + 1):
            logger.log_step(step(number, loss=number + start / 10))
        logger.close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 3, 4, 5]
    series = events(tmp_path / "tb").Scalars("loss_metrics/global_avg_loss")
    assert [(point.step, pytest.approx(point.value)) for point in series] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.2),
        (4, 4.2),
        (5, 5.2),
    ]


def test_half_a_line_of_a_killed_process_is_dropped(make_logger, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "lo')
    make_logger(tmp_path, start_step=1, start_tokens=1000).log_step(step(2))
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_a_fresh_start_moves_the_earlier_run_aside(make_logger, tmp_path, capsys):
    (tmp_path / "checkpoint").mkdir()
    for loss in (1.0, 2.0, 3.0):
        # the folder of the events is the dump folder itself: only event files may move
        logger = make_logger(tmp_path, enable_tensorboard=True, save_tb_folder=".")
        logger.log_step(step(1, loss=loss))
        logger.close()
    kept = {"earlier-1": 1.0, "earlier-2": 2.0, ".": 3.0}
    for name, loss in kept.items():
        assert [line["loss"] for line in lines(tmp_path / name)] == [loss]
        folder = tmp_path if name == "." else tmp_path / name / "tb"
        (point,) = events(folder).Scalars("loss_metrics/global_avg_loss")
        assert point.value == loss
    assert (tmp_path / "checkpoint").is_dir()
    assert f"are now in {tmp_path}/earlier-2" in capsys.readouterr().out


def test_other_ranks_write_only_events_and_only_when_asked(make_logger, tmp_path, capsys):
    for save_for_all_ranks in False, True:
        logger = make_logger(tmp_path, rank=1, enable_tensorboard=True, save_for_all_ranks=save_for_all_ranks)
        logger.log_step(step(1))
        logger.close()
        found = [path.parent.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
        assert found == [Path("tb/rank_1")] * save_for_all_ranks
    assert capsys.readouterr().out == ""


def test_wandb_goes_on_with_the_same_run(make_logger, tmp_path, monkeypatch):
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "wandb.py").write_text(
        "calls = []\n"
        "class Run:\n"
        "    id = 'abc'\n"
        "    def log(self, scalars, step): calls.append((step, scalars['lr']))\n"
        "    def finish(self): calls.append('finish')\n"
        "def init(**settings):\n"
        "    calls.append((settings['id'], settings['resume'], settings['config']))\n"
        "    return Run()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    for start in 0, 1:
        logger = make_logger(tmp_path, start_step=start, enable_wandb=True, run_config={"seed": 0})
        logger.log_step(step(start + 1))
        logger.close()
    first = [(None, None, {"seed": 0}), (1, 3e-4), "finish"]
    second = [("abc", "allow", {"seed": 0}), (2, 3e-4), "finish"]
    assert sys.modules.pop("wandb").calls == first + second


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA H200 NVL", 835.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", None),
        ("NVIDIA GeForce RTX 9999", None),
    ],
)
def test_a_peak_is_known_or_none(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert known_peak_tflops(torch.device("cuda", 0)) == peak
    assert known_peak_tflops(torch.device("cpu")) is None

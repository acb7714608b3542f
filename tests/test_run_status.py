"""The status of a run and the lock on its folder."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from minititan.config import ConfigError
from minititan.run_status import RunStatus, read_status

HOLD = """
import os, sys, time
from pathlib import Path
from minititan.run_status import RunStatus
status = RunStatus()
status.take({"job.dump_folder": Path(sys.argv[1])})
if os.fork() == 0:  # a worker, which outlives its parent
    time.sleep(60)
print(os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path):
    """Another process that has the folder `run`, and the start of a child of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert int(process.stdout.readline()) == process.pid
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_a_second_run_is_refused_with_the_first_ones_host_and_process(holder, tmp_path):
    folder = tmp_path / "run"
    written_by_it = (folder / "run.lock").read_text()
    status = RunStatus()
    with pytest.raises(ConfigError) as caught:
        status.take({"job.dump_folder": folder})
    where = f'job.dump_folder = "{folder}": another run is in it (process {holder.pid} on '
    assert str(caught.value).startswith(f"{where}{socket.gethostname()}, since ")
    assert str(caught.value).endswith("); wait for its end, end it, or set another")
    status.write("failed", "refused")
    status.failed(caught.value)
    assert sorted(os.listdir(folder)) == ["run.lock"]
    assert (folder / "run.lock").read_text() == written_by_it
    with pytest.raises(ConfigError, match=r"^checkpoint\.folder = "):
        status.take({"job.dump_folder": tmp_path / "other", "checkpoint.folder": folder})
    status.release()


def test_the_lock_of_a_killed_run_is_free_though_its_workers_live(holder, tmp_path):
    holder.kill()
    holder.wait()
    status = RunStatus()
    status.take({"job.dump_folder": tmp_path / "run"})
    assert json.loads((tmp_path / "run" / "run.lock").read_text())["pid"] == os.getpid()
    status.release()


def test_a_folder_that_cannot_be_made_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=f'^job.dump_folder = "{tmp_path}/file": .*run.lock cannot be writ'):
        RunStatus().take({"job.dump_folder": tmp_path / "file"})


def taken(folder: Path) -> RunStatus:
    status = RunStatus()
    status.take({"job.dump_folder": folder})
    return status


def test_what_the_file_says(tmp_path):
    assert read_status(tmp_path) == {}
    status = taken(tmp_path)
    status.step = 7
    status.write("running", "resumed")
    record = read_status(tmp_path)
    assert (record["state"], record["step"], record["reason"]) == ("running", 7, "resumed")
    assert record["host"] == socket.gethostname() and record["pid"] == os.getpid()
    assert sorted(os.listdir(tmp_path)) == ["run.lock", "run_status.json"]
    status.ended_at_once("SIGTERM")
    assert read_status(tmp_path)["state"] == "preempted"
    (tmp_path / "run_status.json").write_text("[")
    assert read_status(tmp_path) == {}
    status.release()


def test_the_first_error_is_the_cause_of_the_others(tmp_path):
    status, another_rank = taken(tmp_path), RunStatus()
    another_rank.join(tmp_path)
    status.write("running", "")
    another_rank.failed(ConfigError("x.toml: a = 1: must not be"))
    status.failed(RuntimeError("connection closed by peer"))
    record = read_status(tmp_path)
    assert (record["state"], record["reason"]) == ("failed", "x.toml: a = 1: must not be")
    status.write("running", "the next one")
    status.failed(ValueError("a bug"))
    assert read_status(tmp_path)["reason"] == "ValueError: a bug"
    status.release()


def test_a_status_that_cannot_be_written_is_said_and_ends_nothing(tmp_path, capsys, monkeypatch):
    status = taken(tmp_path)

    def refuse(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    status.write("running", "")
    said = f"{tmp_path}/run_status.json: cannot be written (No space left on device)\n"
    assert capsys.readouterr().err == said
    status.release()

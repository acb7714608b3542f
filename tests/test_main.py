"""The `minititan` command: exit codes, and what goes to which stream."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tomli

from minititan.__main__ import COMMANDS, command, main
from minititan.config import ConfigError


def test_a_fault_goes_to_stderr_with_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[training]\nsteps = 0\nstepz = 1")
    assert main(["config", "--job.config_file", str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "run.toml: training.stepz = 1: unknown key; nearest: training.steps\n"
        "run.toml: training.steps = 0: must be at least 1\n"
    )


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conf"]) == 2
    assert capsys.readouterr().err == (
        "command line: conf: no such command; nearest: config; "
        "commands: config, models, prepare, data, train, generate, import, export, checkpoint\n"
    )


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"], ["-h"]):
        assert main(words) == 0
        out = capsys.readouterr().out
        assert out.startswith("usage: minititan COMMAND")
        assert all(f"  {name}" in out for name in COMMANDS)
    assert main(["config", "--help"]) == 0
    assert "--job.config_file" in capsys.readouterr().out


def test_config_prints_the_resolved_toml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[training]\nsteps = 5")
    assert main(["config", "--job.config_file", str(file), "--optimizer.lr", "1"]) == 0
    printed = tomli.loads(capsys.readouterr().out)
    assert (printed["training"]["steps"], printed["optimizer"]["lr"]) == (5, 1.0)
    assert "total_steps" not in printed["lr_scheduler"]


def test_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["properties"]) >= {"training", "parallelism", "data"}


def test_every_command_is_there() -> None:
    assert all(callable(command(name)) for name in COMMANDS)


def test_a_command_may_fail_with_its_own_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(argv: object) -> int:
        raise ConfigError("one", "two")

    monkeypatch.setattr("minititan.__main__.command", lambda name: failing)
    assert main(["config"]) == 2
    assert capsys.readouterr().err == "one\ntwo\n"


def test_config_as_a_program_without_torch(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("")
    program = (
        "import sys; from minititan.__main__ import main; code = main(sys.argv[1:]); "
        "sys.exit(code or ('torch' in sys.modules))"
    )
    words = [sys.executable, "-c", program, "config", "--job.config_file", str(file)]
    assert subprocess.run(words, capture_output=True, timeout=60).returncode == 0
    words = [sys.executable, "-m", "minititan", "config", "--job.config_file", str(tmp_path / "none.toml")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == f'command line: job.config_file = "{tmp_path}/none.toml": no such file\n'

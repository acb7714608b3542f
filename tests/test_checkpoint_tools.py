"""`minititan checkpoint`: what the tools say of checkpoints, whole and damaged, and how they end."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from minititan.__main__ import main
from minititan.checkpoint.checkpointer import Checkpointer
from minititan.commands.checkpoint_tensors import difference
from minititan.commands.tables import age_text, size_text
from tests.test_checkpoint import largest_file


def tensors(value: float) -> dict[str, Tensor]:
    return {
        "model.a": torch.full((5, 4), value),
        "model.b": torch.full((3,), value, dtype=torch.bfloat16),
        "optimizer.a.step": torch.tensor(value),
        "optimizer.a.exp_avg": torch.full((5, 4), 0.5),
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with steps 9, 10 and 100."""
    folder = tmp_path / "run"
    there = Checkpointer(folder / "checkpoint", keep_latest_k=0, rank=0)
    for step in (100, 9, 10):
        state = {"train_state": {"tokens_seen": 64 * step}, "hugging_face": {"config": {"vocab_size": 3}}}
        model = {"name": "llama3", "flavor": "debugmodel", "args": {}}
        there.save(step, tensors(float(step)), state, model=model, layout={"dp_shard": 2, "tp": 1})
    return folder


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def tool(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["checkpoint", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


# Misuse


@pytest.mark.parametrize("name", ["ls", "show", "verify"])
def test_a_path_without_a_checkpoint_is_one_line(name, tmp_path, capsys):
    for path in (tmp_path / "nowhere", tmp_path, Path(__file__)):
        code, out, err = tool(capsys, name, path)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"{path}: ")


def test_wrong_words_are_one_line(run, capsys):
    for words in (["list", run], ["ls"], ["ls", run, "--more"], ["diff", run], ["convert", run]):
        code, out, err = tool(capsys, *words)
        assert (code, out, err.count("\n")) == (2, "", 1), words
        assert err.startswith("command line: ") and "--help tells more" in err


def test_help_of_each_tool(capsys):
    code, out, _ = tool(capsys)
    assert code == 0
    for name in ("ls", "show", "verify", "diff", "convert"):
        assert f"  {name}" in out
        assert tool(capsys, name, "--help")[1].startswith(f"usage: minititan checkpoint {name}")


def test_what_the_system_refuses_is_one_line(run, capsys, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    code, _, err = tool(capsys, "ls", run)
    assert (code, err) == (2, f"{run}/checkpoint/step-9: Permission denied; give this user access\n")


DAMAGE = {
    "flipped bit": lambda step: flip(step / "__0_0.distcp"),
    "flipped bit in the state": lambda step: flip(step / "train_state.json"),
    "flipped bit in the list": lambda step: flip(step / ".metadata"),
    "flipped bit in the manifest": lambda step: flip(step / "COMMIT.json"),
    "missing": lambda step: (step / "__0_0.distcp").unlink(),
    "missing manifest": lambda step: (step / "COMMIT.json").unlink(),
    "cut": lambda step: os.truncate(step / "__0_0.distcp", 10),
    "empty": lambda step: os.truncate(step / "train_state.json", 0),
    "no manifest": lambda step: (step / "COMMIT.json").write_text("{}"),
}
SIZES = {"missing", "missing manifest", "cut", "empty", "no manifest", "flipped bit in the manifest"}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_and_its_file_named(run, name, capsys):
    step = run / "checkpoint" / "step-10"
    before = {path: path.stat().st_mtime_ns for path in step.iterdir()}
    DAMAGE[name](step)
    [file] = [path for path in before if not path.exists() or path.stat().st_mtime_ns != before[path]]
    for path in (run, run / "checkpoint", step):
        code, out, _ = tool(capsys, "verify", path)
        lines = out.splitlines()
        assert code == 1
        assert [line for line in lines if line.startswith(f"{file}: ")]
        assert sum("whole" in line for line in lines) == (0 if path == step else 2)
    code, out, _ = tool(capsys, "verify", step, "--sizes")
    assert code == (1 if name in SIZES else 0)
    row = next(line for line in tool(capsys, "ls", run)[1].splitlines() if line.startswith("step-10 "))
    assert (f"no: {file}: " in row) == (name in SIZES)
    for words in (["diff", run, step], ["convert", step, run / "x.safetensors"]):
        code, out, err = tool(capsys, *words)
        assert code == 2 and str(file) in err and not (run / "x.safetensors").exists()


def test_a_step_of_which_only_the_folder_is_left_is_damaged(run, capsys):
    step = run / "checkpoint" / "step-10"
    for file in step.iterdir():
        file.unlink()
    assert tool(capsys, "verify", step)[:2] == (1, f"{step}/COMMIT.json: missing\n")


def test_convert_overwrites_nothing_and_leaves_nothing_half_written(run, capsys, tmp_path):
    step, file = run / "checkpoint" / "step-9", tmp_path / "x.safetensors"
    file.write_text("mine")
    assert "nothing is overwritten" in tool(capsys, "convert", step, file)[2]
    assert "no such folder" in tool(capsys, "convert", step, tmp_path / "no" / "x.safetensors")[2]
    assert "no key matches modle.*" in tool(capsys, "convert", step, tmp_path / "y", "--keys", "modle.*")[2]
    with largest_file(300):
        code, _, err = tool(capsys, "convert", step, tmp_path / "z.safetensors")
    assert (code, "could not be written (File too large)" in err) == (2, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "x.safetensors"]
    assert file.read_text() == "mine"


# What they print


def test_ls(run, capsys):
    old = time.time() - 3 * 3600
    for file in (run / "checkpoint" / "step-9").iterdir():
        os.utime(file, (old, old))
    code, out, err = tool(capsys, "ls", run)
    lines = [line.split("  ") for line in out.splitlines()]
    columns = [[word.strip() for word in line if word] for line in lines]
    assert columns[0] == ["step", "size", "age", "saved by", "content", "valid"]
    assert [row[0] for row in columns[1:]] == ["step-9", "step-10", "step-100"]
    assert columns[1][2:] == ["3 h", "1 process, dp_shard 2", "model + optimizer", "yes"]
    assert (code, err) == (0, "") and "\x1b" not in out
    size = sum(file.stat().st_size for file in (run / "checkpoint" / "step-9").iterdir())
    assert columns[1][1] == size_text(size)


def test_show_takes_the_newest(run, capsys):
    out = tool(capsys, "show", run)[1]
    assert f"{run}/checkpoint/step-100" in out and "llama3 debugmodel" in out
    assert "train_state.tokens_seen  6400" in out and "vocab_size" not in out
    assert "4, 44 elements" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["model.b", "[3]", "bfloat16"] in rows and ["optimizer.a.step", "[]", "float32"] in rows
    assert "step-9\n" in tool(capsys, "show", run / "checkpoint" / "step-9")[1]


def test_long_keys_are_not_cut_in_a_pipe(tmp_path, capsys):
    key = "model." + "deep." * 60 + "weight"
    Checkpointer(tmp_path, keep_latest_k=0, rank=0).save(1, {key: torch.zeros(2)}, {})
    assert key in tool(capsys, "show", tmp_path)[1]
    assert str(tmp_path) in tool(capsys, "verify", tmp_path)[1]


def test_diff_of_equals(run, capsys):
    step = run / "checkpoint" / "step-9"
    assert tool(capsys, "diff", step, step)[:2] == (0, "4 of 4 tensors are equal to the bit, 0 differ\n")


def test_diff_says_what_differs_and_by_how_much(run, capsys, tmp_path):
    other = tensors(9.0)
    other["model.a"][2, 3] += 0.25
    other["model.b"] = other["model.b"].float()
    other["model.c"] = torch.zeros(2)
    other["optimizer.a.exp_avg"] = torch.full((4, 5), 0.5)
    del other["optimizer.a.step"]
    there = Checkpointer(tmp_path / "other", keep_latest_k=0, rank=0)
    there.save(1, other, {})
    code, out, _ = tool(capsys, "diff", run / "checkpoint" / "step-9", tmp_path / "other")
    rows = {
        line.split()[0]: line.split()[1:] for line in out.splitlines() if line.startswith(("model", "optim"))
    }
    assert code == 1
    assert rows["model.a"] == ["0.25", f"{0.25 / (20 * 81) ** 0.5:.3g}"]
    assert rows["model.b"] == ["0", "0", "dtype", "bfloat16,", "float32"]
    assert rows["model.c"] == ["only", "in", f"{tmp_path}/other/step-1"]
    assert rows["optimizer.a.exp_avg"] == ["shape", "[5,", "4],", "[4,", "5]"]
    assert rows["optimizer.a.step"] == ["only", "in", f"{run}/checkpoint/step-9"]
    assert "0 of 5 tensors are equal to the bit, 5 differ" in out
    code, out, _ = tool(capsys, "diff", run, tmp_path / "other", "--keys", "model.a")
    assert code == 1 and "0 of 1 tensors" in out


def test_a_difference_of_bits_is_one():
    nan, zero = torch.tensor([float("nan"), 1.0]), torch.zeros(3)
    assert difference(nan, nan.clone())[2] and difference(zero, zero)[2]
    assert not difference(zero, -zero)[2]
    assert difference(zero, -zero)[0] == 0
    assert difference(torch.ones(2), nan)[0] != difference(torch.ones(2), nan)[0]
    big = torch.zeros(5_000_000)
    big[-1] = 2.0
    assert difference(torch.zeros(5_000_000), big)[:2] == (2.0, 2.0)


def test_convert(run, capsys, tmp_path):
    step = run / "checkpoint" / "step-9"
    assert tool(capsys, "convert", step, tmp_path / "all.safetensors")[0] == 0
    found, expected = load_file(tmp_path / "all.safetensors"), tensors(9.0)
    assert found.keys() == expected.keys()
    assert all(
        torch.equal(found[key], value) and found[key].dtype == value.dtype for key, value in expected.items()
    )
    content = (tmp_path / "all.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert all(header[key]["data_offsets"][0] % value.itemsize == 0 for key, value in expected.items())
    assert tool(capsys, "convert", step, tmp_path / "model.safetensors", "--keys", "model.*")[0] == 0
    assert set(load_file(tmp_path / "model.safetensors")) == {"model.a", "model.b"}


def test_sizes_and_ages():
    assert [size_text(n) for n in (0, 999, 1000, 1_234_567, 5 * 10**9)] == [
        "0 B",
        "999 B",
        "1 kB",
        "1.23 MB",
        "5 GB",
    ]
    assert [age_text(s) for s in (-1, 119, 120, 7199, 7200, 200_000)] == [
        "0 s", "119 s", "2 min", "120 min", "2 h", "2 d",
    ]  # fmt: skip


# As programs


def test_what_only_looks_at_files_does_not_load_torch(run):
    program = (
        "import sys; from minititan.__main__ import main; code = main(sys.argv[1:]); "
        "sys.exit(code or 10 * ('torch' in sys.modules))"
    )
    for name in ("ls", "show", "verify"):
        words = [sys.executable, "-c", program, "checkpoint", name, str(run)]
        assert subprocess.run(words, capture_output=True, timeout=60).returncode == 0, name


def test_a_closed_pipe_is_quiet(tmp_path):
    there = Checkpointer(tmp_path, keep_latest_k=0, rank=0)
    there.save(1, {f"model.{i:0200}": torch.zeros(1) for i in range(1000)}, {})
    words = [sys.executable, "-m", "minititan", "checkpoint", "show", str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 128 + 13


def test_a_table_fits_a_terminal(run):
    """In a terminal of 60 columns no line is longer, and nothing is lost: long words are folded."""
    program = (
        "import pty, os, sys; os.environ['COLUMNS'] = '60'; "
        "pty.spawn([sys.executable, '-m', 'minititan', 'checkpoint', 'show', sys.argv[1]])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(run)],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert "optimizer.a.exp_avg" in done.stdout and json.dumps([5, 4]) in done.stdout
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    assert max(map(len, plain.splitlines())) <= 60


# prune


def test_prune_lists_and_removes_only_when_told_to(run, capsys):
    folder = run / "checkpoint"
    (folder / "step-7").mkdir()  # never committed
    (folder / "notes.txt").write_text("mine")
    code, out, _ = tool(capsys, "prune", run, "--keep_latest_k", 1)
    rows = {line.split()[0]: line.split()[-1] for line in out.splitlines() if line.startswith("step-")}
    assert (code, rows) == (0, {"step-9": "goes", "step-10": "goes", "step-100": "stays"})
    assert "2 of 3 would go" in out and "--yes removes them" in out
    everything = ["notes.txt", "step-10", "step-100", "step-7", "step-9"]
    assert sorted(os.listdir(folder)) == everything
    assert (
        "1 of 3 removed"
        in tool(capsys, "prune", folder, "--keep_latest_k", 1, "--keep_every_n_steps", 9, "--yes")[1]
    )
    left = [name for name in everything if name != "step-10"]
    assert sorted(os.listdir(folder)) == ["notes.txt", "run.lock", *left[1:]]


def test_prune_removes_nothing_while_a_run_saves_there(run, capsys):
    program = (
        "import sys; from pathlib import Path; from minititan.run_status import RunStatus; "
        "status = RunStatus(); status.take({'k': Path(sys.argv[1])}); print(1, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, run / "checkpoint"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        code, _, err = tool(capsys, "prune", run, "--keep_latest_k", 1, "--yes")
        other.communicate(b"\n")
    assert code == 2 and "another run is in it" in err
    assert tool(capsys, "prune", run, "--keep_latest_k", 1, "--yes")[0] == 0


def test_prune_keeps_the_best(run, capsys):
    there = Checkpointer(run / "checkpoint", keep_latest_k=0, rank=0)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        there.save(step, tensors(1.0), {"train_state": {"validation_loss": loss}})
    out = tool(capsys, "prune", run, "--keep_latest_k", 1, "--keep_best_k", 2, "--yes")[1]
    assert "1.0000" in out and there.steps() == [2, 3, 100]


def test_prune_refuses_what_would_remove_all(run, capsys):
    for words in (["--keep_latest_k", 0], ["--keep_latest_k", 1, "--keep_best_k", -1]):
        assert "must be at least" in tool(capsys, "prune", run, *words, "--yes")[2]
    assert "--keep_latest_k" in tool(capsys, "prune", run)[2]
    newest = run / "checkpoint" / "step-100" / "__0_0.distcp"
    flip(newest)
    code, _, err = tool(capsys, "prune", run, "--keep_latest_k", 1, "--yes")
    assert code == 2 and err.startswith(f"{newest}: damaged") and err.endswith("; nothing was removed\n")
    for step in (9, 10, 100):
        (run / "checkpoint" / f"step-{step}" / "COMMIT.json").write_text("{}")
    assert "none of its checkpoints is valid" in tool(capsys, "prune", run, "--keep_latest_k", 1, "--yes")[2]
    assert len(list((run / "checkpoint").glob("step-*"))) == 3

"""The wheel holds the package alone, and the debug job runs from it, outside the checkout."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*command: str | Path, cwd: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PIP_"))}
    ended = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    # From a copy, so that neither a build folder of the checkout nor its stale files get in.
    copy = tmp_path_factory.mktemp("source")
    for name in "pyproject.toml", "README.md", "LICENSE":
        shutil.copy(ROOT / name, copy)
    for name in "models", "parallelisms":
        (copy / name).symlink_to(f"minititan/{name}")
    shutil.copytree(ROOT / "minititan", copy / "minititan", ignore=shutil.ignore_patterns("__pycache__"))
    built = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run(*pip, "--wheel-dir", built, copy, cwd=copy)
    (found,) = built.iterdir()
    return found


def test_the_wheel_claims_one_import_name(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"minititan"}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "minititan").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules


def test_the_debug_job_runs_from_the_wheel(wheel, tmp_path):
    """An environment without the checkout; the packages that minititan needs come from this one's folder."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    site = Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    )
    run(
        sys.executable,
        "-m",
        "pip",
        "--quiet",
        "--python",
        python,
        "install",
        "--no-deps",
        wheel,
        cwd=tmp_path,
    )
    # A folder named in a .pth file is searched, but its own .pth files (the editable checkout) are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    where = run(python, "-c", "import minititan; print(minititan.__file__)", cwd=tmp_path).strip()
    assert Path(where).is_relative_to(site)
    shutil.copy(ROOT / "train_configs" / "debug.toml", tmp_path)
    settings = {"training.steps": 4, "metrics.log_freq": 1, "job.dump_folder": tmp_path / "out"}
    settings |= {"data.cache_folder": tmp_path / "cache"}
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run(*torchrun, "-m", "minititan.train", "--job.config_file", "debug.toml", *words, cwd=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 4
    assert 4.0 < losses[0] < 7.0  # about ln(264), the loss of a guess
    assert losses[3] < losses[0]

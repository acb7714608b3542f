"""The peers' own virtual environments, made once from the package index and kept below a folder."""

import json
import subprocess
import sys
from pathlib import Path

MADE = "made.json"  # written last: what the environment was made from
LINES = 8  # of pip's last words in an error


class LeftOut(Exception):
    """Why a peer cannot take part."""


def python_of(folder: Path, name: str, requirements: list[str], torch: str, pip_words: list[str]) -> Path:
    """Return the Python of the peer's environment, made first where it is not; raises LeftOut.

    `torch` goes first and stays: the other packages take the release that is there.
    """
    home = folder.resolve() / name
    python = home / "bin" / "python"
    wanted = {"torch": torch, "requirements": requirements}
    made = home / MADE
    if made.exists() and json.loads(made.read_text())["wanted"] == wanted:
        return python
    print(
        f"{name}: a virtual environment in {home}: torch {torch}, {', '.join(requirements)} ...", flush=True
    )
    _run([sys.executable, "-m", "venv", "--clear", str(home)], name)
    pin = home / "torch.txt"
    pin.write_text(f"torch=={torch}\n")
    for packages in ([f"torch=={torch}"], requirements):
        words = ["install", "-q", "--disable-pip-version-check", "-c", str(pin), *pip_words, *packages]
        _run([str(python), "-m", "pip", *words], name)
    made.write_text(json.dumps({"wanted": wanted}))
    return python


def versions_in(python: Path, packages: list[str]) -> dict[str, str]:
    """Return the versions of these packages in the Python's environment."""
    code = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    found = subprocess.run([str(python), "-c", code, *packages], capture_output=True, text=True, check=True)
    return dict(zip(packages, found.stdout.split(), strict=True))


def _run(words: list[str], name: str) -> None:
    ended = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if ended.returncode:
        said = "\n".join(ended.stdout.strip().splitlines()[-LINES:])
        raise LeftOut(f"{name}: `{' '.join(words)}` ended with {ended.returncode}:\n{said}")

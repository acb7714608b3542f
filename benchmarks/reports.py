"""How benchmarks report: medians with their spread, what they ran on, JSON, and their part of a page."""

import json
import os
import platform
import statistics
from collections.abc import Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def machine(*packages: str) -> dict[str, Any]:
    """Return the day, the class of the machine, and the versions of torch and of `packages`."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return {
        "date": date.today().isoformat(),
        "device": device,
        "processor": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "cores": usable,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "versions": found,
    }


def machine_line(of: dict[str, Any]) -> str:
    """Return `machine()` as one line for a page."""
    versions = ", ".join(f"{name} {number}" for name, number in of["versions"].items())
    cores = f"{of['cores']} cores ({of['processor']}), {of['memory_gib']} GiB"
    return f"{of['date']}, {of['device']}, {cores}, {versions}."


def spread(values: Sequence[float], digits: int = 1, unit: str = "") -> str:
    """Return the median with the least and the most."""
    least, most = min(values), max(values)
    return f"{statistics.median(values):,.{digits}f}{unit} ({least:,.{digits}f} to {most:,.{digits}f})"


def verdict(value: float, goal: float, *, at_most: bool, digits: int = 3) -> str:
    """Return PASS, or by how much `value` misses a goal that it must reach (or not exceed)."""
    if value <= goal if at_most else value >= goal:
        return "PASS"
    return f"{abs(value / goal - 1):.1%} {'over' if at_most else 'short of'} {goal:.{digits}g}"


def write_json(path: Path, results: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def write_part(page: Path, command: str, part: str, text: str) -> None:
    """Put the text between the marks of its part: `<!-- COMMAND PART -->` and `<!-- end of PART -->`."""
    begin, end = f"<!-- {command} {part} -->", f"<!-- end of {part} -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{page} has no marks of {part}: {begin} and {end}")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")

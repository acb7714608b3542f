"""The pictures of benchmarks/growth.py: what was measured as points, what theory says as lines."""

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BLUE, ORANGE, GREEN, GREY = "#1f5fa8", "#d1671f", "#3a8f4d", "#777777"
MB = 1e6


def panels(count: int) -> tuple[Any, Sequence[Any]]:
    figure, axes = plt.subplots(1, count, figsize=(5.2 * count, 3.8), facecolor="white", layout="constrained")
    for axis in axes:
        axis.grid(True, which="major", color="#dddddd", linewidth=0.6)
        axis.set_axisbelow(True)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    return figure, axes


def points(axis: Any, x: Sequence[float], values: Sequence[Sequence[float]], label: str) -> None:
    """Medians with a bar from the least to the most."""
    middle = [statistics.median(of) for of in values]
    below = [m - min(of) for m, of in zip(middle, values, strict=True)]
    above = [max(of) - m for m, of in zip(middle, values, strict=True)]
    axis.errorbar(x, middle, yerr=[below, above], fmt="o", color=BLUE, capsize=3, label=label)


def finish(figure: Any, path: Path) -> None:
    for axis in figure.axes:
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_size(data: Mapping[str, Any], path: Path) -> None:
    figure, (left, right) = panels(2)
    gflop = [flops / 1e9 for flops in data["flops"]]
    points(left, gflop, data["seconds"], "measured (median, range)")
    rate = 1 / data["time_fit"]["coefficients"][1] / 1e9
    left.plot(
        gflop, data["time_fit"]["values"], color=ORANGE, label=f"fit: constant + FLOPs / {rate:.0f} GFLOP/s"
    )
    left.set(xscale="log", yscale="log", xlabel="GFLOP a step (1,024 tokens)", ylabel="time of a step (s)")
    left.set_title("Time against model size", fontsize=11)
    millions = [n / 1e6 for n in data["parameters"]]
    right.plot(millions, [peak / MB for peak in data["peak"]], "o", color=BLUE, label="peak, measured")
    right.plot(millions, [v / MB for v in data["peak_fit"]["values"]], color=ORANGE, label="fit")
    right.plot(
        millions, [16 * n for n in millions], "--", color=GREEN, label="16 B a parameter (state + gradients)"
    )
    right.plot(millions, [kept / MB for kept in data["kept"]], ":", color=GREY, label="kept by autograd")
    right.set(xscale="log", yscale="log", xlabel="parameters (millions)", ylabel="memory (MB)")
    right.set_title("Memory against model size", fontsize=11)
    finish(figure, path)


def plot_length(data: Mapping[str, Any], path: Path) -> None:
    figure, (left, right) = panels(2)
    lengths = data["lengths"]
    points(left, lengths, data["seconds"], "measured (median, range)")
    left.plot(lengths, data["time_fit"]["values"], color=ORANGE, label="fit: constant + slope x length")
    start = data["time_fit"]["coefficients"][0]
    theory = [start * (1 + data["expected_ratio"] * n) for n in lengths]
    left.plot(lengths, theory, "--", color=GREEN, label="slope by FLOPs")
    left.set(xlabel="sequence length (tokens)", ylabel=f"time of a step of {data['tokens']:,} tokens (s)")
    left.set_ylim(bottom=0)
    left.set_title("Time against length, at equal tokens", fontsize=11)
    right.plot(lengths, [peak / MB for peak in data["peak"]], "o", color=BLUE, label="peak, measured")
    right.plot(lengths, [v / MB for v in data["peak_fit"]["values"]], color=ORANGE, label="fit: constant")
    right.plot(lengths, [kept / MB for kept in data["kept"]], ":", color=GREY, label="kept by autograd")
    right.set(xlabel="sequence length (tokens)", ylabel="memory (MB)")
    right.set_ylim(bottom=0)
    right.set_title("Memory against length, at equal tokens", fontsize=11)
    finish(figure, path)


def plot_ranks(data: Mapping[str, Any], path: Path) -> None:
    figure, (left, right) = panels(2)
    ranks = data["ranks"]
    points(left, ranks, data["seconds"], "measured (median, range)")
    ideal = [data["time"][0] / min(n, data["cores"]) for n in ranks]
    left.plot(ranks, ideal, color=ORANGE, label=f"ideal on {data['cores']} cores")
    left.set(xlabel="FSDP ranks", ylabel="time of a step (s)", xticks=ranks)
    left.set_ylim(bottom=0)
    left.set_title("Time against ranks, one global batch", fontsize=11)
    places = range(len(ranks))
    state = [value / MB for value in data["state"]]
    gradients = [4 * data["parameters"] / n / MB for n in ranks]
    kept = [value / MB for value in data["kept"]]
    gathered = [t / MB - s - g - k for t, s, g, k in zip(data["theory"], state, gradients, kept, strict=True)]
    base, bottom = [data["base"] / MB] * len(ranks), [0.0] * len(ranks)
    for values, color, label in (
        (state, "#9dbfe3", "parameters and moments / ranks"),
        (gradients, "#f3c49b", "gradients / ranks"),
        (kept, "#b9dcbf", "kept by autograd"),
        (gathered, "#b59acb", "gathered units"),
        (base, "#dddddd", "a constant of a process (fit)"),
    ):
        right.bar(places, values, 0.55, bottom=bottom, color=color, label=label)
        bottom = [a + b for a, b in zip(bottom, values, strict=True)]
    right.plot(places, [peak / MB for peak in data["peak"]], "o", color=BLUE, label="peak, measured")
    right.set(xlabel="FSDP ranks", ylabel="memory of a rank (MB)")
    right.set_xticks(list(places), [str(n) for n in ranks])
    right.set_title("Memory of a rank, theory and measured", fontsize=11)
    finish(figure, path)


def plot_steps(data: Mapping[str, Any], path: Path) -> None:
    figure, axes = panels(3)
    for (name, of_ranks), color in zip(data.items(), (BLUE, ORANGE, GREEN), strict=False):
        steps, clock, sizes, objects = zip(*of_ranks[0], strict=True)
        axes[0].plot(steps, [value / 2**20 for value in sizes], color=color, label=name)
        axes[1].plot(steps, objects, color=color, label=name)
        between = [1e3 * (b - a) / (steps[1] - steps[0]) for a, b in pairwise(clock)]
        axes[2].plot(steps[1:], between, color=color, label=name)
    for axis, label, title in zip(
        axes,
        ("resident set of rank 0 (MiB)", "Python objects of rank 0", "time of a step (ms, with saves)"),
        ("Memory over steps", "Objects over steps", "Time over steps"),
        strict=True,
    ):
        axis.set(xlabel="step", ylabel=label)
        axis.set_title(title, fontsize=11)
        axis.set_ylim(bottom=0, top=1.25 * axis.get_ylim()[1])
    finish(figure, path)


PLOTS = {"size": plot_size, "length": plot_length, "ranks": plot_ranks, "steps": plot_steps}

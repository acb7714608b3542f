"""Experts by the grouped operator and by a loop: `python benchmarks/moe.py`, on a GPU where there is one.

Forward and backward of one layer's experts, tokens spread evenly and all to the same few experts, by dtype;
the dense layer with as many active weights beside them.
"""

import argparse
import time
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor

from minititan.models import moe
from minititan.models.feed_forward import FeedForward

NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in (*moe.GROUPED, torch.float64)}


def seconds(compute: Callable[[], Tensor], device: str, budget: float) -> float:
    """Return the shortest time of forward and backward within `budget` seconds, and three at least."""
    times: list[float] = []
    direction = torch.randn_like(compute())
    while len(times) < 4 or sum(times) < budget:
        begin = time.perf_counter()
        compute().backward(direction)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def measure(options: argparse.Namespace, dtype: torch.dtype, device: str) -> list[float]:
    """Return milliseconds of loop and operator for even loads, of both for the same few experts, and of the
    dense layer.
    """
    torch.manual_seed(0)
    experts, top_k = options.experts, options.top_k
    module = moe.SwiGLUExperts(experts, options.width, options.hidden).to(device, dtype)
    dense = FeedForward(options.width, top_k * options.hidden).to(device, dtype)
    for parameter in (*module.parameters(), *dense.parameters()):
        torch.nn.init.normal_(parameter, std=0.02)
    x = torch.randn(options.tokens, options.width, device=device, dtype=dtype, requires_grad=True)
    weights = torch.rand(options.tokens, top_k, device=device, requires_grad=True)
    turns = torch.arange(options.tokens * top_k, device=device).view(-1, top_k)
    found = []
    for indices in (turns % experts, (turns % top_k)):
        counts = torch.bincount(indices.flatten(), minlength=experts)
        for grouped in ((), moe.GROUPED):
            with mock.patch.object(moe, "GROUPED", grouped):
                found.append(
                    seconds(lambda i=indices, c=counts: module(x, weights, i, c), device, options.budget)
                )
    found.append(seconds(lambda: dense(x)[0], device, options.budget))
    return [1000 * value for value in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top_k", type=int, default=4)
    parser.add_argument("--budget", type=float, default=2.0, help="seconds for each number")
    parser.add_argument("--dtypes", nargs="*", default=list(NAMES), choices=NAMES)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(
        f"{options.tokens} tokens, width {options.width}, {options.top_k} of {options.experts} experts of "
        f"width {options.hidden}, on {device}, {torch.get_num_threads()} threads; milliseconds"
    )
    print("| dtype | even: loop | even: operator | few: loop | few: operator | dense |\n|" + "---|" * 6)
    for dtype in (NAMES[name] for name in options.dtypes):
        cells = [f"{value:.1f}" for value in measure(options, dtype, device)]
        if dtype not in moe.GROUPED:
            cells[1] = cells[3] = "no operator"
        print(f"| {str(dtype).removeprefix('torch.')} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

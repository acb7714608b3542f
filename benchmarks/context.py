"""What causal attention costs each rank of a sequence, by the pieces that it has.

    python benchmarks/context.py

One process on one core computes the ranks' parts one after another; nothing is communicated.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from minititan.models.masks import attend, causal_mask
from minititan.parallelisms.context_parallel import Split, attend_to_prefixes

TOKENS, HEADS, CHANNELS, REPEATS = 4096, 4, 64, 3

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def seconds(attention: Attention) -> float:
    """CPU time of a forward and a backward, the least of some."""
    inputs = [torch.randn(1, HEADS, TOKENS, CHANNELS, requires_grad=True) for _ in range(3)]
    times = []
    for _ in range(REPEATS):
        begin = time.process_time()
        attention(*inputs).sum().backward()
        times.append(time.process_time() - begin)
    return min(times)


def prefixes(split: Split) -> Attention:
    return lambda q, k, v: attend_to_prefixes(split, split.part(q, 2), k, v, None, None)


def one_mask(split: Split) -> Attention:
    places = split.part(torch.arange(TOKENS), 0)
    # A window of one token less than all keeps the mask from being left out.
    mask = causal_mask(TOKENS, TOKENS - 1, None, CHANNELS, torch.float32, places.device, places)
    return lambda q, k, v: attend(split.part(q, 2), k, v, mask)


def main() -> None:
    torch.set_num_threads(1)
    whole = seconds(lambda q, k, v: attend(q, k, v, None))
    print(f"{TOKENS} tokens, {HEADS} heads of {CHANNELS}, float32: whole {whole:.2f} s")
    for ranks in (2, 4):
        print(f"cp {ranks}: the whole / {ranks} {whole / ranks:.2f} s")
        for name, head_tail, way in (
            ("head and tail, by prefixes", True, prefixes),
            ("head and tail, by one mask", True, one_mask),
            ("one piece each, by prefixes", False, prefixes),
        ):
            of_ranks = [seconds(way(Split("", rank, ranks, head_tail))) for rank in range(ranks)]
            print(f"  {name}: {', '.join(f'{t:.2f}' for t in of_ranks)}", flush=True)


if __name__ == "__main__":
    main()

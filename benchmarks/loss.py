"""Peak memory and time of head and loss, in chunks of tokens and plain: `python benchmarks/loss.py`.

Each form runs in a process of its own, forward and backward, since the peak of a process cannot be reset. On
a CPU the peak is that of the resident set above what the inputs take; on a GPU the allocator's.
"""

import argparse
import multiprocessing
import resource
import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minititan import loss

FORMS = ("plain", "chunked")


def inputs(tokens: int, width: int, vocabulary: int, device: str) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(width, vocabulary, bias=False, device=device)
    hidden = torch.randn(1, tokens, width, device=device, requires_grad=True)
    return head, hidden, torch.randint(vocabulary, (1, tokens), device=device)


def peak_bytes(device: str) -> int:
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def measure(form: str, sizes: tuple[int, int, int], device: str) -> tuple[float, float, float, float]:
    """Return peak GiB, seconds, the loss and the norm of the head's gradient."""
    warm_up = inputs(8, 8, 8, device)  # what torch allocates once does not count
    warm_up[0](warm_up[1]).sum().backward()
    head, hidden, labels = inputs(*sizes, device)
    before, begin = peak_bytes(device), time.perf_counter()
    if form == "plain":
        total = F.cross_entropy(head(hidden).flatten(0, 1), labels.flatten(), reduction="sum")
    else:
        loss.install_loss(head, None, None)
        total = head(hidden, labels)
    total.backward()
    gib = (peak_bytes(device) - before) / 2**30
    assert head.weight.grad is not None
    return gib, time.perf_counter() - begin, total.item(), head.weight.grad.norm().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=32_768)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = (options.tokens, options.width, options.vocabulary)
    logits = options.tokens * options.vocabulary * 4 / 2**30
    print(
        f"{sizes[0]} tokens, width {sizes[1]}, vocabulary {sizes[2]}: logits of {logits:.2f} GiB in float32"
    )
    print("| form | peak GiB | seconds | loss a token | gradient norm |\n|---|---|---|---|---|")
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for form in FORMS:
            gib, seconds, total, norm = pool.apply(measure, (form, sizes, device))
            print(f"| {form} | {gib:.2f} | {seconds:.1f} | {total / sizes[0]:.6f} | {norm:.4f} |")


if __name__ == "__main__":
    main()

"""Random states of torch's generators, as tensors of a checkpoint: one a rank and device type."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def rng_tensors(rank: int) -> dict[str, Tensor]:
    """This rank's generator states as `rng.<rank>.cpu` and, where there is a GPU, `rng.<rank>.cuda`."""
    states = {f"rng.{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"rng.{rank}.cuda"] = torch.cuda.get_rng_state()
    return states


def restore_rng(tensors: Mapping[str, Tensor], *, rank: int, seed: int, step: int) -> list[str]:
    """Sets this rank's generators from loaded `tensors`.

    A generator without an entry (the run has more ranks now, or moved to GPUs) is seeded from (seed, step,
    rank); the keys of those are returned.
    """
    derived = int.from_bytes(hashlib.sha256(f"{seed}:{step}:{rank}".encode()).digest()[:8], "big") >> 1
    reseeded: list[str] = []
    for key in rng_tensors(rank):
        device = key.rpartition(".")[2]
        state = tensors.get(key)
        if state is None:
            reseeded.append(key)
            if device == "cuda":
                torch.cuda.manual_seed(derived)
            else:
                torch.default_generator.manual_seed(derived)
        elif device == "cuda":
            torch.cuda.set_rng_state(state)
        else:
            torch.set_rng_state(state)
    return reseeded

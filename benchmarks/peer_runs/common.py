"""What all runs of `benchmarks/peers.py` share: the model, the optimizer, the rows of tokens.

The launchers beside this file run in the environments of the peers, which have torch and numpy but not
minititan. Each ends a step with a line `step: N loss: X`, its own or that of `end_step`.
"""

import argparse
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

HIDDEN, LAYERS, HEADS, KV_HEADS, FEED_FORWARD = 256, 8, 8, 4, 832
VOCABULARY, SEQ_LEN, BATCH = 6400, 512, 8
ROPE_THETA, NORM_EPS = 10_000.0, 1e-5
PARAMETERS = 2 * VOCABULARY * HIDDEN + HIDDEN * (
    LAYERS * (2 * HIDDEN + 2 * HIDDEN * KV_HEADS // HEADS + 3 * FEED_FORWARD + 2) + 1
)
LR, BETAS, EPS, WEIGHT_DECAY, MAX_NORM = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--rows", type=Path, required=True, help="rows of SEQ_LEN + 1 ids, BATCH of them a step"
    )
    parser.add_argument("--folder", type=Path, required=True, help="what the run writes")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--compile", action="store_true")
    return parser.parse_args()


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


class Rows(torch.utils.data.Dataset[Tensor]):
    """This rank's rows, a batch after the other: of each step its consecutive part."""

    def __init__(self, path: Path, rank: int, ranks: int) -> None:
        self.rows = np.load(path, mmap_mode="r")
        self.rank, self.batch, self.ranks = rank, BATCH // ranks, ranks

    def __len__(self) -> int:
        return len(self.rows) // self.ranks

    def __getitem__(self, index: int) -> Tensor:
        if index >= len(self):
            raise IndexError(index)
        step, place = divmod(index, self.batch)
        row = self.rows[step * BATCH + self.rank * self.batch + place]
        return torch.from_numpy(row.astype(np.int64))


def batches(rows: Rows) -> torch.utils.data.DataLoader[Tensor]:
    return torch.utils.data.DataLoader(rows, batch_size=rows.batch, drop_last=True)

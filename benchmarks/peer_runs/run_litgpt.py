"""litgpt's `pretrain` with rows of tokens from a file; none of its files is edited.

It compiles the model always, unless torch is told not to (`TORCH_COMPILE_DISABLE=1`). Its own `TextFiles`
is not used: that needs `litdata`, which may bring a torchvision that breaks the import beside this torch.
"""

import sys
from typing import Any

import torch
from common import (
    BATCH,
    BETAS,
    EPS,
    FEED_FORWARD,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    LR,
    MAX_NORM,
    NORM_EPS,
    ROPE_THETA,
    SEQ_LEN,
    VOCABULARY,
    WEIGHT_DECAY,
    Rows,
    arguments,
    batches,
    ranks,
)
from litgpt import pretrain
from litgpt.args import EvalArgs, TrainArgs
from litgpt.config import Config
from litgpt.data import DataModule
from torch.utils.data import DataLoader

given = arguments()
sys.argv[1:] = ["peer"]  # litgpt reads its settings again from here, for a file beside the last checkpoint


class RowsOfTokens(DataModule):
    def connect(self, *_: Any, **__: Any) -> None:
        """Nothing depends on the run: rows are as long as the model takes."""

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return batches(Rows(given.rows, 0, 1))

    val_dataloader = train_dataloader


def main() -> None:
    config = Config(
        name="peer",
        block_size=SEQ_LEN,
        n_layer=LAYERS,
        n_embd=HIDDEN,
        n_head=HEADS,
        n_query_groups=KV_HEADS,
        intermediate_size=FEED_FORWARD,
        vocab_size=VOCABULARY,
        padded_vocab_size=VOCABULARY,
        norm_class_name="RMSNorm",
        norm_eps=NORM_EPS,
        mlp_class_name="LLaMAMLP",
        rotary_percentage=1.0,
        rope_base=ROPE_THETA,
        parallel_residual=False,
        bias=False,
    )
    train = TrainArgs(
        save_interval=None,
        log_interval=1,
        global_batch_size=BATCH,
        micro_batch_size=BATCH // ranks(),
        max_tokens=given.steps * BATCH * SEQ_LEN,
        max_norm=MAX_NORM,
        min_lr=LR,
        lr_warmup_steps=0,
    )
    adamw = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
    pretrain.setup(
        model_name="peer",
        model_config=config,
        out_dir=given.folder,
        precision="32-true",
        data=RowsOfTokens(),
        train=train,
        eval=EvalArgs(
            interval=given.steps + 1, max_iters=1, initial_validation=False, final_validation=False
        ),
        optimizer={"class_path": "torch.optim.AdamW", "init_args": adamw},
        devices=ranks(),
        logger_name="csv",
    )


if __name__ == "__main__":
    main()

"""TorchTitan's `train` on a CPU, which it was not made for. Nothing of its files is edited.

What it needs here is replaced while it is imported: the device's name, functions of `torch.cuda` that
`torch.cpu` has not, timeouts of process groups, and attention (its FlexAttention has no backward pass on a
CPU). Its own settings are kept (fused AdamW, the loss in chunks, compilation by block and of the loss), but
for those of GPUs (CUDA graphs) and activation checkpointing, which would compute much of the forward pass
twice.
"""

import sys
from dataclasses import dataclass
from types import SimpleNamespace
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
    ROPE_THETA,
    SEQ_LEN,
    VOCABULARY,
    WEIGHT_DECAY,
    Rows,
    arguments,
    ranks,
)

GIVEN = arguments()

torch._utils._get_available_device_type = lambda: "cpu"
for name, stub in {
    "get_device_name": lambda *_: "cpu",
    "get_device_properties": lambda *_: SimpleNamespace(total_memory=1),
    "reset_peak_memory_stats": lambda *_: None,
    "empty_cache": lambda: None,
    "memory_stats": lambda *_: {},
}.items():
    if not hasattr(torch.cpu, name):
        setattr(torch.cpu, name, stub)

from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan import train  # noqa: E402
from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import CommConfig, CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.models import llama3  # noqa: E402
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

dist_utils.set_pg_timeouts = lambda **_: None
llama3.get_attention_config = lambda _: ScaledDotProductAttention.Config()


@dataclass(kw_only=True, slots=True)
class RowsConfig(ParallelAwareDataloader.Config):
    pass


class RowsOfTokens(ParallelAwareDataloader):
    """Batches of the file's rows as inputs and labels."""

    Config = RowsConfig

    def __init__(
        self, config: RowsConfig, *, dp_rank: int, dp_world_size: int, local_batch_size: int, **_: Any
    ):
        rows = Rows(GIVEN.rows, dp_rank, dp_world_size)
        super().__init__(
            rows, dp_rank, dp_world_size, batch_size=local_batch_size, collate_fn=inputs_and_labels
        )


def inputs_and_labels(rows: list[torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    batch = torch.stack(rows)
    return {"input": batch[:, :-1].contiguous()}, batch[:, 1:].contiguous()


class NoTokenizer(BaseTokenizer):
    """Rows are ids already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *_: Any, **__: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return VOCABULARY


def model(attn_backend: str, tp_gemm_backend: Any) -> llama3.Llama3Model.Config:
    """Return the model, built as TorchTitan's Llama 3 of other sizes.

    Embedding and head begin as the other weights do: with the much larger values of its own, its losses come
    near those of the others only after many steps.
    """
    small = {"weight": llama3._LINEAR_INIT["weight"]}
    return llama3.Llama3Model.Config(
        dim=HIDDEN,
        vocab_size=VOCABULARY,
        tok_embeddings=Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=HIDDEN, param_init=small),
        norm=RMSNorm.Config(normalized_shape=HIDDEN, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(in_features=HIDDEN, out_features=VOCABULARY, param_init=small),
        layers=llama3._build_llama3_layers(
            n_layers=LAYERS,
            dim=HIDDEN,
            n_heads=HEADS,
            n_kv_heads=KV_HEADS,
            hidden_dim=FEED_FORWARD,
            rope=ComplexRoPE.Config(
                dim=HIDDEN // HEADS, max_seq_len=SEQ_LEN, theta=ROPE_THETA, scaling="none"
            ),
            attn_backend=attn_backend,
        ),
    )


def run() -> Trainer.Config:
    """What TorchTitan's `--config` names."""
    llama3.llama3_configs["peer"] = model
    spec = llama3.model_registry("peer")
    parallelize = spec.parallelize_fn

    def parallelize_on_gloo(*arguments: Any, **named: Any) -> Any:
        parallelized = parallelize(*arguments, **named)
        for module in parallelized.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no averaging
        return parallelized

    spec.parallelize_fn = parallelize_on_gloo
    loss = CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)
    return Trainer.Config(
        model_spec=spec,
        dump_folder=str(GIVEN.folder),
        hf_assets_path=str(GIVEN.folder),
        loss=ChunkedLossWrapper.Config(loss_fn=loss),
        tokenizer=NoTokenizer.Config(),
        dataloader=RowsOfTokens.Config(),
        optimizer=default_adamw(LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0),
        training=TrainingConfig(
            local_batch_size=BATCH // ranks(),
            global_batch_size=BATCH,
            seq_len=SEQ_LEN,
            max_norm=MAX_NORM,
            steps=GIVEN.steps,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor" if ranks() > 1 else "spmd_types"),
        activation_checkpoint=None,
        compile=CompileConfig(enable=GIVEN.compile),
        comm=CommConfig(init_timeout_seconds=3600),  # it may have to wait for its turn
        metrics=MetricsProcessor.Config(log_freq=1, disable_color_printing=True),
    )


if __name__ == "__main__":
    GIVEN.folder.mkdir(parents=True, exist_ok=True)
    sys.argv[1:] = ["--module", "__main__", "--config", "run"]
    train.main()

"""A plain loop of transformers and torch, as its documents have it; FSDP2 by block under torchrun."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import (
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
    rank,
    ranks,
)
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig


def shard(model: torch.nn.Module) -> None:
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no averaging


def main() -> None:
    given = arguments()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=FEED_FORWARD,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=SEQ_LEN,
        rms_norm_eps=NORM_EPS,
        rope_theta=ROPE_THETA,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    print(f"{sum(p.numel() for p in model.parameters()):,} total parameters", flush=True)
    if ranks() > 1:
        dist.init_process_group("gloo")
        if given.compile:
            for block in model.model.layers:
                block.compile()
        shard(model)
    elif given.compile:
        model.compile()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
    )
    for step, batch in enumerate(batches(Rows(given.rows, rank(), ranks())), 1):
        inputs, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        logits = model(input_ids=inputs).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        if ranks() > 1:
            dist.all_reduce(mean)
            mean /= ranks()
        if rank() == 0:
            print(f"step: {step} loss: {mean.item():.4f}", flush=True)
        if step == given.steps:
            break
    if ranks() > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

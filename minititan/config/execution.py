"""Sections on how a run is spread over processes and executed: parallelism, recomputation, compilation."""

from __future__ import annotations

from typing import Annotated, Literal

from minititan.config.fields import (
    Choices,
    Fraction,
    Natural,
    OptionalStringLists,
    OptionalText,
    Positive,
    Range,
    Seconds,
    Section,
    Strings,
    Text,
)


class Parallelism(Section):
    """How the run is spread over processes. The degrees multiply to the number of processes."""

    data_parallel_replicate_degree: Positive = 1
    """Replicas; each replica is sharded `data_parallel_shard_degree` ways."""
    data_parallel_shard_degree: Annotated[int, Range(low=1, special=-1)] = -1
    """Ways that parameters, gradients and moments are sharded (FSDP); -1: what the other degrees leave."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free the gathered parameters after the forward pass and gather them again for the backward pass."""
    tensor_parallel_degree: Positive = 1
    """Ways that the layers' matrices and the sequence are split."""
    disable_loss_parallel: bool = False
    """Compute the loss on whole rows of logits, not split by vocabulary over the tensor-parallel ranks."""
    disable_sequence_parallel: bool = False
    """Own key. Keep the sequence whole between the layers under tensor parallelism; not with experts."""
    disable_embedding_parallel: bool = False
    """Own key. Keep the token embedding whole under tensor parallelism."""
    enable_async_tensor_parallel: bool = False
    """Overlap tensor-parallel communication with computation; only false so far."""
    pipeline_parallel_degree: Positive = 1
    """Ranks that the layers are dealt out to, each with its stage or stages."""
    module_fqns_per_model_part: OptionalStringLists = None
    """Modules of each stage (`embed_tokens`, `layers.0`, ..., `norm`, `lm_head`, or TorchTitan's names);
    unset: split evenly."""
    pipeline_parallel_first_stage_less_layers: Natural = 1
    """What the embedding counts, in layers, where they are split evenly."""
    pipeline_parallel_last_stage_less_layers: Natural = 1
    """What the head counts, in layers, where they are split evenly."""
    pipeline_parallel_layers_per_stage: Annotated[int | None, Range(low=1)] = None
    """Layers of a stage, embedding and head counted, which gives the number of stages; unset: one stage a
    rank, or two where the schedule needs several."""
    pipeline_parallel_schedule: str = "1F1B"
    """GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble or DualPipeV."""
    pipeline_parallel_schedule_csv: OptionalText = None
    """File with a schedule; only unset or empty so far."""
    pipeline_parallel_microbatch_size: Positive = 1
    """Sequences in a micro-batch of the pipeline; divides `training.local_batch_size`."""
    pipeline_parallel_expert_parallel_overlap: bool = True
    """Overlap expert communication with another micro-batch; no effect so far."""
    context_parallel_degree: Positive = 1
    """Ways that the sequence is split between and inside the layers."""
    context_parallel_method: Literal["all_gather", "all_to_all"] = "all_gather"
    """Own key. How attention meets the whole sequence: each rank by its keys and values, or by some heads."""
    context_parallel_load_balancer: Annotated[OptionalText, Choices(("headtail", "none"))] = "headtail"
    """A rank's part: "headtail", a piece from each end, so that all have as much to do; "none": one piece."""
    context_parallel_rotate_method: Literal["allgather", "alltoall"] = "allgather"
    """TorchTitan's key; `context_parallel_method` says how here."""
    expert_parallel_degree: Positive = 1
    """Ranks that experts are spread over, of the shard x context x tensor-parallel ones."""
    expert_tensor_parallel_degree: Positive = 1
    """With experts spread: 1, or tensor_parallel_degree to split each one as well."""
    expert_parallel_comm_backend: Literal["standard", "deepep"] = "standard"
    """How tokens are sent to experts; only "standard" so far."""


class ActivationCheckpoint(Section):
    """Recompute activations in the backward pass instead of keeping them."""

    mode: Literal["selective", "full", "memory_budget", "none"] = "selective"
    """Which blocks, or which of their operations, are recomputed; "memory_budget": compiled blocks choose."""
    selective_ac_option: str = "2"
    """With "selective": "op" keeps the costly operations of each block; "N" recomputes every N-th block."""
    per_op_sac_force_recompute_mm_shapes_by_fqns: Strings = ("moe.router.gate",)
    """With "op": modules whose matrix products are recomputed all the same; only the default or [] so far."""
    early_stop: bool = False
    """Stop recomputing a block when all that is needed is there."""
    memory_budget: Fraction = 0.5
    """With "memory_budget": 0 keeps as little as "full", 1 keeps all."""
    visualize_memory_budget_pareto: bool = False
    """With "memory_budget": write the curve of memory against time; only false so far."""
    preserve_rng_state: bool = True
    """Restore the random state for recomputation, so that dropout is the same."""
    determinism_check: Annotated[str, Choices(("default", "none"))] = "default"
    """Compare shapes and types of what is recomputed: "default", or "none"."""
    debug: bool = False
    """Record what is recomputed, for error messages; slow."""


class Compile(Section):
    """torch.compile, block by block."""

    enable: bool = False
    """Compile."""
    components: Annotated[Strings, Choices(("model", "loss"))] = ("model", "loss")
    """What is compiled."""
    backend: Text = "inductor"
    """Backend of torch.compile."""


class Comm(Section):
    """Time limits of collective operations, and NCCL's flight recorder."""

    init_timeout_seconds: Seconds = 300
    """Limit up to the end of the first step."""
    train_timeout_seconds: Seconds = 100
    """Limit after the first step."""
    trace_buf_size: Annotated[int, Range(low=0, high=10_000_000)] = 20000
    """Operations that the flight recorder keeps; 0: off."""
    save_traces_folder: Text = "comm_traces"
    """Folder of the recorder's files, under `job.dump_folder`."""
    save_traces_file_prefix: str = "rank_"
    """Beginning of the files' names."""
    mode: Literal["default", "fake_backend", "local_tensor"] = "default"
    """Only "default": real processes."""

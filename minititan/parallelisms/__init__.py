"""Parallelisms, each in a module of its own, and `parallelize`, which applies them in the one fixed order."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from minititan.config import Config
from minititan.parallelisms.activation_checkpoint import (
    apply_activation_checkpoint,
    set_compiled_recomputation,
)
from minititan.parallelisms.compile import apply_compile
from minititan.parallelisms.context_parallel import apply_context_parallel, build_split
from minititan.parallelisms.expert_parallel import apply_expert_parallel, connect_routers
from minititan.parallelisms.fsdp import apply_fsdp
from minititan.parallelisms.mesh import Meshes, build_meshes
from minititan.parallelisms.tensor_parallel import apply_tensor_parallel
from minititan.parallelisms.unit import Unit, Unwrap

__all__ = ["Meshes", "build_meshes", "parallelize"]


def parallelize(
    model: Any,
    plan: Mapping[str, str] | None,
    meshes: Meshes,
    config: Config,
    compute_dtype: torch.dtype,
) -> None:
    """Apply the run's parallelisms to `model`, on the meta device, in place; every rank must call it."""
    blocks = [Unit(f"layers.{name}", block) for name, block in model.layers.named_children()]
    edges = [Unit(name, part) for name, part in model.named_children() if name != "layers"]
    units, parallelism = blocks + edges, config.parallelism
    unwraps: dict[str, Unwrap] = {}

    if meshes.tp is not None:
        assert plan is not None, "the config check refuses tensor parallelism without a plan"
        unwraps |= apply_tensor_parallel(
            model,
            meshes.tp,
            plan,
            sequence_parallel=not parallelism.disable_sequence_parallel,
            embedding_parallel=not parallelism.disable_embedding_parallel,
        )
    if meshes.experts is not None:
        unwraps |= apply_expert_parallel(model, meshes.experts)
    if meshes.cp is not None:
        split = build_split(meshes.cp, parallelism.context_parallel_load_balancer)
        apply_context_parallel(model, split, parallelism.context_parallel_method)
    connect_routers(model, meshes.sequence_groups, meshes.token_groups)
    for unit in units:
        unit.localize(unwraps)

    recompute = config.activation_checkpoint
    set_compiled_recomputation(
        recompute.memory_budget if recompute.mode == "memory_budget" else None, meshes.tokens.device_type
    )
    if recompute.mode in ("full", "selective"):
        apply_activation_checkpoint(
            blocks,
            recompute.mode,
            recompute.selective_ac_option,
            recompute.model_dump(include={"preserve_rng_state", "determinism_check", "early_stop", "debug"}),
        )

    if config.compile.enable and "model" in config.compile.components:
        for block in blocks:
            apply_compile(block, config.compile.backend)

    for unit in units:
        unit.install()

    _shard(model, blocks, meshes, config, compute_dtype)


def _shard(
    model: Any, blocks: Sequence[Unit], meshes: Meshes, config: Config, compute_dtype: torch.dtype
) -> None:
    """Apply FSDP where ranks share the parameters, or where it is needed for types or offloading."""
    dtype = next(model.parameters()).dtype
    # FSDP adds up in float32, over micro-batches as well, what is computed in less.
    mixed = compute_dtype != dtype or dtype == torch.bfloat16
    if (
        meshes.tokens.size() > 1
        or meshes.experts_fsdp.size() > 1
        or mixed
        or config.training.enable_cpu_offload
    ):
        apply_fsdp(
            model,
            [block.module for block in blocks],
            meshes.fsdp,
            meshes.experts_fsdp,
            param_dtype=None if compute_dtype == dtype else compute_dtype,
            reduce_dtype=torch.float32 if mixed else None,
            reshard_after_forward=_reshard_after_forward(config),
            cpu_offload=config.training.enable_cpu_offload,
        )


def _reshard_after_forward(config: Config) -> str:
    """Return when gathered parameters are freed: by default not between the micro-batches of a pipeline,
    each of which would gather them again.
    """
    asked, stages = (
        config.parallelism.fsdp_reshard_after_forward,
        config.parallelism.pipeline_parallel_degree,
    )
    return "never" if asked == "default" and stages > 1 else asked

"""Parallelisms, each in a module of its own, and `parallelize`, which applies them in the one fixed order."""

from collections.abc import Mapping
from typing import Any

import torch

from minititan.config import Config
from minititan.parallelisms.activation_checkpoint import apply_activation_checkpoint, set_memory_budget
from minititan.parallelisms.fsdp import apply_fsdp
from minititan.parallelisms.mesh import Meshes, build_meshes
from minititan.parallelisms.tensor_parallel import apply_tensor_parallel
from minititan.parallelisms.unit import Unit

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

    if meshes.tp is not None:
        assert plan is not None, "the config check refuses tensor parallelism without a plan"
        apply_tensor_parallel(
            model,
            units,
            meshes.tp,
            plan,
            sequence_parallel=not parallelism.disable_sequence_parallel,
            embedding_parallel=not parallelism.disable_embedding_parallel,
        )

    recompute = config.activation_checkpoint
    set_memory_budget(recompute.memory_budget if recompute.mode == "memory_budget" else None)
    if recompute.mode in ("full", "selective"):
        apply_activation_checkpoint(
            blocks,
            recompute.mode,
            recompute.selective_ac_option,
            recompute.model_dump(include={"preserve_rng_state", "determinism_check", "early_stop", "debug"}),
        )

    if config.compile.enable and "model" in config.compile.components:
        for block in blocks:
            block.compute = torch.compile(block.compute, backend=config.compile.backend, fullgraph=True)

    for unit in units:
        unit.install()

    dtype = next(model.parameters()).dtype
    # FSDP adds up in float32, over micro-batches as well, what is computed in less.
    mixed = compute_dtype != dtype or dtype == torch.bfloat16
    if meshes.dp.size() > 1 or mixed or config.training.enable_cpu_offload:
        apply_fsdp(
            model,
            [block.module for block in blocks],
            meshes.fsdp,
            param_dtype=None if compute_dtype == dtype else compute_dtype,
            reduce_dtype=torch.float32 if mixed else None,
            reshard_after_forward=parallelism.fsdp_reshard_after_forward,
            cpu_offload=config.training.enable_cpu_offload,
        )

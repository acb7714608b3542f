"""Activation checkpointing: recompute in the backward what would cost memory to keep (arXiv:1604.06174).

`full` keeps a block's input only; `selective` keeps all of most blocks (option n: every n-th block is
recomputed) or, in each block, what is expensive to compute or to communicate again (option `op`). Under
`torch.compile`, `memory_budget` leaves the choice to the compiler.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from minititan.parallelisms.unit import Unit

_aten, _collectives = torch.ops.aten, torch.ops._c10d_functional
# Kept under option `op`, beside every second matrix product. Collectives are kept all or none: an operator
# and its wait must not be treated differently.
KEPT = frozenset(
    {
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_attention_math.default,
        _aten.topk.default,  # the choice of experts is made once
        _collectives.all_gather_into_tensor.default,
        _collectives.reduce_scatter_tensor.default,
        _collectives.all_reduce.default,
        _collectives.all_to_all_single.default,
        _collectives.wait_tensor.default,
    }
)
_PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default, _aten._grouped_mm.default})


def apply_activation_checkpoint(
    blocks: Sequence[Unit], mode: str, option: str, settings: Mapping[str, Any]
) -> None:
    """Wrap the computation of the blocks by mode `full` or `selective`, with `option` "op" or a number n.

    `settings` are further ones of `torch.utils.checkpoint.checkpoint`.
    """
    settings = dict(settings)
    if mode == "selective" and option == "op":
        settings["context_fn"] = _selective_contexts
    every = int(option) if mode == "selective" and option != "op" else 1
    for index, block in enumerate(blocks):
        if index % every == 0:
            block.compute = _checkpointed(block.compute, settings)


def set_compiled_recomputation(budget: float | None, device: str) -> None:
    """Let compiled blocks keep this share, 0 to 1, of the activations that they would keep; None: all.

    On a CPU they don't keep what is pointwise from what is kept: a norm's or SwiGLU's output is made again in
    passes over the same inputs, for three tenths of the memory. Settings of the compiler for the process.
    """
    functorch_config.activation_memory_budget = 1.0 if budget is None else budget
    functorch_config.ban_recompute_materialized_backward = device != "cpu"


def _checkpointed(compute: Callable[..., Any], settings: dict[str, Any]) -> Callable[..., Any]:
    """Return what computes the same and does it again in the backward pass.

    A function, not a `partial`: such torch.compile tells apart by identity, and would compile each block.
    """

    def call(*inputs: Any) -> Any:
        return checkpoint(compute, *inputs, use_reentrant=False, **settings)

    return call


def _selective_contexts() -> Any:
    products = {False: 0, True: 0}  # counted apart in forward and recomputation

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator in KEPT:
            return CheckpointPolicy.MUST_SAVE
        if operator in _PRODUCTS:
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)

"""The rules of how sequences are split, which need the model's arguments: their lengths, and heads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from minititan.config.schema import Config

CP = "parallelism.context_parallel_degree"
ROTATE = "parallelism.context_parallel_rotate_method"
METHOD = "parallelism.context_parallel_method"


def context_notes(config: Config) -> list[str]:
    """A line where TorchTitan's method is another one than ours, and the user has not said which of ours."""
    if config.parallelism.context_parallel_degree == 1 or config.where(METHOD) != "default":
        return []
    if config.parallelism.context_parallel_rotate_method == "allgather":
        return []
    rule = 'keys and values are gathered at once, as by context_parallel_method = "all_gather"'
    return [config.fault(ROTATE, rule, 'the other method is "all_to_all", by heads')]


def length_faults(config: Config, args: Any) -> Iterator[str]:
    """The faults of `seq_len` in training and, where it is on, in validation.

    `args` are the model's arguments, any of whose fields may be missing.
    """
    section = config.parallelism
    cp, tp = section.context_parallel_degree, section.tensor_parallel_degree
    factors = [] if cp == 1 else [f"context_parallel_degree ({cp})"]
    split, way_out = cp, ""
    if cp > 1 and section.context_parallel_load_balancer == "headtail":
        factors, split, way_out = ["2", *factors], 2 * cp, '; or set context_parallel_load_balancer = "none"'
    if tp > 1 and not section.disable_sequence_parallel:
        factors, split = [*factors, f"tensor_parallel_degree ({tp})"], split * tp
        if not (way_out or getattr(args, "num_experts", None)):  # which need the sequence split
            way_out = "; or set parallelism.disable_sequence_parallel"
    product = " x ".join(factors) + (f" = {split}" if len(factors) > 1 else "")
    purpose = " for sequence parallelism" if cp == 1 else ""
    longest = getattr(args, "max_position_embeddings", None)
    for key in ("training.seq_len", *(("validation.seq_len",) if config.validation.enable else ())):
        seq_len = config.value(key)
        if seq_len % split:
            near = [length for length in (seq_len // split * split, (seq_len // split + 1) * split) if length]
            nearest = f"nearest: {' or '.join(map(str, near))}"
            yield config.fault(key, f"must be a multiple of {product}{purpose}", nearest + way_out)
        if longest and seq_len > longest:
            rule = f"must be at most the model's max_position_embeddings ({longest})"
            yield config.fault(key, rule, "lower it, or raise model.args.max_position_embeddings")


def heads_faults(config: Config, args: Any) -> Iterator[str]:
    """The fault of heads that cannot be spread over the ranks of a sequence."""
    section, heads = config.parallelism, getattr(args, "num_attention_heads", None)
    cp, tp = section.context_parallel_degree, section.tensor_parallel_degree
    if cp == 1 or section.context_parallel_method != "all_to_all" or not heads or heads % tp:
        return
    if heads % (cp * tp):
        times = f"times tensor_parallel_degree ({tp}) " if tp > 1 else ""
        rule = f'{times}must divide num_attention_heads ({heads}) with context_parallel_method = "all_to_all"'
        allowed = [str(d) for d in range(1, heads // tp + 1) if heads % (d * tp) == 0]
        yield config.fault(CP, rule, f'allowed: {", ".join(allowed)}; or use "all_gather"')

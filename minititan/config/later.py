"""Sections of features that are still to come: their keys are type-checked, their switches refused."""

from __future__ import annotations

from typing import Annotated, Literal

from minititan.config.fields import Natural, OptionalText, Positive, Range, Section, Strings, StringsOrString


class Float8Linear(Section):
    """Linear layers in float8; switched on by "quantize.linear.float8" in `model.converters`."""

    enable_fsdp_float8_all_gather: bool = False
    """Gather sharded parameters in float8."""
    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """Compute all scales in one go after the optimizer step."""
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    """How scales are chosen; unset: "tensorwise"."""
    filter_fqns: Strings = ()
    """Modules that are left alone."""
    emulate: bool = False
    """Compute in float32, for hardware without float8."""


class MXLinear(Section):
    """Linear layers in MX formats; switched on by "quantize.linear.mx" in `model.converters`."""

    mxfp8_dim1_cast_kernel_choice: Literal["triton", "cuda", "torch"] = "triton"
    """Kernel of the cast along the second dimension."""
    recipe_name: str = "mxfp8_cublas"
    """How values are scaled and multiplied."""
    filter_fqns: Strings = ("output",)
    """Modules that are left alone."""


class QuantizedLinear(Section):
    """Quantised linear layers."""

    float8: Float8Linear = Float8Linear()
    mx: MXLinear = MXLinear()


class Float8GroupedMM(Section):
    """Experts in float8; switched on by "quantize.grouped_mm.float8" in `model.converters`."""

    fqns: StringsOrString = ()
    """Modules that are converted."""


class MXGroupedMM(Section):
    """Experts in MX formats; switched on by "quantize.grouped_mm.mx" in `model.converters`."""

    recipe_name: Literal["mxfp8"] = "mxfp8"
    """How values are scaled."""
    fqns: StringsOrString = ()
    """Modules that are converted."""


class QuantizedGroupedMM(Section):
    """Quantised experts."""

    float8: Float8GroupedMM = Float8GroupedMM()
    mx: MXGroupedMM = MXGroupedMM()


class Quantize(Section):
    """Computation in narrow formats."""

    linear: QuantizedLinear = QuantizedLinear()
    grouped_mm: QuantizedGroupedMM = QuantizedGroupedMM()


class MemoryEstimation(Section):
    """Estimate of a run's memory without running it."""

    enable: bool = False
    """Only false so far."""
    disable_fake_mode: bool = False
    """Use real tensors."""


class FaultTolerance(Section):
    """Replica groups that come and go, by torchft."""

    enable: bool = False
    """Only false so far."""
    process_group: str = "gloo"
    """Backend between the groups."""
    process_group_timeout_ms: Annotated[int, Range(low=1, high=10_000_000_000)] = 10000
    """Limit of an operation between the groups, in milliseconds."""
    replica_id: Natural = 0
    """Number of this group."""
    group_size: Natural = 0
    """Number of groups."""
    min_replica_size: Positive = 1
    """Groups that must be there for a step."""
    semi_sync_method: OptionalText = None
    """How groups are synchronised; unset: at each step."""

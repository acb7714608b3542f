"""Every section and key of a run's TOML file, with its type, default and meaning: the manual.

Names, types and defaults are those of TorchTitan 0.2.2; where a default differs or a key is our own, the text
beside it says so. Sections on parallelism and execution are in `execution.py`, those on checkpoints and on
data in `checkpointing.py` and `data.py`, those of features still to come in `later.py`. `docs/config.md` is
made from these files.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr
from pydantic.fields import FieldInfo

from minititan.config.checkpointing import Checkpoint
from minititan.config.data import BatchSize, Data
from minititan.config.error import ConfigError, fault_line
from minititan.config.execution import ActivationCheckpoint, Comm, Compile, Parallelism
from minititan.config.fields import (
    INT64_MAX,
    Choices,
    Fraction,
    Natural,
    OptionalText,
    Positive,
    Range,
    Section,
    Strings,
    Table,
    Text,
    keys,
    tuples,
)
from minititan.config.later import FaultTolerance, MemoryEstimation, Quantize


class Job(Section):
    """The run: its file, its name, and the folder of everything that it writes."""

    config_file: OptionalText = None
    """The TOML file of the run; given on the command line."""
    dump_folder: Text = "./outputs"
    """Folder of everything the run writes: checkpoints, logs, traces."""
    description: str = "default job"
    """Free text, shown at the start."""
    print_config: bool = False
    """Print the resolved TOML at the start."""
    save_config_file: OptionalText = None
    """File name in `dump_folder` under which the resolved TOML is saved; unset or empty: not saved."""
    custom_config_module: str = ""
    """Module with more sections, as in TorchTitan; only "" so far."""


class Profiling(Section):
    """Traces of torch.profiler and snapshots of GPU memory, one file a rank."""

    enable_profiling: bool = False
    """Record traces."""
    save_traces_folder: Text = "profile_traces"
    """Folder of the traces, under `job.dump_folder`."""
    profile_freq: Positive = 10
    """Steps from one trace to the next; at least warm-up + active steps."""
    profiler_active: Positive = 1
    """Steps recorded in each trace."""
    profiler_warmup: Natural = 3
    """Steps before each trace in which the profiler runs and discards."""
    enable_memory_snapshot: bool = False
    """Record the history of GPU memory (CUDA only), every `profile_freq` steps and when memory runs out."""
    save_memory_snapshot_folder: Text = "memory_snapshot"
    """Folder of the snapshots, under `job.dump_folder`."""


class Metrics(Section):
    """What is logged, how often and where. `metrics.jsonl` in `job.dump_folder` is always written."""

    log_freq: Positive = 10
    """Steps from one log line to the next; step 1 is logged too."""
    enable_tensorboard: bool = False
    """Write TensorBoard events."""
    disable_color_printing: bool = False
    """Print the console lines without colors (always so when the output is no terminal)."""
    save_tb_folder: Text = "tb"
    """Folder of the TensorBoard events, under `job.dump_folder`."""
    save_for_all_ranks: bool = False
    """Every rank writes TensorBoard events of its own, not rank 0 alone."""
    enable_wandb: bool = False
    """Log to Weights & Biases; needs the `wandb` extra."""
    log_batch_hash: bool = False
    """Own key. Add `batch_sha256`, a hash of the step's global token ids, to `metrics.jsonl`."""
    peak_tflops: Annotated[float | None, Range(above=0)] = None
    """Own key. Peak TFLOP/s of one device, for MFU; unset: from the table of known GPUs, else MFU is n/a."""


class Model(Section):
    """Which model is trained, and its tokenizer."""

    name: Text = "llama3"
    """A name of the registry."""
    flavor: Text = "debugmodel"
    """A size of that model."""
    hf_assets_path: str = ""
    """Folder with tokenizer.json, or that file; "": the built-in bytes. (TorchTitan: a test folder.)"""
    converters: Annotated[
        Strings,
        Choices(
            (
                "quantize.linear.float8",
                "quantize.linear.mx",
                "quantize.grouped_mm.float8",
                "quantize.grouped_mm.mx",
            )
        ),
    ] = ()
    """Conversions of the model, in this order; only [] so far."""
    print_after_conversion: bool = False
    """Print the model after the conversions."""
    args: Table = Field(default_factory=dict)
    """Own key, `[model.args]`: fields of the model's arguments that replace those of the flavor."""


class ParamGroup(Section):
    """What differs for parameters whose names match a pattern."""

    pattern: Text
    """Over the whole name, with * and ?; the first group that matches counts."""
    name: Literal["AdamW", "Adam", "Muon"] | None = None
    """The algorithm; Muon for matrices only."""
    lr: Annotated[float | None, Range(low=0)] = None
    """Peak learning rate."""
    weight_decay: Annotated[float | None, Range(low=0)] = None
    """Wins over `no_decay`."""


class Optimizer(Section):
    """The optimizer and its constants."""

    name: Literal["AdamW", "Adam", "Muon"] = "AdamW"
    """The algorithm. "Muon" (own): for the matrices of the layers; everything else gets AdamW."""
    lr: Annotated[float, Range(low=0)] = 8e-4
    """Peak learning rate."""
    beta1: Annotated[float, Range(low=0, below=1)] = 0.9
    """Decay of the first moment, a step."""
    beta2: Annotated[float, Range(low=0, below=1)] = 0.95
    """Decay of the second moment, a step."""
    eps: Annotated[float, Range(low=0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Range(low=0)] = 0.1
    """Decoupled for AdamW, part of the gradient for Adam."""
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    """How the update is computed; the numbers are the same up to rounding."""
    state_dtype: Literal["bfloat16", "float32"] | None = None
    """Own key. Type of the moments; unset: that of the parameters; "float32" also for bfloat16 parameters."""
    early_step_in_backward: bool = False
    """Update each parameter inside the backward pass; only false so far."""
    no_decay: Strings = ()
    """Own key. Patterns (with * and ?) of the names of parameters that get no weight decay."""
    param_groups: Annotated[tuple[ParamGroup, ...], BeforeValidator(tuples)] = ()
    """Own key, `[[optimizer.param_groups]]`: tables with a `pattern` of parameter names (with * and ?) and
    the `name`, `lr` or `weight_decay` that these get instead; the first that matches counts."""
    muon_momentum: Annotated[float, Range(low=0, below=1)] = 0.95
    """Own key. Muon: decay of its momentum, a step."""
    muon_ns_steps: Annotated[int, Range(low=1, high=99)] = 5
    """Own key. Muon: iterations that make an update orthogonal."""
    muon_adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Own key. Muon: the rate of a matrix of A x B is 0.2 sqrt(max(A, B)) times `lr`, so that AdamW's rates
    fit; or ("original") sqrt(max(1, A / B)) times."""


class LRScheduler(Section):
    """Learning rate by step: linear warm-up, a stable part, decay."""

    warmup_steps: Natural = 200
    """Steps of the warm-up."""
    total_steps: Annotated[int | None, Range(low=1)] = None
    """Length of the schedule, at least `training.steps`; unset: `training.steps`."""
    decay_ratio: Annotated[float | None, Range(low=0, high=1)] = None
    """Part of the schedule spent in decay; unset: all after the warm-up."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""
    min_lr_factor: Fraction = 0.0
    """The decay ends at this part of `optimizer.lr`."""


class DataLoader(Section):
    """Processes that read ahead."""

    num_workers: Annotated[int, Range(low=0, high=1024)] = 0
    """Worker processes; 0 reads in the trainer's process and is the fastest for prepared tokens."""
    persistent_workers: bool = False
    """Keep the workers between two passes; of use only with workers."""
    pin_memory: bool = False
    """Copy batches to pinned memory (CUDA only)."""
    prefetch_factor: Annotated[int | None, Range(low=1, high=1024)] = None
    """Batches each worker reads ahead; of use only with workers; unset: 2."""


class Training(Section):
    """Data, batch, precision and length of the run."""

    dataset: Text = "stdlib"
    """Data set: "stdlib" (built in) or a name such as "c4". (TorchTitan: "c4_test".)"""
    dataset_path: OptionalText = None
    """File, folder, glob or `hf:NAME` of text, folder of `minititan prepare`, or token files (.bin and .idx,
    .npy); used in place of `dataset`; unset or empty: none."""
    local_batch_size: Positive = 8
    """Sequences in a micro-batch of one data-parallel rank."""
    global_batch_size: Annotated[int, Range(low=1, special=-1)] = -1
    """Sequences in a step over all ranks; -1: `local_batch_size` x data-parallel degree (no accumulation)."""
    global_batch_size_schedule: Annotated[tuple[BatchSize, ...], BeforeValidator(tuples)] = ()
    """Own key, `[[training.global_batch_size_schedule]]`: tables with a `step` and the `size` of the global
    batch from that step on; `global_batch_size` before."""
    seq_len: Positive = 2048
    """Tokens in a sequence."""
    max_norm: Annotated[float, Range(low=0)] = 1.0
    """Gradients are scaled down to this global norm; 0: they are left as they are."""
    steps: Positive = 10000
    """Optimizer steps of the whole run, restarts included."""
    enable_cpu_offload: bool = False
    """Keep parameters, gradients and moments in CPU memory; the optimizer steps there."""
    dtype: Literal["bfloat16", "float32", "float64"] = "float32"
    """Type of the parameters and moments. "bfloat16" loses updates below 1/256 of a parameter. "float64" is
    our own, for tests."""
    mixed_precision_param: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of the computation. "auto" (own, the default; TorchTitan: bfloat16): bfloat16 where the device
    computes it natively, else float32. "float16" (own) scales the loss, needs `dtype = "float32"`."""
    loss_scale_init: Annotated[float, Range(low=1)] = 65536.0
    """Own key. float16: factor on the loss at the start; halved where a gradient overflows."""
    loss_scale_growth_interval: Positive = 2000
    """Own key. float16: steps without an overflow after which the factor is doubled."""
    mixed_precision_reduce: Literal["float32"] = "float32"
    """Type in which gradients are summed over ranks."""
    gc_freq: Positive = 50
    """Steps from one run of Python's garbage collector to the next."""
    gc_debug: bool = False
    """Report what the garbage collector finds; only false so far."""
    dataloader: DataLoader = DataLoader()


class Experimental(Section):
    """Code of the user."""

    custom_import: str = ""
    """Module that is imported at the start, to register models; "": none."""
    custom_args_module: str = ""
    """Old name of `job.custom_config_module`; only "" so far."""


class Validation(Section):
    """Loss on data that is not trained on."""

    enable: bool = False
    """Validate."""
    dataset: Text = "c4_validation"
    """Data set; "stdlib" is the held-out part of the built-in data."""
    dataset_path: OptionalText = None
    """File, folder, glob or `hf:NAME` of text, folder of `minititan prepare`, or token files (.bin and .idx,
    .npy); used in place of `dataset`; unset or empty: none."""
    holdout: Annotated[float, Range(low=0, below=1)] = 0.0
    """Own key. This share of the training documents, chosen by hash, is the validation set instead, and not
    trained on while `enable` is true; 0: none."""
    local_batch_size: Positive = 8
    """Sequences in a batch of one data-parallel rank."""
    seq_len: Positive = 2048
    """Tokens in a sequence."""
    freq: Positive = 10
    """Steps from one validation to the next."""
    steps: Annotated[int, Range(low=1, special=-1)] = -1
    """n: n x `local_batch_size` sequences over all ranks together (TorchTitan: each rank); -1: whole set."""
    dataloader: DataLoader = DataLoader()


class Debug(Section):
    """Seeds, determinism, and what to do about broken numbers."""

    seed: Annotated[int | None, Range(low=0, high=INT64_MAX)] = 0
    """Seed of weights, data order, and (with step and data-parallel rank) what a model draws. (TorchTitan:
    none.)"""
    deterministic: bool = False
    """Only deterministic algorithms; an operation that has none is an error."""
    deterministic_warn_only: bool = False
    """With `deterministic`: warn instead."""
    nan_policy: Literal["raise", "skip"] = "raise"
    """Own key. Where a loss or gradient is not finite: end the run, or leave the step's update out."""
    max_skipped_in_a_row: Positive = 10
    """Own key. With `nan_policy = "skip"`: the run ends where more updates in a row would be left out."""
    loss_spike_factor: Annotated[float | None, Range(above=1)] = None
    """Own key. A loss above this many times the median of the last steps is treated by `nan_policy` like one
    that is not finite; unset: no such rule."""
    loss_spike_window: Positive = 50
    """Own key. Steps of that median, those left out not counted; the rule begins when there are so many."""
    moe_force_load_balance: bool = False
    """Send the same number of tokens to each expert, whatever the router says: for measurements of speed."""


class Config(Section):
    """The whole file. `load` makes one; nothing changes it afterwards."""

    job: Job = Job()
    profiling: Profiling = Profiling()
    metrics: Metrics = Metrics()
    model: Model = Model()
    optimizer: Optimizer = Optimizer()
    lr_scheduler: LRScheduler = LRScheduler()
    training: Training = Training()
    data: Data = Data()
    parallelism: Parallelism = Parallelism()
    checkpoint: Checkpoint = Checkpoint()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Compile = Compile()
    quantize: Quantize = Quantize()
    comm: Comm = Comm()
    memory_estimation: MemoryEstimation = MemoryEstimation()
    fault_tolerance: FaultTolerance = FaultTolerance()
    experimental: Experimental = Experimental()
    validation: Validation = Validation()
    debug: Debug = Debug()

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    def value(self, key: str) -> Any:
        """The value of a dotted key; None for one that is not there (in `model.args`)."""
        found: Any = self
        for name in key.split("."):
            found = found.get(name) if isinstance(found, dict) else getattr(found, name, None)
        return found

    def where(self, key: str) -> str:
        """Where the value of a dotted key comes from: the TOML file's name, "command line" or "default"."""
        parts = (where for name, where in self._origins.items() if name.startswith(f"{key}."))
        return self._origins.get(key) or " and ".join(dict.fromkeys(parts)) or "default"

    def fault(self, key: str, rule: str, way_out: str = "") -> str:
        """The line that tells the user what is wrong with the value of `key`."""
        return fault_line(self.where(key), key, self.value(key), rule, way_out)

    def located(self, error: ConfigError) -> ConfigError:
        """The error with where a value comes from put before each fault that begins with `KEY = `.

        Library functions take plain values, and do not know where they were set.
        """
        keyed = [(fault.partition(" = ")[0], fault) for fault in error.faults]
        return type(error)(
            *(f"{self.where(key)}: {fault}" if key in all_keys() else fault for key, fault in keyed)
        )

    def to_toml(self) -> str:
        """The TOML file that gives this config; unset optional keys are left out."""
        import tomli_w

        return tomli_w.dumps(self.model_dump(exclude_none=True))


@cache
def all_keys() -> dict[str, FieldInfo]:
    """Every dotted key of the schema."""
    return dict(keys(Config))

"""The section on checkpoints: what is saved when, what is kept, and what a run starts from."""

from __future__ import annotations

from typing import Annotated, Literal

from minititan.config.fields import Choices, Natural, OptionalText, Positive, Range, Section, Strings, Text


class Checkpoint(Section):
    """Saving, resuming and starting from checkpoints."""

    enable: bool = False
    """Save checkpoints, and resume from the newest one in the folder."""
    enable_ft_dataloader_checkpoints: bool = True
    """Of use only with `fault_tolerance.enable`."""
    folder: Text = "checkpoint"
    """Folder of the checkpoints, under `job.dump_folder`."""
    interval: Positive = 500
    """Steps from one checkpoint to the next; the last step is always saved."""
    initial_load_path: OptionalText = None
    """A `step-N` folder to start from where the run has no checkpoint of its own; unset or empty: none."""
    initial_load_model_only: bool = True
    """Take only the weights from `initial_load_path`; the run starts at step 0."""
    initial_load_in_hf: bool = False
    """`initial_load_path` (unset: `model.hf_assets_path`) is in the form of Hugging Face; its weights become
    `training.dtype`."""
    initial_load_in_hf_quantized: bool = False
    """The same with quantised weights; only false: they are not read."""
    last_save_model_only: bool = False
    """Save only the weights at the last step; the run can then not be continued. (TorchTitan: true.)"""
    last_save_in_hf: bool = False
    """With `last_save_model_only`: write the last step in the form of Hugging Face too, into
    `hugging_face/step-N` in `job.dump_folder`."""
    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    """Type of the weights saved under `last_save_model_only`."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Save in the background; only "disabled" so far."""
    keep_latest_k: Natural = 10
    """Checkpoints that are kept; 0: all."""
    load_step: Annotated[int, Range(low=0, special=-1)] = -1
    """Step to resume from; -1: the newest that is whole. Left in a file it counts at every restart."""
    verify: Literal["hashes", "sizes"] = "hashes"
    """What is compared before a checkpoint is loaded: each file's SHA-256 (and size), or only its size."""
    load_strict: bool = True
    """Refuse a checkpoint whose tensors are not exactly those of the run; false: load those that match."""
    exclude_from_loading: Annotated[
        Strings, Choices(("model", "optimizer", "lr_scheduler", "dataloader", "train_state"))
    ] = ()
    """Parts that are not read from a checkpoint."""
    enable_first_step_checkpoint: bool = False
    """Save after step 1 too, to find out early that saving works."""
    create_seed_checkpoint: bool = False
    """Only false: every layout starts from the same weights without a seed checkpoint."""
    load_only: bool = False
    """Load, but save nothing."""

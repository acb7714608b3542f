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
    interval_minutes: Annotated[float, Range(low=0)] = 0.0
    """Own key. Minutes from a save, or the start, to the next one, besides `interval`; 0: no such rule."""
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
    """Type of the weights saved under `last_save_model_only`; correction biases of routers stay float32."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Save in the background: training waits only while the tensors are copied to memory of the CPU, which is
    kept for the next save; "async_with_pinned_mem": to pinned memory where there is a GPU.
    """
    save_failures_allowed: Natural = 0
    """Own key. Failed saves in a row that a run goes on after, with a warning; the last save must succeed."""
    keep_latest_k: Natural = 10
    """Newest checkpoints that are kept; 0: all."""
    keep_every_n_steps: Natural = 0
    """Own key. Keep the checkpoints of steps that it divides, besides the newest; 0: no such rule."""
    keep_best_k: Natural = 0
    """Own key. Keep so many of lowest validation loss, besides the newest, of those that were saved at a step
    with a validation; 0: no such rule.
    """
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

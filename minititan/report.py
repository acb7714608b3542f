"""What a run says at its start and at its end."""

from collections.abc import Sequence

import torch

from minititan.build import compute_dtype
from minititan.run import Run
from minititan.sinks import explained


def opening_lines(run: Run, device: torch.device, parameters: int, steps_done: int, last_step: int) -> str:
    """Return what is about to be trained, where, and how."""
    config, layout, training = run.config, run.layout, run.config.training
    dtype = str(compute_dtype(config, device)).removeprefix("torch.")
    threads = f" with {torch.get_num_threads()} threads each" if device.type == "cpu" else ""
    batch_sizes, micro = layout.batch_sizes.sizes, layout.micro_batch_size
    sizes = _by_step(batch_sizes)
    counts = _by_step([(first, size // (layout.dp * micro)) for first, size in batch_sizes])
    experts = f", experts over {layout.ep * layout.etp}" if layout.ep > 1 else ""
    stages = f"{layout.pp} pipeline ranks x " if layout.pp > 1 else ""
    context = f" x {layout.cp} context-parallel" if layout.cp > 1 else ""
    span = f"steps {steps_done + 1} to {last_step}" if steps_done < last_step else "no step is left"
    return "\n".join(
        [
            f"{config.job.description}: {config.model.name} {config.model.flavor}",
            f"  {parameters:,} parameters in {training.dtype}, computed in {dtype}",
            f"  {layout.world_size} processes on {device.type}{threads}: {stages}"
            f"{layout.dp_replicate} replicas x {layout.dp_shard} shards{context} x "
            f"{layout.tp} tensor-parallel{experts}",
            f"  {sizes} sequences of {training.seq_len} tokens a step: micro-batches of {micro}, "
            f"{counts} of them on each of {layout.dp} data-parallel ranks",
            f"  {span}, everything into {run.folder}",
        ]
    )


def _by_step(numbers: Sequence[tuple[int, int]]) -> str:
    """Numbers and the steps that each is from: "8, 16 from step 100 on"."""
    return ", ".join(f"{n} from step {first} on" if first > 1 else str(n) for first, n in numbers)


def closing_lines(run: Run, step: int, seconds: float | None) -> str:
    """Return where everything is, how to go on, how to look at it.

    `step` is where the run stands; `seconds` None: nothing was left to do.
    """
    config, section, steps = run.config, run.config.checkpoint, run.config.training.steps
    took = (
        "; nothing was done" if seconds is None else f" after {int(seconds // 60)} min {seconds % 60:.0f} s"
    )
    of = f"of {steps}" if step <= steps else f"is past training.steps = {steps}"
    if step < steps:
        of += ", where the data is used up"
    lines = [f"The run is complete: step {step} {of}{took}."]
    if section.enable:
        lines.append(f"  checkpoints  {run.checkpoint_folder}")
    lines.append(f"  metrics      {run.folder / 'metrics.jsonl'}")
    if config.metrics.enable_tensorboard:
        events = run.folder / config.metrics.save_tb_folder
        lines.append(f"  TensorBoard  {events}; to look at it: tensorboard --logdir {events}")
    if section.enable and not section.load_only and not section.last_save_model_only:
        change = "--data.repeat true" if step < steps else f"--training.steps {step + max(step // 2, 1)}"
        lines.append(f"To go on from here, on any number of processes: the same command with {change}")
    return "\n".join(lines)


def stopped_lines(run: Run, step: int, signal: str | None, seconds: float) -> str:
    """Return where a run stands that a signal stopped, and how it goes on."""
    section = run.config.checkpoint
    took = f"{int(seconds // 60)} min {seconds % 60:.0f} s"
    head = f"The run was stopped by {signal}: step {step} of {run.config.training.steps} after {took}."
    if section.enable and not section.load_only:
        return f"{head}\n  checkpoints  {run.checkpoint_folder}\nThe same command goes on from here."
    key = "checkpoint.load_only = true" if section.enable else "checkpoint.enable = false"
    return f"{head}\nNothing is saved ({key}): the same command starts where this run did."


def write_config(run: Run) -> None:
    """Print and save the resolved TOML where the config asks for it."""
    job = run.config.job
    if job.print_config:
        print(run.config.to_toml(), flush=True)
    if job.save_config_file:
        path = run.folder / job.save_config_file
        with explained(path, "the config"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(run.config.to_toml(), encoding="utf-8")

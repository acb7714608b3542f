"""Training: `torchrun -m minititan.train --job.config_file X.toml`, or without torchrun on one process.

`Trainer.build` makes the parts of a run and loads its checkpoint; `Trainer.step` is one optimizer step;
`Trainer.run` is the loop around it.
"""

import dataclasses
import gc
import hashlib
import json
import signal
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from minititan import build
from minititan.checkpoint.checkpointer import Checkpointer
from minititan.checkpoint.folder import committed_steps
from minititan.checkpoint.rng import restore_rng, rng_tensors
from minititan.config import Config, ConfigError, load
from minititan.config.command_line import USAGE, asks_for_help
from minititan.data import DataState
from minititan.distributed import (
    Distributed,
    first_error_speaks,
    init_distributed,
    rank_from_env,
    report_and_exit,
    seed_step,
    set_determinism,
    set_timeout,
    shutdown,
    world_size_from_env,
)
from minititan.gradients import clip_gradients, finish_gradients, gradient_norm, unscale_gradients
from minititan.loss import IGNORED
from minititan.metrics import MetricsLogger, Step
from minititan.optimizer import lr_at, optimizer_tensors, set_lr_factor
from minititan.parallelisms import build_meshes
from minititan.report import closing_lines, opening_lines, write_config
from minititan.run import Run, check
from minititan.validate import run_validation

Batch = dict[str, Tensor]


class Trainer:
    """A run in progress. From step to step change model, optimizer, loader, and the two counters."""

    # Set by `build`, once it is known at which step the run stands:
    metrics: MetricsLogger
    last_step: int

    def __init__(self, run: Run, place: Distributed) -> None:
        """Make the parts of a run at its start; every rank must call it."""
        self.job, self.config, self.place, self.device = run, run.config, place, place.device
        debug, layout = run.config.debug, run.layout
        set_determinism(
            debug.seed or 0, deterministic=debug.deterministic, warn_only=debug.deterministic_warn_only
        )
        self.meshes = build_meshes(self.device.type, layout.dp_replicate, layout.dp_shard, layout.tp)
        self.loader = build.train_loader_of(run, build.tokens_of(run, "training"), self.meshes)
        self.validation_batches = build.validation_loader_of(run, self.meshes)
        self.model = build.model_of(run, self.meshes, self.device)
        # Taken once: while FSDP has gathered a unit's parameters, its modules hold others.
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = build.optimizer_of(run.config, self.parameters, self.device)
        self.checkpointer = Checkpointer(
            run.checkpoint_folder,
            keep_latest_k=run.config.checkpoint.keep_latest_k,
            rank=place.rank,
            say=self.say,
        )
        self.guard = build.guard_of(run.config, self.say)
        self.steps_done = 0
        self.tokens_seen = 0

    @classmethod
    def build(cls, run: Run, place: Distributed) -> "Trainer":
        """Return a trainer that stands where the run's checkpoint left off, or at the start. Every rank."""
        trainer = cls(run, place)
        trainer.load_checkpoint()
        trainer.last_step = trainer.find_last_step()
        trainer.metrics = build.metrics_of(
            run,
            place,
            step=trainer.steps_done,
            last_step=trainer.last_step,
            tokens_seen=trainer.tokens_seen,
        )
        return trainer

    def find_last_step(self) -> int:
        """Return the step that the run ends with: `training.steps`, or where data that is used once ends."""
        steps = self.config.training.steps
        if self.config.data.repeat:
            return steps
        end = self.steps_done + self.loader.steps_left()
        if end == 0:
            rule = f"the data has fewer samples than the {self.job.layout.global_batch_size} of one step"
            raise ConfigError(self.config.fault("data.repeat", rule, "set it to true or give more text"))
        if end < steps:
            rule = f"the data is used up after step {end}: the run ends there"
            self.say(self.config.fault("training.steps", rule, "data.repeat = true goes through it again"))
        return min(end, steps)

    def say(self, line: str) -> None:
        if self.place.rank == 0:
            print(line, flush=True)

    # ---- one step

    def step(self, batches: Any) -> None:
        """Take one optimizer step on the next global batch; `batches` yields this rank's micro-batches."""
        with self.metrics.data_loading():
            micro_batches = [self.to_device(next(batches)) for _ in range(self.job.layout.accumulation_steps)]
        group = self.meshes.dp_group
        labels = torch.stack([(batch["labels"] != IGNORED).sum() for batch in micro_batches]).sum()
        own_labels = labels.clone()
        dist.all_reduce(labels, group=group)
        labels = labels.clamp(min=1)  # a step without any label has loss 0 and no gradient

        step = self.steps_done + 1
        seed_step(self.config.debug.seed or 0, step, self.meshes.dp_rank)
        loss = self.forward_backward(micro_batches, labels)
        parameters = list(self.parameters.values())
        finish_gradients(parameters)
        if scale := self.guard.scale:
            unscale_gradients(parameters, scale.value)
        norm = gradient_norm(parameters)
        factor = self.lr_factor(self.steps_done)
        if self.guard.allows(step, loss, labels, norm, self.parameters, group):
            clip_gradients(parameters, norm, self.config.training.max_norm)
            set_lr_factor(self.optimizer, factor)
            self.optimizer.step()
        self.optimizer.zero_grad()

        self.steps_done = step
        self.tokens_seen += self.job.layout.global_batch_size * self.config.training.seq_len
        if self.metrics.due(step):
            self.log(loss, own_labels, labels, norm, self.config.optimizer.lr * factor, micro_batches)

    def forward_backward(self, micro_batches: list[Batch], labels: Tensor) -> Tensor:
        """Add up the gradients of this rank's part of the batch; return the sum of its token losses.

        `labels` is the number of labels in the whole step: gradients are summed over micro-batches and ranks,
        not averaged. Ranks exchange gradients once, after the last micro-batch; where parameters are never
        resharded inside a step, they are gathered once as well.
        """
        model, total = self.model, torch.zeros((), device=self.device)
        has_fsdp = isinstance(model, FSDPModule)
        keep_gathered = self.config.parallelism.fsdp_reshard_after_forward == "never"
        for index, batch in enumerate(micro_batches):
            inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
            last = index == len(micro_batches) - 1
            if has_fsdp:
                model.set_requires_gradient_sync(last)
                model.set_reshard_after_backward(last or not keep_gathered)
            if scale := self.guard.scale:
                loss = model.lm_head(model(**inputs), batch["labels"], scale.value / labels)
                loss.backward()
            else:
                loss = model.lm_head(model(**inputs), batch["labels"])
                (loss / labels).backward()
            total = total + loss.detach()
        return total

    def to_device(self, batch: Batch) -> Batch:
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}

    def lr_factor(self, step: int) -> float:
        section = self.config.lr_scheduler
        return lr_at(
            step,
            total_steps=section.total_steps or self.config.training.steps,
            warmup_steps=section.warmup_steps,
            decay_ratio=section.decay_ratio,
            decay_type=section.decay_type,
            min_lr_factor=section.min_lr_factor,
        )

    def log(
        self, loss: Tensor, own_labels: Tensor, labels: Tensor, norm: Tensor, lr: float, batches: list[Batch]
    ) -> None:
        """Log the step just done: the mean loss over all ranks, and the largest of one rank."""
        group = self.meshes.dp_group
        largest = loss / own_labels.clamp(min=1)
        dist.all_reduce(loss, group=group)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        done = Step(
            step=self.steps_done,
            loss=(loss / labels).item(),
            max_loss=largest.item(),
            grad_norm=norm.item(),
            lr=lr,
            tokens_seen=self.tokens_seen,
            samples_consumed=self.loader.state().samples_consumed,
            skipped_steps=self.guard.skipped,
            loss_scale=self.guard.scale.value if self.guard.scale else None,
            batch_sha256=self.batch_hash(batches) if self.config.metrics.log_batch_hash else None,
        )
        self.metrics.log_step(done)

    def batch_hash(self, micro_batches: list[Batch]) -> str:
        """Return the SHA-256 of the step's token ids in global order, little-endian int64; every rank must
        call it.
        """
        own = torch.cat([batch["tokens"] for batch in micro_batches])  # [share, T]
        parts = [torch.empty_like(own) for _ in range(self.job.layout.dp)]
        dist.all_gather(parts, own, group=self.meshes.dp_group)
        ids = torch.cat(parts).cpu().numpy().astype("<i8")
        return hashlib.sha256(ids.tobytes()).hexdigest()

    # ---- the loop

    def run(self) -> None:
        """Train to the last step; every rank must call it."""
        begin = time.perf_counter()
        gc.disable()  # a collection at a random moment on one rank makes all ranks wait: all collect together
        batches = iter(self.loader)
        with build.profiler_of(self.job, self.place, self.metrics, self.steps_done) as profiler:
            first = self.steps_done + 1
            while self.steps_done < self.last_step:
                self.step(batches)
                profiler.step()
                if self.steps_done == first:
                    set_timeout(self.config.comm.train_timeout_seconds, [None, *self.meshes.groups])
                if self.steps_done % self.config.training.gc_freq == 0:
                    gc.collect(1)
                if self.validation_due(self.steps_done):
                    with self.metrics.paused():
                        self.validate()
                if self.save_due(self.steps_done):
                    with self.metrics.paused():
                        self.save_checkpoint()
        gc.enable()
        self.metrics.close()
        self.say(closing_lines(self.job, self.steps_done, time.perf_counter() - begin))

    def validation_due(self, step: int) -> bool:
        section = self.config.validation
        return section.enable and (step % section.freq == 0 or step == self.last_step)

    def validate(self) -> None:
        result = run_validation(self.model, self.validation_batches, self.device, self.meshes.dp_group)
        self.metrics.log_validation(
            self.steps_done,
            loss=result.loss,
            perplexity=result.perplexity,
            tokens=result.tokens,
            seconds=result.seconds,
        )

    # ---- checkpoints

    def save_due(self, step: int) -> bool:
        section = self.config.checkpoint
        if not section.enable or section.load_only:
            return False
        first = step == 1 and section.enable_first_step_checkpoint
        return first or step % section.interval == 0 or step == self.last_step

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the live tensors of a checkpoint by name, to be saved or loaded in place."""
        model = {f"model.{name}": parameter.detach() for name, parameter in self.parameters.items()}
        state = optimizer_tensors(self.optimizer, self.parameters)
        return (
            model
            | {f"optimizer.{name}": tensor for name, tensor in state.items()}
            | rng_tensors(self.place.rank)
        )

    def save_checkpoint(self) -> None:
        tensors = self.state_tensors()
        if self.steps_done == self.last_step and self.config.checkpoint.last_save_model_only:
            tensors = {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}
        model = self.config.model
        state = {
            "train_state": {"tokens_seen": self.tokens_seen},
            "guard": self.guard.state(),
            "dataloader": dataclasses.asdict(self.loader.state()),
            "lr_scheduler": schedule_of(self.config),
            "model": {"name": model.name, "flavor": model.flavor, "args": dataclasses.asdict(self.job.args)},
            "versions": {"minititan": version("minititan"), "torch": torch.__version__},
        }
        begin = time.perf_counter()
        self.checkpointer.save(self.steps_done, tensors, state)
        self.say(f"Saved step {self.steps_done} in {time.perf_counter() - begin:.1f} s")

    def load_checkpoint(self) -> None:
        """Resume from the run's own folder, or start from `checkpoint.initial_load_path`, if there is one."""
        section = self.config.checkpoint
        if not section.enable:
            if steps := self.checkpointer.steps():
                self.say(
                    f"checkpoint.enable = false, and {self.checkpointer.folder} holds checkpoints up to step "
                    f"{steps[-1]}: they are left alone, and this run starts from step 0"
                )
            return
        newest = self.checkpointer.latest()
        step = newest if section.load_step < 0 else section.load_step
        if step is not None:
            state = self.load_from(step, model_only=False)  # raises where the step is not there
            if newest is not None and self.steps_done < newest and not section.load_only:
                for name in self.checkpointer.set_newer_aside(self.steps_done):
                    self.say(f"A newer checkpoint was moved aside: {self.checkpointer.folder / name}")
            anew = "" if self.steps_done == step else f"; steps are counted from {self.steps_done}"
            self.say(f"Resumed from step {step}, saved by {state['world_size']} processes{anew}")
        elif section.initial_load_path:
            self.load_from(Path(section.initial_load_path).expanduser(), section.initial_load_model_only)
            self.say(f"Started from {section.initial_load_path}, at step {self.steps_done}")

    def load_from(self, source: Any, model_only: bool) -> dict[str, Any]:
        """Load a step of the run's folder, or another checkpoint's folder, and take over its counters."""
        tensors = self.state_tensors()
        if model_only:
            tensors = {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}
        exclude = self.config.checkpoint.exclude_from_loading
        state = self.checkpointer.load(source, tensors, exclude)
        self.note_changes(state)
        if model_only:
            return state
        if missing := {"train_state", "dataloader"}.difference(state, exclude):
            where = f"the train_state.json of {'step ' * isinstance(source, int)}{source}"
            raise ConfigError(f"{where}: lacks {', '.join(sorted(missing))}; use another checkpoint")
        if "train_state" in state:
            self.steps_done, self.tokens_seen = state["step"], state["train_state"]["tokens_seen"]
            rng = {name: tensor for name, tensor in tensors.items() if name.startswith("rng.")}
            seed, rank = self.config.debug.seed or 0, self.place.rank
            restore_rng(rng, rank=rank, seed=seed, step=self.steps_done)
            self.guard.restore(state.get("guard", self.guard.state()))
        if "dataloader" in state:
            self.loader.resume(DataState.from_json(json.dumps(state["dataloader"])), self.config.fault)
        return state

    def note_changes(self, state: dict[str, Any]) -> None:
        """Say where the config, which wins, differs from what the checkpoint was saved with."""
        pairs = [("lr_scheduler", schedule_of(self.config), state.get("lr_scheduler", {}))]
        pairs.append(
            ("model.args", dataclasses.asdict(self.job.args), state.get("model", {}).get("args", {}))
        )
        for section, now, before in pairs:
            for key, value in before.items():
                if now.get(key) != value:
                    self.say(f"{section}.{key} = {now.get(key)}: the checkpoint has {value}; the config wins")


def schedule_of(config: Config) -> dict[str, Any]:
    """Return what the learning rate is a function of, for the checkpoint."""
    schedule = config.lr_scheduler.model_dump()
    return {
        **schedule,
        "lr": config.optimizer.lr,
        "total_steps": schedule["total_steps"] or config.training.steps,
    }


def completed_step(run: Run) -> int | None:
    """Return the step that the run would resume from, where nothing is left to do after it; else None."""
    section = run.config.checkpoint
    if not section.enable or "train_state" in section.exclude_from_loading:
        return None
    step = section.load_step
    if step < 0:
        step = max(committed_steps(run.checkpoint_folder), default=0)
    return step if step >= run.config.training.steps else None


def main(argv: Sequence[str] | None = None) -> int:
    """Train the run that the command line describes; return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    if asks_for_help(words):
        print(f"{USAGE}\nEvery key of the file is described in docs/config.md.")
        return 0
    config = None
    try:
        config = load(words)
        with first_error_speaks():
            train(config)
    except ConfigError as error:
        report_and_exit(error if config is None else config.located(error))
    except KeyboardInterrupt:
        if rank_from_env() == 0:
            print("Interrupted", file=sys.stderr, flush=True)
        return 128 + signal.SIGINT
    return 0


def train(config: Config) -> None:
    """Train to the last step of the run; every rank must call it."""
    run = check(config, world_size_from_env())
    if (step := completed_step(run)) is not None:
        if rank_from_env() == 0:
            print(closing_lines(run, step, None), flush=True)
        return
    comm = config.comm
    place = init_distributed(
        timeout_seconds=comm.init_timeout_seconds,
        trace_buffer=comm.trace_buf_size,
        trace_prefix=run.folder / comm.save_traces_folder / comm.save_traces_file_prefix,
    )
    trainer = Trainer.build(run, place)
    if place.rank == 0:
        write_config(run)
    parameters = sum(parameter.numel() for parameter in trainer.parameters.values())
    trainer.say(opening_lines(run, place.device, parameters, trainer.steps_done, trainer.last_step))
    trainer.run()
    shutdown(place)


if __name__ == "__main__":
    sys.exit(main())

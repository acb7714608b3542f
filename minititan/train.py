"""Training: `torchrun -m minititan.train --job.config_file X.toml`, or without torchrun on one process.

`Trainer.build` makes the parts of a run and loads its checkpoint; `Trainer.step` is one optimizer step;
`Trainer.run` is the loop around it.
"""

import gc

if __name__ == "__main__":
    # Nothing that is imported is garbage: looking for some took a fifth of the start, and as long at the end.
    gc.disable()

import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from minititan import build
from minititan.config import Config, ConfigError, load
from minititan.config.command_line import USAGE, asks_for_help
from minititan.distributed import (
    PREEMPTED_EXIT_CODE,
    Distributed,
    first_error_speaks,
    hash_of_ranks,
    init_distributed,
    rank_from_env,
    report_and_exit,
    seed_step,
    set_determinism,
    set_timeout,
    shutdown,
    to_device,
    world_size_from_env,
)
from minititan.gradients import clip_gradients, finish_gradients, gradient_norm, unscale_gradients
from minititan.loss import IGNORED
from minititan.metrics import MetricsLogger, Step
from minititan.optimizer import lr_at, set_lr_factor
from minititan.parallelisms import build_meshes
from minititan.report import closing_lines, opening_lines, stopped_lines, write_config
from minititan.resume import Checkpoints, Progress, completed_step, finish_export
from minititan.routing import StepRouters
from minititan.run import Run, check, take_folders
from minititan.run_status import RunStatus
from minititan.saving import Saves
from minititan.signals import StopSignals, watched
from minititan.step_requests import StepRequests
from minititan.validate import run_validation

Batch = dict[str, Tensor]


class Trainer:
    """A run in progress. From step to step change model, optimizer, loader, and the two counters.

    `parts` is the model, or the parts of it that this rank has in a pipeline.
    """

    # Set by `build`, once it is known at which step the run stands:
    metrics: MetricsLogger
    last_step: int

    def __init__(self, run: Run, place: Distributed, stop: StopSignals, status: RunStatus) -> None:
        """Make the parts of a run at its start; every rank must call it."""
        self.job, self.config, self.place, self.device = run, run.config, place, place.device
        self.status = status
        debug, layout = run.config.debug, run.layout
        set_determinism(
            debug.seed or 0, deterministic=debug.deterministic, warn_only=debug.deterministic_warn_only
        )
        self.meshes = build_meshes(
            self.device.type,
            pp=layout.pp,
            dp_replicate=layout.dp_replicate,
            dp_shard=layout.dp_shard,
            cp=layout.cp,
            tp=layout.tp,
            ep=layout.ep,
            etp=layout.etp,
        )
        self.loader = build.train_loader_of(run, self.meshes)
        self.validation_batches = build.validation_loader_of(run, self.meshes)
        self.own_part = build.own_part_of(run, self.meshes)
        parts = build.parts_of(run, self.meshes, self.device)
        self.parts = list(parts.values())
        # Taken once: while FSDP has gathered a unit's parameters, its modules hold others.
        self.parameters = build.parameters_of(run, parts)
        self.pipeline = build.pipeline_of(run, self.meshes, parts, self.device)
        self.routers = StepRouters(self.parts, self.meshes.token_groups, self.meshes.pipeline_group)
        self.optimizer = build.optimizer_of(run, self.parameters, self.device)
        self.guard = build.guard_of(run.config, self.device, self.say)
        self.checkpoints = Checkpoints(
            run, place, self.parameters, self.optimizer, self.loader, self.guard, self.say
        )
        self.saves = Saves(self.checkpoints, rank=place.rank, say=self.say)
        self.requests = StepRequests(stop, self.saves.wanted_by_clock, self.saves.have_failed)
        self.steps_done = 0
        self.tokens_seen = 0

    @classmethod
    def build(
        cls,
        run: Run,
        place: Distributed,
        stop: StopSignals | None = None,
        status: RunStatus | None = None,
    ) -> "Trainer":
        """Return a trainer that stands where the run's checkpoint left off, or at the start. Every rank.

        It answers to `stop`; with `status` no other run may be in its folders.
        """
        trainer = cls(run, place, stop or StopSignals(), status or RunStatus())
        if status is not None:
            take_folders(run, status)
        progress = trainer.checkpoints.load()
        trainer.steps_done, trainer.tokens_seen = progress.steps_done, progress.tokens_seen
        trainer.tell_status()
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
            rule = "the data has fewer samples than one step takes"
            raise ConfigError(self.config.fault("data.repeat", rule, "set it to true or give more text"))
        if end < steps:
            rule = f"the data is used up after step {end}: the run ends there"
            self.say(self.config.fault("training.steps", rule, "data.repeat = true goes through it again"))
        return min(end, steps)

    def say(self, line: str) -> None:
        if self.place.rank == 0:
            print(line, flush=True)

    def tell_status(self) -> None:
        self.status.step = self.steps_done
        if self.place.rank == 0:
            self.status.write("running", "")

    # ---- one step

    def step(self, batches: Any) -> None:
        """Take one optimizer step on the next global batch; `batches` yields this rank's micro-batches."""
        with self.metrics.data_loading():
            count = self.job.layout.accumulation_steps(self.steps_done + 1)
            whole = [to_device(next(batches), self.device) for _ in range(count)]
        micro_batches = [self.own_part(batch) for batch in whole]
        group = self.meshes.loss_group
        labels = torch.stack([(batch["labels"] != IGNORED).sum() for batch in micro_batches]).sum()
        own_labels = labels.clone()
        dist.all_reduce(labels, group=group)
        labels = labels.clamp(min=1)  # a step without any label has loss 0 and no gradient

        step = self.steps_done + 1
        seed_step(self.config.debug.seed or 0, step, self.meshes.tokens.get_local_rank())
        loss = self.forward_backward(micro_batches, labels)
        parameters = list(self.parameters.values())
        finish_gradients(parameters)
        if scale := self.guard.scale:
            unscale_gradients(parameters, scale.value)
        norm = gradient_norm(parameters, self.meshes.pipeline_group)
        factor = self.lr_factor(self.steps_done)
        if self.guard.allows(step, loss, labels, norm, self.parameters, group, self.requests):
            clip_gradients(parameters, norm, self.config.training.max_norm)
            set_lr_factor(self.optimizer, factor)
            self.optimizer.left_out = self.guard.left_out
            self.optimizer.step()
            self.routers.correct(self.guard.left_out)
        self.optimizer.zero_grad()

        self.steps_done = self.status.step = step
        self.tokens_seen += self.job.layout.batch_sizes.at(step) * self.config.training.seq_len
        if self.metrics.due(step):
            self.guard.settle()
            self.log(loss, own_labels, labels, norm, self.config.optimizer.lr * factor, whole)

    def forward_backward(self, micro_batches: list[Batch], labels: Tensor) -> Tensor:
        """Add up the gradients of this rank's part of the batch; return the sum of its token losses.

        `labels` is the number of labels in the whole step: gradients are summed over micro-batches and ranks,
        not averaged. Ranks exchange gradients once, after the last micro-batch; where parameters are never
        resharded inside a step, they are gathered once as well.
        """
        model, total = self.parts[0], torch.zeros((), device=self.device)
        scale = self.guard.scale.value if self.guard.scale else 1.0
        self.routers.begin(scale / self.job.layout.batch_sizes.at(self.steps_done + 1))
        if self.pipeline is not None:
            return self.pipeline.forward_backward(micro_batches, labels, scale if self.guard.scale else None)
        has_fsdp = isinstance(model, FSDPModule)
        keep_gathered = self.config.parallelism.fsdp_reshard_after_forward == "never"
        for index, batch in enumerate(micro_batches):
            inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
            last = index == len(micro_batches) - 1
            if has_fsdp:
                model.set_requires_gradient_sync(last)
                model.set_reshard_after_backward(last or not keep_gathered)
            if self.guard.scale:
                loss = model.lm_head(model(**inputs), batch["labels"], scale / labels)
                loss.backward()
            else:
                loss = model.lm_head(model(**inputs), batch["labels"])
                (loss / labels).backward()
            total = total + loss.detach()
        return total

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
        group = self.meshes.loss_group
        largest = loss / own_labels.clamp(min=1)
        dist.all_reduce(loss, group=group)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        sequences = self.job.layout.batch_sizes.at(self.steps_done)
        hashed, tokens = self.config.metrics.log_batch_hash, [batch["tokens"] for batch in batches]
        done = Step(
            step=self.steps_done,
            loss=(loss / labels).item(),
            max_loss=largest.item(),
            grad_norm=norm.item(),
            lr=lr,
            tokens_seen=self.tokens_seen,
            samples_consumed=self.loader.state().samples_consumed,
            sources=self.loader.consumed() if self.config.data.sources else None,
            skipped_steps=self.guard.skipped,
            loss_scale=self.guard.scale.value if self.guard.scale else None,
            batch_sha256=hash_of_ranks(tokens, self.meshes.dp.get_group()) if hashed else None,
            routing=self.routers.result(sequences, sequences * self.config.training.seq_len),
        )
        self.metrics.log_step(done)

    # ---- the loop

    def run(self) -> bool:
        """Train to the last step, or until a signal stops all ranks; return whether it was the last step.

        Every rank must call it.
        """
        begin = time.perf_counter()
        gc.disable()  # a collection at a random moment on one rank makes all ranks wait: all collect together
        batches = iter(self.loader)
        # A signal may have come before the first step.
        self.requests.agree_now(self.device)
        with build.profiler_of(self.job, self.place, self.metrics, self.steps_done) as profiler:
            first = self.steps_done + 1
            while self.steps_done < self.last_step and not self.requests.stop:
                self.step(batches)
                profiler.step()
                if self.steps_done == first:
                    set_timeout(self.config.comm.train_timeout_seconds, [None, *self.meshes.groups])
                if self.steps_done % self.config.training.gc_freq == 0:
                    gc.collect(1)
                self.after_step()
        self.guard.settle()
        gc.enable()
        self.metrics.close()
        seconds, finished = time.perf_counter() - begin, self.steps_done == self.last_step
        if finished:
            self.say(closing_lines(self.job, self.steps_done, seconds))
        else:
            self.say(stopped_lines(self.job, self.steps_done, self.requests.stop, seconds))
        return finished

    def after_step(self) -> None:
        """Validate and save where the step just done asks for it."""
        step, loss = self.steps_done, None
        if self.validation_due(step) or self.saves.due(step, self.last_step, self.requests.are_open):
            self.guard.settle()  # nothing is done with a step of which it is not known whether it counts
        stop = self.requests.stop
        last, stopping = step == self.last_step, stop is not None
        if stopping and not last:
            self.say(f"{stop}: the run stops after step {step}; a second signal ends it at once")
        if self.requests.save_has_failed:
            self.saves.finish()
        with self.metrics.paused():
            if self.validation_due(step):
                loss = self.validate()
            if self.saves.due(step, self.last_step, self.requests.save or stopping):
                progress = Progress(step, self.tokens_seen)
                self.saves.save(progress, last=last, stopping=stopping, validation_loss=loss)
                gc.collect()  # what lived through a collection of the young and is garbage now, too
                self.tell_status()

    def validation_due(self, step: int) -> bool:
        section = self.config.validation
        return section.enable and (step % section.freq == 0 or step == self.last_step)

    def validate(self) -> float:
        """Validate and log it; return the loss."""
        group = self.meshes.loss_group
        result = run_validation(
            self.parts, self.validation_batches, self.own_part, self.device, group, self.pipeline
        )
        self.metrics.log_validation(
            self.steps_done,
            loss=result.loss,
            perplexity=result.perplexity,
            tokens=result.tokens,
            seconds=result.seconds,
        )
        return result.loss


def main(argv: Sequence[str] | None = None) -> int:
    """Train the run that the command line describes; return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    if asks_for_help(words):
        print(f"{USAGE}\nEvery key of the file is described in docs/config.md.")
        return 0
    status = RunStatus()
    stop = StopSignals(status.ended_at_once)
    with watched(stop):
        try:
            return supervised(words, stop, status)
        finally:
            status.release()


def supervised(words: Sequence[str], stop: StopSignals, status: RunStatus) -> int:
    """Train the run that `words` describe; return the exit code after reporting what ends it."""
    config = None
    try:
        config = load(words)
        with first_error_speaks(stop, status.failed):
            return train(config, stop, status)
    except ConfigError as error:
        report_and_exit(error if config is None else config.located(error), stop, status.failed)
    except KeyboardInterrupt as interrupt:
        if rank_from_env() == 0:
            status.failed(interrupt)
            print("Interrupted", file=sys.stderr, flush=True)
        return 128 + signal.SIGINT


def train(config: Config, stop: StopSignals, status: RunStatus) -> int:
    """Train to the last step of the run, or a signal; return the exit code. Every rank must call it."""
    run = check(config, world_size_from_env())
    if (step := completed_step(run)) is not None:
        if rank_from_env() == 0:
            status.finished_before(run.locked_folders, step, lambda: finish_export(run, step))
            print(closing_lines(run, step, None), flush=True)
        return 0
    comm = config.comm
    place = init_distributed(
        timeout_seconds=comm.init_timeout_seconds,
        trace_buffer=comm.trace_buf_size,
        trace_prefix=run.folder / comm.save_traces_folder / comm.save_traces_file_prefix,
    )
    trainer = Trainer.build(run, place, stop, status)
    if place.rank == 0:
        write_config(run)
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    trainer.say(opening_lines(run, place.device, parameters, trainer.steps_done, trainer.last_step))
    finished = trainer.run()
    if place.rank == 0:
        if finished:
            status.write("finished", "")
        else:
            nothing = "" if trainer.saves.enabled else "; nothing is saved"
            status.write("preempted", f"{trainer.requests.stop}{nothing}")
    shutdown(place)
    return 0 if finished else PREEMPTED_EXIT_CODE


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    sys.exit(main())

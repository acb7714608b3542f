"""What of a run survives a restart: its tensors, counters and positions, saved and taken up again."""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minititan.checkpoint.checkpointer import Checkpointer, Verified
from minititan.checkpoint.folder import step_folder, step_folders
from minititan.checkpoint.manifest import TRAIN_STATE, verify
from minititan.config import Config, ConfigError
from minititan.config.error import literal
from minititan.data import DataState, TrainLoader
from minititan.distributed import Distributed
from minititan.guard import Guard
from minititan.hugging_face.exports import STATE, kept_state
from minititan.hugging_face.mesh import load_folder, save_folder
from minititan.optimizer import GroupedOptimizer, optimizer_tensors
from minititan.run import Run, initial_load_path


@dataclass(frozen=True)
class Progress:
    """How far a run has come."""

    steps_done: int = 0
    tokens_seen: int = 0


class Checkpoints:
    """The live state of a run's parts, saved and loaded in place; every rank must call its methods."""

    def __init__(
        self,
        run: Run,
        place: Distributed,
        parameters: Mapping[str, nn.Parameter],
        optimizer: GroupedOptimizer,
        loader: TrainLoader,
        guard: Guard,
        say: Callable[[str], None],
    ) -> None:
        self.run, self.section, self.say = run, run.config.checkpoint, say
        self.parameters, self.optimizer, self.loader, self.guard = parameters, optimizer, loader, guard
        self.imported: dict[str, Any] | None = None  # the config.json that the weights came with
        self.checkpointer = Checkpointer(
            run.checkpoint_folder,
            keep_latest_k=self.section.keep_latest_k,
            keep_every_n_steps=self.section.keep_every_n_steps,
            keep_best_k=self.section.keep_best_k,
            rank=place.rank,
            say=say,
            hashes=self.section.verify == "hashes",
        )

    def tensors(self, *, model_only: bool = False) -> dict[str, Tensor]:
        """Return the live tensors of a checkpoint by name."""
        model = {f"model.{name}": parameter.detach() for name, parameter in self.parameters.items()}
        if model_only:
            return model
        state = optimizer_tensors(self.optimizer, self.parameters)
        return model | {f"optimizer.{name}": tensor for name, tensor in state.items()}

    def exported_tensors(self) -> dict[str, Tensor]:
        """Return the weights in the type for a last save of weights only."""
        dtypes = self.run.spec.dtypes_in(self.run.args, getattr(torch, self.section.export_dtype))
        weights = self.tensors(model_only=True)
        return {name: tensor.to(dtypes[name.removeprefix("model.")]) for name, tensor in weights.items()}

    def kept_for_export(self, step: int) -> dict[str, Any]:
        """Return what an export of the step will need besides its tensors."""
        run = self.run
        path = step_folder(run.checkpoint_folder, step)
        return kept_state(self.imported, run.config.model.hf_assets_path, path, run.folder)

    def export(self, step: int) -> None:
        """Write a saved step in Hugging Face's form too."""
        export_step(self.run, step, self.say)

    def to_save(
        self, progress: Progress, *, last: bool, validation_loss: float | None
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return what `Checkpointer.save` takes after the step: live tensors, and all else by keyword.

        `last`: at the end of the run. `validation_loss`: of the validation at this step, if there was one.
        """
        config = self.run.config
        tensors = self.exported_tensors() if last and self.section.last_save_model_only else self.tensors()
        state = {
            "train_state": {
                "tokens_seen": progress.tokens_seen,
                "validation_loss": validation_loss,
                "data_used_up": last and progress.steps_done < config.training.steps,
            },
            "guard": self.guard.state(),
            "dataloader": dataclasses.asdict(self.loader.state()),
            **settings_of(config),
            STATE: self.kept_for_export(progress.steps_done),
        }
        args = dataclasses.asdict(self.run.args)
        return tensors, {
            "train_state": state,
            "model": {"name": config.model.name, "flavor": config.model.flavor, "args": args},
            "layout": dataclasses.asdict(self.run.layout),
        }

    def load(self) -> Progress:
        """Resume from the run's own folder, or start from `checkpoint.initial_load_path`, if there is one."""
        section, checkpointer = self.section, self.checkpointer
        if not section.enable:
            if steps := checkpointer.steps():
                self.say(
                    f"checkpoint.enable = false, and {checkpointer.folder} holds checkpoints up to step "
                    f"{steps[-1]}: they are left alone, and this run starts from step 0"
                )
            return Progress()
        own = checkpointer.newest() if section.load_step < 0 else checkpointer.verified(section.load_step)
        if own is not None:
            imported = own.manifest.step == 0  # weights, of which the run begins
            progress = self.load_from(own, model_only=imported)
            if not section.load_only:
                for name in checkpointer.set_newer_aside(progress.steps_done):
                    self.say(f"A newer checkpoint was moved aside: {checkpointer.folder / name}")
            if imported:
                self.say(
                    f"Started from the imported weights in {own.path}, with a fresh optimizer, at step 0"
                )
                return progress
            done, step = progress.steps_done, own.manifest.step
            anew = "" if done == step else f"; steps are counted from {done}"
            ranks = own.manifest.layout["world_size"]
            self.say(f"Resumed from step {step}, saved by {ranks} processes{anew}")
            return progress
        path = initial_load_path(self.run.config)
        if path is None:
            return Progress()
        if section.initial_load_in_hf:
            return self.load_hugging_face(path)
        initial = checkpointer.verified(path)
        if not section.initial_load_model_only:
            self.check_whole(initial)
        progress = self.load_from(initial, section.initial_load_model_only)
        self.say(f"Started from {section.initial_load_path}, at step {progress.steps_done}")
        return progress

    def load_hugging_face(self, path: Path) -> Progress:
        """Take the weights from a folder in Hugging Face's form."""
        spec, args = self.run.spec, self.run.args
        form = spec.form_of(args)
        assert form is not None, "checked at the start of the run"
        self.imported = load_folder(path, form, self.run.model, self.parameters, args, self.say)
        self.say(f"Started from {path}, at step 0")
        return Progress()

    def check_whole(self, source: Verified) -> None:
        """Raise ConfigError when what is to give all of a run's state holds nothing but a model."""
        left_out = "optimizer" in self.section.exclude_from_loading or not self.section.load_strict
        if not left_out and not any(key.startswith("optimizer.") for key in source.manifest.tensors):
            key, rule = "checkpoint.initial_load_model_only", f"{source.path} holds a model only"
            raise ConfigError(self.run.config.fault(key, rule, "set it to true"))

    def load_from(self, source: Verified, model_only: bool) -> Progress:
        """Take over the state of a checkpoint, or only its weights."""
        section, exclude = self.section, self.section.exclude_from_loading
        tensors = self.tensors(model_only=model_only)
        state = self.checkpointer.load(source, tensors, exclude, strict=section.load_strict, cast=model_only)
        self.imported = state.get(STATE, {}).get("config")
        self.note_changes(source, state)
        if model_only:
            return Progress()
        if missing := {"train_state", "dataloader"}.difference(state, exclude):
            where = f"{source.path}/train_state.json"
            raise ConfigError(f"{where}: lacks {', '.join(sorted(missing))}; use another checkpoint")
        progress = Progress()
        if "train_state" in state:
            progress = Progress(source.manifest.step, state["train_state"]["tokens_seen"])
            self.guard.restore(state.get("guard", self.guard.state()))
        if "dataloader" in state:
            saved = DataState.from_json(json.dumps(state["dataloader"]))
            self.loader.resume(saved, progress.steps_done, self.run.config.fault)
        else:
            self.loader.begin_at(progress.steps_done)
        return progress

    def note_changes(self, source: Verified, state: Mapping[str, Any]) -> None:
        """Say where the config, which wins, differs from what the checkpoint was saved with."""
        saved = {key: state.get(key, {}) for key in ("optimizer", "lr_scheduler")}
        saved["model.args"] = source.manifest.model.get("args", {})
        now = {**settings_of(self.run.config), "model.args": dataclasses.asdict(self.run.args)}
        for section, before in saved.items():
            for key, value in before.items():
                here = json.loads(json.dumps(now[section].get(key)))  # as it would be saved
                if here != value:
                    before_it = f"the checkpoint has {literal(value)}"
                    self.say(f"{section}.{key} = {literal(here)}: {before_it}; the config wins")


def settings_of(config: Config) -> dict[str, dict[str, Any]]:
    """Return what updates are a function of beside the state; it is saved, but the config wins."""
    schedule = config.lr_scheduler.model_dump()
    total_steps = schedule["total_steps"] or config.training.steps
    # How an update is computed is no part of what it is.
    left_out = {"implementation", "early_step_in_backward"}
    return {
        "optimizer": config.optimizer.model_dump(exclude=left_out),
        "lr_scheduler": {**schedule, "total_steps": total_steps},
    }


def export_step(run: Run, step: int, say: Callable[[str], None]) -> None:
    """Write a saved step in Hugging Face's form too; every rank must call it."""
    begin, path = time.perf_counter(), hugging_face_folder(run, step)
    save_folder(step_folder(run.checkpoint_folder, step), path)
    say(f"Wrote {path} in {time.perf_counter() - begin:.1f} s")


def hugging_face_folder(run: Run, step: int) -> Path:
    """Where `checkpoint.last_save_in_hf` writes a step."""
    return run.folder / "hugging_face" / f"step-{step}"


def finish_export(run: Run, step: int) -> None:
    """Write what a run that ended between its last save and the export after it has left out; rank 0."""
    if run.config.checkpoint.last_save_in_hf and not hugging_face_folder(run, step).is_dir():
        export_step(run, step, print)


def completed_step(run: Run) -> int | None:
    """Return the step that the run would resume from, where nothing is left to do after it; else None."""
    section = run.config.checkpoint
    if not section.enable or "train_state" in section.exclude_from_loading:
        return None
    step = section.load_step
    if step < 0:
        step = max(step_folders(run.checkpoint_folder), default=0)
    path = step_folder(run.checkpoint_folder, step)
    if step < run.config.training.steps and not _ended_with_its_data(run.config, path):
        return None
    return None if verify(path, hashes=False) else step


def _ended_with_its_data(config: Config, path: Path) -> bool:
    """Whether the run that saved a step ended there because its data did, and kept nothing to go on with."""
    if config.data.repeat or not config.checkpoint.last_save_model_only:
        return False
    try:
        return json.loads((path / TRAIN_STATE).read_bytes())["train_state"]["data_used_up"] is True
    except (OSError, ValueError, KeyError, TypeError):
        return False

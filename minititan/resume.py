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
from minititan.checkpoint.folder import committed_steps, step_folder
from minititan.config import Config, ConfigError
from minititan.data import DataState, TrainLoader
from minititan.distributed import Distributed
from minititan.guard import Guard
from minititan.hugging_face.exports import STATE, kept_state
from minititan.hugging_face.mesh import load_folder, save_folder
from minititan.optimizer import GroupedOptimizer, optimizer_tensors
from minititan.run import Run


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
            run.checkpoint_folder, keep_latest_k=self.section.keep_latest_k, rank=place.rank, say=say
        )

    def due(self, step: int, last_step: int) -> bool:
        """Whether this step of a run that ends with `last_step` is to be saved."""
        section = self.section
        if not section.enable or section.load_only:
            return False
        first = step == 1 and section.enable_first_step_checkpoint
        return first or step % section.interval == 0 or step == last_step

    def tensors(self, *, model_only: bool = False) -> dict[str, Tensor]:
        """Return the live tensors of a checkpoint by name."""
        model = {f"model.{name}": parameter.detach() for name, parameter in self.parameters.items()}
        if model_only:
            return model
        state = optimizer_tensors(self.optimizer, self.parameters)
        return model | {f"optimizer.{name}": tensor for name, tensor in state.items()}

    def exported_tensors(self) -> dict[str, Tensor]:
        """Return the weights in the type for a last save of weights only."""
        dtype = getattr(torch, self.section.export_dtype)
        return {name: tensor.to(dtype) for name, tensor in self.tensors(model_only=True).items()}

    def export(self, step: int) -> None:
        """Write a saved step in Hugging Face's form too."""
        run, begin = self.run, time.perf_counter()
        assets = run.config.model.hf_assets_path
        path = run.folder / "hugging_face" / f"step-{step}"
        save_folder(
            step_folder(run.checkpoint_folder, step), path, Path(assets).expanduser() if assets else None
        )
        self.say(f"Wrote {path} in {time.perf_counter() - begin:.1f} s")

    def save(self, progress: Progress, last_step: int) -> None:
        run, step = self.run, progress.steps_done
        last = step == last_step
        weights_only = last and self.section.last_save_model_only
        assets = run.config.model.hf_assets_path
        state = {
            "train_state": {"tokens_seen": progress.tokens_seen},
            "guard": self.guard.state(),
            "dataloader": dataclasses.asdict(self.loader.state()),
            "lr_scheduler": schedule_of(run.config),
            STATE: kept_state(self.imported, assets, step_folder(run.checkpoint_folder, step), run.folder),
        }
        model = run.config.model
        begin = time.perf_counter()
        self.checkpointer.save(
            step,
            self.exported_tensors() if weights_only else self.tensors(),
            state,
            model={"name": model.name, "flavor": model.flavor, "args": dataclasses.asdict(run.args)},
            layout=dataclasses.asdict(run.layout),
        )
        self.say(f"Saved step {step} in {time.perf_counter() - begin:.1f} s")
        if last and self.section.last_save_in_hf:
            self.export(step)

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
        if not section.initial_load_path:
            return Progress()
        path = Path(section.initial_load_path).expanduser()
        if section.initial_load_in_hf:
            progress = self.load_hugging_face(path)
        else:
            progress = self.load_from(checkpointer.verified(path), section.initial_load_model_only)
        self.say(f"Started from {section.initial_load_path}, at step {progress.steps_done}")
        return progress

    def load_hugging_face(self, path: Path) -> Progress:
        """Take the weights from a folder in Hugging Face's form."""
        spec, args = self.run.spec, self.run.args
        assert spec.hugging_face is not None, "checked at the start of the run"
        with torch.device("meta"):
            model = spec.build(args)
        self.imported = load_folder(path, spec.hugging_face, model, self.parameters, args, self.say)
        return Progress()

    def load_from(self, source: Verified, model_only: bool) -> Progress:
        """Take over the state of a checkpoint, or only its weights."""
        exclude = self.section.exclude_from_loading
        state = self.checkpointer.load(source, self.tensors(model_only=model_only), exclude, cast=model_only)
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
            self.loader.resume(DataState.from_json(json.dumps(state["dataloader"])), self.run.config.fault)
        return progress

    def note_changes(self, source: Verified, state: Mapping[str, Any]) -> None:
        """Say where the config, which wins, differs from what the checkpoint was saved with."""
        pairs = {
            "lr_scheduler": (schedule_of(self.run.config), state.get("lr_scheduler", {})),
            "model.args": (dataclasses.asdict(self.run.args), source.manifest.model.get("args", {})),
        }
        for section, (now, before) in pairs.items():
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

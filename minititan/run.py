"""What is known of a run before any process group or file exists, and the check that finds it."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from minititan import data, registry
from minititan.checkpoint.agreement import RanksFailedError, first_rank
from minititan.checkpoint.folder import check_checkpoint, check_step, check_writable, committed_steps
from minititan.config import Config, ConfigError, Layout, validate
from minititan.config.stages import PP, stage_faults, stages_of
from minititan.hugging_face.mesh import check_folder
from minititan.models.hugging_face import HuggingFaceForm
from minititan.optimizer import ParamGroup, rules_of
from minititan.parallelisms.context_parallel import seam_faults
from minititan.parallelisms.expert_parallel import experts_faults
from minititan.parallelisms.fsdp import uneven_faults
from minititan.parallelisms.stages import stage_fault
from minititan.parallelisms.tensor_parallel import plan_faults
from minititan.run_status import RunStatus
from minititan.sinks import check_wandb


@dataclass(frozen=True)
class Run:
    """A checked run: its config, and what follows from it."""

    config: Config
    spec: registry.ModelSpec
    args: Any  # the model's, with overrides and vocabulary
    model: Any  # plain and whole, on the meta device: to look at
    tokenizer: data.Tokenizer
    layout: Layout

    @property
    def folder(self) -> Path:
        return folder_of(self.config)

    @property
    def checkpoint_folder(self) -> Path:
        return checkpoint_folder_of(self.config)

    @property
    def locked_folders(self) -> dict[str, Path]:
        """The folders that only one run may write at a time, each under the key that sets it."""
        folders, checkpoints = {"job.dump_folder": self.folder}, self.checkpoint_folder
        section = self.config.checkpoint
        saves = section.enable and not section.load_only
        if saves and checkpoints.resolve() != self.folder.resolve():
            folders["checkpoint.folder"] = checkpoints  # it can be that of a run elsewhere
        return folders


def folder_of(config: Config) -> Path:
    return Path(config.job.dump_folder).expanduser()


def checkpoint_folder_of(config: Config) -> Path:
    return folder_of(config) / config.checkpoint.folder


def initial_load_path(config: Config) -> Path | None:
    """Return what a run without a checkpoint of its own starts from."""
    section = config.checkpoint
    path = section.initial_load_path
    if path is None and section.initial_load_in_hf:
        path = config.model.hf_assets_path
    return Path(path).expanduser() if path else None


def check_model(config: Config, spec: registry.ModelSpec, args: Any) -> nn.Module:
    """Return the model on the meta device; raise ConfigError where it does not keep the registry's contract,
    or its plan misses a part.
    """
    model = spec.on_meta(args)
    faults = [config.fault("model.name", rule) for rule in registry.model_faults(model)]
    plan = spec.plan_of(args)
    if config.parallelism.tensor_parallel_degree > 1 and plan is not None:
        rules = plan_faults(model, plan)
        way_out = f"mend the plan of the model {config.model.name}, or use 1"
        faults += [config.fault("parallelism.tensor_parallel_degree", rule, way_out) for rule in rules]
    if config.parallelism.context_parallel_degree > 1 and not faults:
        way_out = "docs/models.md says what it takes, or use 1"
        rules = seam_faults(model)
        faults += [config.fault("parallelism.context_parallel_degree", rule, way_out) for rule in rules]
    if faults:
        raise ConfigError(*faults)
    return model


def rule_settings(config: Config) -> dict[str, Any]:
    """Return what `rules_of` makes the rules of parameters from."""
    section = config.optimizer
    return {
        "name": section.name,
        "lr": section.lr,
        "weight_decay": section.weight_decay,
        "no_decay": section.no_decay,
        "param_groups": [ParamGroup(**group.model_dump()) for group in section.param_groups],
    }


def check_shards(config: Config, plan: Mapping[str, str] | None, model: nn.Module, layout: Layout) -> None:
    """Raise ConfigError where parameters cannot be sharded as the layout has it."""
    if layout.tp > 1 and plan is not None:
        rules = uneven_faults(model, plan, layout.tp, layout.dp_shard * layout.cp)
        if layout.ep == 1 or layout.etp > 1:
            rules += experts_faults(model, layout.tp)
        way_out = f"choose sizes that {layout.tp} divides, or another degree"
        if rules:
            key = "parallelism.tensor_parallel_degree"
            raise ConfigError(*(config.fault(key, rule, way_out) for rule in rules))


def stages_of_model(config: Config, model: Any) -> list[list[str]]:
    """Return the names of the modules of each stage of the pipeline."""
    return stages_of(config, *_modules(model))


def _modules(model: Any) -> tuple[list[str], list[str]]:
    """Return the names of the model's layers, and of its modules beside those that every model has."""
    known = ("embed_tokens", "layers", "norm", "lm_head")
    return list(model.layers), [name for name, _ in model.named_children() if name not in known]


def check_stages(config: Config, spec: registry.ModelSpec, args: Any, model: Any) -> None:
    """Raise ConfigError where the model cannot be cut into the stages that the config asks for."""
    if config.parallelism.pipeline_parallel_degree == 1:
        return
    faults = stage_faults(config, *_modules(model))
    part = spec.on_meta(args)
    if fault := stage_fault(part, model.lm_head.in_features):
        rule = f'the model "{config.model.name}" cannot be cut into stages: {fault}'
        faults.append(config.fault(PP, rule, "mend its forward, or use 1"))
    if faults:
        raise ConfigError(*faults)


def check_names(config: Config, model: nn.Module) -> None:
    """Raise ConfigError where a key names something outside of the config that is not there."""
    rules_of(dict(model.named_parameters()), **rule_settings(config))
    if config.profiling.enable_memory_snapshot and not torch.cuda.is_available():
        rule = "needs a CUDA device"
        raise ConfigError(config.fault("profiling.enable_memory_snapshot", rule, "set it to false on a CPU"))
    if config.metrics.enable_wandb:
        check_wandb()
    name = config.compile.backend
    if config.compile.enable and name not in torch.compiler.list_backends(exclude_tags=()):
        way_out = f"there are: {', '.join(torch.compiler.list_backends())}"
        raise ConfigError(config.fault("compile.backend", "no such backend", way_out))


def check_folders(config: Config, form: HuggingFaceForm | None, model: nn.Module) -> None:
    """Raise ConfigError where a folder cannot be written, or a checkpoint to start from is not there."""
    check_writable("job.dump_folder", folder_of(config))
    section, folder = config.checkpoint, checkpoint_folder_of(config)
    if section.enable and not section.load_only:
        elements = sum(parameter.numel() for parameter in model.parameters())
        with_moments = 3 * elements * getattr(torch, config.training.dtype).itemsize
        check_writable("checkpoint.folder", folder, with_moments)
    if section.enable and section.load_step >= 0:
        check_step(folder, section.load_step)
    elif section.enable and (path := initial_load_path(config)) and not committed_steps(folder):
        if not section.initial_load_in_hf:
            check_checkpoint(path, f"checkpoint.initial_load_path = {json.dumps(section.initial_load_path)}")
        elif form is not None:
            check_folder(path, form, model)


def check_hugging_face(config: Config, form: HuggingFaceForm | None) -> None:
    """Raise ConfigError where the config asks for Hugging Face's form of a model that has none."""
    section, faults = config.checkpoint, []
    for key in ("initial_load_in_hf", "last_save_in_hf"):
        if section.enable and getattr(section, key) and form is None:
            rule = f"the family {config.model.name} has no form of Hugging Face for this model"
            faults.append(
                config.fault(f"checkpoint.{key}", rule, "give its ModelSpec one, or set it to false")
            )
    if faults:
        raise ConfigError(*faults)


@contextmanager
def collected(faults: list[str]) -> Iterator[None]:
    """Add the faults that the block raises to those of others, so that all are reported at once."""
    try:
        yield
    except ConfigError as error:
        faults += error.faults


def sources_of(config: Config, name: str) -> dict[str, tuple[str, str, str | None]]:
    """Return what section `name`, `training` or `validation`, reads: by source, the key that names it, its
    dataset and its path. Without a mixture the one source is called "".
    """
    if name == "validation" and config.validation.holdout:
        name = "training"
    section = getattr(config, name)
    if name == "training" and config.data.sources:
        return {s.name: (f"data.sources.{s.name}", s.dataset or "", s.path) for s in config.data.sources}
    return {"": (name, section.dataset, section.dataset_path)}


def source_fault(config: Config) -> data.Fault:
    """Return `config.fault` that takes keys such as `data.sources.NAME.path`, inside the list, too."""

    def fault(key: str, rule: str, way_out: str = "") -> str:
        if not key.startswith("data.sources."):
            return config.fault(key, rule, way_out)
        return config.fault("data.sources", f"{key.split('.')[2]}: {rule}", way_out)

    return fault


def check(config: Config, world_size: int) -> Run:
    """Return the run that `config` describes on `world_size` processes; raises ConfigError with what is
    wrong.
    """
    registry.load_user_models(config.experimental.custom_import, config.fault)
    tokenizer = data.build_tokenizer(config.model.hf_assets_path, config.fault)
    model = config.model
    spec, args = registry.resolve(model.name, model.flavor, model.args, tokenizer.vocab_size, config.fault)
    built, form = check_model(config, spec, args), spec.form_of(args)
    faults: list[str] = []
    layout = None
    with collected(faults):
        layout = validate(
            config,
            args,
            world_size,
            tensor_parallel_plan=spec.tensor_parallel_plan is not None,
            vocab_size=tokenizer.vocab_size,
        )
        check_shards(config, spec.plan_of(args), built, layout)
    with collected(faults):
        check_stages(config, spec, args, built)
    for name in ("training", "validation") if config.validation.enable else ("training",):
        for key, dataset, path in sources_of(config, name).values():
            with collected(faults):
                data.check_source(dataset, path, section=key, fault=source_fault(config))
    with collected(faults):
        check_names(config, built)
    with collected(faults):
        check_hugging_face(config, form)
    with collected(faults):
        check_folders(config, form, built)
    if faults or layout is None:
        raise ConfigError(*faults)
    return Run(config, spec, args, built, tokenizer, layout)


def take_folders(run: Run, status: RunStatus) -> None:
    """Make this the only run in its folders; raise ConfigError on all ranks where another is in them."""
    try:
        first_rank(lambda: status.take(run.locked_folders))
    except RanksFailedError as failed:
        raise failed.explained(f"{run.folder}: could not be locked", "set another job.dump_folder") from None
    status.join(run.folder)

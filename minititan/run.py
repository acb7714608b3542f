"""What is known of a run before any process group or file exists, and the check that finds it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minititan import data, registry
from minititan.checkpoint import check_writable
from minititan.config import Config, Layout, validate


@dataclass(frozen=True)
class Run:
    """A checked run: its config, and what follows from it."""

    config: Config
    spec: registry.ModelSpec
    args: Any  # the model's, with overrides and vocabulary
    tokenizer: data.Tokenizer
    layout: Layout

    @property
    def folder(self) -> Path:
        return Path(self.config.job.dump_folder)

    @property
    def checkpoint_folder(self) -> Path:
        return self.folder / self.config.checkpoint.folder


def check(config: Config, world_size: int) -> Run:
    """Return the run that `config` describes on `world_size` processes; raises ConfigError with what is
    wrong.
    """
    registry.load_user_models(config.experimental.custom_import, config.fault)
    tokenizer = data.build_tokenizer(config.model.hf_assets_path, config.fault)
    model = config.model
    spec, args = registry.resolve(model.name, model.flavor, model.args, tokenizer.vocab_size, config.fault)
    layout = validate(
        config,
        args,
        world_size,
        tensor_parallel_plan=spec.tensor_parallel_plan is not None,
        vocab_size=tokenizer.vocab_size,
    )
    sections = {"training": config.training} | (
        {"validation": config.validation} if config.validation.enable else {}
    )
    for name, section in sections.items():
        data.check_source(section.dataset, section.dataset_path, section=name, fault=config.fault)
    run = Run(config, spec, args, tokenizer, layout)
    check_writable("job.dump_folder", run.folder)
    return run

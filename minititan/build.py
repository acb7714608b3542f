"""The parts of a run, made from its config: model, optimizer, tokens and loaders, logs."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from minititan import data
from minititan.config import Config
from minititan.config.stages import schedule_of
from minititan.distributed import Distributed, computes_bfloat16, rank_from_env
from minititan.guard import Guard
from minititan.init import init_parameters, materialize
from minititan.loss import VocabularyShard, install_loss
from minititan.loss_scale import LossScale
from minititan.metrics import MetricsLogger
from minititan.models.moe import Router
from minititan.optimizer import GroupedOptimizer, build_optimizer
from minititan.parallelisms import Meshes, parallelize
from minititan.parallelisms.context_parallel import Batch, build_split
from minititan.parallelisms.stages import keep_modules
from minititan.parallelisms.tensor_parallel import first_row
from minititan.profiling import Profiler
from minititan.run import Run, rule_settings, source_fault, sources_of, stages_of_model

if TYPE_CHECKING:
    from minititan.parallelisms.pipeline import Pipeline


def stages_of(run: Run, meshes: Meshes) -> tuple[list[list[str]], list[int]]:
    """Return the modules of each stage of the pipeline, and the rank on `meshes.pp` that has it."""
    schedule = schedule_of(run.config)
    assert schedule is not None and meshes.pp is not None, "the config check finds the schedule"
    stages = stages_of_model(run.config, run.model)
    return stages, schedule.ranks_of(len(stages), meshes.pp.size())


def parts_of(run: Run, meshes: Meshes, device: torch.device) -> dict[int, Any]:
    """Return this rank's parts of the model by their stage: the whole one where there is no pipeline.

    Their parallelisms are applied, their parameters at their initial values. Every rank must call it.
    """
    if meshes.pp is None:
        return {0: model_of(run, meshes, device)}
    stages, ranks = stages_of(run, meshes)
    own = [stage for stage, rank in enumerate(ranks) if rank == meshes.pp.get_local_rank()]
    parts = {stage: model_of(run, meshes, device, stages[stage]) for stage in own}
    for part in parts.values():
        part.routing = getattr(next(iter(parts.values())), "routing", None)
    return parts


def parameters_of(run: Run, parts: Mapping[int, Any]) -> dict[str, nn.Parameter]:
    """Return the parameters of this rank's parts by name, without the copy of a tied embedding."""
    names = dict(run.model.named_parameters())
    return {
        name: parameter
        for part in parts.values()
        for name, parameter in part.named_parameters()
        if name in names
    }


def pipeline_of(
    run: Run, meshes: Meshes, parts: Mapping[int, Any], device: torch.device
) -> "Pipeline | None":
    """Return how batches go through the stages; None where there is no pipeline."""
    if meshes.pp is None:
        return None
    from minititan.parallelisms.pipeline import Pipeline  # late: torch's schedules load its compiler, 0.6 s

    section, training, (_, ranks) = run.config.parallelism, run.config.training, stages_of(run, meshes)
    size = section.pipeline_parallel_microbatch_size
    split = meshes.tp is not None and not section.disable_sequence_parallel
    schedule = schedule_of(run.config)
    assert schedule is not None
    return Pipeline(
        parts,
        ranks,
        meshes.pp,
        schedule.name,
        micro_batches=training.local_batch_size // size,
        micro_batch_size=size,
        seq_len=training.seq_len // run.layout.cp,
        shards=run.layout.tp if split else 1,
        width=run.model.lm_head.in_features,
        dtype=compute_dtype(run.config, device),
        device=device,
        tied="lm_head.weight" not in dict(run.model.named_parameters()),
    )


def model_of(run: Run, meshes: Meshes, device: torch.device, modules: Sequence[str] | None = None) -> Any:
    """Return the model, its parallelisms applied, its parameters at their initial values. Every rank.

    `modules`: those that it keeps, as a stage of a pipeline; None: all.
    """
    config = run.config
    model: Any = run.spec.on_meta(run.args).to(getattr(torch, config.training.dtype))
    if modules is not None:
        keep_modules(model, modules)
    compiled = config.compile.enable and "loss" in config.compile.components
    shard = None
    if meshes.tp is not None and model.lm_head is not None:
        shard = vocabulary_shard(model, meshes.tp, parallel=not config.parallelism.disable_loss_parallel)
    for module in model.modules():
        if isinstance(module, Router):
            module.forced = config.debug.moe_force_load_balance
    if model.lm_head is not None:
        install_loss(model.lm_head, shard, config.compile.backend if compiled else None)
    parallelize(model, run.spec.plan_of(run.args), meshes, config, compute_dtype(config, device))
    materialize(model, torch.device("cpu") if config.training.enable_cpu_offload else device)
    init_parameters(
        dict(model.named_parameters()),
        lambda name, tensor, generator: run.spec.init_(name, tensor, generator, run.args),
        config.debug.seed or 0,
    )
    return model


def vocabulary_shard(model: Any, tp: DeviceMesh, *, parallel: bool) -> VocabularyShard:
    """Return this rank's part of the vocabulary."""
    vocab_size = model.lm_head.out_features
    rows, first = -(-vocab_size // tp.size()), first_row(vocab_size, tp)
    return VocabularyShard(tp.get_group().group_name, rows, first, parallel)


def own_part_of(run: Run, meshes: Meshes) -> Callable[[Batch], Batch]:
    """Return what takes this rank's part of each sequence of a batch."""
    if meshes.cp is None:
        return lambda batch: batch
    return build_split(meshes.cp, run.config.parallelism.context_parallel_load_balancer).batch


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    """Return the dtype of forward and backward; "auto": bfloat16 where the device has instructions for it."""
    name = config.training.mixed_precision_param
    if name != "auto":
        return getattr(torch, name)
    if config.training.dtype == "float32" and computes_bfloat16(device):
        return torch.bfloat16
    return getattr(torch, config.training.dtype)


def guard_of(config: Config, device: torch.device, say: Callable[[str], None]) -> Guard:
    debug, training = config.debug, config.training
    scaled = training.mixed_precision_param == "float16"
    # Of Adam's forms the fused one alone can leave an update out on the device.
    gated = config.optimizer.implementation == "fused" and not training.enable_cpu_offload
    return Guard(
        debug.nan_policy,
        debug.max_skipped_in_a_row,
        debug.loss_spike_factor,
        debug.loss_spike_window,
        config.fault,
        say,
        LossScale(training.loss_scale_init, training.loss_scale_growth_interval) if scaled else None,
        late=device.type == "cuda" and gated and not scaled,
    )


def optimizer_of(run: Run, parameters: dict[str, nn.Parameter], device: torch.device) -> GroupedOptimizer:
    config = run.config
    section, dtype = config.optimizer, compute_dtype(config, device)
    return build_optimizer(
        parameters,
        whole=dict(run.model.named_parameters()),
        **rule_settings(config),
        betas=(section.beta1, section.beta2),
        eps=section.eps,
        implementation=section.implementation,
        state_dtype=getattr(torch, section.state_dtype) if section.state_dtype else None,
        muon_momentum=section.muon_momentum,
        muon_ns_steps=section.muon_ns_steps,
        muon_adjust_lr=section.muon_adjust_lr,
        muon_dtype=torch.bfloat16 if dtype == torch.float16 else dtype,
    )


def samples_of(run: Run, name: str) -> dict[str, data.Samples]:
    """Return the samples of section `name`, `training` or `validation`, by source, prepared where need be."""
    config = run.config
    section, options, validation = getattr(config, name), config.data, config.validation
    cache, say = data.resolve_cache(options.cache_folder, config.fault), _say_on_first_rank
    found = {}
    for source, (key, dataset, path) in sources_of(config, name).items():
        whole = data.open_tokens(
            dataset,
            path,
            "validation" if name == "validation" and not validation.holdout else "train",
            run.tokenizer,
            cache_folder=options.cache_folder,
            text_key=options.text_key,
            txt_lines=options.txt_lines,
            add_bos=options.add_bos,
            add_eos=options.add_eos,
            on_bad_record=options.on_bad_record,
            npy_dtype=options.npy_dtype,
            vocab_size=getattr(run.args, "vocab_size", None),
            section=key,
            fault=source_fault(config),
            say=_say,
            say_waiting=say,
        )
        part = None
        if validation.enable and validation.holdout:
            part = data.open_part(whole, str(validation.holdout), name == "validation", cache, say)
        found[source] = data.build_samples(
            part or whole,
            options.samples,
            section.seq_len,
            cache=cache,
            document_mask=options.document_mask,
            predict_first_token=options.predict_first_token,
            say=say,
        )
    return found


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")  # one write, so that lines of several ranks are not mixed
    sys.stdout.flush()


def _say_on_first_rank(line: str) -> None:
    if rank_from_env() == 0:
        _say(line)


def train_loader_of(run: Run, meshes: Meshes) -> data.TrainLoader:
    section, options = run.config.training, run.config.data
    weights = {source.name: source.weight for source in options.sources} or {"": 1.0}
    changes = [(1, weights), *((stage.step, stage.weights) for stage in options.stages)]
    return data.build_train_loader(
        samples_of(run, "training"),
        kind=options.samples,
        seq_len=section.seq_len,
        seed=run.config.debug.seed or 0,
        batch_sizes=run.layout.batch_sizes,
        micro_batch_size=section.local_batch_size,
        dp_rank=meshes.dp_rank,
        dp_degree=run.layout.dp,
        stages=[(step, tuple(str(of[name]) for name in weights)) for step, of in changes],
        document_mask=options.document_mask,
        auto_global_batch_size=section.global_batch_size == -1,
        **section.dataloader.model_dump(),
    )


def validation_loader_of(run: Run, meshes: Meshes) -> Any:
    """Return batches that can be gone through again and again; None where the run does not validate."""
    section = run.config.validation
    if not section.enable:
        return None
    return data.build_validation_loader(
        list(samples_of(run, "validation").values()),
        seq_len=section.seq_len,
        batch_size=section.local_batch_size,
        num_samples=-1 if section.steps < 0 else section.steps * section.local_batch_size,
        dp_rank=meshes.dp_rank,
        dp_degree=run.layout.dp,
        document_mask=run.config.data.document_mask,
        **section.dataloader.model_dump(),
    )


def metrics_of(run: Run, place: Distributed, *, step: int, last_step: int, tokens_seen: int) -> MetricsLogger:
    config, flops = run.config, run.spec.flops_per_token
    section = config.metrics
    return MetricsLogger(
        run.folder,
        rank=place.rank,
        world_size=place.world_size,
        device=place.device,
        start_step=step,
        start_tokens=tokens_seen,
        total_steps=last_step,
        log_freq=section.log_freq,
        flops_per_token=flops(run.args, config.training.seq_len) if flops else None,
        peak_tflops=section.peak_tflops,
        enable_tensorboard=section.enable_tensorboard,
        save_tb_folder=section.save_tb_folder,
        save_for_all_ranks=section.save_for_all_ranks,
        enable_wandb=section.enable_wandb,
        run_config=config.model_dump(),
        disable_color_printing=section.disable_color_printing,
    )


def profiler_of(run: Run, place: Distributed, metrics: MetricsLogger, step: int) -> Profiler:
    section = run.config.profiling

    def folder(name: str, enabled: bool) -> Path | None:
        return run.folder / name if enabled else None

    return Profiler(
        rank=place.rank,
        device=place.device,
        start_step=step,
        freq=section.profile_freq,
        warmup=section.profiler_warmup,
        active=section.profiler_active,
        traces=folder(section.save_traces_folder, section.enable_profiling),
        snapshots=folder(section.save_memory_snapshot_folder, section.enable_memory_snapshot),
        say=metrics.say,
    )

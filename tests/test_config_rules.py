"""Values out of range and features that are not there are refused, but only where a feature is on."""

from pathlib import Path

import pytest

from minititan.config import ConfigError, load
from minititan.config.fields import Range, marks
from minititan.config.rules import FEATURES, REFUSALS
from minititan.config.schema import all_keys


def faults(folder: Path, *words: str) -> tuple[str, ...]:
    """The faults of an empty file with these overrides, without "command line: "."""
    file = folder / "run.toml"
    file.write_text("")
    try:
        load(["--job.config_file", str(file), *(f"--{word}" for word in words)])
    except ConfigError as error:
        return tuple(fault.removeprefix("command line: ") for fault in error.faults)
    return ()


# Words that are fine; the key that breaks; values out of range; values at its ends.
RANGES = [
    ("", "job.dump_folder", ["", " "], ["a"]),
    ("profiling.enable_profiling", "profiling.profile_freq", [0, -1], [4]),
    ("profiling.enable_memory_snapshot", "profiling.profile_freq", [0], [1]),
    ("profiling.enable_profiling", "profiling.profiler_active", [0], [1]),
    ("profiling.enable_profiling", "profiling.profiler_warmup", [-1], [0]),
    ("", "metrics.log_freq", [0], [1]),
    ("", "metrics.peak_tflops", [0, -1], [1e-3]),
    ("", "model.name", [""], ["x"]),
    ("", "optimizer.lr", [-1e-9], [0, 1]),
    ("", "optimizer.beta1", [-0.1, 1], [0, 0.999]),
    ("", "optimizer.beta2", [-0.1, 1], [0, 0.999]),
    ("", "optimizer.eps", [-1], [0]),
    ("", "optimizer.weight_decay", [-1], [0]),
    ("", "lr_scheduler.warmup_steps", [-1], [0]),
    ("", "lr_scheduler.total_steps", [0], [10000]),
    ("", "lr_scheduler.decay_ratio", [-0.1, 1.1], [0, 1]),
    ("", "lr_scheduler.min_lr_factor", [-0.1, 1.1], [0, 1]),
    ("", "training.local_batch_size", [0, 2**63], [1, 2**63 - 1]),
    ("", "training.global_batch_size", [0, -2], [-1, 1]),
    ("", "training.seq_len", [0], [1]),
    ("", "training.max_norm", [-1], [0, 1e-9]),
    ("", "training.steps", [0, 2**63], [1]),
    ("", "training.gc_freq", [0], [1]),
    ("", "training.dataloader.num_workers", [-1, 1025], [0, 1024]),
    ("training.dataloader.num_workers=1", "training.dataloader.prefetch_factor", [0, 1025], [1]),
    ("", "parallelism.data_parallel_replicate_degree", [0, -1], [1]),
    ("", "parallelism.data_parallel_shard_degree", [0, -2], [-1, 1]),
    ("", "parallelism.tensor_parallel_degree", [0, -1], [1]),
    ("", "parallelism.pipeline_parallel_degree", [0, -1], [1]),
    ("", "parallelism.context_parallel_degree", [0, -1], [1]),
    ("", "parallelism.expert_parallel_degree", [0, -1], [1]),
    ("checkpoint.enable", "checkpoint.interval", [0], [1]),
    ("checkpoint.enable", "checkpoint.folder", [""], ["x"]),
    ("checkpoint.enable", "checkpoint.keep_latest_k", [-1], [0, 1]),
    ("checkpoint.enable", "checkpoint.load_step", [-2], [-1, 0]),
    ("checkpoint.enable", "checkpoint.interval_minutes", [-0.5], [0, 0.5]),
    ("checkpoint.enable", "checkpoint.save_failures_allowed", [-1], [0, 1]),
    ("checkpoint.enable", "checkpoint.keep_every_n_steps", [-1], [0, 1]),
    ("checkpoint.enable validation.enable", "checkpoint.keep_best_k", [-1], [0, 1]),
    (
        "checkpoint.enable",
        "checkpoint.exclude_from_loading",
        ["weights"],
        ["", "model,optimizer,lr_scheduler"],
    ),
    ("", "activation_checkpoint.selective_ac_option", ["0", "ops", "-1", "1.5"], ["op", "1", "3"]),
    ("", "activation_checkpoint.determinism_check", ["maybe"], ["default", "none"]),
    ("compile.enable", "compile.components", ["model,losses"], ["model", "loss"]),
    ("compile.enable", "compile.backend", [""], ["eager", "anything"]),
    ("", "comm.init_timeout_seconds", [0, 10**7 + 1], [1, 10**7]),
    ("", "comm.train_timeout_seconds", [0, 10**7 + 1], [1, 10**7]),
    ("", "comm.trace_buf_size", [-1, 10**7 + 1], [0]),
    ("debug.nan_policy=skip", "debug.max_skipped_in_a_row", [0], [1]),
    ("", "debug.loss_spike_factor", [0, 1], [1.01]),
    ("debug.loss_spike_factor=2", "debug.loss_spike_window", [0], [1]),
    ("validation.enable", "validation.local_batch_size", [0], [1]),
    ("validation.enable", "validation.seq_len", [0], [1]),
    ("validation.enable", "validation.freq", [0], [1]),
    ("validation.enable", "validation.steps", [0, -2], [-1, 1]),
    ("validation.enable", "validation.dataloader.num_workers", [-1], [0]),
    ("", "debug.seed", [-1, 2**63], [0, 2**63 - 1]),
    ("", "data.text_key", [""], ["text"]),
]


@pytest.mark.parametrize("switch, key, wrong, right", RANGES)
def test_range(tmp_path: Path, switch: str, key: str, wrong: list, right: list) -> None:
    switches = switch.split()
    for value in wrong:
        found = faults(tmp_path, *switches, f"{key}={value}")
        assert len(found) == 1
        assert found[0].startswith(f"{key} = ")
        assert ": must " in found[0]
    for value in right:
        assert faults(tmp_path, *switches, f"{key}={value}") == ()


def test_every_number_has_a_range() -> None:
    numbers = {int, float, int | None, float | None}
    assert [
        key
        for key, field in all_keys().items()
        if field.annotation in numbers and not any(isinstance(mark, Range) for mark in marks(field))
    ] == []


def test_a_rule_names_its_range(tmp_path: Path) -> None:
    words = ("training.global_batch_size=0", "optimizer.beta1=1", "comm.trace_buf_size=-1", "debug.seed=-5")
    assert faults(tmp_path, *words) == (
        "optimizer.beta1 = 1.0: must be at least 0 and below 1",
        "training.global_batch_size = 0: must be at least 1, or -1",
        "comm.trace_buf_size = -1: must be at least 0 and at most 10000000",
        "debug.seed = -5: must be at least 0 and at most 2^63 - 1",
    )
    assert faults(tmp_path, f"training.steps={2**63}") == (f"training.steps = {2**63}: must fit in 64 bits",)
    assert faults(tmp_path, "checkpoint.enable", "checkpoint.exclude_from_loading=model,optimiser") == (
        'checkpoint.exclude_from_loading = ["model", "optimiser"]: must be one of "model", "optimizer", '
        '"lr_scheduler", "dataloader", "train_state"; nearest: "optimizer"',
    )


OFF = [
    "profiling.profile_freq=0",
    "training.dataloader.prefetch_factor=0",
    "parallelism.pipeline_parallel_microbatch_size=0",
    "parallelism.pipeline_parallel_schedule=none such",
    "parallelism.expert_tensor_parallel_degree=8",
    "parallelism.context_parallel_rotate_method=alltoall",
    "parallelism.context_parallel_load_balancer=x",
    "checkpoint.interval=0",
    "checkpoint.async_mode=async",
    "checkpoint.last_save_in_hf",
    "checkpoint.initial_load_in_hf",
    "checkpoint.create_seed_checkpoint",
    "checkpoint.export_dtype=bfloat16",
    "checkpoint.exclude_from_loading=x",
    "activation_checkpoint.memory_budget=7",
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns=x",
    "compile.components=x",
    "quantize.linear.float8.recipe_name=rowwise",
    "quantize.linear.mx.filter_fqns=x",
    "quantize.grouped_mm.float8.fqns=x",
    "memory_estimation.disable_fake_mode",
    "fault_tolerance.min_replica_size=0",
    "fault_tolerance.semi_sync_method=diloco",
    "validation.freq=0",
    "validation.seq_len=0",
]


@pytest.mark.parametrize("word", OFF)
def test_keys_of_a_feature_that_is_off_are_only_type_checked(tmp_path: Path, word: str) -> None:
    assert faults(tmp_path, word) == ()


def test_types_are_checked_all_the_same(tmp_path: Path) -> None:
    words = ("validation.freq=x", "quantize.linear.float8.recipe_name=x", "fault_tolerance.group_size=x")
    assert [fault.split(":")[0] for fault in faults(tmp_path, *words)] == [
        'quantize.linear.float8.recipe_name = "x"',
        'fault_tolerance.group_size = "x"',
        'validation.freq = "x"',
    ]


def test_recomputation_options_count_only_in_their_mode(tmp_path: Path) -> None:
    for mode in ("none", "full"):
        words = (f"activation_checkpoint.mode={mode}", "activation_checkpoint.selective_ac_option=x")
        assert faults(tmp_path, *words) == ()


# Each refused feature: the words that switch it on, and what the line says.
REFUSED = {
    "job.custom_config_module": (
        ["job.custom_config_module=a"],
        "extending the config by a module is not there yet",
    ),
    "experimental.custom_args_module": (
        ["experimental.custom_args_module=a"],
        "extending the config by a module is",
    ),
    "model.converters": (
        ["model.converters=quantize.linear.mx"],
        "linear layers in MX formats are not there yet",
    ),
    "optimizer.early_step_in_backward": (
        ["optimizer.early_step_in_backward"],
        "the optimizer step inside the",
    ),
    "training.gc_debug": (["training.gc_debug"], "debugging of the garbage collector is not there yet"),
    "parallelism.enable_async_tensor_parallel": (
        ["parallelism.enable_async_tensor_parallel"],
        "asynchronous tensor parallelism is not there yet",
    ),
    "parallelism.pipeline_parallel_schedule_csv": (
        ["parallelism.pipeline_parallel_degree=2", "parallelism.pipeline_parallel_schedule_csv=a.csv"],
        "a schedule from a file is not there yet; only unset so far",
    ),
    "parallelism.expert_parallel_comm_backend": (
        ["parallelism.expert_parallel_degree=2", "parallelism.expert_parallel_comm_backend=deepep"],
        'DeepEP is not there yet; only "standard" so far',
    ),
    "checkpoint.initial_load_in_hf_quantized": (
        ["checkpoint.enable", "checkpoint.initial_load_in_hf_quantized"],
        "quantised weights are not read; load a checkpoint in bfloat16",
    ),
    "checkpoint.create_seed_checkpoint": (
        ["checkpoint.enable", "checkpoint.create_seed_checkpoint"],
        "not needed: with one seed every layout starts from the same weights; leave it out",
    ),
    "activation_checkpoint.visualize_memory_budget_pareto": (
        [
            "activation_checkpoint.mode=memory_budget",
            "activation_checkpoint.visualize_memory_budget_pareto",
        ],
        "the curve of memory against time is not there yet; only false so far",
    ),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": (
        [
            "activation_checkpoint.selective_ac_option=op",
            "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns=x",
        ],
        "forced recomputation by module is not there yet",
    ),
    "comm.mode": (["comm.mode=fake_backend"], "training without real processes is not there yet"),
    "memory_estimation.enable": (["memory_estimation.enable"], "memory estimation is not there yet"),
    "fault_tolerance.enable": (["fault_tolerance.enable"], "fault tolerance by torchft is not there yet"),
}


def test_every_refusal_is_tried_here() -> None:
    assert {refusal.key for refusal in REFUSALS} == set(REFUSED)


@pytest.mark.parametrize("key", REFUSED)
def test_a_feature_that_is_not_there_is_named(tmp_path: Path, key: str) -> None:
    words, rule = REFUSED[key]
    found = faults(tmp_path, *words)
    assert len(found) == 1
    assert found[0].startswith(f"{key} = ")
    assert f": {rule}" in found[0]


def test_each_converter_is_refused_by_its_own_name(tmp_path: Path) -> None:
    words = "model.converters=float8,quantize.grouped_mm.mx"
    assert [fault.split(": ", 1)[1] for fault in faults(tmp_path, words)] == [
        'linear layers in float8 are not there yet; take "quantize.linear.float8" out',
        'experts in MX formats are not there yet; take "quantize.grouped_mm.mx" out',
    ]
    assert faults(tmp_path, "model.converters=float9")[0].startswith(
        'model.converters = ["float9"]: must be one of "quantize.linear.float8", '
    )


def test_keys_that_must_agree(tmp_path: Path) -> None:
    assert faults(tmp_path, "profiling.enable_profiling", "profiling.profile_freq=3") == (
        "profiling.profile_freq = 3: must be at least profiler_warmup + profiler_active (4)",
    )
    assert faults(tmp_path, "lr_scheduler.total_steps=9", "training.steps=10") == (
        "lr_scheduler.total_steps = 9: must be at least training.steps (10); raise it or leave it out",
    )
    assert faults(tmp_path, "lr_scheduler.total_steps=10", "training.steps=10") == ()
    assert faults(tmp_path, "checkpoint.enable", "checkpoint.keep_best_k=2") == (
        "checkpoint.keep_best_k = 2: the best checkpoints are those of lowest validation loss; "
        "set validation.enable, or 0",
    )
    budget, compiled = "activation_checkpoint.mode=memory_budget", "compile.enable"
    rule = 'activation_checkpoint.mode = "memory_budget": only compiled blocks keep to a memory budget'
    for uncompiled in ([], [compiled, "compile.components=loss"]):
        (fault,) = faults(tmp_path, budget, *uncompiled)
        assert fault.startswith(rule)
    assert faults(tmp_path, budget, compiled) == ()


def test_switches_and_refusals_name_real_keys() -> None:
    for feature in FEATURES:
        assert all(switch in all_keys() for switch in feature.switches)
        for prefix in feature.prefixes:
            assert any(key.startswith(prefix) for key in all_keys())
    assert all(refusal.key in all_keys() for refusal in REFUSALS)


TWO = 'data.sources=[{name = "a", path = "a.txt", weight = 3}, {name = "b", dataset = "stdlib"}]'
MIXTURES = [
    (('data.sources=[{name = "a", path = "x"}, {name = "a", path = "y"}]',), "each name must be there once"),
    (('data.sources=[{name = "a"}]',), "a must have a path or a dataset, not both"),
    (
        ('data.sources=[{name = "a", path = "x", dataset = "stdlib"}]',),
        "a must have a path or a dataset, not",
    ),
    (('data.sources=[{name = "a", path = "x", weight = 0}]',), "weights must be 0, or at least 1/4096 of"),
    (('data.sources=[{name = "a", path = "x", weight = -1}]',), "weight must be at least 0"),
    (
        (TWO, "data.stages=[{step = 5, weights = {a = 1, b = 0.0001}}]"),
        "weights must be 0, or at least 1/4096",
    ),
    ((TWO, "data.stages=[{step = 5, weights = {a = 1, c = 1}}]"), "must have a weight for each of a, b, and"),
    ((TWO, "data.stages=[{step = 1, weights = {a = 1, b = 1}}]"), "step must be at least 2"),
    (
        (TWO, "data.stages=[{step = 5, weights = {a = 1, b = 1}}, {step = 5, weights = {a = 2, b = 1}}]"),
        "steps must ascend",
    ),
    (
        ("validation.enable", "validation.dataset=stdlib", "validation.holdout=0.1"),
        "validation.holdout takes the validation set from the training data; leave one of the two out",
    ),
    ((TWO, "training.dataset_path=x"), "[[data.sources]] says what is read; leave one of the two out"),
    (("data.stages=[{step = 5, weights = {a = 1}}]",), "weights need [[data.sources]]"),
    (("training.global_batch_size_schedule=[{step = 5, size = 8}]",), "must be set, to the size before"),
    (("training.global_batch_size_schedule=[{step = 5, size = 0}]",), "size must be at least 1"),
    (("data.samples=pack", "data.predict_first_token=false"), 'needs data.samples = "window"'),
]


@pytest.mark.parametrize("words, rule", MIXTURES)
def test_a_mixture_that_cannot_be_is_refused(tmp_path: Path, words: tuple[str, ...], rule: str) -> None:
    (fault,) = faults(tmp_path, *words)
    assert f": {rule}" in fault


def test_a_mixture_is_taken(tmp_path: Path) -> None:
    stage = "data.stages=[{step = 5, weights = {a = 0, b = 1.0}}, {step = 6, weights = {a = 1, b = 2}}]"
    assert faults(tmp_path, TWO, stage) == ()


def test_files_of_hugging_face_hold_weights_only(tmp_path: Path) -> None:
    assert faults(tmp_path, "checkpoint.enable", "checkpoint.initial_load_in_hf") == (
        "checkpoint.initial_load_in_hf = true: needs checkpoint.initial_load_path, or "
        "model.hf_assets_path with weights; name the folder, or set it to false",
    )
    words = ("checkpoint.initial_load_path=x", "checkpoint.no_initial_load_model_only")
    assert faults(tmp_path, "checkpoint.enable", "checkpoint.initial_load_in_hf", *words) == (
        "checkpoint.initial_load_model_only = false: files in Hugging Face's form hold weights only; "
        "set it to true",
    )
    words = ("checkpoint.initial_load_path=x", "checkpoint.exclude_from_loading=model")
    assert faults(tmp_path, "checkpoint.enable", "checkpoint.initial_load_in_hf", *words) == (
        'checkpoint.exclude_from_loading = ["model"]: leaves out all that '
        'checkpoint.initial_load_in_hf loads; take "model" out',
    )
    assert faults(tmp_path, "checkpoint.enable", "checkpoint.last_save_in_hf") == (
        "checkpoint.last_save_in_hf = true: needs checkpoint.last_save_model_only = true; "
        "set it, or keep the whole step and run minititan export",
    )

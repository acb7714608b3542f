"""The keys, types and defaults of TorchTitan 0.2.2 are ours, but for what is listed; those of 0.1.0 load."""

import logging
from pathlib import Path

import pytest

from minititan.config import Config, ConfigError, load
from minititan.config.fields import describe
from minititan.config.old_names import DROPPED, MOVED
from minititan.config.schema import all_keys

TOMLS = Path(__file__).parent / "torchtitan_tomls"

# Section, then key: type = default, as released; a type in brackets is a choice.
TORCHTITAN_0_2_2 = """
job
config_file: str? = None; dump_folder: str = './outputs'; description: str = 'default job'
print_config: bool = False
save_config_file: str? = None; custom_config_module: str = ''
profiling
enable_profiling: bool = False; save_traces_folder: str = 'profile_traces'; profile_freq: int = 10
profiler_active: int = 1; profiler_warmup: int = 3; enable_memory_snapshot: bool = False
save_memory_snapshot_folder: str = 'memory_snapshot'
metrics
log_freq: int = 10; enable_tensorboard: bool = False; disable_color_printing: bool = False
save_tb_folder: str = 'tb'
save_for_all_ranks: bool = False; enable_wandb: bool = False
model
name: str = 'llama3'; flavor: str = 'debugmodel'; hf_assets_path: str = './tests/assets/tokenizer'
converters: strings = (); print_after_conversion: bool = False
optimizer
name: [AdamW Adam] = 'AdamW'; lr: float = 0.0008; beta1: float = 0.9; beta2: float = 0.95; eps: float = 1e-08
weight_decay: float = 0.1; implementation: [for-loop foreach fused] = 'fused'
early_step_in_backward: bool = False
lr_scheduler
warmup_steps: int = 200; total_steps: int? = None; decay_ratio: float? = None
decay_type: [linear sqrt cosine] = 'linear'; min_lr_factor: float = 0.0
training
dataset: str = 'c4_test'; dataset_path: str? = None; local_batch_size: int = 8; global_batch_size: int = -1
seq_len: int = 2048; max_norm: float = 1.0; steps: int = 10000; enable_cpu_offload: bool = False
dtype: [bfloat16 float32] = 'float32'; mixed_precision_param: [bfloat16 float32] = 'bfloat16'
mixed_precision_reduce: [float32] = 'float32'; gc_freq: int = 50; gc_debug: bool = False
training.dataloader
num_workers: int = 0; persistent_workers: bool = False; pin_memory: bool = False; prefetch_factor: int? = None
parallelism
data_parallel_replicate_degree: int = 1; data_parallel_shard_degree: int = -1
fsdp_reshard_after_forward: [default always never] = 'default'; tensor_parallel_degree: int = 1
disable_loss_parallel: bool = False; enable_async_tensor_parallel: bool = False
pipeline_parallel_degree: int = 1
module_fqns_per_model_part: stringlists? = None; pipeline_parallel_first_stage_less_layers: int = 1
pipeline_parallel_last_stage_less_layers: int = 1; pipeline_parallel_layers_per_stage: int? = None
pipeline_parallel_schedule: str = '1F1B'; pipeline_parallel_schedule_csv: str? = ''
pipeline_parallel_microbatch_size: int = 1; pipeline_parallel_expert_parallel_overlap: bool = True
context_parallel_degree: int = 1; context_parallel_load_balancer: str? = 'headtail'
context_parallel_rotate_method: [allgather alltoall] = 'allgather'; expert_parallel_degree: int = 1
expert_tensor_parallel_degree: int = 1; expert_parallel_comm_backend: [standard deepep] = 'standard'
checkpoint
enable: bool = False; enable_ft_dataloader_checkpoints: bool = True; folder: str = 'checkpoint'
interval: int = 500
initial_load_path: str? = None; initial_load_model_only: bool = True; initial_load_in_hf: bool = False
initial_load_in_hf_quantized: bool = False; last_save_model_only: bool = True; last_save_in_hf: bool = False
export_dtype: [float16 bfloat16 float32] = 'float32'
async_mode: [disabled async async_with_pinned_mem] = 'disabled'; keep_latest_k: int = 10; load_step: int = -1
exclude_from_loading: strings = (); enable_first_step_checkpoint: bool = False
create_seed_checkpoint: bool = False
load_only: bool = False
activation_checkpoint
mode: [selective full memory_budget none] = 'selective'; selective_ac_option: str = '2'
per_op_sac_force_recompute_mm_shapes_by_fqns: strings = ('moe.router.gate',); early_stop: bool = False
memory_budget: float = 0.5; visualize_memory_budget_pareto: bool = False; preserve_rng_state: bool = True
determinism_check: str = 'default'; debug: bool = False
compile
enable: bool = False; components: strings = ('model', 'loss'); backend: str = 'inductor'
quantize.linear.float8
enable_fsdp_float8_all_gather: bool = False; precompute_float8_dynamic_scale_for_fsdp: bool = False
recipe_name: [tensorwise rowwise rowwise_with_gw_hp]? = None; filter_fqns: strings = (); emulate: bool = False
quantize.linear.mx
mxfp8_dim1_cast_kernel_choice: [triton cuda torch] = 'triton'; recipe_name: str = 'mxfp8_cublas'
filter_fqns: strings = ('output',)
quantize.grouped_mm.float8
fqns: strings/str = ()
quantize.grouped_mm.mx
recipe_name: [mxfp8] = 'mxfp8'; fqns: strings/str = ()
comm
init_timeout_seconds: int = 300; train_timeout_seconds: int = 100; trace_buf_size: int = 20000
save_traces_folder: str = 'comm_traces'; save_traces_file_prefix: str = 'rank_'
mode: [default fake_backend local_tensor] = 'default'
memory_estimation
enable: bool = False; disable_fake_mode: bool = False
fault_tolerance
enable: bool = False; process_group: str = 'gloo'; process_group_timeout_ms: int = 10000; replica_id: int = 0
group_size: int = 0; min_replica_size: int = 1; semi_sync_method: str? = None
experimental
custom_import: str = ''; custom_args_module: str = ''
validation
enable: bool = False; dataset: str = 'c4_validation'; dataset_path: str? = None; local_batch_size: int = 8
seq_len: int = 2048; freq: int = 10; steps: int = -1
validation.dataloader
num_workers: int = 0; persistent_workers: bool = False; pin_memory: bool = False; prefetch_factor: int? = None
debug
seed: int? = None; deterministic: bool = False; deterministic_warn_only: bool = False
moe_force_load_balance: bool = False
"""
OUR_DEFAULTS = {
    "training.dataset": "stdlib",
    "model.hf_assets_path": "",
    "training.mixed_precision_param": "auto",
    "checkpoint.last_save_model_only": False,
    "debug.seed": 0,
    "parallelism.pipeline_parallel_schedule_csv": None,  # "" and unset are the same
}
OUR_KEYS = {
    "optimizer.no_decay": (),
    "parallelism.disable_sequence_parallel": False,
    "parallelism.disable_embedding_parallel": False,
    "parallelism.context_parallel_method": "all_gather",
    "data.cache_folder": None,
    "data.text_key": "text",
    "data.txt_lines": False,
    "data.on_bad_record": "error",
    "data.npy_dtype": None,
    "data.add_bos": False,
    "data.add_eos": True,
    "data.repeat": True,
    "data.samples": "window",
    "validation.holdout": 0.0,
    "data.document_mask": False,
    "data.predict_first_token": True,
    "data.sources": (),
    "data.stages": (),
    "training.global_batch_size_schedule": (),
    "checkpoint.verify": "hashes",
    "checkpoint.load_strict": True,
    "checkpoint.interval_minutes": 0.0,
    "checkpoint.keep_every_n_steps": 0,
    "checkpoint.keep_best_k": 0,
    "checkpoint.save_failures_allowed": 0,
    "metrics.log_batch_hash": False,
    "metrics.peak_tflops": None,
    "model.args": {},
    "optimizer.param_groups": (),
    "optimizer.muon_momentum": 0.95,
    "optimizer.muon_ns_steps": 5,
    "optimizer.muon_adjust_lr": "match_rms_adamw",
    "optimizer.state_dtype": None,
    "training.loss_scale_init": 65536.0,
    "training.loss_scale_growth_interval": 2000,
    "debug.nan_policy": "raise",
    "debug.max_skipped_in_a_row": 10,
    "debug.loss_spike_factor": None,
    "debug.loss_spike_window": 50,
}
OUR_CHOICES = {
    "optimizer.name": ["AdamW", "Adam", "Muon"],
    "training.dtype": ["bfloat16", "float32", "float64"],
    "training.mixed_precision_param": ["auto", "bfloat16", "float16", "float32"],
}
WORDS = {
    "str": "a string",
    "int": "an integer",
    "float": "a finite number",
    "bool": "true or false",
    "strings": "a list of strings",
    "stringlists": "a list of lists of strings",
    "strings/str": "a list of strings or a string",
}


def table() -> dict[str, tuple[str, object]]:
    """Dotted key -> type in words and default, from the text above."""
    found: dict[str, tuple[str, object]] = {}
    section = ""
    for line in TORCHTITAN_0_2_2.strip().splitlines():
        if ":" not in line:
            section = line
            continue
        for entry in line.split("; "):
            key, rest = entry.split(": ", 1)
            kind, default = rest.split(" = ", 1)
            found[f"{section}.{key}"] = (kind.rstrip("?"), eval(default, {}))
    return found


def words_of(key: str, kind: str) -> str:
    if not kind.startswith("["):
        return WORDS[kind]
    choices = OUR_CHOICES.get(key, kind[1:-1].split())
    return "one of " + ", ".join(f'"{choice}"' for choice in choices)


def test_keys_and_defaults() -> None:
    expected = {key: default for key, (_, default) in table().items()} | OUR_DEFAULTS | OUR_KEYS
    assert len(table()) == 148
    assert {key: Config().value(key) for key in all_keys()} == expected


@pytest.mark.parametrize("key", table())
def test_type(key: str) -> None:
    assert describe(all_keys()[key].annotation) == words_of(key, table()[key][0])


def test_every_key_is_described() -> None:
    assert [key for key, field in all_keys().items() if not field.description] == []


def test_json_schema_names_ranges_and_meanings() -> None:
    schema = Config.model_json_schema()
    training = schema["$defs"]["Training"]
    assert training["additionalProperties"] is False
    assert training["properties"]["steps"]["minimum"] == 1
    assert training["properties"]["steps"]["description"].startswith("Optimizer steps")
    assert training["properties"]["global_batch_size"]["anyOf"] == [{"minimum": 1}, {"const": -1}]
    assert schema["$defs"]["Optimizer"]["properties"]["beta1"]["exclusiveMaximum"] == 1
    assert schema["$defs"]["Compile"]["properties"]["enable"]["type"] == "boolean"


@pytest.mark.parametrize("size, flavor", [("8b", "8B"), ("70b", "70B"), ("debug", "debugmodel")])
def test_a_file_of_0_2_2_loads_as_it_is(size: str, flavor: str, caplog: pytest.LogCaptureFixture) -> None:
    config = load(["--job.config_file", str(TOMLS / f"llama3_{size}_0.2.2.toml")])
    assert config.model.flavor == flavor
    assert caplog.messages == []


def test_a_file_of_0_2_2_gives_its_values() -> None:
    config = load(["--job.config_file", str(TOMLS / "llama3_70b_0.2.2.toml")])
    assert config.model.hf_assets_path == "./assets/hf/Llama-3.1-70B"
    assert (config.lr_scheduler.decay_ratio, config.lr_scheduler.decay_type) == (0.8, "cosine")
    assert config.parallelism.tensor_parallel_degree == 8
    assert config.quantize.linear.mx.filter_fqns == ("output", "attention.wk", "attention.wv")


def test_a_file_of_0_1_0_loads_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = load(["--job.config_file", str(TOMLS / "llama3_8b_0.1.0.toml")])
    assert len(caplog.messages) == 1
    for old, new in MOVED.items():
        assert f"{old} -> {new}" in caplog.messages[0]
    for old in DROPPED:
        assert f"{old} (no effect)" in caplog.messages[0]
    assert "[float8] -> [quantize.linear.float8], [mx] -> [quantize.linear.mx]" in caplog.messages[0]
    assert config.model.hf_assets_path == "./assets/tokenizer/original/tokenizer.model"
    assert (config.lr_scheduler.min_lr_factor, config.debug.seed) == (0.1, 7)
    assert config.quantize.linear.float8.filter_fqns == ("output",)
    assert config.quantize.linear.mx.recipe_name == "mxfp8"


def test_float8_of_0_1_0_is_refused_by_name() -> None:
    with pytest.raises(ConfigError) as caught:
        load(["--job.config_file", str(TOMLS / "llama3_70b_0.1.0.toml")])
    assert caught.value.faults == (
        'llama3_70b_0.1.0.toml: model.converters = ["quantize.linear.float8"]: linear layers in float8 are '
        'not there yet; take "quantize.linear.float8" out',
    )


def test_old_names_at_other_than_their_off_values(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        """
        [parallelism]
        enable_compiled_autograd = true
        pipeline_parallel_split_points = ["layers.2"]
        [checkpoint]
        model_weights_only = true
        [fault_tolerance]
        sync_steps = "5"
        [lr_scheduler]
        lr_min = 2.0
        """
    )
    with pytest.raises(ConfigError) as caught:
        load(["--job.config_file", str(file)])
    assert [fault.removeprefix("run.toml: ") for fault in caught.value.faults] == [
        "parallelism.enable_compiled_autograd = true: this key is gone; compiled autograd is not there; "
        "leave it out",
        'parallelism.pipeline_parallel_split_points = ["layers.2"]: this key is gone; use '
        "parallelism.module_fqns_per_model_part",
        "checkpoint.model_weights_only = true: this key is gone; use checkpoint.last_save_model_only",
        'fault_tolerance.sync_steps = "5": must be an integer',
        "lr_scheduler.min_lr_factor = 2.0: must be at least 0 and at most 1",
    ]

"""A wrong file or command line is refused, one line a fault; a right one gives exactly what it says."""

import logging
import pickle
from pathlib import Path

import pytest
import tomli
from hypothesis import given, settings
from hypothesis import strategies as st

from minititan.config import Config, ConfigError, load


def write(folder: Path, text: str) -> str:
    file = folder / "run.toml"
    file.write_text(text)
    return str(file)


def faults(folder: Path, text: str, *words: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load(["--job.config_file", write(folder, text), *words])
    assert str(caught.value) == "\n".join(caught.value.faults)
    return caught.value.faults


WRONG_FILES = {
    "syntax": ("[training]\nsteps = \n", "run.toml: line 2, column 9: Invalid value"),
    "syntax at the end": ('[job]\n\ndescription = """a\n', "run.toml: line 4, column 1: "),
    "unknown section": ("[trainin]\nsteps = 1", "run.toml: trainin: unknown section; nearest: [training]"),
    "unknown empty section": ("[profilin]", "run.toml: profilin: unknown section; nearest: [profiling]"),
    "section like none": ("[zzz]\nq = 1", "run.toml: zzz: unknown section; sections: job, profiling"),
    "section of another's key": ("[zzz]\nlr = 1", "run.toml: zzz: unknown section; nearest: optimizer.lr"),
    "unknown key": (
        "[training]\nstep = 1",
        "run.toml: training.step = 1: unknown key; nearest: training.steps",
    ),
    "key of another section": (
        "[training]\nlr = 1",
        "run.toml: training.lr = 1: unknown key; nearest: optimizer.lr",
    ),
    "unknown key in a nested table": (
        "[training.dataloader]\nworkers = 1",
        "run.toml: training.dataloader.workers = 1: unknown key; nearest: training.dataloader.num_workers",
    ),
    "section without table": ("training = 3", "run.toml: training = 3: must be a table; write [training]"),
    "array of tables": ("[[training]]\nsteps = 1", "run.toml: training = [{steps = 1}]: must be a table"),
    "quoted integer": (
        '[training]\nsteps = "10"',
        'run.toml: training.steps = "10": must be an integer; write 10 without quotes',
    ),
    "true for an integer": (
        "[training]\nsteps = true",
        "run.toml: training.steps = true: must be an integer",
    ),
    "float for an integer": (
        "[training]\nsteps = 10.0",
        "run.toml: training.steps = 10.0: must be an integer",
    ),
    "true for a float": ("[optimizer]\nlr = true", "run.toml: optimizer.lr = true: must be a finite number"),
    "integer for a flag": ("[compile]\nenable = 1", "run.toml: compile.enable = 1: must be true or false"),
    "integer for a string": ("[model]\nname = 3", "run.toml: model.name = 3: must be a string"),
    "string for a list": (
        '[compile]\ncomponents = "model"',
        'run.toml: compile.components = "model": must be a list of strings',
    ),
    "integer in a list": (
        "[compile]\ncomponents = [1]",
        "run.toml: compile.components = [1]: must be a list of strings",
    ),
    "table for an integer": (
        "[training.steps]\na = 1",
        "run.toml: training.steps = {a = 1}: must be an integer",
    ),
    "group": (
        "[[optimizer.param_groups]]\nlr = 1.0",
        "run.toml: optimizer.param_groups = [{lr = 1.0}]: each table needs pattern",
    ),
    "group-key": (
        '[[optimizer.param_groups]]\npattern = "*"\nbeta = 1.0',
        'run.toml: optimizer.param_groups = [{pattern = "*", beta = 1.0}]: beta: unknown key; keys: ',
    ),
    "group-type": (
        '[[optimizer.param_groups]]\npattern = "*"\nname = "SGD"',
        'run.toml: optimizer.param_groups = [{pattern = "*", name = "SGD"}]: name must be one of "AdamW", ',
    ),
    "group-range": (
        '[[optimizer.param_groups]]\npattern = "*"\nlr = -1',
        'run.toml: optimizer.param_groups = [{pattern = "*", lr = -1.0}]: lr must be at least 0',
    ),
    "no-groups": (
        "[optimizer]\nparam_groups = 3",
        "run.toml: optimizer.param_groups = 3: must be a list of tables",
    ),
    "nan": ("[optimizer]\nlr = nan", "run.toml: optimizer.lr = nan: must be a finite number"),
    "infinity": ("[training]\nmax_norm = inf", "run.toml: training.max_norm = inf: must be a finite number"),
    "choice": (
        '[optimizer]\nname = "adamw"',
        'run.toml: optimizer.name = "adamw": must be one of "AdamW", "Adam", "Muon"; nearest: "AdamW"',
    ),
    "date": ("[training]\nsteps = 1979-05-27", "run.toml: training.steps = 1979-05-27: must be an integer"),
    "model.args without table": ("[model]\nargs = 3", "run.toml: model.args = 3: must be a table"),
}


@pytest.mark.parametrize("text, fault", WRONG_FILES.values(), ids=WRONG_FILES.keys())
def test_wrong_file(tmp_path: Path, text: str, fault: str) -> None:
    found = faults(tmp_path, text)
    assert len(found) == 1
    assert found[0].startswith(fault)
    assert "\n" not in found[0]


WRONG_WORDS = {
    "no option": (["foo"], "command line: foo: an option begins with -- and a name; write --section.key"),
    "no name": (["--"], "command line: --: an option begins with -- and a name"),
    "a file as it stands": (
        ["a/b.toml"],
        "command line: a/b.toml: an option begins with -- and a name; write --job.config_file a/b.toml",
    ),
    "no section": (["--steps", "3"], "command line: steps: unknown section; nearest: training.steps"),
    "unknown key": (
        ["--training.step", "3"],
        'command line: training.step = "3": unknown key; nearest: training.steps',
    ),
    "unknown flag": (
        ["--checkpoint.no_enabl"],
        "command line: checkpoint.no_enabl = unset: unknown key; nearest: checkpoint.enable",
    ),
    "missing value": (["--training.steps"], "command line: training.steps: needs a value"),
    "option for a value": (
        ["--training.steps", "--job.print_config"],
        "command line: training.steps: needs a value",
    ),
    "type": (["--training.steps", "ten"], 'command line: training.steps = "ten": must be an integer'),
    "float": (["--training.steps", "1e3"], 'command line: training.steps = "1e3": must be an integer'),
    "flag": (["--compile.enable", "yes"], 'command line: compile.enable = "yes": must be true or false'),
    "negated flag with value": (
        ["--compile.no_enable", "true"],
        'command line: compile.no_enable = "true": takes no value; leave it out',
    ),
    "negated key that is no flag": (
        ["--training.no_steps"],
        "command line: training.no_steps = unset: unknown key; nearest: training.steps",
    ),
    "nan": (["--optimizer.lr", "nan"], "command line: optimizer.lr = nan: must be a finite number"),
    "range": (["--training.steps", "0"], "command line: training.steps = 0: must be at least 1"),
}


@pytest.mark.parametrize("words, fault", WRONG_WORDS.values(), ids=WRONG_WORDS.keys())
def test_wrong_words(tmp_path: Path, words: list[str], fault: str) -> None:
    found = faults(tmp_path, "", *words)
    assert len(found) == 1
    assert found[0].startswith(fault)


def test_all_faults_at_once(tmp_path: Path) -> None:
    text = """
        training.steps = "10"
        training.seq_lenn = 5
        optimizer.beta1 = 1.5
        parallelism.enable_async_tensor_parallel = true
        checkpoint.enable_checkpoint = true
        checkpoint.enable = true
        """
    found = faults(tmp_path, text, "--training.max_norm=x", "stray")
    assert [fault.split(" = ")[0] for fault in found] == [
        "command line: stray: an option begins with -- and a name; write --section.key VALUE",
        "run.toml: checkpoint.enable_checkpoint",
        "run.toml: training.seq_lenn",
        "command line: training.max_norm",
        "run.toml: training.steps",
        "run.toml: optimizer.beta1",
        "run.toml: parallelism.enable_async_tensor_parallel",
    ]


def test_an_error_survives_the_way_from_another_process() -> None:
    error = pickle.loads(pickle.dumps(ConfigError("one", "two")))
    assert (type(error), error.faults, str(error)) == (ConfigError, ("one", "two"), "one\ntwo")


def test_no_config_file() -> None:
    with pytest.raises(ConfigError, match="command line: no config file is given; usage: torchrun -m"):
        load(["--training.steps", "3"])
    with pytest.raises(ConfigError, match="command line: no config file is given"):
        load(["--job.config_file="])


def test_config_file_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    long = tmp_path / ("x" * 300)
    rules = {
        missing: "no such file",
        tmp_path: "must be a file, not a folder",
        long: "cannot be read (File name too long)",
    }
    for path, rule in rules.items():
        with pytest.raises(ConfigError) as caught:
            load(["--job.config_file", str(path)])
        assert caught.value.faults == (f'command line: job.config_file = "{path}": {rule}',)
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b'# first\ndescription = "caf\xe9"\n')
    with pytest.raises(ConfigError, match=r"^latin\.toml: line 2: not UTF-8 text"):
        load(["--job.config_file", str(latin)])


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(b"\xef\xbb\xbf[training]\r\nsteps = 4\r\n")
    assert load(["--job.config_file", str(file)]).training.steps == 4


def test_command_line_over_file_over_default(tmp_path: Path) -> None:
    file = write(tmp_path, "[training]\nsteps = 5\nseq_len = 64\n[optimizer]\nlr = 1")
    config = load(["--training.steps", "7", f"--job.config-file={file}"])
    assert (config.training.steps, config.training.seq_len, config.training.gc_freq) == (7, 64, 50)
    assert config.optimizer.lr == 1.0 and isinstance(config.optimizer.lr, float)
    assert config.job.config_file == file
    keys = ("training.steps", "training.seq_len", "training.gc_freq")
    assert [config.where(key) for key in keys] == ["command line", "run.toml", "default"]
    assert (
        config.fault("training.seq_len", "a rule", "a way")
        == "run.toml: training.seq_len = 64: a rule; a way"
    )
    assert config.fault("training.gc_freq", "a rule") == "default: training.gc_freq = 50: a rule"


WORDS = {
    "--training.steps 3": ("training.steps", 3),
    "--training.steps=1_000": ("training.steps", 1000),
    "--parallelism.data-parallel-shard-degree -1": ("parallelism.data_parallel_shard_degree", -1),
    "--optimizer.lr 3e-4": ("optimizer.lr", 3e-4),
    "--optimizer.lr 1": ("optimizer.lr", 1.0),
    "--compile.enable": ("compile.enable", True),
    "--compile.enable true": ("compile.enable", True),
    "--compile.enable=false": ("compile.enable", False),
    "--activation-checkpoint.no-preserve-rng-state": ("activation_checkpoint.preserve_rng_state", False),
    "--job.description=a=b": ("job.description", "a=b"),
    "--job.description 10": ("job.description", "10"),
    "--optimizer.no_decay *norm*,lm_head": ("optimizer.no_decay", ("*norm*", "lm_head")),
    "--optimizer.no-decay=": ("optimizer.no_decay", ()),
    '--compile.components ["model"]': ("compile.components", ("model",)),
    "--training.dataset_path=": ("training.dataset_path", None),
    "--lr_scheduler.total_steps none": ("lr_scheduler.total_steps", None),
    "--debug.seed 0": ("debug.seed", 0),
    '--parallelism.module_fqns_per_model_part [["a","b"],["c"]]': (
        "parallelism.module_fqns_per_model_part",
        (("a", "b"), ("c",)),
    ),
    "--quantize.grouped_mm.float8.fqns experts": ("quantize.grouped_mm.float8.fqns", ("experts",)),
    "--training.dataloader.num_workers 2": ("training.dataloader.num_workers", 2),
    "--checkpoint.enable_checkpoint": ("checkpoint.enable", True),
    "--training.no_compile": ("compile.enable", False),
}


@pytest.mark.parametrize("words, expected", WORDS.items(), ids=WORDS.keys())
def test_overrides(tmp_path: Path, words: str, expected: tuple[str, object]) -> None:
    config = load(["--job.config_file", write(tmp_path, "[training]\nsteps = 9"), *words.split()])
    value = config.value(expected[0])
    assert value == expected[1] and type(value) is type(expected[1])


def test_a_real_key_that_begins_with_no_is_no_negation(tmp_path: Path) -> None:
    found = faults(tmp_path, "", "--optimizer.no_decay")
    assert found == ("command line: optimizer.no_decay: needs a value; write --optimizer.no_decay VALUE",)


def test_a_second_file_is_not_passed_over(tmp_path: Path) -> None:
    first = tmp_path / "run.toml"
    found = faults(tmp_path, "", "--job.config-file", "b.toml")
    assert found == (f'command line: job.config_file = "b.toml": a second file, after {first}; give one',)


def test_the_last_of_two_overrides_counts(tmp_path: Path) -> None:
    words = ["--training.steps", "3", "--training.steps", "4"]
    assert load(["--job.config_file", write(tmp_path, ""), *words]).training.steps == 4


def test_model_args(tmp_path: Path) -> None:
    file = write(tmp_path, "[model.args]\nhidden_size = 64\nsizes = [1, 2]\nrope_scaling.factor = 8.0")
    words = [
        "--model.args.hidden-size",
        "128",
        "--model.args.rope_scaling.kind",
        "llama3",
        "--model.args.tied=true",
    ]
    config = load(["--job.config_file", file, *words])
    assert config.model.args == {
        "hidden_size": 128,
        "sizes": (1, 2),
        "rope_scaling": {"factor": 8.0, "kind": "llama3"},
        "tied": True,
    }
    assert config.where("model.args.hidden_size") == "command line"
    assert config.fault("model.args.sizes", "r") == "run.toml: model.args.sizes = [1, 2]: r"
    assert config.fault("model.args.rope_scaling", "r").startswith(
        "run.toml and command line: model.args.rope_scaling = {factor = 8.0"
    )
    config = load(["--job.config_file", file, "--model.args.rope_scaling", "none"])
    assert config.model.args["rope_scaling"] == "none"
    file = write(tmp_path, '[model.args]\nrope_scaling = "none"')
    config = load(["--job.config_file", file, "--model.args.rope_scaling.factor", "8"])
    assert config.model.args["rope_scaling"] == {"factor": 8}
    assert config.where("model.args.rope_scaling") == "command line"


def test_config_is_frozen(tmp_path: Path) -> None:
    config = load(["--job.config_file", write(tmp_path, "")])
    with pytest.raises(ValueError, match="frozen"):
        config.training.steps = 3


def test_lists_are_tuples_and_an_empty_path_is_unset() -> None:
    config = Config.model_validate(
        {"optimizer": {"no_decay": ["a"]}, "checkpoint": {"initial_load_path": ""}}
    )
    assert config.optimizer.no_decay == ("a",)
    assert config.checkpoint.initial_load_path is None


def test_warnings_by_rank_0_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "[training]\nsteps = 10\ncompile = false\n[lr_scheduler]\nwarmup_steps = 4\ndecay_ratio = 0.8"
    words = ["--job.config_file", write(tmp_path, text), "--lr_scheduler.warmup_steps", "12"]
    monkeypatch.setenv("RANK", "1")
    load(words)
    assert caplog.messages == []
    monkeypatch.setenv("RANK", "0")
    with caplog.at_level(logging.WARNING):
        load(words)
    assert caplog.messages == [
        "run.toml: old names of TorchTitan are understood: training.compile -> compile.enable",
        "command line: lr_scheduler.warmup_steps = 12: longer than the schedule; 10 steps are used",
        "run.toml: lr_scheduler.decay_ratio = 0.8: warm-up and decay are longer than the schedule; "
        "0 steps of decay are used",
    ]
    caplog.clear()
    load(["--job.config_file", write(tmp_path, "[training]\nsteps = 10")])
    assert caplog.messages == []


text = st.text(alphabet=st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)
leaves = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.booleans(), text, st.floats(allow_nan=False, allow_infinity=False)
)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.integers(1, 2**63 - 1),
    lr=st.floats(0, 10),
    description=text,
    no_decay=st.lists(text, max_size=3),
    total=st.none() | st.just(2**63 - 1),
    args=st.dictionaries(
        st.from_regex(r"[a-z_]{1,9}", fullmatch=True), leaves | st.lists(leaves, max_size=3), max_size=3
    ),
)
def test_printed_toml_gives_the_same_config(
    tmp_path_factory: pytest.TempPathFactory,
    steps: int,
    lr: float,
    description: str,
    no_decay: list[str],
    total: int | None,
    args: dict,
) -> None:
    config = Config.model_validate(
        {
            "job": {"description": description},
            "training": {"steps": steps},
            "optimizer": {"lr": lr, "no_decay": no_decay},
            "lr_scheduler": {"total_steps": total, "warmup_steps": 0},
            "model": {"args": args},
        }
    )
    file = tmp_path_factory.mktemp("trip") / "run.toml"
    file.write_text(config.to_toml(), encoding="utf-8", newline="\n")
    again = load(["--job.config_file", str(file)])
    expected = config.model_dump()
    expected["job"]["config_file"] = str(file)
    assert again.model_dump() == expected
    assert tomli.loads(config.to_toml())["training"]["steps"] == steps

"""What a user gets for bad input: a line a fault, `WHERE: KEY = VALUE: RULE; WAY OUT`, once in the whole run,
exit code 2, nothing left behind, and all ranks end. An error that is no user's fault keeps its traceback.
"""

import contextlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch.distributed as dist

from minititan import distributed, report, run, train
from minititan.checkpoint.folder import check_writable
from minititan.config import ConfigError
from minititan.data.order import samples_at
from tests.distributed.harness import run_ranks

RUN = """
[job]
dump_folder = "{tmp}/dump"
[model.args]
hidden_size = 32
num_hidden_layers = 1
intermediate_size = 64
[lr_scheduler]
warmup_steps = 0
[training]
dataset_path = "{tmp}/text.txt"
local_batch_size = 1
global_batch_size = 2
seq_len = 16
steps = 2
[checkpoint]
enable = true
[data]
cache_folder = "{tmp}/cache"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return prepared(tmp_path)


def prepared(folder: Path) -> Path:
    """`folder`, with a run that is right in it."""
    folder.mkdir(exist_ok=True)
    (folder / "run.toml").write_text(RUN.format(tmp=folder))
    (folder / "text.txt").write_text("to be or not to be\n" * 50)
    return folder


def words_of(folder: Path, *words: str) -> list[str]:
    return ["--job.config_file", f"{folder}/run.toml", *(word.format(tmp=folder) for word in words)]


# ---- Found before a process group or a file exists.
# name: (what is added to the file, words of the command line, processes, what the lines begin with)

BEFORE: dict[str, tuple[str, str, int, list[str]]] = {
    "TOML syntax": ("[metrics]\nlog_freq = = 1", "", 1, ["run.toml: line 21, column 12: "]),
    "unknown section": (
        "[trainin]\nsteps = 1",
        "",
        1,
        ["run.toml: trainin: unknown section; nearest: [training]"],
    ),
    "unknown key": (
        "[metrics]\nlog_frequ = 1",
        "",
        1,
        ["run.toml: metrics.log_frequ = 1: unknown key; nearest: metrics.log_freq"],
    ),
    "wrong type": (
        '[metrics]\nlog_freq = "10"',
        "",
        1,
        ['run.toml: metrics.log_freq = "10": must be an integer; write 10 without quotes'],
    ),
    "out of range": ("", "--optimizer.beta1 1.5", 1, ["command line: optimizer.beta1 = 1.5: must be "]),
    "no such choice": (
        "",
        "--optimizer.name Adamw",
        1,
        ['command line: optimizer.name = "Adamw": must be one of "AdamW", "Adam", "Muon"; nearest: "AdamW"'],
    ),
    "word for a number": (
        "",
        "--training.steps ten",
        1,
        ['command line: training.steps = "ten": must be an integer'],
    ),
    "value missing at the end": ("", "--training.steps", 1, ["command line: training.steps: needs a value"]),
    "no such flag": ("", "--foo", 1, ["command line: foo: unknown section; sections: "]),
    "not a word of ours": ("", "-x", 1, ["command line: -x: an option begins with -- and a name"]),
    "a second config file": (
        "",
        "--job.config_file other.toml",
        1,
        ['command line: job.config_file = "other.toml": a second file, after '],
    ),
    "no data": (
        "",
        "--training.dataset_path {tmp}/nope",
        1,
        ['command line: training.dataset_path = "{tmp}/nope": no such file or folder'],
    ),
    "a pattern without files": (
        "",
        "--training.dataset_path {tmp}/*.gz",
        1,
        ['command line: training.dataset_path = "{tmp}/*.gz": the pattern matches nothing'],
    ),
    "no validation data": (
        "",
        "--validation.enable --validation.seq_len 16 --validation.dataset_path {tmp}/nope",
        1,
        ['command line: validation.dataset_path = "{tmp}/nope": no such file or folder'],
    ),
    "unknown data set": (
        '[validation]\nenable = true\nseq_len = 16\ndataset = "stdlb"',
        "",
        1,
        ["run.toml: validation.dataset = \"stdlb\": unknown data set; did you mean 'stdlib'?"],
    ),
    "no tokenizer": (
        "",
        "--model.hf_assets_path {tmp}/nope",
        1,
        ['command line: model.hf_assets_path = "{tmp}/nope": no such file or folder'],
    ),
    "damaged tokenizer": (
        "",
        "--model.hf_assets_path {tmp}/damaged.json",
        1,
        ['command line: model.hf_assets_path = "{tmp}/damaged.json": {tmp}/damaged.json cannot be read'],
    ),
    "ids beyond the vocabulary": (
        "",
        "--model.hf_assets_path {tmp}/400.json --model.args.vocab_size 264",
        1,
        [
            'command line: model.hf_assets_path = "{tmp}/400.json": the tokenizer has 400 ids, the model\'s '
            "vocabulary only 264; set model.args.vocab_size = 400"
        ],
    ),
    "no such model": ("", "--model.name lama3", 1, ['command line: model.name = "lama3": is not registered']),
    "no such flavor": (
        "",
        "--model.flavor 10m",
        1,
        ['command line: model.flavor = "10m": is not registered; nearest: 10M'],
    ),
    "impossible model": (
        "",
        "--model.args.num_attention_heads 6",
        1,
        [
            "run.toml and command line: model.args = {hidden_size = 32, num_hidden_layers = 1, "
            "intermediate_size = 64, num_attention_heads = 6}: num_attention_heads (6) must be a multiple of "
        ],
    ),
    "no such module": (
        "",
        "--experimental.custom_import nope.models",
        1,
        ['command line: experimental.custom_import = "nope.models": no such module'],
    ),
    "degrees and processes": (
        "",
        "--parallelism.data_parallel_shard_degree 3",
        2,
        [
            "command line: parallelism.data_parallel_shard_degree = 3: times data_parallel_replicate_degree "
            "(1) times tensor_parallel_degree (1) is 3 and must be the world size (2); allowed: 2, or -1"
        ],
    ),
    "heads by tp": (
        "",
        "--parallelism.tensor_parallel_degree 3 --training.seq_len 15 --training.global_batch_size 1",
        3,
        [
            "command line: parallelism.tensor_parallel_degree = 3: must divide num_key_value_heads (4); "
            "allowed: 1, 2, 4"
        ],
    ),
    "heads of latent attention by tp": (
        "",
        "--model.name deepseek_v3 --parallelism.tensor_parallel_degree 3 --training.seq_len 15 "
        "--training.global_batch_size 1",
        3,
        [
            "command line: parallelism.tensor_parallel_degree = 3: must divide num_key_value_heads (8); "
            "allowed: 1, 2, 4, 8"
        ],
    ),
    "latent heads in groups": (
        "",
        "--model.name deepseek_v3 --model.args.num_key_value_heads 4",
        1,
        [
            "run.toml and command line: model.args = {hidden_size = 32, num_hidden_layers = 1, "
            "intermediate_size = 64, num_key_value_heads = 4}: num_key_value_heads (4) must be "
            "num_attention_heads (8): latent attention has no groups"
        ],
    ),
    "sequence by tp": (
        "",
        "--parallelism.tensor_parallel_degree 2 --training.seq_len 15",
        2,
        ["command line: training.seq_len = 15: must be a multiple of tensor_parallel_degree (2)"],
    ),
    "global batch": (
        "",
        "--training.global_batch_size 3",
        2,
        [
            "command line: training.global_batch_size = 3: must be a multiple of local_batch_size (1) x "
            "data-parallel degree (2) = 2; nearest: 2 or 4, or -1"
        ],
    ),
    "dump folder below a file": (
        "",
        "--job.dump_folder {tmp}/text.txt/x",
        1,
        ['command line: job.dump_folder = "{tmp}/text.txt/x": {tmp}/text.txt must be a folder'],
    ),
    "checkpoint folder is a file": (
        "",
        "--job.dump_folder {tmp} --checkpoint.folder text.txt",
        1,
        ['command line: checkpoint.folder = "{tmp}/text.txt": {tmp}/text.txt must be a folder'],
    ),
    "no such step": (
        "",
        "--checkpoint.load_step 7",
        1,
        ["command line: checkpoint.load_step = 7: {tmp}/dump/checkpoint has no such step; leave it out"],
    ),
    "no checkpoint to start from": (
        "",
        "--checkpoint.initial_load_path {tmp}/nope",
        1,
        ['command line: checkpoint.initial_load_path = "{tmp}/nope": must be a checkpoint'],
    ),
    "a pattern of no parameter": (
        "",
        "--optimizer.no_decay *bias",
        1,
        ['command line: optimizer.no_decay = ["*bias"]: must match a parameter\'s name; nearest: '],
    ),
    "snapshots without a GPU": (
        "",
        "--profiling.enable_memory_snapshot",
        1,
        ["command line: profiling.enable_memory_snapshot = true: needs a CUDA device; set it to false on "],
    ),
    "no such backend": (
        "",
        "--compile.enable --compile.backend indctor",
        1,
        ['command line: compile.backend = "indctor": no such backend; there are: '],
    ),
    "all at once": (
        "",
        "--training.dataset_path {tmp}/nope --training.global_batch_size 3 --optimizer.no_decay *bias "
        "--job.dump_folder {tmp}/text.txt",
        2,
        [
            "command line: training.global_batch_size = 3: ",
            'command line: training.dataset_path = "{tmp}/nope": ',
            'command line: optimizer.no_decay = ["*bias"]: ',
            'command line: job.dump_folder = "{tmp}/text.txt": ',
        ],
    ),
}


@pytest.mark.parametrize("more, words, processes, begins", BEFORE.values(), ids=BEFORE.keys())
def test_found_before_anything_is_made(
    folder: Path, more: str, words: str, processes: int, begins: list[str], capfd, monkeypatch
) -> None:
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": processes}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(train, "init_distributed", lambda **_: pytest.fail("the ranks have met"))
    with (folder / "run.toml").open("a") as file:
        file.write(more)
    (folder / "damaged.json").write_text("{")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(400)}, "0")).save(
        str(folder / "400.json")
    )
    before = sorted(folder.rglob("*"))

    with pytest.raises(SystemExit) as caught:
        train.main(words_of(folder, *words.split()))

    assert caught.value.code == 2
    out, err = capfd.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == len(begins), err
    for line, begin in zip(lines, begins, strict=True):
        assert line.startswith(begin.replace("{tmp}", str(folder)))
    assert sorted(folder.rglob("*")) == before
    assert not dist.is_initialized()


def test_a_config_file_that_is_missing(capfd) -> None:
    for words, begin in (
        (
            ["--job.config_file", "/nope/x.toml"],
            'command line: job.config_file = "/nope/x.toml": no such file',
        ),
        ([], "command line: no config file is given; usage: torchrun -m minititan.train "),
        (
            ["x.toml"],
            "command line: x.toml: an option begins with -- and a name; write --job.config_file x.toml",
        ),
    ):
        with pytest.raises(SystemExit) as caught:
            train.main(words)
        assert caught.value.code == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert line.startswith(begin)


def test_help_is_no_fault(capsys) -> None:
    for words in (["--help"], ["--job.config_file", "nope.toml", "-h"]):
        assert train.main(words) == 0
        assert capsys.readouterr().out.startswith("usage: torchrun -m minititan.train --job.config_file")


def test_a_disk_without_room(folder: Path, capfd, monkeypatch) -> None:
    usage = namedtuple("usage", "total used free")
    # 264 x 32 twice, 4 matrices of attention, 3 of the feed-forward, 3 norms; float32, with two moments.
    elements = 2 * 264 * 32 + (2 * 32 * 32 + 2 * 32 * 16) + 3 * 32 * 64 + 3 * 32
    for free, rule in (
        (0, f'run.toml: job.dump_folder = "{folder}/dump": the disk of {folder} is full; '),
        (
            12 * elements - 1,
            f'default: checkpoint.folder = "{folder}/dump/checkpoint": the disk of {folder} has ',
        ),
    ):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage(10**9, 10**9 - free, free))
        with pytest.raises(SystemExit):
            train.main(words_of(folder))
        (line,) = capfd.readouterr().err.splitlines()
        assert line.startswith(rule)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, 12 * elements))
    assert run.check(train.load(words_of(folder)), 1).layout.world_size == 1


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Permissions count inside, for root too."""
    if os.getuid() != 0:
        yield
        return
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def test_a_folder_of_another_user() -> None:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o755)
        closed = place / "closed"
        closed.mkdir(mode=0o555)
        with unprivileged(), pytest.raises(ConfigError, match=f"{closed} must be writable; choose another"):
            check_writable("job.dump_folder", closed / "dump")


# ---- Found while the data is prepared, by one of the ranks.
# name: (file, its content, the line)

DATA: dict[str, tuple[str, bytes, str]] = {
    "nothing in it": (
        "e.txt",
        b"",
        'command line: training.dataset_path = "{tmp}/e.txt": holds no text; give files with text in them',
    ),
    "shorter than a sequence": (
        "s.txt",
        b"0123456789",
        'command line: training.dataset_path = "{tmp}/s.txt": holds 11 tokens, fewer than one sample of '
        "sequence length 16 (which needs 17); give more text or a smaller seq_len",
    ),
    "a bad line": (
        "b.jsonl",
        b'{"text": "good"}\n{"text":\n',
        "{tmp}/b.jsonl:2: not valid JSON (Expecting value at character 10); each line must be one "
        "JSON object",
    ),
    "no such key": (
        "k.jsonl",
        b'{"text": "good"}\n\n{"content": "x"}\n',
        "{tmp}/k.jsonl:3: no key 'text' (keys here: 'content'); set data.text_key",
    ),
    "no UTF-8": (
        "u.txt",
        b"good\nb\xe4d\n",
        "{tmp}/u.txt:2: invalid UTF-8 (byte 0xe4: invalid continuation byte); convert it to UTF-8",
    ),
    "no UTF-8 in a record": (
        "u.jsonl",
        b'{"text": "\xff"}\n',
        "{tmp}/u.jsonl:1: invalid UTF-8 (byte 0xff: invalid start byte); convert it to UTF-8",
    ),
    "half a line": (
        "h.jsonl",
        b'\xef\xbb\xbf{"text": "good"}\r\n{"text": "b',
        "{tmp}/h.jsonl:2: not valid JSON (Unterminated string starting at character 10, in a last line "
        "without an end: was the file cut off?); each line must be one JSON object",
    ),
    "NUL bytes": (
        "n.jsonl",
        b'{"text": "good"}\n' + b"\0" * 9,
        "{tmp}/n.jsonl:2: not valid JSON (Expecting value at character 1, in a last line without an end: was "
        "the file cut off?); each line must be one JSON object",
    ),
    "no zstd": (
        "z.jsonl.zst",
        b"plain",
        "{tmp}/z.jsonl.zst: damaged zstd file before byte 5 (zstd decompressor error: Unknown frame "
        "descriptor); replace it",
    ),
    "no parquet": (
        "p.parquet",
        b"PAR1PAR1",
        "{tmp}/p.parquet: damaged parquet file (Parquet file size is 8 bytes, smaller than the size "
        "reported by footer's (827474256bytes)); replace it",
    ),
    "a pair without its half": (
        "m.bin",
        b"\0\0",
        "{tmp}/m.bin: has no m.idx beside it; give both files of Megatron's format",
    ),
    "ids beyond the model's": (
        "i.npy",
        b"\x93NUMPY\x01\x00v\x00{'descr': '<u2', 'fortran_order': False, 'shape': (40,), }".ljust(127)
        + b"\n"
        + b"\x09\x01" * 40,
        "{tmp}/i.npy: token 0 has the id 265, outside of the vocabulary of 264; set model.hf_assets_path to "
        "the tokenizer that the tokens were made with",
    ),
    "no gzip": (
        "z.txt.gz",
        b"plain",
        "{tmp}/z.txt.gz: damaged gzip file before byte 2 (Not a gzipped file (b'pl')); replace it",
    ),
}

Outcome = tuple[int, str]  # exit code, standard error


def outcomes(rank: int, world: int, calls: list[list[str]]) -> list[Outcome]:
    """What this rank gets from each of the calls, one after the other."""
    distributed.FAULT_WAIT_SECONDS = 0.0  # no launcher ends the others: each rank shows what it found
    found = []
    for words in calls:
        err = io.StringIO()
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
            try:
                code = train.main(words)
            except SystemExit as error:
                code = error.code
        dist.barrier()
        found.append((code, err.getvalue()))
    return found


def on_two_ranks(calls: dict[str, list[str]]) -> dict[str, Outcome]:
    """What rank 0 gets from each call; the other must get the same."""
    first, second = run_ranks(outcomes, 2, list(calls.values()))
    assert first == second
    return dict(zip(calls, first, strict=True))


@pytest.fixture(scope="module")
def data_outcomes(tmp_path_factory) -> tuple[Path, dict[str, Outcome]]:
    place, calls = tmp_path_factory.mktemp("data"), {}
    for name, (file, content, _) in DATA.items():
        folder = prepared(place / name)
        (folder / file).write_bytes(content)
        calls[name] = words_of(folder, "--training.dataset_path", f"{folder}/{file}")
    return place, on_two_ranks(calls)


@pytest.mark.parametrize("name", DATA)
def test_found_in_the_data(data_outcomes: tuple[Path, dict[str, Outcome]], name: str) -> None:
    folder, (code, err) = data_outcomes[0] / name, data_outcomes[1][name]
    assert (code, err) == (2, DATA[name][2].replace("{tmp}", str(folder)) + "\n")
    assert not (folder / "dump").exists()
    left = {path.suffix for path in (folder / "cache").rglob("*") if path.is_file()}
    if DATA[name][0].endswith((".bin", ".npy")):  # read in place
        assert left == set()
    elif name == "shorter than a sequence":  # its tokens are good, and whole
        assert left == {"", ".lock", ".json", ".npy", ".bin"}
    else:
        assert left == {".lock", ".fault"}
    assert not list((folder / "cache").glob(".tmp*"))


# ---- Found when a run goes on, or while it runs.
# name: (words of the second call, what its line begins with)

AFTER: dict[str, tuple[str, str]] = {
    "another seed": (
        "--debug.seed 5",
        "command line: debug.seed = 5: the run to be resumed has 0; set debug.seed = 0",
    ),
    "another length": (
        "--training.seq_len 8",
        "command line: training.seq_len = 8: the run to be resumed has 16; set training.seq_len = 16",
    ),
    "other data": (
        "--training.dataset_path {tmp}/other.txt",
        'command line: training.dataset_path = "{tmp}/other.txt": gives other tokens (fingerprint ',
    ),
    "another model": (
        "--model.args.hidden_size 64",
        "{tmp}/dump/checkpoint/step-2: other shapes: model.embed_tokens.weight [264, 32], here [264, 64]; ",
    ),
    "another step": (
        "--checkpoint.load_step 1",
        "command line: checkpoint.load_step = 1: {tmp}/dump/checkpoint has no such step; there: 2",
    ),
    "a folder of checkpoints": (
        "--job.dump_folder {tmp}/new --checkpoint.initial_load_path {tmp}/dump/checkpoint",
        'command line: checkpoint.initial_load_path = "{tmp}/dump/checkpoint": must be a checkpoint, '
        "a folder with COMMIT.json; inside it: step-2",
    ),
    "numbers that explode": (
        "--job.dump_folder {tmp}/new --optimizer.lr 1e30",
        'default: debug.nan_policy = "raise": step 2: the gradient of layers.0.',
    ),
}


@pytest.fixture(scope="module")
def run_outcomes(tmp_path_factory) -> tuple[Path, dict[str, Outcome]]:
    folder = prepared(tmp_path_factory.mktemp("runs"))
    (folder / "other.txt").write_text("not to be\n" * 50)
    calls = {"a good run": words_of(folder)}
    for name, (words, _) in AFTER.items():
        calls[name] = words_of(folder, "--training.steps", "4", *words.split())
    return folder, on_two_ranks(calls)


def test_the_run_before_was_good(run_outcomes: tuple[Path, dict[str, Outcome]]) -> None:
    folder, found = run_outcomes
    assert found["a good run"] == (0, "")
    assert sorted(os.listdir(folder / "dump" / "checkpoint")) == ["run.lock", "step-2"]  # no fault touched it


@pytest.mark.parametrize("name", AFTER)
def test_found_when_a_run_goes_on(run_outcomes: tuple[Path, dict[str, Outcome]], name: str) -> None:
    folder, (code, err) = run_outcomes[0], run_outcomes[1][name]
    assert code == 2
    (line,) = err.splitlines()
    assert line.startswith(AFTER[name][1].replace("{tmp}", str(folder)))


def test_no_place_for_the_config(folder: Path) -> None:
    """Only rank 0 writes it, and only rank 0 has the fault."""
    checked = run.check(train.load(words_of(folder, "--job.save_config_file", "../text.txt/run.toml")), 1)
    with pytest.raises(ConfigError, match=r"text.txt/run.toml: the config cannot be written \("):
        report.write_config(checked)


# ---- With a real launcher: once in the whole run, all ranks end.


def torchrun(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A run on two processes, which must end by itself."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "minititan.train", *words_of(folder, *words)]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        environment.pop(name, None)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_two_ranks_print_a_fault_once(folder: Path) -> None:
    ended = torchrun(folder, "--training.stepz", "3")
    fault = 'command line: training.stepz = "3": unknown key; nearest: training.steps'
    assert ended.returncode == 1
    assert ended.stderr.splitlines().count(fault) == 1
    assert "exitcode  : 2 " in ended.stderr
    assert "minititan/train.py" not in ended.stderr  # no traceback of ours
    assert ended.stdout == ""
    assert not (folder / "dump").exists()


def test_a_fault_of_rank_0_alone_ends_the_others_without_an_echo(folder: Path) -> None:
    (folder / "dump").mkdir()
    (folder / "dump" / "tb").write_text("a file is in the way")
    ended = torchrun(folder, "--metrics.enable_tensorboard")
    faults = [line for line in ended.stderr.splitlines() if line.startswith(f"{folder}/dump/tb: the metrics")]
    assert len(faults) == 1
    assert ended.returncode == 1
    assert "exitcode  : 2 " in ended.stderr
    assert "minititan/train.py" not in ended.stderr


def test_a_fault_that_a_worker_of_rank_1_alone_meets_is_one_line(folder: Path) -> None:
    ids = np.zeros(4_000_000, dtype=np.uint16)
    sample = int(samples_at(np.array([3]), (len(ids) - 1) // 16, 0)[0])  # of rank 1 at the second step
    ids[sample * 16 + 8] = 5000
    np.save(folder / "ids.npy", ids)
    words = ["--training.dataset_path", f"{folder}/ids.npy", "--debug.seed", "0", "--metrics.log_freq", "1"]
    ended = torchrun(folder, *words, "--training.dataloader.num_workers", "1")
    assert "step: 1/2" in ended.stdout
    faults = [line for line in ended.stderr.splitlines() if line.startswith(f"{folder}/ids.npy: token ")]
    assert len(faults) == 1
    assert "exitcode  : 2 " in ended.stderr
    assert "minititan/train.py" not in ended.stderr


def test_an_error_that_is_no_users_fault_keeps_its_traceback(folder: Path) -> None:
    (folder / "broken.py").write_text(
        "import os\nif os.environ['RANK'] == '1':\n    raise ValueError('a bug of rank 1')\n"
    )
    ended = torchrun(folder, "--experimental.custom_import", "broken")
    assert ended.returncode == 1
    assert ended.stderr.splitlines().count("ValueError: a bug of rank 1") == 1
    assert f'File "{folder}/broken.py", line 3' in ended.stderr

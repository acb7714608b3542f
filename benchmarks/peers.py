"""minititan beside what a user would pick instead: `python benchmarks/peers.py`.

Each peer gets its own environment from the package index (`--folder`, made once and kept) and trains the
same model of 10M parameters on the same tokens in the same order, in float32, with AdamW and clipping. In a
round each program starts in fresh processes, alone until its first step is done, and is stopped; then they
go on in turns, a step each, so that a machine that gets slower is slower for all. All are watched from
outside in the same way (peer_runs/watch.py): a step ends when its line arrives; tokens/s are those of the
median step after the warm-up; memory is the resident set's peak as the kernel keeps it, of the largest
process and of all ranks together; the first step's time counts from the start of the process.

Words choose cases among `eager compiled eager-2 compiled-2` (2: two processes with FSDP), `--only` chooses
programs. With `--more` the runs of earlier calls on this machine are kept, so that a long measurement can
be taken in parts; `--report` only writes what the JSON holds.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data import documents
from peer_runs import common
from peer_runs.environments import LeftOut, python_of, versions_in
from peer_runs.watch import Program, RunFailed
from reports import machine, machine_line, spread, verdict, write_json, write_part
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from minititan.data.order import samples_at
from minititan.models.decoder import Decoder
from minititan.models.llama3 import FLAVORS

HERE = Path(__file__).resolve().parent
RUNS = HERE / "peer_runs"
OURS = "minititan"
DOCUMENTS, SEED = 500, 0  # of the tokens; the seed is that of minititan.toml
TOKENS = common.BATCH * common.SEQ_LEN
WARM_UP = 2  # steps
LOSS_RANGE = 0.5  # between programs, whose initial weights differ

Json = dict[str, Any]


@dataclass(frozen=True)
class Case:
    ranks: int
    compiled: bool
    speed_goal: float

    @property
    def title(self) -> str:
        return (
            f"{'compiled' if self.compiled else 'eager'}, {self.ranks} process{'es, FSDP' * (self.ranks > 1)}"
        )


CASES = {
    "eager": Case(1, False, 1.0),
    "compiled": Case(1, True, 1.1),
    "eager-2": Case(2, False, 1.0),
    "compiled-2": Case(2, True, 1.1),
}


@dataclass(frozen=True)
class Peer:
    """What is installed, with the release of the first package shown, and why some cases cannot run."""

    requirements: list[str]
    most_ranks: int = 2
    why_not_more: str = ""

    @property
    def package(self) -> str:
        return self.requirements[0].partition("==")[0]


PEERS = {
    "torchtitan": Peer(["torchtitan==0.3.0", "triton"]),
    # `requests`: litgpt writes its settings through an optional part of jsonargparse that needs it.
    "litgpt": Peer(["litgpt==0.5.13", "requests"], 1, "Lightning's FSDP strategy is for GPUs alone"),
    "transformers": Peer(["transformers==5.24.0"]),
}


# ---- the data


def write_tokens(folder: Path) -> None:
    """Write tokens of Python's standard library, and the same as rows in the order that minititan takes."""
    texts, pieces = documents()[:DOCUMENTS], pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pieces
    trainer = trainers.BpeTrainer(
        vocab_size=common.VOCABULARY, initial_alphabet=pieces.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    ids = np.concatenate([np.array(text.ids, np.uint16) for text in tokenizer.encode_batch(texts)])
    count = (len(ids) - 1) // common.SEQ_LEN
    order = samples_at(np.arange(count), count, SEED) * common.SEQ_LEN
    np.save(folder / "tokens.npy", ids)
    np.save(folder / "rows.npy", np.stack([ids[at : at + common.SEQ_LEN + 1] for at in order.tolist()]))


# ---- the runs


def command(name: str, python: Path, case: Case, steps: int, folder: Path) -> list[str]:
    words = [str(python)]
    if case.ranks > 1:
        words += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks)]
    if name != OURS:
        own = ["--rows", str(folder / "rows.npy"), "--folder", str(folder / "out"), "--steps", str(steps)]
        return [*words, str(RUNS / f"run_{name}.py"), *own, *["--compile"] * case.compiled]
    keys = {
        "job.dump_folder": folder / "out",
        "data.cache_folder": folder / "cache",
        "training.dataset_path": folder / "tokens.npy",
        "training.local_batch_size": common.BATCH // case.ranks,
        "training.steps": steps,
        "compile.enable": str(case.compiled).lower(),
    }
    overrides = [f"--{key}={value}" for key, value in keys.items()]
    return [*words, "-m", "minititan.train", f"--job.config_file={RUNS / 'minititan.toml'}", *overrides]


def environment(name: str, case: Case, folder: Path) -> dict[str, str]:
    """Return the variables of a run: the same threads for all, nothing compiled before."""
    cores = len(os.sched_getaffinity(0))
    found = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    found |= {
        "OMP_NUM_THREADS": str(max(1, cores // case.ranks)),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"),
    }
    if name == OURS:
        found["PYTHONPATH"] = str(HERE.parent)
    elif not case.compiled:
        found["TORCH_COMPILE_DISABLE"] = "1"
    if name == "torchtitan" and case.ranks == 1:  # it has no start without a launcher's variables
        found |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        found |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    return found


def figures(program: Program, case: Case) -> Json:
    """Return a run as numbers; the ranks are the largest processes."""
    times = program.seconds[WARM_UP:]
    peaks = sorted(program.peaks.values(), reverse=True)[: case.ranks]
    return {
        "tokens_per_second": TOKENS / statistics.median(times),
        "step_seconds": times,
        "first_step_seconds": program.seconds[0],
        "peak_gb": peaks[0] / 1e9,
        "peak_gb_of_all_ranks": sum(peaks) / 1e9,
        "parameters": program.parameters,
        "losses": program.losses,
    }


def own_parameters() -> int:
    """Return the size of minititan's model, whose run does not tell it."""
    with torch.device("meta"):
        model = Decoder(dataclasses.replace(FLAVORS["10M"], vocab_size=common.VOCABULARY))
    return sum(parameter.numel() for parameter in model.parameters())


def take_turns(
    case: Case, found: Mapping[str, Path], data: Path, given: argparse.Namespace
) -> tuple[dict[str, Json], dict[str, str]]:
    """Return a run of each program, and why others gave none.

    They start one after the other, each alone to the end of its first step, and then take turns step by step,
    until they have done their steps or the time of a round is over.
    """
    programs: dict[str, Program] = {}
    failures: dict[str, str] = {}
    over = time.monotonic() + given.seconds
    with contextlib.ExitStack() as stack:
        for name, python in found.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peers-")))
            for file in data.iterdir():
                Path(folder, file.name).symlink_to(file)
            words = command(name, python, case, given.steps + 1, folder)  # what comes after is left out
            programs[name] = Program(words, environment(name, case, folder), launched=case.ranks > 1)
            stack.callback(programs[name].end)
            attempt(name, programs, failures, given.timeout)
        for turn in range(1, given.steps):
            if turn > WARM_UP + 1 and time.monotonic() > over:
                break
            for name in list(programs):
                attempt(name, programs, failures, given.timeout)
        runs = {name: figures(program, case) for name, program in programs.items()}
    if OURS in runs:
        runs[OURS]["parameters"] = own_parameters()
    return runs, failures


def attempt(name: str, programs: dict[str, Program], failures: dict[str, str], timeout: float) -> None:
    """Let a program do a step; one that cannot is left out of what comes."""
    try:
        programs[name].step(timeout)
    except RunFailed as reason:
        failures[name] = str(reason)
        del programs[name]


def pythons(folder: Path, names: Sequence[str], pip_words: list[str], results: Json) -> dict[str, Path]:
    """Return the Pythons of the programs; why a peer cannot be installed goes into the results."""
    found = {OURS: Path(sys.executable)}
    release = version("torch").partition("+")[0]
    for name in names:
        if name == OURS:
            continue
        peer = PEERS[name]
        try:
            found[name] = python_of(folder, name, peer.requirements, release, pip_words)
        except LeftOut as reason:
            print(f"{name} is left out. {reason}", flush=True)
            results["left_out"][name] = str(reason)
            continue
        results["left_out"].pop(name, None)
        results["versions"][name] = versions_in(found[name], [peer.package, "torch"])
    return {name: found[name] for name in names if name in found}


def run_rounds(given: argparse.Namespace, results: Json) -> None:
    found = pythons(given.folder, given.only, given.pip, results)
    data = (given.folder / "data").resolve()
    if not (data / "rows.npy").exists():
        data.mkdir(parents=True, exist_ok=True)
        write_tokens(data)
    for number in range(given.rounds):
        for key in given.cases:
            case = CASES[key]
            able = {
                name: at for name, at in found.items() if name == OURS or case.ranks <= PEERS[name].most_ranks
            }
            print(f"round {number + 1} of {given.rounds}, {case.title}: {', '.join(able)} ...", flush=True)
            runs, failures = take_turns(case, able, data, given)
            begun = datetime.now().isoformat(timespec="seconds")
            for name, run in runs.items():
                run["round"] = begun
                results["runs"].setdefault(key, {}).setdefault(name, []).append(run)
                speed, first = run["tokens_per_second"], run["first_step_seconds"]
                text = f"{speed:,.0f} tokens/s, {run['peak_gb']:.2f} GB, first step {first:.1f} s"
                print(f"  {name}: {text}, loss {run['losses'][-1]:.3f}", flush=True)
            for name, reason in failures.items():
                print(f"  {name} gave no run: {reason}", flush=True)
                results["failed"][f"{name}, {case.title}"] = reason
            write_json(given.json, results)


# ---- the report


def middle(runs: Sequence[Json], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def steps_of(runs: Sequence[Json]) -> list[float]:
    """Return the seconds of the steps of all rounds."""
    return [seconds for run in runs for seconds in run["step_seconds"]]


def table(case: Case, runs: Mapping[str, list[Json]]) -> list[str]:
    ranks = case.ranks > 1
    memory = f"peak memory, GB{' (largest rank; all)' * ranks}"
    lines = [
        f"| {case.title} | tokens/s, by step | {memory} | first step, s | loss | rounds |",
        "|---|---|---|---|---|---|",
    ]
    for name, of in runs.items():
        speed = spread([TOKENS / seconds for seconds in steps_of(of)], 0)
        memory = spread([run["peak_gb"] for run in of], 2)
        if ranks:
            memory += f"; {middle(of, 'peak_gb_of_all_ranks'):.2f}"
        first = spread([run["first_step_seconds"] for run in of], 1)
        loss = f"{of[-1]['losses'][-1]:.3f} at step {len(of[-1]['losses'])}"
        lines.append(f"| {name} | {speed} | {memory} | {first} | {loss} | {len(of)} |")
    return lines


def ratios_of(ours: Sequence[Json], theirs: Sequence[Json], key: str) -> list[float]:
    """Return ours by theirs, of the rounds that both ran; of "step_seconds" the speeds, turn by turn."""
    other = {run["round"]: run[key] for run in theirs}
    pairs = [(run[key], other[run["round"]]) for run in ours if run["round"] in other]
    if key != "step_seconds":
        return [own / against for own, against in pairs]
    return [slow / fast for own, against in pairs for fast, slow in zip(own, against, strict=False)]


def goals(case: Case, runs: Mapping[str, list[Json]]) -> list[Json]:
    """Return the ratios that have a goal; none without minititan and a peer."""
    ours = runs.get(OURS, [])
    speeds = {name: ratios_of(ours, of, "step_seconds") for name, of in runs.items() if name != OURS}
    peers = {name: runs[name] for name, ratios in speeds.items() if ratios}
    if not peers:
        return []
    best = min(peers, key=lambda name: statistics.median(speeds[name]))
    least = min(peers, key=lambda name: middle(peers[name], "peak_gb"))
    rows = [
        ("tokens/s", best, "step_seconds", case.speed_goal, False),
        ("peak memory", best, "peak_gb", 0.8, True),
    ]
    if least != best:
        rows.append(("peak memory", least, "peak_gb", 0.8, True))
    if "torchtitan" in peers:
        rows.append(("first step", "torchtitan", "first_step_seconds", 0.5, True))
    found = []
    for what, peer, key, goal, at_most in rows:
        ratios = ratios_of(ours, peers[peer], key)
        ratio = statistics.median(ratios)
        found.append(
            {
                "case": case.title,
                "what": f"{what} of {peer}" + " (the fastest)" * (peer == best and what != "first step"),
                "ratio": ratio,
                "ratios": ratios,
                "goal": goal,
                "at_most": at_most,
                "verdict": verdict(ratio, goal, at_most=at_most),
            }
        )
    return found


def differences(case: Case, runs: Mapping[str, list[Json]]) -> list[str]:
    """Return in what the programs did not train the same."""
    found = []
    counts = {name: of[-1]["parameters"] for name, of in runs.items() if of[-1]["parameters"]}
    found += [f"{name}: {n:,} parameters" for name, n in counts.items() if n != common.PARAMETERS]
    steps = min(len(of[-1]["losses"]) for of in runs.values())
    losses = [of[-1]["losses"][steps - 1] for of in runs.values()]
    if max(losses) - min(losses) > LOSS_RANGE:
        found.append(f"losses from {min(losses):.3f} to {max(losses):.3f} at step {steps}")
    return [f"{case.title}: {text}" for text in found]


def report(results: Json) -> str:
    lines = [machine_line(results["machine"])]
    for name, versions in results["versions"].items():
        lines.append(
            f"{name}: " + ", ".join(f"{package} {number}" for package, number in versions.items()) + "."
        )
    results["goals"], results["differences"] = [], []
    for key, case in CASES.items():
        if runs := results["runs"].get(key):
            lines += ["", *table(case, runs)]
            results["goals"] += goals(case, runs)
            results["differences"] += differences(case, runs)
    if results["goals"]:
        lines += ["", "| minititan against | ratio | goal | |", "|---|---|---|---|"]
    for row in results["goals"]:
        sign = "at most" if row["at_most"] else "at least"
        ratios = spread(row["ratios"], 2)
        lines.append(f"| {row['what']}, {row['case']} | {ratios} | {sign} {row['goal']} | {row['verdict']} |")
    if any(len(runs) > 1 for runs in results["runs"].values()):
        same = f"All have {common.PARAMETERS:,} parameters; their last losses differ by {LOSS_RANGE} at most."
        lines += ["", *(results["differences"] or [same])]
    if any(CASES[key].ranks > 1 for key in results["runs"]):
        few = {name: peer for name, peer in PEERS.items() if peer.most_ranks == 1}
        lines += [f"{name} has no run of several processes here: {few[name].why_not_more}." for name in few]
    for what in ("left_out", "failed"):
        lines += [f"{name}: {reason.splitlines()[-1]}" for name, reason in results[what].items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], help="default: all")
    parser.add_argument("--only", nargs="+", choices=[OURS, *PEERS], default=[OURS, *PEERS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help=f"of a run, {WARM_UP} of them warm-up")
    seconds_help = "a round gives no further turn after so long (default: no limit)"
    parser.add_argument("--seconds", type=float, default=math.inf, help=seconds_help)
    parser.add_argument("--folder", type=Path, default=Path("outputs/peers"), help="environments and tokens")
    pip_help = "more words for pip install: --pip='--index-url ...', as for builds for CPUs alone"
    parser.add_argument("--pip", type=shlex.split, default=[], metavar="WORDS", help=pip_help)
    parser.add_argument("--timeout", type=float, default=600, help="seconds that a step may take")
    parser.add_argument("--more", action="store_true", help="add to the runs that the JSON holds")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--json", type=Path, default=Path("outputs/peers_benchmark.json"))
    parser.add_argument("--page", type=Path, help="write the tables between their marks in this page")
    given = parser.parse_args()
    given.cases = given.cases or list(CASES)
    unknown = [] if given.page is None or given.page.exists() else [f"no page {given.page}"]
    if given.steps <= WARM_UP:
        unknown.append(f"--steps {given.steps}: more than the {WARM_UP} of the warm-up")
    if unknown:
        parser.error("; ".join(unknown))
    results: Json = {"machine": machine(), "versions": {}, "runs": {}, "left_out": {}, "failed": {}}
    if (given.more or given.report) and given.json.exists():
        results |= {key: json.loads(given.json.read_text())[key] for key in results if key != "machine"}
    results["failed"] = {}
    if not given.report:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run in progress is ended too
        run_rounds(given, results)
    text = report(results)
    write_json(given.json, results)
    print(f"\n{text}")
    if given.page is not None:
        write_part(given.page, "python benchmarks/peers.py", "peers", text)


if __name__ == "__main__":
    main()

"""How long a run takes to its first step, phase by phase; what its imports cost; how fast commands answer.

`python benchmarks/startup.py [eager] [compiled] [imports] [commands] [--repeats N] [--more]`. The model is
the 10M one of `llama3` with a vocabulary of 6,400, 8 sequences of 512 tokens a step, bytes of Python's
standard library as text, prepared beforehand. A run is a new process, or `torchrun` with two, and takes two
steps. Compiled runs start with an empty compile cache, and then once more with what the first left there.
Cases are interleaved. `--more` adds to the measurements of the JSON file instead of replacing them.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from reports import machine, machine_line, spread, verdict, write_json, write_part

ROOT = Path(__file__).resolve().parents[1]
MODEL = (
    *("--model.name", "llama3", "--model.flavor", "10M", "--model.args.vocab_size", "6400"),
    *("--training.seq_len", "512", "--training.steps", "2"),
    *("--metrics.log_freq", "1", "--training.mixed_precision_param", "float32"),
    *("--activation_checkpoint.mode", "none"),
)
BATCH = 8  # of all processes
PHASES = (
    *("interpreter", "import of torch", "import of minititan", "config", "check", "process group", "data"),
    *("model", "parallelisms", "initial values", "optimizer", "checkpoint look-up", "other", "first step"),
)
AFTER = ("later step", "end")
CASES = {
    "eager": {"1 process": (1, "eager"), "2 processes": (2, "eager")},
    "compiled": {
        "1 process, first start": (1, "first"),
        "1 process, second start": (1, "second"),
        "2 processes, first start": (2, "first"),
        "2 processes, second start": (2, "second"),
    },
}
TORCHTITAN_SECONDS = {1: 17.0, 2: 21.0}  # once, on 2 quiet cores; benchmarks/peers.py measures it anew
COMMANDS = {
    "python -c pass": ("-c", "pass"),
    "import torch": ("-c", "import torch"),
    "minititan --help": ("-m", "minititan", "--help"),
    "minititan config": ("-m", "minititan", "config", "--job.config_file", "run.toml"),
    "minititan models": ("-m", "minititan", "models"),
    "minititan data --help": ("-m", "minititan", "data", "--help"),
    "minititan checkpoint --help": ("-m", "minititan", "checkpoint", "--help"),
    "minititan generate --help": ("-m", "minititan", "generate", "--help"),
    "minititan train, a wrong key": ("-m", "minititan", "train", "--job.config_file", "wrong.toml"),
}
COMMAND_CODES = {"minititan train, a wrong key": 2}


def environment(**more: str) -> dict[str, str]:
    """Return the environment, in which bytecode is kept, as for a user."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


# ---- runs


def run_once(processes: int, compiled: bool, compile_cache: Path) -> dict[str, Any]:
    """Start a run; return the seconds of its phases on the rank whose first step ended last."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run.toml").touch()
        words = [*MODEL, "--job.config_file", str(folder / "run.toml"), "--job.dump_folder", f"{name}/out"]
        words += ["--training.local_batch_size", str(BATCH // processes)]
        if compiled:
            words += ["--compile.enable"]
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
        begin = time.monotonic()
        command = [
            *([sys.executable] + (launcher if processes > 1 else [])),
            *(str(ROOT / "benchmarks/startup_phases.py"), name, repr(begin), *words),
        ]
        ended = subprocess.run(
            command,
            env=environment(TORCHINDUCTOR_CACHE_DIR=str(compile_cache)),
            capture_output=True,
            text=True,
        )
        left = time.monotonic()
        if ended.returncode:
            raise SystemExit(f"{' '.join(command)}\n{ended.stdout}{ended.stderr}")
        ranks = [json.loads(path.read_text()) for path in folder.glob("rank-*.json")]
    result = max(ranks, key=lambda rank: until_first_step(rank["seconds"]))
    result["seconds"]["end"] = result["seconds"].get("end", 0.0) + left - result.pop("ended")
    return result


def until_first_step(seconds: Mapping[str, float]) -> float:
    return sum(seconds.get(phase, 0.0) for phase in PHASES)


def measure_runs(part: str, repeats: int) -> dict[str, list[dict[str, Any]]]:
    """Return the runs of each case, after one that counts nowhere: it fills the disk's cache, and prepares
    the text.
    """
    found: dict[str, list[dict[str, Any]]] = {case: [] for case in CASES[part]}
    with tempfile.TemporaryDirectory() as name:
        if part == "eager":
            run_once(1, False, Path(name))
        for repeat in range(repeats):
            for case, (processes, kind) in CASES[part].items():
                cache = Path(name) / f"{repeat}-{processes}"
                found[case].append(run_once(processes, kind != "eager", cache))
                print(
                    f"{part}, {case}: {until_first_step(found[case][-1]['seconds']):.2f} s", file=sys.stderr
                )
    return found


def table_of_runs(part: str, runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return the phases by case, in seconds."""
    cases = list(CASES[part])
    count = len(runs[cases[0]])
    lines = [f"| seconds, median (range) of {count} | {' | '.join(cases)} |", "|---|" + "---:|" * len(cases)]

    def row(name: str, values: Iterable[Sequence[float]], bold: bool = False) -> None:
        cells = [spread(of_case, 2) for of_case in values]
        lines.append("| " + " | ".join(f"**{cell}**" if bold else cell for cell in (name, *cells)) + " |")

    def seconds(case: str, phase: str) -> list[float]:
        return [run["seconds"].get(phase, 0.0) for run in runs[case]]

    for phase in PHASES:
        row(phase, [seconds(case, phase) for case in cases])
    totals = {case: [until_first_step(run["seconds"]) for run in runs[case]] for case in cases}
    row("process start to the end of the first step", totals.values(), bold=True)
    for phase in AFTER:
        row(phase, [seconds(case, phase) for case in cases])
    lines.append("")
    for case in cases:
        processes, kind = CASES[part][case]
        took, titan = statistics.median(totals[case]), TORCHTITAN_SECONDS[processes]
        if kind == "eager":  # TorchTitan's are eager starts
            told = verdict(took / titan, 0.5, at_most=True)
            lines.append(f"- {case}: {took:.1f} s, {took / titan:.2f} of TorchTitan's {titan:.0f} s: {told}")
        counts = runs[case][-1]["compiler"]
        if counts:
            lines.append(f"- {case}: the compiler counts {compiler_line(counts)}")
    return "\n".join(lines)


def compiler_line(counts: Mapping[str, int]) -> str:
    names = {
        "stats.unique_graphs": "graphs",
        "aot_autograd.autograd_cache_hit": "found in AOTAutograd's cache",
        "aot_autograd.autograd_cache_miss": "not found there",
        "inductor.fxgraph_cache_hit": "found in Inductor's cache",
        "inductor.fxgraph_cache_miss": "not found there",
    }
    return ", ".join(f"{counts.get(key, 0)} {name}" for key, name in names.items())


# ---- imports


def measure_imports() -> list[tuple[str, int, int]]:
    """Return every module that `import minititan.train` loads, with its own and its whole microseconds.

    Without garbage collections, as a run starts: their time would be counted to modules at random.
    """
    command = [sys.executable, "-X", "importtime", "-c", "import gc; gc.disable(); import minititan.train"]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    lines = re.findall(r"import time:\s+(\d+) \|\s+(\d+) \|\s+(\S+)", ended.stderr)
    return [(name, int(own), int(whole)) for own, whole, name in lines]


def group_of(module: str) -> str:
    """Return the package that a module is counted to; torch's parts that not every run needs stand alone."""
    for part in ("torch._dynamo", "torch._inductor", "torch._functorch", "torch.distributed"):
        if f"{module}.".startswith(f"{part}."):
            return part
    top = module.split(".")[0]
    return "Python's own" if top in sys.stdlib_module_names else top


def table_of_imports(samples: Sequence[Sequence[tuple[str, int, int]]]) -> tuple[str, Any]:
    """Return own milliseconds by package, and own and whole ones of the modules of minititan."""
    groups: dict[str, list[float]] = defaultdict(list)
    counts: Counter[str] = Counter()
    ours: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for sample in samples:
        total: Counter[str] = Counter()
        counts = Counter()
        for name, own, whole in sample:
            total[group_of(name)] += own
            counts[group_of(name)] += 1
            if name.split(".")[0] == "minititan":
                ours[name].append((own / 1000, whole / 1000))
        for group, own in total.items():
            groups[group].append(own / 1000)
    by_time = sorted(groups, key=lambda group: -statistics.median(groups[group]))
    lines = ["| package | modules | own ms |", "|---|---:|---:|"]
    small = [group for group in by_time if statistics.median(groups[group]) < 5]
    for group in by_time:
        if group not in small:
            lines.append(f"| {group} | {counts[group]} | {spread(groups[group])} |")
    rest = sum(statistics.median(groups[name]) for name in small)
    lines.append(f"| {len(small)} more | {sum(counts[name] for name in small)} | {rest:.1f} |")
    every = [sum(own for _, own, _ in sample) / 1000 for sample in samples]
    lines.append(f"| **all** | **{sum(counts.values())}** | **{spread(every)}** |")
    lines += [
        "",
        "| module of minititan | own ms | with what it is the first to import, ms |",
        "|---|---:|---:|",
    ]
    medians = {
        name: [statistics.median(values) for values in zip(*pairs, strict=True)]
        for name, pairs in ours.items()
    }
    for name, (own, whole) in sorted(medians.items(), key=lambda item: -item[1][1]):
        if whole >= 10:
            lines.append(f"| {name} | {own:.1f} | {whole:.1f} |")
    lines.append(f"| all {len(medians)} of them | {sum(own for own, _ in medians.values()):.1f} | |")
    return "\n".join(lines), {"packages": groups, "modules": medians}


# ---- commands


def measure_commands(repeats: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "run.toml").write_text("")
        (Path(folder) / "wrong.toml").write_text("[training]\nstepz = 1\n")
        for repeat in range(repeats + 1):
            for name, words in COMMANDS.items():
                begin = time.monotonic()
                ended = subprocess.run(
                    [sys.executable, *words], cwd=folder, env=environment(), capture_output=True, text=True
                )
                took = time.monotonic() - begin
                if ended.returncode != COMMAND_CODES.get(name, 0):
                    raise SystemExit(f"{name}\n{ended.stdout}{ended.stderr}")
                if repeat:  # the first round fills the disk's cache
                    found[name].append(took)
    return dict(found)


def table_of_commands(seconds: Mapping[str, Sequence[float]]) -> str:
    lines = ["| command | seconds |", "|---|---:|"]
    return "\n".join([*lines, *(f"| {name} | {spread(values, 2)} |" for name, values in seconds.items())])


# ---- the command

PARTS = ("eager", "compiled", "imports", "commands")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--more", action="store_true", help="add to what the JSON file has")
    parser.add_argument("--page", type=Path, help="such as docs/performance.md")
    parser.add_argument("--json", type=Path, default=Path("outputs/startup_benchmark.json"))
    options = parser.parse_args()
    chosen = options.parts or list(PARTS)
    if unknown := set(chosen) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are: {', '.join(PARTS)}")
    results = json.loads(options.json.read_text()) if options.json.exists() else {}
    results["machine"] = machine("pydantic", "sympy")
    texts: dict[str, str] = {}
    for part in chosen:
        if part in CASES:
            found: Any = measure_runs(part, options.repeats)
        elif part == "imports":
            found = {"samples": [measure_imports() for _ in range(options.repeats)]}
        else:
            found = measure_commands(options.repeats)
        if options.more:
            for case, values in results.get(part, {}).items():
                found[case] = values + found[case]
        results[part] = found
        if part == "imports":
            texts[part], results["imports by package and module"] = table_of_imports(found["samples"])
        else:
            texts[part] = table_of_runs(part, found) if part in CASES else table_of_commands(found)
        write_json(options.json, results)
    for part, text in texts.items():
        text = f"{machine_line(results['machine'])}\n\n{text}"
        print(f"\n{part}\n\n{text}")
        if options.page is not None:
            write_part(options.page, "python benchmarks/startup.py", part, text)


if __name__ == "__main__":
    main()

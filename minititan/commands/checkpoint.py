"""`minititan checkpoint`: what lies in a checkpoint folder, whether it is whole, and what can go.

What only looks at files does not load torch.
"""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from minititan.checkpoint import manifest
from minititan.checkpoint.folder import (
    is_step_name,
    remove_step,
    step_folder,
    step_folders,
    validation_losses,
)
from minititan.checkpoint.manifest import COMMIT, TRAIN_STATE, Manifest
from minititan.checkpoint.retention import Keep, steps_to_remove
from minititan.commands import Parser, parser_of
from minititan.commands.tables import age_text, print_table, size_text
from minititan.config import ConfigError
from minititan.run_status import RunStatus

HELP = """\
Tools for checkpoints. PATH is a checkpoint (RUN/checkpoint/step-N), a folder of them, or a run's folder."""


def checkpoint_command(argv: Sequence[str]) -> int:
    """Runs one of the tools; returns the exit code."""
    parser = parser_of("minititan checkpoint", HELP)
    tools = parser.add_subparsers(dest="tool", metavar="TOOL", required=True, parser_class=Parser)
    for add in (_add_ls, _add_show, _add_verify, _add_diff, _add_prune, _add_convert):
        add(tools)
    given = parser.parse_args(argv or ["--help"])
    try:
        return given.run(given)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}; give this user access") from None


def steps_at(path: Path) -> list[Path]:
    """The checkpoint at a path, or the ones in it, ascending, whole or not. Raises ConfigError for none."""
    if (path / COMMIT).is_file() or (path / TRAIN_STATE).is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(
            f"{path}: no such folder; give a checkpoint, a folder of them, or the folder of a run"
        )
    for folder in (path, path / "checkpoint"):
        if folder.is_dir() and (steps := step_folders(folder)):
            return [step_folder(folder, step) for step in steps]
    if is_step_name(path.name):  # all of it is lost but the folder
        return [path]
    raise ConfigError(f"{path}: holds no checkpoint (step-N); give a folder that does")


def step_at(path: Path) -> Path:
    """The checkpoint at a path, or the newest one in it."""
    return steps_at(path)[-1]


def _add(tools: Any, name: str, run: Callable[[Any], int], summary: str, more: str = "") -> Parser:
    parser = tools.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}. {more}".strip()
    )
    parser.set_defaults(run=run)
    return parser


# ---- ls


def _add_ls(tools: Any) -> None:
    more = "Valid: COMMIT.json is undamaged and all files have their sizes; verify compares hashes too."
    parser = _add(tools, "ls", ls, "list steps: size, age, layout, content, valid or not", more)
    parser.add_argument("path", metavar="PATH", type=Path)


def ls(given: Any) -> int:
    rows = [_row(step) for step in steps_at(given.path.expanduser())]
    columns = ("step", "size", "age", "saved by", "content", "valid")
    print_table(columns, rows, right=("size", "age"))
    return 0


def _row(step: Path) -> tuple[str, ...]:
    size = _size(step)
    age = age_text(time.time() - max((file.stat().st_mtime for file in step.iterdir()), default=time.time()))
    faults = manifest.verify(step, hashes=False)
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        return (step.name, size_text(size), age, "", "", f"no: {faults[0]}{more}")
    saved = manifest.read(step)
    return (step.name, size_text(size), age, layout_text(saved), content_text(saved), "yes")


def layout_text(saved: Manifest) -> str:
    """The layout of the run that saved: "4 processes: dp_shard 2, tp 2"."""
    count = saved.layout.get("world_size", 1)
    degrees = (
        f"{key} {saved.layout[key]}"
        for key in ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")
        if saved.layout.get(key, 1) != 1
    )
    return f"{count} {'process' if count == 1 else 'processes'}" + "".join(f", {text}" for text in degrees)


def content_text(saved: Manifest) -> str:
    """What the tensors are of."""
    return " + ".join(dict.fromkeys(key.partition(".")[0] for key in saved.tensors))


# ---- show


def _add_show(tools: Any) -> None:
    more = "Of a folder, the newest step."
    parser = _add(tools, "show", show, "print counters, and keys, shapes and types of all tensors", more)
    parser.add_argument("path", metavar="PATH", type=Path)


def show(given: Any) -> int:
    step = step_at(given.path.expanduser())
    saved = manifest.read(step)
    model = saved.model
    lines = {
        "checkpoint": str(step),
        "step": f"{saved.step}",
        "model": f"{model.get('name', '?')} {model.get('flavor', '')}",
        "saved by": layout_text(saved),
        "versions": ", ".join(f"{name} {version}" for name, version in saved.versions.items()),
        "files": f"{len(saved.files)}, {size_text(sum(file.size for file in saved.files.values()))}",
        "tensors": f"{len(saved.tensors)}, {_elements(saved.tensors.values()):,} elements",
    }
    print_table(("", ""), [*lines.items(), *_counters(step)])
    print()
    rows = [(key, str(list(info.shape)), info.dtype) for key, info in saved.tensors.items()]
    print_table(("key", "shape", "dtype"), rows)
    return 0


def _elements(infos: Any) -> int:
    total = 0
    for info in infos:
        count = 1
        for length in info.shape:
            count *= length
        total += count
    return total


def _counters(step: Path) -> list[tuple[str, str]]:
    """Numbers in `train_state.json`, but for what an import has left there."""
    try:
        state = json.loads((step / TRAIN_STATE).read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{step / TRAIN_STATE}: cannot be read ({error}); use another checkpoint") from None
    return [
        (f"{section}.{key}", str(value))
        for section, values in state.items()
        if isinstance(values, dict) and section != "hugging_face"
        for key, value in values.items()
        if isinstance(value, (int, float, str, bool))
    ]


# ---- verify


def _add_verify(tools: Any) -> None:
    more = "Reads every byte. Exit code 1 where anything is damaged, missing or not committed."
    parser = _add(tools, "verify", verify, "compare all files with their hashes", more)
    parser.add_argument("path", metavar="PATH", type=Path)
    parser.add_argument("--sizes", action="store_true", help="compare sizes only: fast")


def verify(given: Any) -> int:
    damaged = False
    for step in steps_at(given.path.expanduser()):
        faults = manifest.verify(step, hashes=not given.sizes)
        damaged = damaged or bool(faults)
        for fault in faults:
            print(fault, flush=True)
        if not faults:
            files = manifest.read(step).files
            size = size_text(sum(file.size for file in files.values()))
            print(f"{step}: whole ({len(files)} files, {size})", flush=True)
    return 1 if damaged else 0


# ---- tools that need torch


def _add_diff(tools: Any) -> None:
    more = "Exit code 1 where they differ. Tensors are read one at a time."
    parser = _add(
        tools, "diff", _diff, "print which tensors differ between two checkpoints, by how much", more
    )
    parser.add_argument("first", metavar="STEP", type=Path)
    parser.add_argument("second", metavar="OTHER", type=Path)
    parser.add_argument("--keys", default="*", metavar="PATTERN", help='only these, e.g. "model.*"')


def _diff(given: Any) -> int:
    from minititan.commands.checkpoint_tensors import diff

    return diff(step_at(given.first.expanduser()), step_at(given.second.expanduser()), given.keys)


def _add_prune(tools: Any) -> None:
    more = "Keeps what any rule wants, as a run does. Removes only with --yes, after verifying the newest."
    parser = _add(tools, "prune", prune, "remove checkpoints but the newest, every n-th, the best", more)
    parser.add_argument("path", metavar="PATH", type=Path)
    parser.add_argument(
        "--keep_latest_k", type=int, required=True, metavar="K", help="the newest K; at least 1"
    )
    parser.add_argument("--keep_every_n_steps", type=int, default=0, metavar="N", help="steps that N divides")
    parser.add_argument(
        "--keep_best_k", type=int, default=0, metavar="K", help="the K of lowest validation loss"
    )
    parser.add_argument("--yes", action="store_true", help="remove them")


def prune(given: Any) -> int:
    for name, least in (("keep_latest_k", 1), ("keep_every_n_steps", 0), ("keep_best_k", 0)):
        if getattr(given, name) < least:
            raise ConfigError(f"command line: --{name} {getattr(given, name)}: must be at least {least}")
    folder, status = steps_at(given.path.expanduser())[-1].parent, RunStatus()
    if not given.yes:
        return _prune(folder, given)
    try:
        status.take({"checkpoint.folder": folder})
        return _prune(folder, given)
    finally:
        status.release()


def _prune(folder: Path, given: Any) -> int:
    losses = validation_losses(folder)
    if not losses:
        raise ConfigError(
            f"{folder}: none of its checkpoints is valid; minititan checkpoint verify tells more"
        )
    keep = Keep(given.keep_latest_k, given.keep_every_n_steps, given.keep_best_k)
    surplus = steps_to_remove(keep, losses, max(losses))
    rows = []
    for step in losses:
        loss, path = losses[step], step_folder(folder, step)
        goes = "goes" if step in surplus else "stays"
        rows.append((path.name, size_text(_size(path)), "" if loss is None else f"{loss:.4f}", goes))
    print_table(("step", "size", "validation loss", ""), rows, right=("size", "validation loss"))
    freed = size_text(sum(_size(step_folder(folder, step)) for step in surplus))
    if given.yes:
        if faults := manifest.verify(step_folder(folder, max(losses))):
            raise ConfigError(*(f"{fault}; nothing was removed" for fault in faults))
        for step in surplus:
            remove_step(folder, step)
    print(
        f"\n{len(surplus)} of {len(losses)} "
        + (f"removed: {freed}" if given.yes else f"would go: {freed}; --yes removes them")
    )
    return 0


def _size(step: Path) -> int:
    return sum(file.stat().st_size for file in step.iterdir() if file.is_file())


def _add_convert(tools: Any) -> None:
    more = "Tensors are read one at a time; the keys are those that show prints."
    parser = _add(tools, "convert", _convert, "consolidate a checkpoint to one safetensors file", more)
    parser.add_argument("path", metavar="STEP", type=Path)
    parser.add_argument("file", metavar="FILE.safetensors", type=Path)
    parser.add_argument("--keys", default="*", metavar="PATTERN", help='only these, e.g. "model.*"')


def _convert(given: Any) -> int:
    from minititan.commands.checkpoint_tensors import convert

    return convert(step_at(given.path.expanduser()), given.file.expanduser(), given.keys)

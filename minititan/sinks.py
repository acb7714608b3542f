"""Where metrics go besides the console: `metrics.jsonl`, TensorBoard events, a Weights & Biases run.

Each goes on over the restarts of a run; a fresh start in a used folder moves an earlier run's files aside.
"""

import contextlib
import importlib
import importlib.util
import itertools
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from minititan.config import ConfigError

JSONL_NAME = "metrics.jsonl"
WANDB_ID_NAME = "wandb_run_id"
EVENTS = "events.out.tfevents.*"


class JsonLines:
    """`metrics.jsonl` in `folder`: one JSON object a line, in the file when `write` returns.

    Numbers that are not finite become null, since JSON has no other name for them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
            _drop_torn_line(folder / JSONL_NAME)
            self._file = (folder / JSONL_NAME).open("ab", buffering=0)

    def write(self, record: Mapping[str, object]) -> None:
        with explained(self.folder):
            self._file.write(json.dumps(_finite(record)).encode() + b"\n")

    def close(self) -> None:
        self._file.close()


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def explained(folder: Path, what: str = "the metrics") -> Iterator[None]:
    """Turns a failed write under `folder` into a ConfigError that names it."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{folder}: {what} cannot be written ({error.strerror or error}); make room or set another "
            "job.dump_folder; a restart goes on from the last checkpoint"
        ) from error


def _drop_torn_line(path: Path) -> None:
    """A process that was killed while it wrote leaves half a line, which is no record."""
    if path.exists() and not (text := path.read_bytes()).endswith(b"\n"):
        os.truncate(path, text.rfind(b"\n") + 1)


def move_aside(folder: Path, events_folder: Path) -> Path | None:
    """Moves an earlier run's logs into a new folder `earlier-N` and returns it; None where there are none."""
    moves = [(path, path.name) for name in (JSONL_NAME, WANDB_ID_NAME) if (path := folder / name).exists()]
    for path in (*events_folder.glob(EVENTS), *events_folder.glob(f"rank_*/{EVENTS}")):
        moves.append((path, f"tb/{path.relative_to(events_folder)}"))
    if not moves:
        return None
    target = next(path for n in itertools.count(1) if not (path := folder / f"earlier-{n}").exists())
    for path, name in moves:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, target / name)  # the events may lie on another file system
    return target


class TensorBoard:
    """Events in `folder`, which exists from the first `write` on; tensorboard is imported then."""

    def __init__(self, folder: Path, start_step: int) -> None:
        self.folder, self.start_step = folder, start_step
        self._writer: Any = None

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        with explained(self.folder):
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                # What an earlier process logged after the resumed step is hidden by TensorBoard, not deleted.
                purge_step = self.start_step + 1 if self.start_step else None
                self._writer = SummaryWriter(str(self.folder), purge_step=purge_step)
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def check_wandb() -> None:
    """Raises ConfigError where the package wandb is not installed."""
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            "metrics.enable_wandb = true: needs the package wandb; pip install 'minititan[wandb]'"
        )


class Wandb:
    """A run whose id is kept in `folder`, so that a restart goes on with the same one.

    Project, entity and name are taken from wandb's own environment variables (`WANDB_PROJECT`, ...).
    """

    def __init__(self, folder: Path, run_config: Mapping[str, Any]) -> None:
        id_file = folder / WANDB_ID_NAME
        known = id_file.read_text().strip() if id_file.exists() else None
        self._run = importlib.import_module("wandb").init(
            project=os.environ.get("WANDB_PROJECT", "minititan"),
            id=known,
            resume="allow" if known else None,
            dir=str(folder),
            config=dict(run_config),
        )
        with explained(folder):
            id_file.write_text(self._run.id)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()

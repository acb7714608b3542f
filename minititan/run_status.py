"""How a run stands: `run_status.json` in its dump folder, for whoever started it, and the lock on the folder.

A launcher's exit code does not tell a run that was preempted and saved from one that failed; this file does.
It is replaced as a whole, and only by the run that holds the lock: a second job cannot disturb the first.
"""

import fcntl
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, TextIO

from minititan.config import ConfigError

STATUS_NAME = "run_status.json"
LOCK_NAME = "run.lock"
State = Literal["running", "finished", "preempted", "failed"]


class RunStatus:
    """The status of a run, which says nothing until it has taken its folder. `step`: where the run stands."""

    def __init__(self) -> None:
        self.step = 0
        self._folder: Path | None = None
        self._locks: list[TextIO] = []

    def take(self, folders: Mapping[str, Path]) -> None:
        """Lock the run's folders, each under the key that sets it; the first one gets the status.

        Raises ConfigError, which names the host and the process, where another run has one of them.
        """
        for key, folder in folders.items():
            self._locks.append(_lock(key, folder))
        self._folder = next(iter(folders.values()))

    def join(self, folder: Path) -> None:
        """Be a rank of the run whose rank 0 has taken `folder`."""
        self._folder = folder

    def write(self, state: State, reason: str) -> None:
        """Replace the file; what cannot be written is said, and ends nothing."""
        if self._folder is None:
            return
        record = {"state": state, "step": self.step, "reason": reason, **_self_description()}
        temporary = self._folder / f".{STATUS_NAME}-{os.getpid()}"
        try:
            temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            temporary.replace(self._folder / STATUS_NAME)
        except OSError as error:
            print(f"{self._folder / STATUS_NAME}: cannot be written ({error.strerror})", file=sys.stderr)

    def failed(self, error: BaseException) -> None:
        """Write what the run failed of, unless another rank has: the first error is the cause of others."""
        if self._folder is not None and read_status(self._folder).get("state") != "failed":
            known = isinstance(error, ConfigError)
            name = "" if known else type(error).__name__
            self.write("failed", ": ".join(filter(None, (name, str(error)))))

    def finished_before(
        self, folders: Mapping[str, Path], step: int, finish: Callable[[], None] = lambda: None
    ) -> None:
        """Correct what a run has left that was ended after its last save, before it could write the file.

        `finish` does what it has left undone.
        """
        if read_status(next(iter(folders.values()))).get("state", "finished") != "finished":
            self.take(folders)
            self.step = step
            finish()
            self.write("finished", "nothing was left to do")

    def ended_at_once(self, signal_name: str) -> None:
        """Write that a second signal ends the run."""
        if self._locks:
            self.write("preempted", f"a second signal, {signal_name}: ended at once, without a save")

    def release(self) -> None:
        """Give the folders back."""
        for file in self._locks:
            file.close()
        self._locks, self._folder = [], None


def read_status(folder: Path) -> dict[str, Any]:
    """Return what `run_status.json` in `folder` says; nothing where there is none, or it is damaged."""
    try:
        record = json.loads((folder / STATUS_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _self_description() -> dict[str, Any]:
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"time": now, "host": socket.gethostname(), "pid": os.getpid()}


def _lock(key: str, folder: Path) -> TextIO:
    """Return the lock file of `folder`, locked until it is closed or this process ends, however it ends."""
    path = folder / LOCK_NAME
    where = f"{key} = {json.dumps(str(folder), ensure_ascii=False)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{where}: {path} cannot be written ({error.strerror}); set another") from error
    try:
        # Of this process alone (lockf): a worker that outlives it for a moment must not keep the folder.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        way_out = "wait for its end, end it, or set another"
        raise ConfigError(f"{where}: another run is in it ({_holder(path)}); {way_out}") from None
    except OSError as error:
        print(f"{path}: cannot be locked ({error.strerror}); a second run would not be noticed", flush=True)
    file.truncate(0)
    json.dump(_self_description(), file)
    file.flush()
    return file


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        return f"process {holder['pid']} on {holder['host']}, since {holder['time']}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"see {path}"  # it has just been locked

"""Makes every fault of a checkpoint happen, and writes the tables of docs/checkpoints.md: `make faults`."""

import os
import sys
import tempfile
from pathlib import Path

from tests.checkpoints import found_flips
from tests.distributed.fault_runs import run_faults
from tests.distributed.faults import AT_REST, KILLED, SAVING, Outcome
from tests.distributed.kills import Killed, kill_saves
from tests.distributed.reshard import SIX, reshard_all

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"
BEGIN, END = "<!-- Made by `make faults`; do not edit. -->\n", "<!-- End of what `make faults` makes. -->\n"
KILLS, FLIPS = 300, 60


def fault_table(outcomes: dict[str, Outcome]) -> str:
    lines = ["| fault | all ranks say | a restart takes |", "|---|---|---|"]
    for name, outcome in outcomes.items():
        said = f"`{outcome.said}`" if outcome.said not in ("", KILLED) else outcome.said or "nothing"
        taken = "nothing: it stops" if outcome.restart is None else f"step {outcome.restart}"
        lines.append(f"| {name} | {said} | {taken} |")
    return "\n".join(lines) + "\n"


def reshard_table(found: dict[tuple[str, str], list[str]]) -> str:
    names = [row.name for row in SIX]
    lines = ["| from \\ to | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for before in names:
        cells = [", ".join(found[before, after]) or "equal" for after in names]
        lines.append(f"| {before} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def section(
    outcomes: dict[str, Outcome], killed: Killed, flips: int, found: dict[tuple[str, str], list[str]]
) -> str:
    """What stands between the marks."""
    return f"""{BEGIN}
Two ranks save step 3 beside the steps 1 and 2 (the newest two are kept) and meet a fault, or the newest of
the steps 1 to 3 is spoiled; then the run starts again. After each the last step that was whole is as it was
to the bit, the restart has its values, and the next save clears what was left. (N and M stand for sizes.)

{fault_table(outcomes)}
- SIGKILL at a random moment of a save loop, {killed.kills} times: each restart took a whole step, and no
  saved step was lost; {killed.torn} kills left a torn save behind.
- One bit flipped at a random place of a checkpoint's files, {FLIPS} times: {flips} were found.

From each of six layouts to each of six ({len(SIX) ** 2} pairs): "equal" says that all parameters, both
moments and the step counters, put together from the ranks' pieces, are equal to the bit, and so are the
counters, the position in the data and what each data-parallel rank draws in the next step. dpN: FSDP over N
ranks; ddpN: N replicas; hsdpRxS: R replicas of S shards; tpN: tensor parallelism. No layout divides the
sizes evenly.

{reshard_table(found)}
{END}"""


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        root = Path(name)
        os.chmod(root, 0o755)  # one fault is met by a user without rights
        outcomes = run_faults(root)
        expected = {fault.name: fault.expected for fault in (*SAVING, *AT_REST)}
        if left_out := expected.keys() - outcomes.keys():
            print(f"nothing is written: this user has no right to make happen: {', '.join(left_out)}")
            return 1
        killed = kill_saves(root / "kills", KILLS)
        flips = found_flips(root / "flips", FLIPS)
        found = reshard_all(root / "layouts", root / "tokens")
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    PAGE.write_text(head + section(outcomes, killed, flips, found) + rest.partition(END)[2], encoding="utf-8")
    wrong = [name for name, outcome in outcomes.items() if outcome != expected[name]]
    wrong += [f"{before} to {after}" for (before, after), what in found.items() if what]
    print(
        f"{PAGE}: {len(outcomes)} faults, {killed.kills} kills, {flips} of {FLIPS} flips, {len(found)} pairs"
    )
    print("\n".join(f"not as expected: {name}" for name in wrong))
    return 1 if wrong or flips < FLIPS else 0


if __name__ == "__main__":
    sys.exit(main())

"""The pages on the config are as the code is."""

import re
import runpy
from pathlib import Path

from minititan.config.old_names import DROPPED, MOVED, MOVED_TABLES
from minititan.config.rules import REFUSALS
from minititan.config.schema import all_keys

DOCS = Path(__file__).parent.parent / "docs"


def test_the_manual_is_up_to_date() -> None:
    made = runpy.run_path(str(DOCS / "config_manual.py"))["manual"]()
    assert (DOCS / "config.md").read_text(encoding="utf-8") == made, "run: python docs/config_manual.py"
    assert made.count("\n| `") == len(all_keys())


def rows() -> dict[str, str]:
    """Dotted key -> what the page for people from TorchTitan says of it."""
    found = {}
    section = ""
    for line in (DOCS / "torchtitan.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line[4:-1] + "." if line.startswith("## [") else ""
        elif match := re.fullmatch(r"\| `([^`]+)` \| (.+) \|", line):
            found[section + match[1]] = match[2]
    return found


def test_every_key_of_torchtitan_has_a_row() -> None:
    names = re.search(
        r"## Our own keys\n+(.*)", (DOCS / "torchtitan.md").read_text(encoding="utf-8"), re.DOTALL
    )
    assert names
    own = set(re.findall(r"`([a-z_]+\.[a-z_]+)`", names[1]))
    tables = {f"[{table}]" for table in MOVED_TABLES}
    assert set(rows()) == (set(all_keys()) - own) | set(MOVED) | set(DROPPED) | tables
    assert all(key in all_keys() for key in own)


def test_refused_features_are_said_to_be() -> None:
    refusable = {refusal.key for refusal in REFUSALS}
    assert {key for key, text in rows().items() if "refused" in text and key in all_keys()} - refusable == {
        "lr_scheduler.total_steps",
        "model.name",
        "training.seq_len",
    }
    assert [key for key in refusable if "refused" not in rows()[key]] == []
    for old, new in MOVED.items():
        assert rows()[old] in (f"`{new}`", "works: old name of `hf_assets_path`, with a warning")

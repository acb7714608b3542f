"""Writes docs/config.md, the manual of every key, from the schema: `python docs/config_manual.py`."""

from pathlib import Path

from minititan.config import Config
from minititan.config.error import literal
from minititan.config.fields import Section, describe, marks, sections

HEAD = """# The config file

A run is one TOML file; the command line overrides it (`--section.key value`). Made from the schema by
`python docs/config_manual.py`; do not edit.

`minititan config --job.config_file FILE` prints a run's resolved file, `minititan config --schema` a JSON
schema with which editors complete and check files. A feature has one switch; while it is off, its other keys
are only type-checked. How this relates to TorchTitan's files stands in [torchtitan.md](torchtitan.md).
"""


def manual() -> str:
    """The whole page."""
    pages = [HEAD]
    for name, section in sections(Config):
        table = _table(section, Config(), name)
        if table:
            pages.append(f"## [{name}]\n{section.__doc__}\n\n{table}\n")
    return "\n".join(pages)


def _table(section: type[Section], config: Config, name: str) -> str:
    rows = []
    for key, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            continue
        rules = [mark.rule().removeprefix("must be ") for mark in marks(field)]
        kind = ", ".join([describe(field.annotation), *rules])
        value = literal(config.value(f"{name}.{key}"))
        meaning = " ".join((field.description or "").split())
        rows.append(f"| `{key}` | {kind} | `{value}` | {meaning} |")
    if not rows:
        return ""
    return "\n".join(["| key | value | default | meaning |", "|---|---|---|---|", *rows])


if __name__ == "__main__":
    Path(__file__).with_name("config.md").write_text(manual(), encoding="utf-8")

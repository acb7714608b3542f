"""The import direction holds, and nothing heavy is imported before it is used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import minititan

PACKAGE = Path(minititan.__file__).parent

# A unit imports from lower levels and its own, never from higher ones; units of one level form no cycle.
LEVELS = [
    {"config"},
    {"models", "cpu", "distributed", "faults", "run_status", "signals"},
    {"checkpoint", "data", "optimizer", "loss", "metrics", "sinks", "profiling", "registry", "parallelisms"}
    | {
        "gradients",
        "guard",
        "decoding",
        "routing",
        "hugging_face",
        "init",
        "loss_scale",
        "muon",
        "step_requests",
    },
    {"train", "build", "commands", "run", "report", "resume", "saving", "validate", "generate", "plan"}
    | {"prepare", "inspect_data", "model_source"},
    {"__main__"},
]
LEVEL = {unit: level for level, units in enumerate(LEVELS) for unit in units}
LONERS = {"config", "models"}  # import nothing of ours

USED_LATE = ("datasets", "wandb", "tensorboard", "pyarrow", "transformers", "pandas", "IPython")
COMPILER = ("torch._dynamo", "torch._inductor")


def imported_units(path: Path) -> set[str]:
    """Units of the package that a file imports anywhere, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("minititan.")}


def graph() -> dict[str, set[str]]:
    units: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        unit = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if unit != "__init__":
            units.setdefault(unit, set()).update(imported_units(path) - {unit})
    return units


def test_every_unit_has_a_level():
    assert graph().keys() <= LEVEL.keys(), "add the new unit to LEVELS"


def test_imports_go_downwards():
    wrong = [
        f"{unit} -> {other}"
        for unit, others in graph().items()
        for other in others
        if LEVEL[other] > LEVEL[unit] or unit in LONERS
    ]
    assert not wrong


def test_units_of_a_level_form_no_cycle():
    left = graph()
    while free := [unit for unit, others in left.items() if not others & left.keys()]:
        for unit in free:
            del left[unit]
    assert not left


def python(code: str) -> str:
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def loaded_by(code: str, *modules: str) -> list[str]:
    """Return which of the modules a program loads."""
    printed = python(f"import sys; {code}\nprint('loaded:', *(m for m in {modules} if m in sys.modules))")
    return printed.splitlines()[-1].split()[1:]


@pytest.mark.parametrize(
    "words, modules",
    [
        (["--help"], ("torch", "numpy", "tokenizers", "pydantic")),
        (["config", "--schema"], ("torch", "numpy", "tokenizers")),
        (["models", "llama3"], (*COMPILER, "sympy", "torch.distributed.tensor")),
    ],
)
def test_commands_load_what_they_need(words: list[str], modules: tuple[str, ...]) -> None:
    assert loaded_by(f"from minititan.__main__ import main; main({words})", *modules) == []


def test_nothing_heavy_is_loaded_at_start():
    units = sorted(graph().keys() - {"__main__"})
    imports = "; ".join(f"import minititan.{unit}" for unit in units)
    assert loaded_by(imports, *USED_LATE, *COMPILER) == []


def test_an_eager_run_loads_no_compiler(tmp_path: Path) -> None:
    (tmp_path / "run.toml").touch()
    (tmp_path / "text.txt").write_text("what is learned " * 100)
    keys = {
        "job.config_file": tmp_path / "run.toml",
        "job.dump_folder": tmp_path / "out",
        "data.cache_folder": tmp_path / "cache",
        "training.dataset_path": tmp_path / "text.txt",
        "training.mixed_precision_param": "float32",
        "training.seq_len": 16,
        "training.steps": 2,
        "activation_checkpoint.mode": "none",
    }
    words = [f"--{key}={value}" for key, value in keys.items()]
    assert loaded_by(f"from minititan.train import main; assert main({words}) == 0", *COMPILER) == []
    assert (tmp_path / "out" / "metrics.jsonl").exists()

"""One run, any layout: each row of the matrix against one process, by loss and gradient norm."""

import contextlib
import io
import json
from functools import cache
from pathlib import Path

import pytest

from tests.distributed.harness import run_ranks
from tests.distributed.layouts import (
    BASE,
    COMPILED,
    CROSSED,
    ONE,
    OPTIONS,
    TIED,
    TIED_ROWS,
    Layout,
)

# Relative, over all steps; the order in which numbers are added moves float32 by about 1e-6.
BOUNDS = {"float32": 1e-5, "float64": 1e-9}
COMPILED_BOUND = 1e-4
DTYPES = {
    "float32": {"training.dtype": "float32", "training.mixed_precision_param": "float32"},
    "float64": {"training.dtype": "float64", "training.mixed_precision_param": "auto"},
}


def train_in_rank(rank: int, world: int, row: Layout, folder: str, token_cache: str) -> list[dict]:
    """Run the training that `row` describes in `folder`; return the lines of its `metrics.jsonl`."""
    from minititan.train import main

    Path(folder, "run.toml").touch()
    overrides = BASE | {"job.dump_folder": f"{folder}/out", "data.cache_folder": token_cache} | row.overrides
    with contextlib.redirect_stdout(io.StringIO()):
        main(
            [
                f"--job.config_file={folder}/run.toml",
                *(f"--{key}={value}" for key, value in overrides.items()),
            ]
        )
    text = Path(folder, "out", "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()] if rank == 0 else []


def train(row: Layout, folder: Path, token_cache: Path) -> list[dict]:
    return run_ranks(train_in_rank, row.ranks, row, str(folder), str(token_cache), timeout=300)[0]


@pytest.fixture(scope="module")
def reference(tmp_path_factory, token_cache):
    """One process's steps with some keys set, each computed once."""

    @cache
    def steps(changes: tuple[tuple[str, str], ...]) -> list[dict]:
        folder = tmp_path_factory.mktemp("reference")
        return train(ONE.with_("reference", dict(changes)), folder, token_cache)

    return lambda changes: steps(tuple(changes.items()))


def assert_same(found: list[dict], expected: list[dict], bound: float) -> None:
    assert [step["step"] for step in found] == [step["step"] for step in expected]
    for one, other in zip(found, expected, strict=True):
        for key in ("batch_sha256", "tokens_seen", "samples_consumed", "lr"):
            assert one[key] == other[key], (key, one["step"])
        for key in ("loss", "grad_norm"):
            assert one[key] == pytest.approx(other[key], rel=bound), (key, one["step"])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("row", CROSSED, ids=str)
def test_layouts_and_checkpointing(row, dtype, reference, tmp_path, token_cache):
    found = train(row.with_(dtype, DTYPES[dtype]), tmp_path, token_cache)
    assert_same(found, reference(DTYPES[dtype]), BOUNDS[dtype])


@pytest.mark.parametrize("row", OPTIONS + TIED_ROWS, ids=str)
def test_options(row, reference, tmp_path, token_cache):
    found = train(row.with_("float64", DTYPES["float64"]), tmp_path, token_cache)
    same_model = {key: value for key, value in row.overrides.items() if key.startswith("model.args.")}
    assert_same(found, reference(DTYPES["float64"] | same_model), BOUNDS["float64"])


@pytest.mark.parametrize("row", COMPILED, ids=str)
def test_compile(row, reference, tmp_path, token_cache):
    same_model = {key: row.overrides[key] for key in ("model.args.num_hidden_layers", "training.steps")}
    assert_same(train(row, tmp_path, token_cache), reference(same_model), COMPILED_BOUND)


def test_tied_is_another_model(reference):
    untied, tied = reference(DTYPES["float64"]), reference(DTYPES["float64"] | TIED)
    assert untied[-1]["loss"] != pytest.approx(tied[-1]["loss"], rel=1e-6)

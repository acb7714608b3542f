"""`minititan models`: the whole registry, in numbers."""

import pytest

from minititan import registry
from minititan.__main__ import main


def rows_of(printed: str) -> dict[tuple[str, str], list[str]]:
    head, *lines = printed.split("\n\n")[0].splitlines()
    assert head.split() == ["family", "flavor", "parameters", "active", "GFLOPs", "a", "token"]
    return {(name, flavor): numbers for name, flavor, *numbers in map(str.split, lines)}


def test_the_whole_registry(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert {(n, f) for n, spec in registry.families().items() for f in spec.flavors} == set(rows)
    # 6 x 7,504,658,432 weights of matrix products, and 12 x 32 layers x 4,096 x 4,096 of attention.
    assert rows["llama3", "8B"] == ["8,030,261,248", "8,030,261,248", "51.5"]
    # A quarter of the experts and what is not in experts; operations with the bytes as vocabulary.
    assert rows["qwen3", "debugmodel_moe"][:2] == ["1,842,432", "662,784"]
    assert rows["qwen3", "30B-A3B"][:2] == ["30,532,122,624", "3,353,032,704"]


def test_one_family_at_another_length(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "llama3", "--seq_len", "8192"]) == 0
    printed = capsys.readouterr().out
    rows = rows_of(printed)
    assert {name for name, _ in rows} == {"llama3"}
    assert rows["llama3", "8B"][2] == "57.9"
    assert "Operations at 8192 tokens" in printed


def test_a_family_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--experimental.custom_import", "tests.expert_family"]
    assert main(["models", "numbered", *words]) == 0
    # Embedding, head, norm; two layers of 12 experts of 2 x 6 x 8.
    count = f"{2 * 264 * 8 + 8 + 2 * 12 * 2 * 48:,}"
    assert rows_of(capsys.readouterr().out) == {("numbered", "small"): [count, count, "n/a"]}


@pytest.mark.parametrize(
    "words, fault",
    [
        (["qwen"], "command line: qwen: no such family; nearest: qwen3; there are: llama3, qwen2, qwen3, "),
        (["--seq_len", "0"], "command line: --seq_len 0: must be at least 1"),
        (["--seq_len", "x"], "command line: argument --seq_len/--seq-len: invalid int value: 'x'"),
        (["--experimental.custom_import", "nothing_here"], "no such module"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], words: list[str], fault: str) -> None:
    assert main(["models", *words]) == 2
    printed = capsys.readouterr()
    assert fault in printed.err and len(printed.err.splitlines()) == 1 and not printed.out

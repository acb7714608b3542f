"""`minititan generate`: where models are found, what is written where, how it ends, bad input."""

import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from minititan.__main__ import main
from minititan.data.tokenizer import ByteTokenizer
from minititan.generate import Writer
from tests.toy_llama import read, save, tokenizer_files, toy

PROMPT = "Hello, "
GREEDY = ("--temperature", "0", "--max_new_tokens", "20")
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of bytes in Hugging Face's form; `run` beside it is its import."""
    path = tmp_path_factory.mktemp("models") / "folder"
    save(toy(vocab_size=264), path)
    assert main(["import", str(path), "--job.dump_folder", str(path.with_name("run"))]) == 0
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> str:
    """What `transformers` makes of the prompt."""
    inputs = torch.tensor([list(PROMPT.encode())])
    tokens = read(folder).generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=20, do_sample=False, eos_token_id=None
    )
    return ByteTokenizer().decode(tokens[0, inputs.shape[1] :].tolist()) + "\n"


def generated(capsys: Captured, *words: object) -> tuple[str, str]:
    """What a command writes to stdout and to stderr."""
    capsys.readouterr()
    assert main(["generate", *map(str, words)]) == 0
    return capsys.readouterr()


@pytest.mark.parametrize(
    "place", ["folder", "run", "run/run.toml", "run/checkpoint", "run/checkpoint/step-0", "exported"]
)
def test_every_place_of_a_model(folder: Path, expected: str, place: str, capsys: Captured) -> None:
    if place == "exported":
        step = folder.with_name("run") / "checkpoint" / "step-0"
        assert main(["export", str(step), str(folder.with_name("exported"))]) == 0
    out, err = generated(capsys, folder.parent / place, "--prompt", PROMPT, *GREEDY)
    assert out == expected
    assert "7 prompt tokens at" in err and "20 new ones, then" in err
    assert err.endswith("tokens/s; stopped at max_new_tokens\n")


def test_the_prompt_from_a_file_and_from_stdin(
    folder: Path, expected: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT + "\n")
    assert generated(capsys, folder, "--prompt_file", file, *GREEDY)[0] == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{PROMPT}\n".encode())))
    assert generated(capsys, folder, *GREEDY, "--echo")[0] == PROMPT + expected


def test_a_seed_gives_the_same_text_and_another_one_another(folder: Path, capsys: Captured) -> None:
    one, again, other = (
        generated(capsys, folder, "--prompt", PROMPT, "--max-new-tokens", 20, "--seed", seed)[0]
        for seed in (1, 1, 2)
    )
    assert one == again != other


def test_the_longest_that_the_model_can_do(folder: Path, capsys: Captured) -> None:
    words = ("--prompt", "x" * 250, "--temperature", "0", "--max_new_tokens", "20")
    err = generated(capsys, folder, *words)[1]
    assert "6 new ones" in err and err.endswith("stopped at the model's max_position_embeddings\n")


# ---- tokenizers


def lettered(folder: Path, wanted: str, **special: Any) -> Path:
    """A model of letters (a to z: 3 to 28) that, after any text, ends it at once or says `wanted`."""
    model = toy(vocab_size=40, tie_word_embeddings=False)
    token = {"</s>": 1, "<stop>": 30}.get(wanted) or ord(wanted) - 94
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(float("norm" in name or "embed" in name))
        model.lm_head.weight[token] = 1.0
    save(model, folder)
    tokenizer_files(folder)
    if special:
        (folder / "generation_config.json").write_text(json.dumps(special))
    return folder


def test_the_text_ends_at_eos(tmp_path: Path, capsys: Captured) -> None:
    out, err = generated(capsys, lettered(tmp_path / "m", "</s>"), "--prompt", "ab", *GREEDY)
    assert out == "\n" and "1 new ones; stopped at the end of the text" in err


def test_and_at_the_tokens_that_the_authors_name(tmp_path: Path, capsys: Captured) -> None:
    model = lettered(tmp_path / "m", "<stop>", eos_token_id=[1, 30])
    assert "stopped at the end of the text" in generated(capsys, model, "--prompt", "a", *GREEDY)[1]
    model = lettered(tmp_path / "n", "q", eos_token_id=1)
    assert generated(capsys, model, "--prompt", "a", *GREEDY, "--max_new_tokens", 3)[0] == " q q q\n"


def test_bos(tmp_path: Path, capsys: Captured) -> None:
    model = lettered(tmp_path / "m", "q")

    def prompt_tokens(*words: str) -> str:
        return generated(capsys, model, "--prompt", "a", *GREEDY, *words)[1].partition(" prompt")[0]

    assert (prompt_tokens(), prompt_tokens("--add_bos")) == ("1", "2")
    content = json.loads((model / "tokenizer.json").read_text())
    bos = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    }
    (model / "tokenizer.json").write_text(json.dumps(content))
    assert (prompt_tokens(), prompt_tokens("--no_add_bos")) == ("2", "1")


def test_an_empty_prompt_begins_where_a_document_does(folder: Path, capsys: Captured) -> None:
    assert "\n1 prompt tokens" in generated(capsys, folder, "--prompt", "", *GREEDY)[1]


# ---- bad input


@pytest.mark.parametrize(
    "words, message",
    [
        (["nowhere", "--prompt", "a"], "nowhere: no such folder; "),
        (["nowhere.toml", "--prompt", "a"], "nowhere.toml"),
        (["{empty}", "--prompt", "a"], "holds no checkpoint (step-N); "),
        (
            ["{folder}", "--prompt", "a", "--top_p", "0"],
            '--top_p: "0": must be a number above 0, at most 1; ',
        ),
        (["{folder}", "--prompt", "a", "--top_k", "-1"], '"-1": must be a whole number, 0 or more; '),
        (["{folder}", "--prompt", "a", "--temperature", "nan"], '"nan": must be a number, 0 or more; '),
        (["{folder}", "--prompt", "a", "--max_new_tokens", "0"], "must be a whole number, 1 or more; "),
        (["{folder}", "--prompt", "a", "--seed", "x"], '--seed: "x": must be a whole number from 0 to '),
        (["{folder}", "--prompt", "a", "--prompt_file", "b"], "not allowed with argument --prompt; "),
        (["{folder}", "--prompt", "a", "--warmth", "1"], "unrecognized arguments: --warmth 1; "),
        (["{folder}", "--prompt_file", "nothing.txt"], "nothing.txt: cannot be read (No such file"),
        (["{folder}", "--prompt_file", "{latin}"], "not UTF-8 (byte 1); "),
        (["{folder}", "--prompt", "x" * 256], "the prompt has 256 tokens, and the model's max_position_emb"),
        (["{folder}", "--prompt", "a", "--tokenizer", "nowhere"], 'tokenizer = "nowhere": no such file or f'),
        (
            ["{lettered}", "--prompt", "a", "--tokenizer", "none"],
            "the tokenizer gives token 97, the model has",
        ),
        (["{folder}", "--prompt", "a", "--experimental.custom_import", "no_such"], "no such module; "),
        (["{damaged}", "--prompt", "a"], "damaged"),
        (["{nan}", "--prompt", "a"], "the model's output in float32 is not finite; "),
        (["{strange}", "--prompt", "a"], 'model_type = "strange": no family has this type; '),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_is_one_line(
    words: list[str], message: str, folder: Path, tmp_path: Path, capsys: Captured
) -> None:
    places = {"{folder}": folder, "{empty}": tmp_path, "{latin}": tmp_path / "latin.txt"}
    (tmp_path / "latin.txt").write_bytes(b"h\xe4llo")
    if words[0] == "{lettered}":
        places[words[0]] = lettered(tmp_path / "m", "q")
    if words[0] == "{nan}":
        model = toy(vocab_size=264)
        torch.nn.init.constant_(model.lm_head.weight, float("nan"))
        places[words[0]] = save(model, tmp_path / "nan")
    if words[0] == "{damaged}":
        places[words[0]] = tmp_path / "run"
        assert main(["import", str(folder), "--job.dump_folder", str(tmp_path / "run")]) == 0
        file = max((tmp_path / "run" / "checkpoint" / "step-0").iterdir(), key=lambda f: f.stat().st_size)
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    if words[0] == "{strange}":
        places[words[0]] = tmp_path / "strange"
        (tmp_path / "strange").mkdir()
        (tmp_path / "strange" / "config.json").write_text('{"model_type": "strange"}')
    capsys.readouterr()
    assert main(["generate", *(str(places.get(word, word)) for word in words)]) == 2
    out, err = capsys.readouterr()
    line = [said for said in err.splitlines() if not said.endswith("--tokenizer names another")]
    assert out == "" and message in line[0]
    assert len(line) == 1 + (words[0] == "{damaged}"), "the damage, and that there is no other checkpoint"


# ---- a terminal and a pipe


def program(folder: Path, **streams: Any) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "minititan", "generate", str(folder), "--prompt", PROMPT]
    words += ["--max_new_tokens", "1000000"]
    return subprocess.Popen(words, text=True, stderr=subprocess.PIPE, **streams)


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that goes on for long."""
    return save(toy(vocab_size=264, max_position_embeddings=10**6), tmp_path_factory.mktemp("endless") / "m")


def test_interrupted(endless: Path) -> None:
    with program(endless, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        started.stdout.read(20)
        started.send_signal(signal.SIGINT)
        out, err = started.communicate(timeout=60)
    assert started.returncode == 130
    assert out.endswith("\n") and err.endswith("stopped at an interrupt\n") and "Traceback" not in err


def test_a_reader_that_has_seen_enough(endless: Path) -> None:
    with program(endless, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None and started.stderr is not None
        started.stdout.read(20)
        started.stdout.close()
        err = started.stderr.read()
    assert started.returncode == 0
    assert err.endswith("stopped at a closed pipe\n") and "Traceback" not in err


def test_a_terminal_gets_no_commands_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    Writer().write("a\x1b[2Jb\r\x9bc\td\né")
    assert terminal.getvalue() == "a\ufffd[2Jb\ufffd\ufffdc\td\né"

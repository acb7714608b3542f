"""Tokenizers: what cannot be read, then ids, special tokens and fingerprints."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from minititan.config import ConfigError
from minititan.data import build_tokenizer

TEXTS = ["a small text about small things\n", "things and texts, 1234 of them\n", "größe 你好\n"] * 20


def save_tokenizer(folder: Path, **files: object) -> Path:
    """A byte-level BPE in `folder`, and JSON files beside it."""
    folder.mkdir(exist_ok=True)
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TEXTS, trainer)
    bpe.enable_truncation(4)
    bpe.enable_padding(length=9)
    bpe.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    "path, words",
    [
        ("absent", "no such file or folder"),
        ("empty", "the folder holds no tokenizer.json"),
        ("sentencepiece", "needs a tokenizer.json; SentencePiece and tiktoken files"),
        ("sentencepiece/tokenizer.model", "needs a tokenizer.json; SentencePiece and tiktoken files"),
        ("broken", "tokenizer.json cannot be read: "),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, path: str, words: str):
    for name in ("empty", "sentencepiece", "broken"):
        (tmp_path / name).mkdir()
    (tmp_path / "sentencepiece" / "tokenizer.model").write_bytes(b"\x0a")
    (tmp_path / "broken" / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ConfigError) as error:
        build_tokenizer(str(tmp_path / path))
    assert str(error.value).startswith("model.hf_assets_path: ") and words in str(error.value)


def test_special_token_of_another_tokenizer_is_refused(tmp_path: Path):
    folder = save_tokenizer(tmp_path / "t", tokenizer_config={"eos_token": "<|end|>"})
    with pytest.raises(ConfigError, match=r"tokenizer_config.json names the eos_token '<\|end\|>'"):
        build_tokenizer(str(folder))


def test_broken_companion_is_refused(tmp_path: Path):
    folder = save_tokenizer(tmp_path / "t")
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"tokenizer_config.json holds no JSON object"):
        build_tokenizer(str(folder))


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_are_utf8(text: str):
    tokenizer = build_tokenizer("")
    (ids,) = tokenizer.encode_batch([text])
    assert list(ids) == list(text.encode())
    assert tokenizer.decode([256, *ids, 257, 263]) == text


def test_byte_vocabulary():
    tokenizer = build_tokenizer("")
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (264, 256, 257)
    assert tokenizer.decode([0xC3, 0x41]) == "\ufffdA"


def test_file_gives_the_library_s_ids_whole(tmp_path: Path):
    """No special token, no truncation and no padding, whatever the file has switched on."""
    folder = save_tokenizer(tmp_path / "t")
    reference = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    reference.no_truncation()
    reference.no_padding()
    for path in (folder, folder / "tokenizer.json"):
        tokenizer = build_tokenizer(str(path))
        encoded = tokenizer.encode_batch(TEXTS)
        assert [list(ids) for ids in encoded] == [
            reference.encode(t, add_special_tokens=False).ids for t in TEXTS
        ]
        assert 4 < max(map(len, encoded)) < 9
        assert [tokenizer.decode(ids) for ids in encoded] == TEXTS
        assert tokenizer.vocab_size == reference.get_vocab_size()
        assert tokenizer.bos_id is None and tokenizer.eos_id is None


def test_special_tokens_in_both_forms(tmp_path: Path):
    configured = save_tokenizer(
        tmp_path / "a", tokenizer_config={"bos_token": {"content": "<s>"}, "eos_token": None}
    )
    mapped = save_tokenizer(tmp_path / "b", special_tokens_map={"bos_token": "<s>", "eos_token": "</s>"})
    assert (build_tokenizer(str(configured)).bos_id, build_tokenizer(str(configured)).eos_id) == (0, None)
    assert (build_tokenizer(str(mapped)).bos_id, build_tokenizer(str(mapped)).eos_id) == (0, 1)


def test_vocabulary_covers_the_largest_id(tmp_path: Path):
    folder = save_tokenizer(tmp_path / "t")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 5000, "content": "<far>"})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = build_tokenizer(str(folder))
    (ids,) = tokenizer.encode_batch(["<far>"])
    assert max(ids) < tokenizer.vocab_size and tokenizer.vocab_size == max(ids) + 1


def test_fingerprint_follows_what_ids_depend_on(tmp_path: Path):
    plain = build_tokenizer(str(save_tokenizer(tmp_path / "a")))
    moved = build_tokenizer(str(save_tokenizer(tmp_path / "b")))
    ended = build_tokenizer(str(save_tokenizer(tmp_path / "c", special_tokens_map={"eos_token": "</s>"})))
    assert plain.fingerprint == moved.fingerprint
    assert len({plain.fingerprint, ended.fingerprint, build_tokenizer("").fingerprint}) == 3

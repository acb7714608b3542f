"""Token files of other programs: what does not fit is named, the rest is read as it stands."""

import struct
from pathlib import Path

import numpy as np
import pytest

from minititan.config import ConfigError
from minititan.data import Tokens, build_tokenizer, check_source, open_tokens

BYTES = build_tokenizer("")
CODES = {"uint8": 1, "int32": 4, "int64": 5, "uint16": 8}


def save_megatron(path: Path, documents: list[list[list[int]]], dtype: str = "uint16") -> None:
    """Documents of sequences of tokens, as Megatron's IndexedDatasetBuilder writes them."""
    sequences = [sequence for document in documents for sequence in document]
    sizes = np.array([len(sequence) for sequence in sequences], dtype=np.int32)
    pointers = np.cumsum([0, *sizes[:-1]], dtype=np.int64) * np.dtype(dtype).itemsize
    first = np.cumsum([0, *(len(document) for document in documents)], dtype=np.int64)
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, CODES[dtype], len(sequences), len(first))
    path.with_suffix(".idx").write_bytes(header + sizes.tobytes() + pointers.tobytes() + first.tobytes())
    path.write_bytes(np.array([t for s in sequences for t in s], dtype=dtype).tobytes())


def opened(path: Path | str, **options) -> Tokens:
    return open_tokens("mine", str(path), "train", BYTES, cache_folder="/nowhere", **options)


def all_tokens(tokens: Tokens) -> list[int]:
    out = np.empty(tokens.num_tokens, dtype=np.int64)
    tokens.read(0, tokens.num_tokens, out)
    return out.tolist()


def all_starts(tokens: Tokens) -> list[int]:
    """The documents' starts, asked for in one range, which every smaller range must agree with."""
    whole = tokens.document_starts(0, tokens.num_tokens).tolist()
    for begin in range(tokens.num_tokens):
        for end in range(begin, tokens.num_tokens + 1):
            expected = [start for start in whole if begin <= start < end]
            assert tokens.document_starts(begin, end).tolist() == expected
    return whole


DOCUMENTS = [[[1, 2], [3]], [[4, 5, 6]], [[7], [8], [9, 10]]]


# ---- What is refused.


def test_pairs_that_do_not_fit_are_named(tmp_path: Path):
    def fault(words: str) -> None:
        with pytest.raises(ConfigError) as error:
            opened(path)
        assert str(error.value).startswith(str(path.with_suffix(""))) and words in str(error.value)

    path, other = tmp_path / "a.bin", tmp_path / "other.bin"
    path.write_bytes(b"\0" * 20)
    fault("a.bin: has no a.idx beside it")
    save_megatron(path, DOCUMENTS)
    save_megatron(other, [[[1, 2, 3]]])
    good = path.with_suffix(".idx").read_bytes()
    path.with_suffix(".idx").write_bytes(other.with_suffix(".idx").read_bytes())
    fault("a.bin: holds 20 bytes, a.idx says 6; give the two files of one set, whole")
    path.with_suffix(".idx").write_bytes(good[:-1])
    fault(f"a.idx: holds {len(good) - 1} bytes, its header asks for {len(good)}; replace it")
    path.with_suffix(".idx").write_bytes(b"TNTIDX\x00\x00\x00" + good[9:])
    fault("a.idx: no index of Megatron's (it must begin with MMIDIDX)")
    path.with_suffix(".idx").write_bytes(good[:17] + b"\x07" + good[18:])
    fault("a.idx: version 1 with tokens of type 7 is not read")
    path.with_suffix(".idx").write_bytes(good)
    path.write_bytes(path.read_bytes()[:-2])
    fault("a.bin: holds 18 bytes, a.idx says 20")


def test_npy_files_that_do_not_fit_are_named(tmp_path: Path):
    raw = tmp_path / "a.npy"
    np.arange(5, dtype="<u2").tofile(raw)
    with pytest.raises(
        ConfigError, match=r"^data.npy_dtype: .*a.npy has no header of numpy's .*; set it, as"
    ):
        opened(raw)
    with pytest.raises(
        ConfigError, match=r"^data.npy_dtype: .*a.npy holds 10 bytes, no whole number of uint32"
    ):
        opened(raw, npy_dtype="uint32")
    np.save(raw, np.zeros((2, 3), dtype="<u2"))
    with pytest.raises(
        ConfigError, match=r"a.npy: holds uint16 of shape \(2, 3\); it must be one row of integ"
    ):
        opened(raw)
    np.save(raw, np.zeros(3))
    with pytest.raises(ConfigError, match=r"a.npy: holds float64 of shape \(3,\)"):
        opened(raw)
    np.save(raw, np.zeros(3, dtype="<u2"))
    raw.write_bytes(raw.read_bytes()[:-2])
    with pytest.raises(ConfigError, match=r"a.npy: holds 4 bytes, its header says 6; replace it"):
        opened(raw)
    np.zeros(0, dtype="<u2").tofile(raw)
    with pytest.raises(ConfigError, match=r'training.dataset_path = ".*a.npy": holds no tokens'):
        opened(raw, npy_dtype="uint16")


@pytest.mark.parametrize("bad", [264, -1])
def test_ids_outside_of_the_vocabulary_are_named(tmp_path: Path, bad: int):
    """At the opening where they are seen, else where they are read: never an index into the embedding."""
    path = tmp_path / "a.npy"
    ids = np.arange(100_000, dtype="<i4") % 264
    ids[7] = bad
    np.save(path, ids)
    shown = bad % (1 << 32)
    with pytest.raises(
        ConfigError, match=rf"a.npy: token 7 has the id {shown}, outside of the vocabulary of 264"
    ):
        opened(path)
    ids[7], ids[5000] = 0, bad  # between the blocks that are looked at
    np.save(path, ids)
    tokens = opened(path)
    assert tokens.window(0, 4999).tolist() == ids[:5000].tolist()
    with pytest.raises(
        ConfigError, match=rf"a.npy: token 5000 has the id {shown}, outside of the vocabulary"
    ):
        tokens.window(1, 4999)
    if bad > 0:
        assert opened(path, vocab_size=265).window(1, 4999).max() == 264


def test_text_beside_token_files_is_refused(tmp_path: Path):
    np.save(tmp_path / "a.npy", np.zeros(3, dtype="<u2"))
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"holds token files \(a.npy\) beside files of text; name the ones"):
        check_source("mine", str(tmp_path))
    check_source("mine", str(tmp_path / "*.npy"))


def test_a_file_that_goes_away_is_named(tmp_path: Path):
    np.save(tmp_path / "a.npy", np.zeros(3, dtype="<u2"))
    tokens = opened(tmp_path / "a.npy")
    (tmp_path / "a.npy").unlink()
    with pytest.raises(ConfigError, match=r"a.npy: cannot be read \(.*\); is it still there\?"):
        all_tokens(tokens)


# ---- What is read.


@pytest.mark.parametrize("dtype", CODES)
def test_megatron_pairs(tmp_path: Path, dtype: str):
    save_megatron(tmp_path / "b.bin", DOCUMENTS, dtype)
    save_megatron(tmp_path / "a.bin", [[[11]], [[], [12]]], dtype)
    tokens = opened(tmp_path)
    assert all_tokens(tokens) == [11, 12, *range(1, 11)]
    assert all_starts(tokens) == [0, 1, 2, 5, 8]
    assert tokens.num_documents == 5
    for name in ("b.bin", "b.idx", "b", "b.*"):
        assert all_starts(opened(tmp_path / name)) == [0, 3, 6]


@pytest.mark.parametrize("header", [False, True])
def test_npy_files_with_documents_that_eos_ends(tmp_path: Path, header: bool):
    ids = np.array([1, 2, 257, 3, 257, 257, 4], dtype="<u4")
    for name in ("a.npy", "b.npy"):
        np.save(tmp_path / name, ids) if header else ids.tofile(tmp_path / name)
    tokens = opened(tmp_path, npy_dtype=None if header else "uint32")
    assert all_tokens(tokens) == ids.tolist() * 2
    assert all_starts(tokens) == [0, 3, 5, 6, 7, 10, 12, 13]


def test_fingerprint_follows_content_and_bounds(tmp_path: Path):
    def fingerprint(documents: list[list[list[int]]], name: str) -> str:
        save_megatron(tmp_path / f"{name}.bin", documents)
        return opened(tmp_path / f"{name}.bin").fingerprint

    first = fingerprint(DOCUMENTS, "a")
    assert fingerprint(DOCUMENTS, "elsewhere") == first
    others = {fingerprint([[[*range(1, 11)]]], "b"), fingerprint([*DOCUMENTS[:2], [[7], [8], [9, 11]]], "c")}
    assert len(others | {first}) == 3


def test_documents_by_number(tmp_path: Path):
    """As packing and padding ask for them, over several files, empty documents among them."""
    save_megatron(tmp_path / "a.bin", [[[1, 2], [3]], [], [[4]], []])
    save_megatron(tmp_path / "b.bin", DOCUMENTS)
    tokens = opened(tmp_path)
    bounds = [(0, 3), (3, 3), (3, 4), (4, 7), (7, 10), (10, 14)]
    assert tokens.num_documents == len(bounds)
    for first in range(len(bounds)):
        for count in range(1, len(bounds) + 2):
            begins, ends = tokens.documents(first, count)
            found = list(zip(begins.tolist(), ends.tolist(), strict=True))
            assert found == bounds[first : first + count], (first, count)
    np.save(tmp_path / "c.npy", np.zeros(3, dtype="<u2"))
    with pytest.raises(ConfigError, match=r'has no list of its documents.*; use data.samples = "window", or'):
        _ = opened(tmp_path / "c.npy").num_documents

"""Tokenizers: plain bytes, and Hugging Face `tokenizer.json` files read by the `tokenizers` library.

Encoding adds no special token; whoever builds documents puts `bos_id` and `eos_id` around them. A tokenizer's
`fingerprint` names everything that its token ids depend on.
"""

import json
import os
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers

from minititan.config import ConfigError
from minititan.data.fault import Fault, plain_fault

KEY = "model.hf_assets_path"


class Tokenizer(Protocol):
    """`vocab_size` covers the largest id that `encode_batch` may give; `path` is its file, "" for none;
    `adds_bos`: its own rule for a text, which `encode_batch` leaves out, begins with the bos token.
    """

    path: str
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    adds_bos: bool
    fingerprint: str

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Sequence[int] | np.ndarray]: ...

    def decode(self, ids: Iterable[int]) -> str: ...


class ByteTokenizer:
    """One token a byte of UTF-8: ids 0 to 255, then bos, eos, pad, unk and four reserved ids."""

    path = ""
    vocab_size = 264
    bos_id: int | None = 256
    eos_id: int | None = 257
    adds_bos = False
    fingerprint = sha256(b"minititan bytes 1").hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text, without special tokens; bytes that are no UTF-8 become U+FFFD."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class FileTokenizer:
    """A `tokenizer.json`, with the special tokens that the files beside it name."""

    def __init__(self, file: Path, fault: Fault) -> None:
        self.path = str(file.absolute())
        try:
            content = file.read_bytes()
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises bare Exception for a malformed file
            raise ConfigError(
                fault(KEY, f"{file} cannot be read: {error}", "give a valid tokenizer.json")
            ) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # The library runs threads; a process that forks dataloader workers later gets a warning on each fork
        # unless the variable is set. The workers never encode.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ConfigError(fault(KEY, f"{file} has an empty vocabulary", "give a trained tokenizer.json"))
        self.vocab_size = max(vocabulary.values()) + 1
        self.bos_id = self._special("bos", file, fault)
        self.eos_id = self._special("eos", file, fault)
        self.adds_bos = self.bos_id is not None and self._tokenizer.encode("").ids[:1] == [self.bos_id]
        specials = json.dumps([self.bos_id, self.eos_id]).encode()
        self.fingerprint = sha256(sha256(content).digest() + specials).hexdigest()

    def _special(self, kind: str, file: Path, fault: Fault) -> int | None:
        for path in (file.with_name("tokenizer_config.json"), file.with_name("special_tokens_map.json")):
            token = _read_object(path, fault).get(f"{kind}_token") if path.is_file() else None
            token = token.get("content") if isinstance(token, dict) else token
            if token is None:
                continue
            token_id = self._tokenizer.token_to_id(token) if isinstance(token, str) else None
            if token_id is None:
                rule = f"{path} names the {kind}_token {token!r}, which {file.name} does not have"
                raise ConfigError(fault(KEY, rule, "use the files of one tokenizer"))
            return token_id
        return None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)


def _read_object(path: Path, fault: Fault) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(fault(KEY, f"{path} cannot be read: {error}", "repair or remove it")) from None
    if not isinstance(value, dict):
        raise ConfigError(fault(KEY, f"{path} holds no JSON object", "repair or remove it"))
    return value


def build_tokenizer(path: str, fault: Fault = plain_fault) -> Tokenizer:
    """The tokenizer at `path`: "" for bytes, a `tokenizer.json`, or a folder that holds one.

    Raises ConfigError.
    """
    if not path:
        return ByteTokenizer()
    given = Path(path).expanduser()
    file = given / "tokenizer.json" if given.is_dir() else given
    if file.is_file() and file.suffix == ".json":
        return FileTokenizer(file, fault)
    way_out = "give a tokenizer.json, a folder that holds one, or leave it empty for the byte tokenizer"
    if file.is_file() or (given / "tokenizer.model").is_file():
        rule = "needs a tokenizer.json; SentencePiece and tiktoken files (tokenizer.model) are not read"
    elif given.is_dir():
        rule = "the folder holds no tokenizer.json"
    else:
        rule = "no such file or folder"
    raise ConfigError(fault(KEY, rule, way_out))

"""Data: sources of text, tokenizers, the cache of prepared tokens, and loaders in a layout-free order."""

from minititan.data.cache import open_tokens
from minititan.data.loader import DataState, TrainLoader, build_train_loader, build_validation_loader
from minititan.data.shards import Tokens
from minititan.data.sources import check_source
from minititan.data.tokenizer import Tokenizer, build_tokenizer

__all__ = [
    "DataState",
    "Tokenizer",
    "Tokens",
    "TrainLoader",
    "build_tokenizer",
    "build_train_loader",
    "build_validation_loader",
    "check_source",
    "open_tokens",
]

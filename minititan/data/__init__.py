"""Data: sources of text, tokenizers, the cache of prepared tokens, and loaders in a layout-free order."""

from minititan.data.cache import open_tokens, resolve_cache
from minititan.data.fault import Fault
from minititan.data.loader import DataState, TrainLoader, build_train_loader, build_validation_loader
from minititan.data.samples import Samples, build_samples
from minititan.data.shards import Tokens
from minititan.data.sources import check_source
from minititan.data.tokenizer import Tokenizer, build_tokenizer

__all__ = [
    "DataState",
    "Fault",
    "Samples",
    "Tokenizer",
    "Tokens",
    "TrainLoader",
    "build_samples",
    "build_tokenizer",
    "build_train_loader",
    "build_validation_loader",
    "check_source",
    "open_tokens",
    "resolve_cache",
]

"""Data: sources of text, tokenizers, prepared tokens, and loaders in a layout-free order."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from minititan.data.access import check_source, open_tokens
from minititan.data.tokenizer import Tokenizer, build_tokenizer
from minititan.data.tokens import Tokens

if TYPE_CHECKING:
    from minititan.data.loader import DataState, TrainLoader, build_train_loader, build_validation_loader

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


def __getattr__(name: str) -> Any:
    """The loaders, which need torch: preparing data does without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("minititan.data.loader"), name)

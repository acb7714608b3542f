"""Data: sources of text, tokenizers, prepared tokens, and loaders in a layout-free order."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from minititan.data.access import check_source, open_tokens
from minititan.data.cache import resolve_cache
from minititan.data.fault import Fault
from minititan.data.holdout import open_part
from minititan.data.tokenizer import Tokenizer, build_tokenizer
from minititan.data.tokens import TokenRow, Tokens

if TYPE_CHECKING:
    from minititan.data.loader import DataState, TrainLoader, build_train_loader, build_validation_loader
    from minititan.data.samples import Samples, build_samples

__all__ = [
    "DataState",
    "Fault",
    "Samples",
    "TokenRow",
    "Tokenizer",
    "Tokens",
    "TrainLoader",
    "build_samples",
    "build_tokenizer",
    "build_train_loader",
    "build_validation_loader",
    "check_source",
    "open_part",
    "open_tokens",
    "resolve_cache",
]


def __getattr__(name: str) -> Any:
    """Samples and loaders, which need torch: preparing data does without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "samples" if name in ("Samples", "build_samples") else "loader"
    return getattr(import_module(f"minititan.data.{home}"), name)

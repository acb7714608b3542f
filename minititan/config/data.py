"""The section on data: how text becomes sequences, what is mixed, and what changes at a step."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from minititan.config.fields import OptionalText, Positive, Range, Section, Text, tuples


class BatchSize(Section):
    """Another global batch size from a step on."""

    step: Annotated[int, Range(low=2)]
    """The first step with this size."""
    size: Positive
    """Sequences in a step over all ranks."""


class DataSource(Section):
    """One source of a mixture."""

    name: Text
    """What metrics and messages call it."""
    path: OptionalText = None
    """As `training.dataset_path`."""
    dataset: OptionalText = None
    """A data set by name, as `training.dataset`."""
    weight: Annotated[float, Range(low=0)] = 1.0
    """Its share of the sequences, relative to those of the others."""


class DataStage(Section):
    """Other weights from a step on."""

    step: Annotated[int, Range(low=2)]
    """The first step with these weights."""
    weights: dict[str, float]
    """By name of the source, all of them."""


class Data(Section):
    """Own section: how text becomes prepared tokens, and how often they are used."""

    cache_folder: OptionalText = None
    """Folder of prepared tokens; shared storage on several nodes; unset or empty: the user's cache folder."""
    text_key: Text = "text"
    """Key of the text in a JSON line; column of the text in a parquet file."""
    txt_lines: bool = False
    """Each line of a .txt file is a document; false: each file is."""
    add_bos: bool = False
    """Begin each document with the tokenizer's beginning-of-sequence id."""
    add_eos: bool = True
    """End each document with the tokenizer's end-of-sequence id."""
    on_bad_record: Literal["error", "skip"] = "error"
    """What a document that cannot be read does: end the run, or be left out, counted and listed."""
    npy_dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] | None = None
    """Type of the tokens in .npy files without a header of numpy's."""
    samples: Literal["window", "pack", "pad"] = "window"
    """How documents become sequences: windows of the running text; whole documents packed into them, best
    fit; or one document a sequence, cut or padded."""
    document_mask: bool = False
    """Attention stays inside documents, and positions restart with each."""
    predict_first_token: bool = True
    """"window": train on the first token of a document too, predicted from the document before it."""
    sources: Annotated[tuple[DataSource, ...], BeforeValidator(tuples)] = ()
    """`[[data.sources]]`: tables with a `name`, a `path` or `dataset`, and a `weight`, mixed by sequences;
    instead of `training.dataset` and `training.dataset_path`."""
    stages: Annotated[tuple[DataStage, ...], BeforeValidator(tuples)] = ()
    """`[[data.stages]]`: tables with a `step` and the `weights`, by source, from that step on."""
    repeat: bool = True
    """Go through the data again, in a new order, when all of it was used; false: the run ends there."""

"""`minititan import` and `minititan export`: weights in and out of Hugging Face's form."""

import re
import time
from collections.abc import Sequence
from pathlib import Path

from minititan.commands import add_custom_import, give_back_freed_memory, parser_of
from minititan.config import ConfigError

IMPORT_HELP = """\
usage: minititan import SOURCE --job.dump_folder RUN [--section.key VALUE]...

Makes a run that trains on from given weights: RUN/checkpoint/step-0, RUN/tokenizer and RUN/run.toml. Then:
  torchrun -m minititan.train --job.config_file RUN/run.toml

SOURCE is a folder in Hugging Face's form (config.json, safetensors, tokenizer.json), or a file with a state
dict that torch.save wrote, with Hugging Face's names. A state dict does not say what it is of: it needs
--model.name and --model.flavor, and --model.args.FIELD for each size that differs from the flavor's.

RUN must be new or empty. Every key of a run's TOML can be given, and is written into run.toml:
  --training.steps 500 --optimizer.lr 2e-5 --model.hf_assets_path FOLDER (a tokenizer from elsewhere)
  --experimental.custom_import MODULE (a family of your own)"""

EXPORT_HELP = """\
Writes a checkpoint as a folder in Hugging Face's form (config.json, safetensors, tokenizer), for
transformers.AutoModelForCausalLM.from_pretrained(DIR). The checkpoint is verified first."""


def import_command(argv: Sequence[str]) -> int:
    """Makes a run from weights in Hugging Face's form."""
    if not argv or {"-h", "--help"} & set(argv):
        print(IMPORT_HELP)
        return 0
    if argv[0].startswith("-"):
        raise ConfigError(f"command line: {argv[0]}: SOURCE comes first; minititan import --help tells more")
    from minititan.hugging_face.imports import import_model

    give_back_freed_memory()
    begin = time.perf_counter()
    toml = import_model(Path(argv[0]).expanduser(), argv[1:], print)
    print(f"Imported {argv[0]} in {time.perf_counter() - begin:.1f} s. To train on:")
    print(f"  torchrun --nproc-per-node 1 -m minititan.train --job.config_file {toml}")
    return 0


def export_command(argv: Sequence[str]) -> int:
    """Writes a checkpoint in Hugging Face's form."""
    parser = parser_of("minititan export", EXPORT_HELP)
    parser.add_argument("step", metavar="RUN/checkpoint/step-N", type=Path, help="a checkpoint")
    parser.add_argument("folder", metavar="DIR", type=Path, help="where to write; new or empty")
    parser.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), help="type of the weights; default: as stored"
    )
    parser.add_argument(
        "--shard_size",
        "--shard-size",
        metavar="SIZE",
        default="5GB",
        help="of a file: bytes, MB, GB; default: 5GB",
    )
    parser.add_argument(
        "--tokenizer", metavar="FOLDER", help="tokenizer to copy, or none; default: the one of the run"
    )
    add_custom_import(parser)
    given = parser.parse_args(argv)
    shard_bytes = bytes_of(given.shard_size)
    from minititan.hugging_face.exports import export_model

    give_back_freed_memory()
    begin = time.perf_counter()
    export = export_model(
        given.step.expanduser(),
        given.folder.expanduser(),
        dtype=given.dtype,
        shard_bytes=shard_bytes,
        tokenizer=given.tokenizer,
        custom_import=given.custom_import,
    )
    size = sum(tensor.nbytes for shard in export.shards for tensor in shard.tensors)
    took = time.perf_counter() - begin
    print(f"Wrote {given.folder}: {size / 1e9:.3f} GB in {len(export.shards)} files, in {took:.1f} s")
    if export.assets is None:
        print("No tokenizer is written: the run has none of its own but plain bytes.")
    return 0


def bytes_of(text: str) -> int:
    """A size in bytes from "500000000", "500MB" or "5 GB" (powers of ten)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?B)?", text.strip(), re.IGNORECASE)
    size = float(match[1]) * 1000 ** "BKMGT".index((match[2] or "B")[0].upper()) if match else 0
    if size < 1:
        raise ConfigError(f"command line: --shard_size {text}: must be a size such as 500MB or 5GB")
    return int(size)

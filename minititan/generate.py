"""`minititan generate`: text from a model, as it comes; several processes are tensor-parallel:
`torchrun --nproc-per-node N -m minititan.generate`.

The text goes to stdout, everything else to stderr. Rank 0 reads the prompt, chooses the tokens and writes.
"""

import contextlib
import io
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from minititan.checkpoint.agreement import RanksFailedError, first_rank
from minititan.commands import add_custom_import, parser_of
from minititan.config import ConfigError
from minititan.config.error import literal
from minititan.data import Tokenizer
from minititan.decoding import NoNumberError, Sampling, TextStream, tokens_after
from minititan.distributed import Distributed, first_error_speaks, init_distributed, report_and_exit, shutdown
from minititan.model_source import Source, load_model, source_at
from minititan.prepare import with_underscores

WHERE = "command line"
TIMEOUT_SECONDS = 600.0
INTERRUPTED, STOPPED = 128 + signal.SIGINT, -1
GENERATION_CONFIG = "generation_config.json"
DESCRIPTION = """\
Continues a text:

  minititan generate outputs/run --prompt "import os" --max_new_tokens 100 --temperature 0.8
  minititan generate ~/llama-3.2-1b < prompt.txt > continued.txt
  torchrun --nproc-per-node 2 -m minititan.generate outputs/run/checkpoint/step-500 --prompt_file prompt.txt

MODEL is the folder of a run, its TOML, a checkpoint (step-N), or a folder in Hugging Face's form. Of a run,
the newest checkpoint is taken. Only the new text goes to stdout. docs/generate.md tells more."""


def _number(kind: Callable[[str], Any], allowed: Callable[[Any], bool], rule: str) -> Callable[[str], Any]:
    """A type for argparse whose fault says what is allowed."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not allowed(value):
            raise _argument_error(f"{literal(text)}: must be {rule}")
        return value

    return read


def _argument_error(message: str) -> Exception:
    from argparse import ArgumentTypeError

    return ArgumentTypeError(message)


def options_of(words: Sequence[str]) -> Any:
    """What the command line says. Raises ConfigError."""
    parser = parser_of("minititan generate", DESCRIPTION)
    add = parser.add_argument
    add("model", metavar="MODEL", type=Path, help="a run's folder or TOML, a checkpoint, an exported folder")
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    text.add_argument("--prompt_file", metavar="FILE", help="a file with it; default: stdin")
    natural = _number(int, lambda n: n >= 0, "a whole number, 0 or more")
    positive = _number(int, lambda n: n >= 1, "a whole number, 1 or more")
    add("--max_new_tokens", type=positive, default=256, metavar="N", help="at most so many (default: 256)")
    warmth = _number(float, lambda t: 0 <= t < math.inf, "a number, 0 or more")
    add("--temperature", type=warmth, default=1.0, metavar="T", help="0: the likeliest token (default: 1)")
    add("--top_k", type=natural, default=0, metavar="K", help="among the K likeliest (default: 0, all)")
    share = _number(float, lambda p: 0 < p <= 1, "a number above 0, at most 1")
    add("--top_p", type=share, default=1.0, metavar="P", help="among the fewest of that share (default: 1)")
    seed = _number(int, lambda n: 0 <= n < 2**63, "a whole number from 0 to 2^63 - 1")
    add("--seed", type=seed, default=0, metavar="N", help="another one draws another text (default: 0)")
    add("--echo", action="store_true", help="write the prompt before the new text")
    bos: dict[str, Any] = {"dest": "add_bos", "default": None}
    add("--add_bos", action="store_true", help="begin with the bos token (default: as the model's)", **bos)
    add("--no_add_bos", action="store_false", help="do not", **bos)
    add(
        "--tokenizer",
        metavar="PATH",
        help="a tokenizer.json, its folder, or none: bytes (default: the model's)",
    )
    types = ("float32", "bfloat16", "float16", "float64")
    add("--dtype", choices=types, help="to compute in (default: the type of the weights)")
    add_custom_import(parser)
    return parser.parse_args(with_underscores(words))


# ---- the prompt


def prompt_text(options: Any) -> str:
    """The text to continue; of a file and stdin without one newline at the end. Raises ConfigError."""
    if options.prompt is not None:
        return options.prompt
    name = options.prompt_file or "stdin"
    try:
        if options.prompt_file:
            data = Path(options.prompt_file).expanduser().read_bytes()
        elif sys.stdin is None or sys.stdin.isatty():
            raise ConfigError(f"{WHERE}: no prompt; give --prompt TEXT, --prompt_file FILE, or text on stdin")
        else:
            data = sys.stdin.buffer.read()
        return data.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not UTF-8 (byte {error.start}); convert it") from None
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read ({error.strerror}); give a file with text") from None


def prompt_tokens(text: str, source: Source, add_bos: bool | None) -> list[int]:
    """The tokens of the prompt. Raises ConfigError where the model cannot take them."""
    tokenizer, args = source.tokenizer, source.args
    tokens = [int(token) for token in tokenizer.encode_batch([text])[0]]
    if add_bos and tokenizer.bos_id is None:
        raise ConfigError(f"{WHERE}: add_bos: the tokenizer has no bos token; leave it out")
    begins = source.add_bos if add_bos is None else add_bos
    if begins and tokenizer.bos_id is not None:
        tokens.insert(0, tokenizer.bos_id)
    if not tokens:  # a document begins where another ends
        starts = [token for token in (tokenizer.eos_id, tokenizer.bos_id) if token is not None]
        if not starts:
            rule = "the prompt is empty, and the tokenizer has no token that begins a text"
            raise ConfigError(f"{WHERE}: {rule}; give a prompt")
        tokens = starts[:1]
    vocabulary = getattr(args, "vocab_size", None)
    if vocabulary is not None and max(tokens) >= vocabulary:
        rule = f"the tokenizer gives token {max(tokens)}, the model has {vocabulary}"
        raise ConfigError(f"{source.path}: {rule}; give the model's own with --tokenizer")
    longest = _longest(args)
    if len(tokens) >= longest:
        rule = f"the prompt has {len(tokens)} tokens, and the model's max_position_embeddings is {longest}"
        raise ConfigError(f"{source.path}: {rule}; give a shorter one")
    return tokens


def _longest(args: Any) -> float:
    return getattr(args, "max_position_embeddings", None) or math.inf


def stop_tokens(tokenizer: Tokenizer) -> set[int]:
    """The tokens that end a text: the tokenizer's eos, and those of a `generation_config.json` beside it."""
    found = set() if tokenizer.eos_id is None else {tokenizer.eos_id}
    file = Path(tokenizer.path).with_name(GENERATION_CONFIG) if tokenizer.path else None
    if file is not None and file.is_file():
        try:
            more = json.loads(file.read_bytes()).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"{file}: cannot be read ({error}); repair or remove it") from None
        found |= {token for token in (more if isinstance(more, list) else [more]) if isinstance(token, int)}
    return found


# ---- writing


# Commands to a terminal, which a model may write.
CONTROLS = {code: "\ufffd" for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\n\t"}


class Writer:
    """Writes text to stdout at once; `closed`: its reader has seen enough."""

    def __init__(self) -> None:
        self.closed = False
        self._terminal = sys.stdout.isatty()
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")

    def write(self, text: str) -> None:
        try:
            sys.stdout.write(text.translate(CONTROLS) if self._terminal else text)
            sys.stdout.flush()
        except BrokenPipeError:
            self.closed = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Give whether there was a SIGINT, whose first ends the text after a token; the second ends at once."""
    came = False

    def note(number: int, frame: Any) -> None:
        nonlocal came
        came = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGINT, before)


def say(line: str) -> None:
    """Tell the user something that is not the text."""
    print(line, file=sys.stderr, flush=True)


@dataclass
class Report:
    """What came of it."""

    prompt: int
    tokens: int = 0
    reason: str = ""
    first_seconds: float = 0.0  # the prompt, and the first token
    other_seconds: float = 0.0

    def line(self) -> str:
        later = f", then {self._rate(self.tokens - 1, self.other_seconds)}" if self.tokens > 1 else ""
        prompt = f"{self.prompt} prompt tokens at {self._rate(self.prompt, self.first_seconds)}"
        return f"{prompt}, {self.tokens} new ones{later}; stopped at {self.reason}"

    @staticmethod
    def _rate(tokens: int, seconds: float) -> str:
        return f"{tokens / max(seconds, 1e-9):,.1f} tokens/s"


def write_text(
    model: Any, source: Source, options: Any, text: str, place: Distributed
) -> tuple[Report, bool]:
    """Write what the model makes of the prompt; return what came of it, and whether it was interrupted.

    Every rank must call it.
    """
    tokenizer, prompt = source.tokenizer, prompt_tokens(text, source, options.add_bos)
    ends, report, first = stop_tokens(tokenizer), Report(len(prompt)), place.rank == 0
    room = _longest(source.args) - len(prompt)
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    stream, writer = TextStream(tokenizer.decode, prompt), Writer() if first else None
    if writer and options.echo:
        writer.write(text)

    with interruptible() as interrupted:

        def agree(token: int) -> int:
            """Rank 0's token, or its wish to stop."""
            if first and (interrupted() or (writer and writer.closed)):
                token = STOPPED
            if place.world_size == 1:
                return token
            chosen = torch.tensor(token, device=place.device)
            dist.broadcast(chosen, src=0)
            return int(chosen)

        begin = last = time.perf_counter()
        for token in tokens_after(prompt, model, sampling, agree=agree):
            report.tokens += 1
            last = time.perf_counter()
            report.first_seconds = report.first_seconds or last - begin
            if token in ends:
                report.reason = "the end of the text"
                break
            if writer:
                writer.write(stream.add(token))
            if report.tokens >= min(options.max_new_tokens, room):
                full = room <= options.max_new_tokens
                report.reason = "the model's max_position_embeddings" if full else "max_new_tokens"
                break
        else:
            report.reason = "an interrupt" if interrupted() else "a closed pipe"
        report.other_seconds = last - begin - report.first_seconds
        if writer:
            writer.write(stream.end() + "\n")
        return report, interrupted()


def generate(options: Any) -> int:
    """Load the model, write the text; return the exit code. Every rank must call it."""
    place = init_distributed(timeout_seconds=TIMEOUT_SECONDS)
    told = say if place.rank == 0 else (lambda line: None)
    source = source_at(options.model.expanduser(), options.tokenizer, options.custom_import, told)
    try:
        text = first_rank(lambda: prompt_text(options))
    except RanksFailedError as failed:
        raise failed.explained("the prompt could not be read", "give --prompt") from None
    dtype = getattr(torch, options.dtype) if options.dtype else source.dtype
    model = load_model(source, dtype, place)
    try:
        report, interrupted = write_text(model, source, options, text, place)
    except NoNumberError:
        rule = f"the model's output in {str(dtype).removeprefix('torch.')} is not finite"
        raise ConfigError(
            f"{source.path}: {rule}; its weights are damaged, or --dtype float32 helps"
        ) from None
    told(report.line())
    shutdown(place)
    return INTERRUPTED if interrupted else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Write what a model makes of a prompt; return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    try:
        with first_error_speaks():
            return generate(options_of(words or ["--help"]))
    except ConfigError as error:
        report_and_exit(error)
    except KeyboardInterrupt:
        say("Interrupted")
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())

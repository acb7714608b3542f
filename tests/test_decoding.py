"""Tokens one after another: caches, choices and text against plain references."""

import itertools
import warnings
from dataclasses import replace
from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from minititan import registry
from minititan.data.tokenizer import ByteTokenizer
from minititan.decoding import Cache, NoNumberError, Sampling, TextStream, choose, tokens_after
from minititan.init import init_parameters

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

VOCABULARY = 264
DEBUG_MODELS = [
    (name, flavor)
    for name, spec in registry.families().items()
    for flavor in spec.flavors
    if flavor.startswith("debugmodel")
]


def debug_model(name: str, flavor: str) -> Any:
    """A family's smallest model in float64, with weights that make attention and routing far from even."""
    spec = registry.families()[name]
    args = replace(spec.flavors[flavor], vocab_size=VOCABULARY, initializer_range=0.2)
    model = spec.build(args).double()

    def init_(name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        spec.init_(name, tensor, generator, args)
        if name.endswith("bias"):
            tensor.normal_(std=0.2, generator=generator)

    init_parameters(dict(model.named_parameters()), init_, seed=5)
    return model.eval()


@pytest.mark.parametrize("name, flavor", DEBUG_MODELS)
@torch.no_grad()
def test_with_a_cache_the_same_logits_and_tokens(name: str, flavor: str) -> None:
    model = debug_model(name, flavor)
    tokens = torch.randint(VOCABULARY, (1, 60), generator=torch.Generator().manual_seed(2))
    whole = model.lm_head(model(tokens))
    caches, parts = {layer: Cache() for layer in model.layers}, []
    for begin, end in itertools.pairwise([0, 40, 41, 42, 50, 60]):
        hidden = model(tokens[:, begin:end], torch.arange(begin, end), caches=caches)
        parts.append(model.lm_head(hidden))
    found = torch.cat(parts, dim=1)
    assert (found - whole).abs().max() < 1e-9 * whole.abs().max()

    prompt = tokens[0, :35].tolist()
    for sampling in (Sampling(temperature=0), Sampling(temperature=1.5, top_k=20, seed=3)):
        one, other = (
            list(itertools.islice(tokens_after(prompt, model, sampling, cached=cached), 12))
            for cached in (True, False)
        )
        assert one == other
        assert len(set(one)) > 2, "a model that says one thing shows nothing"


def test_a_cache_grows_and_forgets_nothing() -> None:
    cache, given_ = Cache(), []
    for length in (3, 1, 300, 1, 700):
        new = torch.randn(1, 2, length, 4), torch.randn(1, 1, length, 6)
        given_.append(new)
        kept = cache.extend(*new)
        for of_kind, tensor in zip(zip(*given_, strict=True), kept, strict=True):
            assert torch.equal(tensor, torch.cat(of_kind, dim=2))
    assert cache.length == 1005


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.5),
        Sampling(top_k=3),
        Sampling(top_p=0.7),
        Sampling(temperature=2.0, top_k=5, top_p=0.8),
        Sampling(top_p=1e-9),
        Sampling(top_k=1),
    ],
    ids=str,
)
def test_draws_are_distributed_as_those_of_transformers(sampling: Sampling) -> None:
    logits = torch.tensor([1.0, -1.0, 2.0, 0.5, 0.0, -2.0, 1.7])
    expected = logits[None].clone()
    expected = TemperatureLogitsWarper(sampling.temperature)(torch.tensor([[0]]), expected)
    if sampling.top_k:
        expected = TopKLogitsWarper(sampling.top_k)(torch.tensor([[0]]), expected)
    if sampling.top_p < 1:
        expected = TopPLogitsWarper(sampling.top_p)(torch.tensor([[0]]), expected)
    generator, draws = torch.Generator().manual_seed(1), 4000
    drawn = torch.tensor([choose(logits, sampling, generator) for _ in range(draws)])
    shares, probabilities = drawn.bincount(minlength=7) / draws, expected.softmax(-1)[0]
    assert ((shares > 0) <= (probabilities > 0)).all()
    bound = 4 * (probabilities * (1 - probabilities) / draws).sqrt()  # four standard deviations
    assert ((shares - probabilities).abs() <= bound).all()


def test_a_seed_gives_the_same_draws_and_another_seed_others() -> None:
    logits = torch.zeros(50)
    one, again, other = (
        [choose(logits, Sampling(), generator) for _ in range(20)]
        for generator in (torch.Generator().manual_seed(seed) for seed in (4, 4, 5))
    )
    assert one == again != other


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_no_choice(temperature: float, bad: float) -> None:
    with pytest.raises(NoNumberError):
        choose(torch.tensor([0.0, bad]), Sampling(temperature), torch.Generator())


# ---- text

TEXTS = ["plain ascii", "häßlich, naïve", "日本語のテキスト", "🙂🙃 and 👩‍👩‍👧", " two  spaces ", "a\n\n\tb"]


def by_bytes() -> tokenizers.Tokenizer:
    """A byte-level tokenizer without merges, as of Llama 3 or Qwen: a character is up to four tokens."""
    made = tokenizers.Tokenizer(
        models.BPE({letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def with_byte_fallback() -> tokenizers.Tokenizer:
    """One as of Llama 2: words begin with a mark, which decoding leaves out at the beginning of a text."""
    words = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz"]
    made = tokenizers.Tokenizer(
        models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    return made


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("make", [by_bytes, with_byte_fallback])
def test_characters_come_whole(make: Any, text: str) -> None:
    tokenizer = make()
    tokens = tokenizer.encode(text).ids
    stream = TextStream(tokenizer.decode)
    pieces = [stream.add(token) for token in tokens]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join([*pieces, stream.end()]) == tokenizer.decode(tokens)


def test_a_continuation_keeps_the_space_at_its_beginning() -> None:
    tokenizer = with_byte_fallback()
    prompt, rest = tokenizer.encode("ab").ids, tokenizer.encode("cd").ids
    stream = TextStream(tokenizer.decode, prompt)
    assert "".join(stream.add(token) for token in rest) == " cd"
    assert tokenizer.decode(rest) == "cd", "the reference shows the difference"


@given(st.lists(st.integers(0, VOCABULARY - 1), max_size=300))
def test_any_bytes_are_what_decoding_them_at_once_gives(tokens: list[int]) -> None:
    tokenizer = ByteTokenizer()
    stream = TextStream(tokenizer.decode)
    assert "".join([*map(stream.add, tokens), stream.end()]) == tokenizer.decode(tokens)


def test_text_is_not_held_back_longer_than_a_character() -> None:
    stream = TextStream(ByteTokenizer().decode)
    assert [stream.add(byte) for byte in "aé🙂b".encode()] == ["a", "", "é", "", "", "", "🙂", "b"]
    assert [stream.add(255) for _ in range(5)] == ["", "", "", "\ufffd", "\ufffd"]
    assert stream.end() == "\ufffd" * 3

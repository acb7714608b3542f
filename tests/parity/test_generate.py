"""Greedy text of each family beside `transformers`, from one folder in its form."""

from itertools import islice
from pathlib import Path

import pytest
import torch

from minititan.decoding import Sampling, tokens_after
from minititan.distributed import Distributed
from minititan.model_source import load_model, source_at
from tests.parity.families import VARIANTS, theirs
from tests.toy_llama import save

ALONE = Distributed(0, 1, 0, torch.device("cpu"), owns_group=False)
PROMPT = [72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100, 33, 7, 290]
LENGTH = 30
GREEDY = Sampling(temperature=0)


@pytest.mark.parametrize("family, variant", VARIANTS)
def test_the_same_tokens(tmp_path: Path, family: str, variant: str) -> None:
    reference = theirs(*VARIANTS[family, variant])
    save(reference, tmp_path / "folder")
    source = source_at(tmp_path / "folder", None, "", print)
    found = list(islice(tokens_after(PROMPT, load_model(source, source.dtype, ALONE), GREEDY), LENGTH))
    inputs = torch.tensor([PROMPT])
    expected = reference.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=LENGTH,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert found == expected[0, len(PROMPT) :].tolist()
    assert len(set(found)) > 1, "a model that says one thing shows nothing"

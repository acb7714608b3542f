"""Attention inside documents, by each kernel, against attention to each document alone."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from minititan.models import masks

B, H, K, T, C = 2, 8, 4, 40, 16


@pytest.fixture
def inputs() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (B, H, T, C), "k": (B, K, T, C), "v": (B, K, T, C)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


IDS = torch.tensor([[0] * 7 + [1] * 1 + [2] * 20 + [3] * 12, [4] * 40])


def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(q)
    for row, ids in enumerate(IDS):
        for document in ids.unique().tolist():
            places = ids == document
            own_q, own_k, own_v = (tensor[row : row + 1, :, places] for tensor in (q, k, v))
            out[row : row + 1, :, places] = F.scaled_dot_product_attention(
                own_q, own_k, own_v, is_causal=True, enable_gqa=True
            )
    return out


def test_a_boolean_mask_is_attention_to_each_document_alone(inputs: dict[str, Any]) -> None:
    mask = masks.causal_mask(T, None, IDS, C, torch.float32, IDS.device)
    assert isinstance(mask, torch.Tensor) and mask.shape == (B, 1, T, T)
    assert torch.allclose(masks.attend(**inputs, mask=mask), alone(**inputs), atol=1e-6)


@pytest.mark.parametrize("sinks", [None, torch.linspace(-2.0, 3.0, H)], ids=["", "sinks"])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("ids", [None, IDS], ids=["", "documents"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_what_a_boolean_mask_is(
    ids: torch.Tensor | None,
    window: int | None,
    sinks: torch.Tensor | None,
    inputs: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eager, and without gradients, which FlexAttention has on a GPU only."""
    monkeypatch.setattr(masks, "_flex_attention", lambda: (flex_attention, create_block_mask))
    device = torch.device("cpu")
    boolean = masks.causal_mask(T, window, ids, C, torch.float32, device)
    blocks = masks.block_mask(T, window, ids, device)
    one, other = (masks.attend(**inputs, mask=mask, scale=0.3, sinks=sinks) for mask in (boolean, blocks))
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


PLACES = torch.tensor([3, 4, 5, 30, 31, 39])


@pytest.mark.parametrize("kernel", ["boolean", "blocks"])
@pytest.mark.parametrize("ids", [None, IDS], ids=["", "documents"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_queries_that_are_some_of_the_tokens_see_what_they_would_among_all(
    ids: torch.Tensor | None, kernel: str, inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "_flex_attention", lambda: (flex_attention, create_block_mask))
    device = torch.device("cpu")
    whole = masks.causal_mask(T, 6, ids, C, torch.float32, device)
    if kernel == "boolean":
        mask = masks.causal_mask(T, 6, ids, C, torch.float32, device, PLACES)
    else:
        mask = masks.block_mask(T, 6, ids, device, PLACES)
    own = masks.attend(inputs["q"][:, :, PLACES], inputs["k"], inputs["v"], mask)
    torch.testing.assert_close(own, masks.attend(**inputs, mask=whole)[:, :, PLACES], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sinks", [None, torch.linspace(-2.0, 3.0, H)], ids=["", "sinks"])
def test_without_a_mask_queries_are_the_last_of_the_keys(
    sinks: torch.Tensor | None, inputs: dict[str, Any]
) -> None:
    own = masks.attend(inputs["q"][:, :, -9:], inputs["k"], inputs["v"], None, sinks=sinks)
    whole = masks.attend(**inputs, mask=None, sinks=sinks)
    torch.testing.assert_close(own, whole[:, :, -9:], rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_the_same(inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager: its compiled kernel needs a GPU, or a C++ compiler and minutes."""
    monkeypatch.setattr(masks, "_flex_attention", lambda: (flex_attention, create_block_mask))
    found = masks.attend(**inputs, mask=masks.block_mask(T, None, IDS, IDS.device))
    assert torch.allclose(found, alone(**inputs), atol=1e-6)
    assert not torch.allclose(found, masks.attend(**inputs, mask=None), atol=1e-2)

"""The loss against `F.cross_entropy` on whole logits: values and gradients, in chunks and on shards."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from minititan import loss
from minititan.loss import IGNORED, VocabularyShard, install_loss
from minititan.parallelisms.tensor_parallel import first_row
from tests.distributed.harness import run_ranks

WIDTH = 12
FACTOR = 0.37  # what the gradient that comes in is, not 1


def data(vocab_size: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [2, 7, D], a head's weight [V, D], labels [2, 7] of which some are left out."""
    generator = torch.Generator().manual_seed(vocab_size)
    hidden = torch.randn(2, 7, WIDTH, generator=generator, dtype=torch.float64) * 2
    weight = torch.randn(vocab_size, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(vocab_size, (2, 7), generator=generator)
    labels[0, 2:4] = labels[1, 6] = IGNORED
    labels[0, 0], labels[0, 1] = 0, vocab_size - 1  # both ends of the vocabulary
    return hidden.to(dtype), weight.to(dtype), labels


def expected(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """The sum of the token losses, and FACTOR times its gradients by hidden states and weight."""
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    total = F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten(), reduction="sum")
    return total.detach(), *torch.autograd.grad(total * FACTOR, (hidden, weight))


def found(
    hidden: Tensor, weight: Tensor, labels: Tensor, vocab_size: int, shard: VocabularyShard | None = None
) -> tuple[Tensor, ...]:
    """What `expected` gives, the same loss without gradients, and the logits."""
    head = nn.Linear(WIDTH, vocab_size, bias=False)
    head.weight = nn.Parameter(weight)  # the local rows, as a unit's computation sees them
    install_loss(head, shard, None)
    hidden = hidden.detach().requires_grad_()
    total = head(hidden, labels)
    gradients = torch.autograd.grad(total * FACTOR, (hidden, head.weight))
    with torch.no_grad():
        return total.detach(), *gradients, head(hidden, labels), head(hidden)


def assert_close(one: Any, other: Any, bound: float = 1e-12) -> None:
    torch.testing.assert_close(one, other, rtol=bound, atol=bound)


@pytest.mark.parametrize(
    "chunk_elements", [2**27, 130 * 14, 130 * 5, 1], ids=["one", "exact", "three", "tokens"]
)
def test_values_and_gradients_in_chunks(chunk_elements, monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", chunk_elements)
    inputs = data(130)
    total, grad_hidden, grad_weight, without, logits = found(*inputs, 130)
    assert_close((total, grad_hidden, grad_weight), expected(*inputs))
    assert_close(without, total, bound=0)
    assert_close(logits, inputs[0] @ inputs[1].T)
    assert grad_hidden[inputs[2] == IGNORED].abs().max() == 0


@pytest.mark.parametrize("chunk_elements", [2**27, 3 * 130])
def test_no_label_at_all_is_zero_not_nan(chunk_elements, monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", chunk_elements)
    hidden, weight, labels = data(130)
    total, grad_hidden, grad_weight, _, _ = found(hidden, weight, torch.full_like(labels, IGNORED), 130)
    assert total == 0
    assert not grad_hidden.any() and not grad_weight.any()


def test_large_logits_do_not_overflow():
    hidden, weight, labels = data(130, torch.float32)
    inputs = hidden * 100, weight, labels
    assert_close(found(*inputs, 130)[:3], expected(*inputs), bound=1e-4)


def test_bfloat16_is_summed_in_float32(monkeypatch):
    """Losses and the head's gradient, over the chunks."""
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", 130)
    hidden, weight, labels = data(130, torch.bfloat16)
    total, grad_hidden, grad_weight, _, _ = found(hidden, weight, labels, 130)
    assert (total.dtype, grad_hidden.dtype, grad_weight.dtype) == (
        torch.float32,
        torch.bfloat16,
        torch.bfloat16,
    )
    # From the same rounded logits, all else in float64.
    logits = (hidden @ weight.T).double().flatten(0, 1).requires_grad_()
    reference = F.cross_entropy(logits, labels.flatten(), reduction="sum")
    assert total.item() == pytest.approx(reference.item(), rel=1e-6)
    (grad_logits,) = torch.autograd.grad(reference * FACTOR, logits)
    by_weight = grad_logits.T @ hidden.double().flatten(0, 1)
    assert (grad_weight.double() - by_weight).norm() < 4e-3 * by_weight.norm()  # half a unit of 8 bits


# ---- on ranks


VOCABULARIES = [130, 5]  # over 4 ranks: 33, 33, 33, 31 and 2, 2, 1, 0
CASES = [
    (vocab, ranks, parallel, False)
    for vocab in VOCABULARIES
    for ranks in (2, 4)
    for parallel in (True, False)
]
CASES += [(130, 4, True, True), (5, 4, False, True)]  # no label at all


def on_ranks(rank: int, world: int) -> dict[Any, Any]:
    loss.CHUNK_ELEMENTS = 130  # several chunks, of which a rank with fewer rows would make fewer
    meshes = {2: init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]}
    meshes[4] = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    results = {}
    for vocab, ranks, parallel, ignored in CASES:
        mesh = meshes[ranks]
        hidden, weight, labels = data(vocab)
        local = distribute_tensor(weight, mesh, [Shard(0)]).to_local()
        first = first_row(vocab, mesh)
        assert torch.equal(weight[first : first + len(local)], local)
        shard = VocabularyShard(mesh.get_group().group_name, -(-vocab // ranks), first, parallel)
        labels = torch.full_like(labels, IGNORED) if ignored else labels
        results[vocab, ranks, parallel, ignored] = found(hidden, local, labels, vocab, shard)
    return results


@pytest.fixture(scope="module")
def sharded():
    return run_ranks(on_ranks, 4)


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_a_vocabulary_over_ranks(vocab, sharded):
    for case in (case for case in CASES if case[0] == vocab):
        _, ranks, _, ignored = case
        hidden, weight, labels = data(vocab)
        labels = torch.full_like(labels, IGNORED) if ignored else labels
        parts = [result[case] for result in sharded[:ranks]]
        total, by_hidden, by_weight = expected(hidden, weight, labels)
        # A rank's gradient of the hidden states is its part of a sum, which the norm before the head closes.
        assert_close(sum(part[1] for part in parts), by_hidden)
        assert_close(torch.cat([part[2] for part in parts]), by_weight)
        for own_total, _, _, without, logits in parts:
            assert_close(own_total, total)
            assert_close(without, own_total, bound=0)
            assert_close(logits, hidden @ weight.T)

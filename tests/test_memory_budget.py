"""The compiler's memory budget: less of it, fewer activations kept, and the same gradients."""

import torch
from torch import Tensor, nn

from minititan.parallelisms.activation_checkpoint import set_compiled_recomputation


def kept_and_gradient(budget: float | None, device: str = "cpu") -> tuple[int, Tensor]:
    """Bytes that a compiled stack of layers keeps for its backward, its parameters aside, and a gradient."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(32, 32), nn.GELU(), nn.SiLU())))
    own = {parameter.data_ptr() for parameter in layers.parameters()}
    x = torch.randn(64, 32, requires_grad=True)
    kept = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.nbytes if tensor.data_ptr() not in own else 0
        return tensor

    set_compiled_recomputation(budget, device)
    try:
        compiled = torch.compile(layers, backend="aot_eager", fullgraph=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = compiled(x)
        out.square().sum().backward()
    finally:
        set_compiled_recomputation(None, "cpu")
    assert x.grad is not None
    return kept, x.grad


def test_a_smaller_budget_keeps_less() -> None:
    found = {budget: kept_and_gradient(budget) for budget in (None, 1.0, 0.5, 0.0)}
    sizes = {budget: size for budget, (size, _) in found.items()}
    assert sizes[0.0] < sizes[0.5] < sizes[1.0] == sizes[None]
    for _, gradient in found.values():
        torch.testing.assert_close(gradient, found[None][1])


def test_on_a_cpu_pointwise_results_are_made_again() -> None:
    kept, gradient = kept_and_gradient(None)
    more, same = kept_and_gradient(None, "cuda")
    assert kept < more
    torch.testing.assert_close(gradient, same)

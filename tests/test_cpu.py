"""What a run sets in its process on a CPU: the allocator, and large products by parts of their rows."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from minititan import cpu


@pytest.mark.parametrize("name, calls", [("OTHER", 2), ("MALLOC_ARENA_MAX", 0), ("GLIBC_TUNABLES", 0)])
def test_the_users_allocator_settings_are_kept(monkeypatch, name, calls):
    for known in ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES"):
        monkeypatch.delenv(known, raising=False)
    monkeypatch.setenv(name, "1")
    libc = mock.Mock()
    monkeypatch.setattr(cpu.platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(cpu.ctypes, "CDLL", lambda name: libc)
    cpu.keep_freed_memory()
    assert libc.mallopt.call_count == calls


@pytest.fixture
def parts(monkeypatch):
    """Parts of 2 rows a thread, and what was found tall."""
    cpu.compute_products_by_rows()
    found, is_tall = [], cpu._is_tall
    monkeypatch.setattr(cpu, "ROWS_A_THREAD", 2)
    monkeypatch.setattr(cpu, "_is_tall", lambda a: found.append(is_tall(a)) or found[-1])
    return found


def error(found, a, b):
    return (found.double() - a.double() @ b.double()).abs().max().item()


@pytest.mark.parametrize("rows", [1, 4 * torch.get_num_threads(), 37])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_by_parts_is_the_product(parts, rows, transposed):
    a, b = torch.randn(rows, 5), torch.randn(7, 5).t() if transposed else torch.randn(5, 7)
    assert error(a @ b, a, b) < 1e-5
    wide = torch.zeros(rows, 9)
    torch.mm(a, b, out=wide[:, 1:8])  # rows that are not dense
    assert error(wide[:, 1:8], a, b) < 1e-5
    assert not wide[:, [0, 8]].any()
    assert any(parts) == (rows > 1)


def test_gradients_through_parts_are_those_of_the_product(parts):
    x, weight = torch.randn(3, 16, 5, requires_grad=True), torch.randn(7, 5, requires_grad=True)
    found = torch.autograd.grad(F.linear(x, weight).square().sum(), (x, weight))
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = torch.autograd.grad(F.linear(*exact).square().sum(), exact)
    for gradient, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient.double(), reference, rtol=1e-5, atol=1e-5)
    assert any(parts)


def test_what_is_no_tall_matrix_is_left_to_blas(parts):
    for a in (torch.randn(37, 5).double(), torch.randn(5, 37).t(), torch.randn(37, 5).bfloat16()):
        torch.mm(a, torch.randn(5, 7).to(a.dtype))
    assert parts == [False] * 3


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("shape", [(0,), (37, 3), (5, 7)])
def test_an_output_of_another_shape_is_resized_as_ever(parts, shape):
    a, b, out = torch.randn(37, 5), torch.randn(5, 7), torch.zeros(shape)
    assert torch.mm(a, b, out=out) is out
    assert error(out, a, b) < 1e-5


def test_a_wrong_product_is_refused_as_ever(parts):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.mm(torch.randn(37, 5), torch.randn(6, 7))
    with pytest.raises(RuntimeError, match="dtype"):
        torch.mm(torch.randn(37, 5), torch.randn(5, 7).double())

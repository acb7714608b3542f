"""What a run on a CPU sets in its process: what becomes of freed memory, how large products are computed."""

import ctypes
import os
import platform
import warnings
from typing import Any

import torch
from torch import Tensor

ROWS_A_THREAD = 256


def set_up_cpu() -> None:
    """Set this process up for training on the CPU; again changes nothing."""
    keep_freed_memory()
    compute_products_by_rows()


def keep_freed_memory() -> None:
    """Let glibc's allocator keep freed memory for the next step, unless the user's environment tunes it.

    By default it gives large tensors back to the system at once and asks for new pages, cleared, the next
    time: 170,000 page faults in a step of a 10M model, a sixth of its time.
    """
    tuned = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if tuned or platform.libc_ver()[0] != "glibc":
        return
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of malloc.h
    libc = ctypes.CDLL(None)
    libc.mallopt(trim_threshold, -1)  # never
    libc.mallopt(mmap_max, 0)


_by_rows: torch.library.Library | None = None


def compute_products_by_rows() -> None:
    """Give BLAS the rows of a large float32 product in parts that stay in the cache, whoever asks for it.

    Each row is computed as before. MKL takes 1.1 to 1.3 times as long for all rows of the tokens of a batch
    at once (AMD EPYC, matrices 256 to 1,664 wide). Below autograd and the compiler, which see `aten::mm`.
    """
    global _by_rows
    if _by_rows is not None:
        return
    _by_rows = torch.library.Library("aten", "IMPL", "CPU")
    product = torch.library.get_kernel("aten::mm", "CPU")
    product_out = torch.library.get_kernel("aten::mm.out", "CPU")

    def mm(keys: Any, a: Tensor, b: Tensor) -> Tensor:
        if not _is_tall(a):
            return product.call_boxed(keys, a, b)
        return mm_out(keys, a, b, out=a.new_empty(a.shape[0], b.shape[-1]))

    def mm_out(keys: Any, a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        if not _is_tall(a) or out.shape != (a.shape[0], b.shape[-1]):  # it may be resized
            return product_out.call_boxed(keys, a, b, out=out)
        rows = ROWS_A_THREAD * torch.get_num_threads()
        for part, out_part in zip(a.split(rows), out.split(rows), strict=True):
            product_out.call_boxed(keys, part, b, out=out_part)
        return out

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        _by_rows.impl("mm", mm, with_keyset=True)
        _by_rows.impl("mm.out", mm_out, with_keyset=True)


def _is_tall(a: Tensor) -> bool:
    """Whether a [N, K] is kept row by row and has so many of them that parts pay."""
    return (
        a.dtype == torch.float32
        and a.ndim == 2
        and a.stride(1) == 1
        and a.shape[0] >= 2 * ROWS_A_THREAD * torch.get_num_threads()
    )

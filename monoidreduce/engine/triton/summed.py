"""The sum of few numbers as one launch: of a loss's rows, where torch's own sum costs the host more than the device.

One program instance takes them all at once, so that their order is fixed."""

from __future__ import annotations

import torch
from torch import Tensor

from . import emit, launch
from .plan import KernelPlan
from .tape import Leaf, Recipe

_MOST = 2**13
_TYPES = (torch.float32, torch.float64)
_TEXT = f'''"""The sum of few numbers."""

import triton
import triton.language as tl


@triton.jit
def summed(out, x, size, {", ".join(f"{c}: tl.constexpr" for c in emit.CONSTANTS)}):
    at = tl.arange(0, KEPT)
    tl.store(out, tl.sum(tl.load(x + at, mask=at < size, other=0), 0))
'''


def recipe(x: Tensor) -> Recipe | None:
    """How numbers like these, which lie side by side, are added up; None where there is no kernel for them."""
    size = x.numel()
    if x.dtype not in _TYPES or not 0 < size <= _MOST or not x.is_contiguous():
        return None
    plan = KernelPlan(max(32, 1 << (size - 1).bit_length()), 1, 4 if size <= 1024 else 8, 1)
    kernel = emit.Kernel("summed", _TEXT, ())
    out = torch.empty((), dtype=x.dtype, device=x.device)
    again = launch.execute(launch.Call(kernel, plan, 1, (out, x, size), False, "ieee", True, x.device))
    return None if again is None else Recipe(again, (((), x.dtype),), (Leaf(0, True), size))

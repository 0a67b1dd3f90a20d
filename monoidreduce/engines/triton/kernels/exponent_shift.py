"""The shift of an exponent along the folded axis, made before the launch: (number + logarithm of a total) × log2(e).

torch takes four operations for it, each a launch of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..codegen.exponents import LOG2E
from ..launch import jit_module
from ..launch.launch_cache import Kernels

_TEXT = f'''"""Shifts of exponents."""

import triton
import triton.language as tl


@triton.jit
def shift(out, number, total, size, LANES: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    here = at < size
    of_total = tl.load(total + at, mask=here, other=0.0)
    seen = tl.where(tl.abs(of_total) == float("inf"), float("inf"), of_total)  # a total of nothing hides all
    tl.store(out + at, (tl.load(number + at, mask=here, other=0.0) + seen) * {LOG2E!r}, mask=here)
'''
_LANES = 1024
_kernels = Kernels(_TEXT)


def fits_kernel(number: Tensor, total: Tensor, size: int) -> bool:
    """Whether one kernel makes the shifts of so many numbers."""
    plain = all(v.dtype is torch.float32 and v.is_contiguous() and v.numel() == size for v in (number, total))
    return plain and jit_module.can_relaunch(number.device)


def compute_shift(number: Tensor, total: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The shifts, of this shape; infinite where the total is of nothing."""
    if fits_kernel(number, total, math.prod(shape)):
        found = torch.empty_like(number)
        _launch(found, number, total)
        return found.view(shape)
    seen = torch.nan_to_num(total, nan=math.nan, posinf=math.inf, neginf=math.inf)
    return (number + seen).mul_(LOG2E).expand(shape).contiguous()


def prepare_replay(number: Any, total: Any, shape: tuple[int, ...]) -> Callable[..., None] | None:
    """What launches the kernel again for tensors like these, after it did once; None where torch makes the shifts."""
    return _launch(torch.empty_like(number), number, total) if fits_kernel(number, total, math.prod(shape)) else None


def _launch(out: Tensor, number: Tensor, total: Tensor) -> Callable[..., None] | None:
    size = out.numel()
    return _kernels("shift", (-(-size // _LANES),), (out, number, total, size), {"LANES": _LANES})

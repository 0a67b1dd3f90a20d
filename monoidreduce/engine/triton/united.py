"""The parts of a softmax whose walk was cut, put together in one kernel for each mean: torch takes twenty operations.

The arithmetic is that of ``combine.py``, part by part in their order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .kept import Kernels

_TEXT = '''"""A softmax from those of its parts."""

import triton
import triton.language as tl


@triton.jit
def part(log, peak, place, here):
    # the total's logarithm and the peak of one part: what saw nothing has none, what saw infinity has that
    of_total = tl.load(log + place, mask=here, other=float("-inf"))
    top = tl.load(peak + place, mask=here, other=0.0)
    return of_total, tl.where(tl.abs(of_total) == float("inf"), of_total, top)


@triton.jit(do_not_specialize=["parts"])
def unite_softmax(
    z_out, mean_out, log_out, peak_out, mean, log, peak, parts, rows,
    WIDTH: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, NUMBERS: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    here = at < rows
    inside = here[:, None] & (lane < WIDTH)[None, :]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    for k in range(0, parts):
        of_total, own = part(log, peak, at + tl.cast(k, tl.int64) * rows, here)
        top = tl.maximum(top, own, propagate_nan=tl.PropagateNan.ALL)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, LANES], tl.float32)
    for k in range(0, parts):
        place = at + tl.cast(k, tl.int64) * rows
        of_total, own = part(log, peak, place, here)
        below = tl.where(own == top, 0.0, own) - tl.where(own == top, 0.0, top)  # infinities too
        weight = tl.exp(below) * tl.exp(of_total)
        total += weight
        if WIDTH:
            sums += weight[:, None] * tl.load(mean + place[:, None] * WIDTH + lane[None, :], mask=inside, other=0.0)
    seen = tl.where(total == 0.0, 1.0, total)  # a row that sees nothing has mean 0
    if WIDTH:
        tl.store(mean_out + at[:, None] * WIDTH + lane[None, :], sums / seen[:, None], mask=inside)
    if NUMBERS:
        of_total = tl.where(total == 0.0, float("-inf"), tl.log(seen))
        safe = tl.where(tl.abs(top) == float("inf"), 0.0, top)
        tl.store(z_out + at, of_total + safe, mask=here)
        tl.store(log_out + at, of_total, mask=here)
        tl.store(peak_out + at, safe, mask=here)
'''
_WIDEST = 1024
_kernels = Kernels(_TEXT)


def room(stacked: Sequence[Tensor]) -> list[Tensor] | None:
    """Where a whole softmax goes; None where there is no kernel for its parts: float64, too many features."""
    widest = max([1, *(t.shape[-1] for t in stacked if t.dim() > stacked[0].dim())])
    plain = all(t.dtype is torch.float32 and t.is_contiguous() and t.numel() for t in stacked)
    return [torch.empty_like(t[0]) for t in stacked] if plain and widest <= _WIDEST else None


def softmax(stacked: Sequence[Tensor]) -> list[Tensor] | None:
    """(z, means, logarithm, peak) of a whole from those of its parts ``[parts, *batch, length(, features)]``."""
    out = room(stacked)
    if out is None:
        return None
    z, *means, log, peak = stacked
    widths = [m.shape[-1] if m.dim() > log.dim() else 1 for m in means]
    whole, parts = (out[0], out[-2], out[-1]), (log, peak)
    for k, (mean, width) in enumerate(zip(means or [z], widths or [0], strict=True)):
        _launched(whole, parts, mean, out[1 + k] if means else out[0], width, k == 0)
    return out


def _launched(
    whole: tuple[Tensor, ...], parts: tuple[Tensor, ...], mean: Tensor, made: Tensor, width: int, first: bool
) -> None:
    """One mean, and with the first of them the numbers."""
    rows, lanes = whole[0].numel(), 1 << max(width - 1, 0).bit_length()
    constants = dict(WIDTH=width, LANES=lanes, ROWS=max(1, min(32, 2048 // lanes)), NUMBERS=first)
    given = (whole[0], made, *whole[1:], mean, *parts, len(mean), rows)
    _kernels("unite_softmax", (-(-rows // constants["ROWS"]),), given, constants)

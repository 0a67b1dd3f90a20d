"""Values in 8-bit floats with their features first, as Hopper's matrix units take them: the folded axis is contiguous.

A copy is made before the launch, of one byte a number. In it, the columns of each sixteen are in the order in which a
thread of the warp-specialised attention kernel holds their weights (``attention_template.py``, ``narrow_weights``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ....program.expression import Expr
from ..launch.jit_module import Kernels

_COLS = 128  # columns of an instance
_TEXT = '''"""Vectors with their features first."""

import triton
import triton.language as tl


@triton.jit
def turn(out, x, cols, inner, outer_step, step, col, feature, out_step, room, WIDTH: tl.constexpr, COLS: tl.constexpr):
    place = tl.program_id(0) * COLS + tl.arange(0, COLS)
    # of sixteen columns, 8 b + 2 t + e comes to stand at 4 t + 2 b + e
    at = (place // 16) * 16 + (place // 2 % 2) * 8 + (place % 16 // 4) * 2 + place % 2
    lane, batch = tl.arange(0, WIDTH), tl.program_id(1).to(tl.int64)
    x += batch // inner * outer_step + batch % inner * step
    block = x + at.to(tl.int64)[:, None] * col + lane[None, :] * feature
    block = tl.load(block, mask=(at < cols)[:, None], other=0)
    turned = out + batch * out_step + lane.to(tl.int64)[:, None] * room + place[None, :]
    tl.store(turned, tl.trans(block), mask=(place < room)[None, :])
'''
_kernels = Kernels(_TEXT)


def turn_leaves(turned: Iterable[Expr], values: Mapping[Expr, Any], batch: int) -> dict[Expr, Tensor]:
    """The leaves [*batch, columns, features] as [*batch, features, columns]; features are a power of two, and columns
    padded with zeros to a multiple of 16."""
    found = {}
    for e in turned:
        v = values[e]
        own = v[tuple(slice(1) if s == 0 else slice(None) for s in v.stride()[:batch])]  # a broadcast leaf once
        flat = own.view(torch.int8)
        while flat.dim() != 4:  # two batch dimensions with strides of their own
            flat = flat[None] if flat.dim() < 4 else flat.flatten(0, 1)
        (outer, inner, cols, width), strides = flat.shape, flat.stride()
        room = -(-cols // 16) * 16
        out = torch.empty(*own.shape[:-2], width, room, dtype=v.dtype, device=v.device)
        if flat.numel() and not v.is_meta:  # a dry run
            given = (out.view(torch.int8), flat, cols, inner, *strides, width * room, room)
            _kernels("turn", (-(-room // _COLS), outer * inner), given, dict(WIDTH=width, COLS=_COLS))
        found[e] = out.expand(*v.shape[:batch], width, room)
    return found

"""Vectors stored with scales for blocks of features, or in 4 bits, as plain tensors: a tile at a time.

Such a leaf (``Expr.packing``) is one tensor of small numbers, and where blocks have scales of their own, that is the
leaf's argument. The engines in torch call this for the rows or columns that a tile reads.
"""

from __future__ import annotations

import torch
from torch import Tensor


def unpack(packing: tuple[int, int], width: int, values: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Stored vectors [..., n, f] of 8 bits, or [..., n, f / 2] of 4, times their scales [..., n, blocks]; ``width``: f.

    >>> unpack((4, 2), 4, torch.tensor([[0x98, 0xA7]], dtype=torch.uint8), torch.tensor([[1.0, 10.0]]), torch.float32)
    tensor([[  0.,   1., -10.,  20.]])
    """
    bits, block = packing
    if bits == 4:
        values = torch.stack((values & 15, values >> 4), -1).flatten(-2).to(torch.int8) - 8
    values = _cut(values.to(dtype), width)
    return values if scale is None else values * _cut(scale.to(dtype).repeat_interleave(block, -1), width)


def _cut(t: Tensor, width: int) -> Tensor:
    """The first features. Lengths of a dry run are primes, of which none is twice another: there the first is all."""
    return t[..., :width] if t.shape[-1] >= width else t[..., :1].expand(*t.shape[:-1], width)

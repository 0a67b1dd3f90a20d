"""Random numbers that depend on a counter and a key alone, in plain integer arithmetic.

``uniform`` is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): the counter is (j, i,
batch, 0), the key the seed's 64 bits. ``coin``, for masks, costs a pair one multiplication: every row and every column
has a ``word``, an odd number of 32 bits that two rounds of 64 bits make of seed, batch and place, and a pair has the
upper bits of their product. Words are made once, outside the pairs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

DRAWS = {"word": 3, "coin": 2, "uniform": 4}  # the primitives that draw, and how many arguments they take
_MASK = 0xFFFFFFFF
_STEPS = -0x61C8864680B583EB, -0x2E4AB5CD2E6D12FD  # odd: from place to place, from batch element to batch element
_FACTORS = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
_CHUNK = 2**16  # elements at a time: eight words of this many stay in the cache


def uniform(seed: Any, batch: Any, i: Any, j: Any, out: Any = None) -> Any:
    """Uniform numbers in (0, 1) for every (seed, batch, i, j), broadcast against each other.

    The number is (first word + 1/2) / 2**32 in float32, whatever the type of the arithmetic around it: never 0 or 1,
    and fine near 0, so that the tail of an exponential or Gumbel number is there."""
    parts = [
        t.long() if isinstance(t, Tensor) else torch.full((), t, dtype=torch.int64, device=j.device)
        for t in (seed, batch, i, j)
    ]
    if out is None:
        out = torch.empty(torch.broadcast_shapes(*(p.shape for p in parts)), dtype=torch.float32, device=j.device)
    if out.dim() < 2 or not out.numel():
        return _draw(*parts, out=out)
    step = max(1, _CHUNK // max(1, out.numel() // out.shape[-2]))
    for at in range(0, out.shape[-2], step):
        rows = slice(at, at + step)
        _draw(*(p[..., rows, :] if p.dim() > 1 and p.shape[-2] > 1 else p for p in parts), out=out[..., rows, :])
    return out


def _draw(seed: Tensor, batch: Tensor, i: Tensor, j: Tensor, *, out: Tensor) -> Tensor:
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    c0, c1, c2, c3 = j & _MASK, i & _MASK, batch & _MASK, torch.zeros_like(seed)
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = _high(p1) ^ c1 ^ k0, p1 & _MASK, _high(p0) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return out.copy_(c0.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24))


def _high(product: Tensor) -> Tensor:
    """The upper 32 bits of a 64-bit product, whose sign bit is just a bit."""
    return (product >> 32) & _MASK


def word(seed: Any, batch: Any, place: Any, out: Any = None) -> Any:
    """Odd whole numbers of 32 bits, as int32 holds them, for every (seed, batch, place), broadcast."""
    seed, batch, place = (
        t.long() if isinstance(t, Tensor) else torch.full((), t, dtype=torch.int64, device=place.device)
        for t in (seed, batch, place)
    )
    found = (place * _STEPS[0] + batch * _STEPS[1]) ^ seed
    for factor in _FACTORS:
        found = found.bitwise_xor_(found >> 32).mul_(factor)
    found = found.bitwise_right_shift_(32).bitwise_or_(1).to(torch.int32)
    return found if out is None else out.copy_(found)


def coin(row: Any, col: Any, out: Any = None) -> Any:
    """The upper 31 of the lower 32 bits of the product of two words."""
    found = torch.mul(row, col).long() if out is None else torch.mul(row, col, out=out)
    return found.bitwise_and_(_MASK).bitwise_right_shift_(1)

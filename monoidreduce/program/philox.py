"""Random numbers that depend on a counter and a key alone, in plain integer arithmetic.

``uniform`` is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): the counter is (j, i,
batch, 0), the key the seed's 64 bits. ``coin``, for masks, costs two pairs one multiplication: every row and every two
neighbouring columns have a ``word``, an odd number of 32 bits that two rounds of 64 bits make of seed, batch and place,
and the halves of the words' product are the random bits of the two. Words are made once, outside the pairs.

A lower half knows the lower halves of its words alone, of which there are few. So a row's word goes on from ``BLOCK``
to block of columns, in steps that its upper half makes: rows that are alike in one are not in another. And a block's
columns end in the powers of one number, times one of the block's own. That number was chosen so that no two of them
decide alike, or as opposites: their coins correlate by 0.014 at most, over all words of a row and for any p.

``gumbel``, for drawing one of many columns, costs a little more: seed, batch and row are hashed to a place in a
sequence of 2³² words, the column counts from there in steps that are the row's own, so that no row meets another's
numbers, shifted, and two rounds of multiplying mix the word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

DRAWS = {"word": 3, "mark": 2, "coin": 3, "gumbel": 4, "uniform": 4}  # the primitives that draw, and their arguments
COINS = 2**15  # values of a coin
BLOCK = 128  # columns that meet the same word of a row
_MASK = 0xFFFFFFFF
_STEPS = -0x61C8864680B583EB, -0x2E4AB5CD2E6D12FD  # odd: from place to place, from batch element to batch element
_FACTORS = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
_POWERS = tuple(pow(13795, 2**k, COINS) for k in range(6))  # whose products are what a block's columns end in
_CHUNK = 2**16  # elements at a time: eight words of this many stay in the cache


def uniform(seed: Any, batch: Any, i: Any, j: Any, out: Any = None) -> Any:
    """Uniform numbers in (0, 1) for every (seed, batch, i, j), broadcast against each other, by Philox."""
    return _make_numbers(_run_philox, seed, batch, i, j, out)


def ticket(seed: Any, batch: Any, i: Any, j: Any, out: Any = None) -> Any:
    """Uniform numbers in (0, 1) for every (seed, batch, i, j), broadcast against each other, by a cheaper hash."""
    return _make_numbers(_make_ticket, seed, batch, i, j, out)


def gumbel(seed: Any, batch: Any, i: Any, j: Any, out: Any = None) -> Any:
    """Gumbel numbers for every (seed, batch, i, j), broadcast: in the type of ``out``, or float64."""
    u = ticket(seed, batch, i, j, out)
    return (u.double() if out is None else u).neg_().log1p_().neg_().log_().neg_()


def _make_numbers(draw: Callable[..., Tensor], seed: Any, batch: Any, i: Any, j: Any, out: Any) -> Tensor:
    """Words as numbers: (word + 1/2) / 2**32 in float32, whatever the type of the arithmetic around it.

    Never 0 or 1, and fine near 0, so that the tail of an exponential or Gumbel number is there."""
    parts = [
        t.long() if isinstance(t, Tensor) else torch.full((), t, dtype=torch.int64, device=j.device)
        for t in (seed, batch, i, j)
    ]
    if out is None:
        out = torch.empty(torch.broadcast_shapes(*(p.shape for p in parts)), dtype=torch.float32, device=j.device)
    if out.dim() < 2 or not out.numel():
        return _make_number(draw(*parts), out)
    step = max(1, _CHUNK // max(1, out.numel() // out.shape[-2]))
    for at in range(0, out.shape[-2], step):
        rows = slice(at, at + step)
        _make_number(
            draw(*(p[..., rows, :] if p.dim() > 1 and p.shape[-2] > 1 else p for p in parts)), out[..., rows, :]
        )
    return out


def _make_number(word: Tensor, out: Tensor) -> Tensor:
    return out.copy_(word.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24))


def _run_philox(seed: Tensor, batch: Tensor, i: Tensor, j: Tensor) -> Tensor:
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    c0, c1, c2, c3 = j & _MASK, i & _MASK, batch & _MASK, torch.zeros_like(seed)
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = _take_high_bits(p1) ^ c1 ^ k0, p1 & _MASK, _take_high_bits(p0) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0


def _make_ticket(seed: Tensor, batch: Tensor, i: Tensor, j: Tensor) -> Tensor:
    low, high, batch = seed & _MASK, (seed >> 32) & _MASK, batch & _MASK
    begin = _mix_bits((_hash_words(low, high, batch) + i * 0x9E3779B9) & _MASK)
    step = _mix_bits((_hash_words(batch, low, high) + i * 0x85EBCA6B) & _MASK) | 1
    word = torch.mul(j, step).add_(begin).bitwise_and_(_MASK)
    return _mix_round(_mix_round(word, 16, 0x21F0AAAD), 15, 0xD35A2D97)


def _hash_words(*words: Tensor) -> Tensor:
    found = _mix_bits(words[0])
    for word in words[1:]:
        found = _mix_bits(found ^ word)
    return found


def _take_high_bits(product: Tensor) -> Tensor:
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


def mark(seed: Any, col: Any, out: Any = None) -> Any:
    """A column's word, shifted so that its product with a row's has the column's coin in the upper 15 of 32 bits.

    The word is that of two neighbours; the lower half of the product is for the even one."""
    pair = col >> 1
    low = (word(seed, 0, 2**40 + col // BLOCK).long() & _MASK) >> 17 | 1
    for k, power in enumerate(_POWERS):
        low = torch.where((pair >> k & 1).bool(), low * power % COINS, low)
    found = (word(seed, 0, -1 - pair).long() & -COINS) | low
    found = (found << (17 - (col & 1) * 16)).to(torch.int32)
    return found if out is None else out.copy_(found)


def coin(row: Any, mark: Any, col: Any, out: Any = None) -> Any:
    """15 bits: the upper ones of the product of a column's mark and a row's word at the column's block."""
    word = row.long() & _MASK
    step = (word << 16 | word >> 16) & _MASK  # an even number of them, else what they add up to is of 16 bits
    found = torch.mul(step, col // BLOCK * 2, out=out).add_(word).mul_(mark)
    return found.bitwise_right_shift_(17).bitwise_and_(COINS - 1)


def _mix_round(word: Tensor, shift: int, factor: int) -> Tensor:
    """In place: the upper bits are added to the lower (xor), then all are multiplied by an odd number."""
    return word.bitwise_xor_(word >> shift).mul_(factor).bitwise_and_(_MASK)


def _mix_bits(word: Tensor) -> Tensor:
    """A one-to-one map of 32 bits in which every bit depends on all."""
    word = _mix_round(_mix_round(word.clone(), 16, 0x21F0AAAD), 15, 0xD35A2D97)
    return word ^ (word >> 15)

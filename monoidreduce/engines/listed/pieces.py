"""Lists of any lengths cut into pieces of few different lengths, and the pieces of one list combined again.

Pieces of equal length make one dense batch, without masks. A length is cut into numbers of few significant bits: with
three of them, 1000 is 896 + 104 and 104 is 96 + 8. Few bits are few different lengths and more pieces, so long lists
in all allow more bits. Pieces of one list are combined in a tree whose form depends on their number alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_LEAST_BITS, _MOST_BITS = 2, 6
_FREE_BITS = 9  # of the number of items: below 2⁹ items two significant bits, above one more for every factor of 8


@dataclass(frozen=True, eq=False)
class Batch:
    """Pieces of one length: ``list`` says whose, ``start`` where in the items, ``slot`` where the result belongs: the
    number of a kept block where it is ``whole``, else a place among the parts."""

    units: int
    whole: bool
    list: Tensor
    start: Tensor
    slot: Tensor


@dataclass(frozen=True, eq=False)
class Pieces:
    """All pieces. ``parts``: how many belong to lists of several pieces; ``counts`` and ``owners``: of each kept block
    with several, how many parts and its number; ``empty``: whether some kept block may have none."""

    batches: tuple[Batch, ...]
    parts: int
    counts: Tensor
    owners: Tensor


def cut(owner: Tensor, start: Tensor, length: Tensor, most: int) -> Pieces:
    """Cut lists into pieces; ``owner``: the kept block that each list belongs to, several lists may have one."""
    lists, starts, units = _cut_lengths(start, length, most)
    whose = owner[lists]
    order = (starts - start[lists]).argsort(stable=True)
    order = order[whose[order].argsort(stable=True)]
    lists, starts, units, whose = lists[order], starts[order], units[order], whose[order]
    owners, place, counts = torch.unique_consecutive(whose, return_inverse=True, return_counts=True)
    several = counts > 1
    whole = ~several[place]
    slot = torch.where(whole, whose, (~whole).cumsum(0) - 1)
    order = (units * 2 + whole).argsort(stable=True)
    kinds, sizes = torch.unique_consecutive((units * 2 + whole)[order], return_counts=True)
    batches, at = [], 0
    for kind, size in zip(kinds.tolist(), sizes.tolist(), strict=True):
        mine = order[at : at + size]
        batches.append(Batch(kind // 2, bool(kind % 2), lists[mine], starts[mine], slot[mine]))
        at += size
    return Pieces(tuple(batches), int((~whole).sum()), counts[several], owners[several])


def _cut_lengths(start: Tensor, length: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """The list, the start and the length of every piece."""
    total = int(length.sum())
    bits = max(_LEAST_BITS, min(_MOST_BITS, _LEAST_BITS + (total.bit_length() - _FREE_BITS) // 3))
    whole = length // most
    lists = torch.repeat_interleave(whole)
    first = whole.cumsum(0) - whole
    place = torch.arange(len(lists), device=length.device) - first[lists]
    found = [(lists, start[lists] + place * most, torch.full_like(lists, most))]
    at, rest = start + whole * most, length % most
    lists = torch.arange(len(length), device=length.device)
    powers = 2 ** torch.arange(63, device=length.device)
    while True:
        seen = rest > 0
        lists, at, rest = lists[seen], at[seen], rest[seen]
        if not len(rest):
            break
        low = (torch.bucketize(rest, powers, right=True) - bits).clamp(min=0)
        units = rest >> low << low
        found.append((lists, at, units))
        at, rest = at + units, rest - units
    lists, starts, units = (torch.cat(parts) for parts in zip(*found, strict=True))
    return lists, starts, units


def combine_parts(
    state: list[Tensor], counts: Tensor, dim: int, merge: Callable[[Sequence[list[Tensor]]], list[Tensor]]
) -> list[Tensor]:
    """The states along ``dim``, ``counts[k]`` neighbours for each k, combined to one for each k."""
    while len(counts) and int(counts.max()) > 1:
        first = counts.cumsum(0) - counts
        owner = torch.repeat_interleave(counts)
        rank = torch.arange(len(owner), device=counts.device) - first[owner]
        even = (rank % 2 == 0).nonzero().squeeze(1)
        paired = rank[even] + 1 < counts[owner[even]]
        left = even[paired]
        both = merge([[t.index_select(dim, at) for t in state] for at in (left, left + 1)])
        kept = [t.index_select(dim, even) for t in state]
        where = paired.nonzero().squeeze(1)
        state = [t.index_copy(dim, where, new.to(t.dtype)) for t, new in zip(kept, both, strict=True)]
        counts = (counts + 1) // 2
    return state

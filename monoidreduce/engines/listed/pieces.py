"""Lists of any lengths cut into pieces of few different lengths, and the pieces of one list combined again.

Pieces of equal length make one dense batch, without masks. A length is cut into numbers of few significant bits: with
three of them, 1000 is 896 + 104 and 104 is 96 + 8. Few bits are few different lengths and more pieces, so long lists
in all allow more bits. Pieces of one list are combined in a tree whose form depends on their number alone.

Where a batch costs more to begin than to run, lists of unequal lengths are one batch: the shorter ones are filled up,
and a condition hides what they were filled with.
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
    number of a kept block where they are ``complete`` lists, else a place among the parts. ``length``: the units of
    each that are its own, where some are filled up."""

    units: int
    complete: bool
    list: Tensor
    start: Tensor
    slot: Tensor
    length: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Pieces:
    """All pieces. ``parts``: how many belong to lists of several pieces; ``counts`` and ``owners``: of each kept block
    with several, how many parts and its number; ``empty``: whether some kept block may have none."""

    batches: tuple[Batch, ...]
    parts: int
    counts: Tensor
    owners: Tensor


def cut(owner: Tensor, start: Tensor, length: Tensor, most: int, spare: int = 0) -> Pieces:
    """Cut lists into pieces; ``owner``: the kept block that each list belongs to, several lists may have one.
    ``spare``: units that may be filled up in a batch; 0: none are."""
    lists, starts, units = _cut_at_most(start, length, most) if spare else _cut_lengths(start, length, most)
    own, units = units, _fill_up(units, spare) if spare else units
    whose = owner[lists]
    order = (starts - start[lists]).argsort(stable=True)
    order = order[whose[order].argsort(stable=True)]
    lists, starts, units, own, whose = lists[order], starts[order], units[order], own[order], whose[order]
    owners, place, counts = torch.unique_consecutive(whose, return_inverse=True, return_counts=True)
    several = counts > 1
    complete = ~several[place]
    slot = torch.where(complete, whose, (~complete).cumsum(0) - 1)
    order = (units * 2 + complete).argsort(stable=True)
    kinds, sizes = torch.unique_consecutive((units * 2 + complete)[order], return_counts=True)
    batches, at = [], 0
    for kind, size in zip(kinds.tolist(), sizes.tolist(), strict=True):
        mine = order[at : at + size]
        filled = own[mine] if bool((own[mine] != units[mine]).any()) else None
        batches.append(Batch(kind // 2, bool(kind % 2), lists[mine], starts[mine], slot[mine], filled))
        at += size
    return Pieces(tuple(batches), int((~complete).sum()), counts[several], owners[several])


def _cut_at_most(start: Tensor, length: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """The list, the start and the length of every piece, the last of each list as long as it is."""
    count = -(-length // most)
    lists = torch.repeat_interleave(count)
    place = torch.arange(len(lists), device=length.device) - (count.cumsum(0) - count)[lists]
    return lists, start[lists] + place * most, (length[lists] - place * most).clamp(max=most)


def _fill_up(units: Tensor, spare: int) -> Tensor:
    """Lengths of pieces, each as long as the longest of its batch: from the longest one on, until more would be filled
    up than is spare."""
    if not len(units):
        return units
    lengths, counts = torch.unique(units, return_counts=True)
    ceilings: list[int] = []
    top, filled = 0, 0
    for n, count in zip(reversed(lengths.tolist()), reversed(counts.tolist()), strict=True):
        filled += (top - n) * count
        if not ceilings or filled > spare:
            top, filled = n, 0
        ceilings.append(top)
    return torch.tensor(ceilings[::-1], device="cpu")[torch.searchsorted(lengths, units)]


def _cut_lengths(start: Tensor, length: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """The list, the start and the length of every piece."""
    total = int(length.sum())
    bits = max(_LEAST_BITS, min(_MOST_BITS, _LEAST_BITS + (total.bit_length() - _FREE_BITS) // 3))
    lists, at, units = _cut_at_most(start, length // most * most, most)
    found = [(lists, at, units)]
    at, rest = start + length // most * most, length % most
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

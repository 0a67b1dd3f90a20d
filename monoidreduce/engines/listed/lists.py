"""Lists as the gathering engine reads them: for one direction, with all that a piece needs to know of its list.

A list belongs to one block of the kept axis in one element of the domain's batch. Its items are blocks of the folded
axis; a ragged last block makes the unit smaller, so that every unit is whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from ...domains import ColumnLists, Pages
from ...errors import ArgumentError
from ..common import bounded_cache
from ..common.evaluate import restore_domain
from .pieces import Pieces, cut


@dataclass(frozen=True, eq=False)
class Lists:
    """List g is ``items[start[g]:start[g] + length[g]]``: units of the folded axis, for the ``kept_block`` indices from
    ``kept[g] * kept_block`` in the element ``element[g]`` of the batch."""

    batch: tuple[int, ...]  # the domain's: one number for each batch dimension of the call, 1 where lists are shared
    kept_block: int
    kept_size: int
    unit: int
    element: Tensor
    kept: Tensor
    start: Tensor
    length: Tensor
    items: Tensor
    entry: Tensor | None = None  # per item: its place in the domain's own list (the number of an edge)
    once: Tensor | None = None  # per item: whether it is the first of its list's equal ones
    position: Tensor | None = None  # of pages, per list: the position of its first kept index
    limit: Tensor | None = None  # of pages, per list: the length of the sequence
    known: dict[tuple, Pieces] = field(default_factory=dict)

    @property
    def kept_blocks(self) -> int:
        return -(-self.kept_size // self.kept_block)

    def pieces(self, most: int, merged: tuple[int, ...], spare: int = 0) -> Pieces:
        """The lists cut into pieces of at most ``most`` units; ``merged``: batch dimensions along which lists of one
        kept block are combined; ``spare``: units that may be filled up in a batch of pieces."""
        key = most, merged, spare
        if key not in self.known:
            owner = self.kept
            if any(self.batch):
                left = [1 if d in merged else n for d, n in enumerate(self.batch)]
                places = [p if d not in merged else 0 for d, p in enumerate(self.coordinates(self.element))]
                owner = flatten_index(places, left) * self.kept_blocks + self.kept
            self.known[key] = cut(owner, self.start, self.length, most, spare)
        return self.known[key]

    def coordinates(self, element: Tensor) -> list[Tensor | int]:
        """The index of some elements along each batch dimension."""
        found: list[Tensor | int] = []
        for n in reversed(self.batch):
            found.insert(0, element % n if n != 1 else 0)
            element = element // n if n != 1 else element
        return found


def flatten_index(places: Sequence[Tensor | int], sizes: Sequence[int]) -> Tensor | int:
    """The row-major index of these coordinates."""
    at: Tensor | int = 0
    for p, n in zip(places, sizes, strict=True):
        at = at * n + p
    return at


def find_lists(form: tuple, tensors: Sequence[Tensor], rows: int, cols: int, over: str, ordered: bool) -> Lists:
    """The lists of a domain for reductions over ``over``, made once for the same tensors; ``ordered``: items rise
    within each list, and those that are listed again are marked."""
    given = ("lists", form, rows, cols, over, ordered, *tensors)

    def make() -> Lists:
        return _own_memory(tensors, _make_lists(form, tensors, rows, cols, over, ordered))

    return bounded_cache.compute_once(given, make, tensors[0].device)


def _own_memory(tensors: Sequence[Tensor], lists: Lists) -> Lists:
    """The same lists with tensors of their own: what is cached for a tensor must not keep it alive."""
    given = {t.untyped_storage()._cdata for t in tensors}
    held: dict[str, Any] = {f.name: getattr(lists, f.name) for f in fields(lists)}
    mine = {n: v for n, v in held.items() if isinstance(v, Tensor) and v.untyped_storage()._cdata in given}
    own: dict[str, Any] = {n: v.clone() for n, v in mine.items()}
    return replace(lists, **own) if mine else lists


def _make_lists(form: tuple, tensors: Sequence[Tensor], rows: int, cols: int, over: str, ordered: bool) -> Lists:
    domain = restore_domain(form, tensors)
    if isinstance(domain, Pages):
        batch = tuple(tensors[1].shape)
        return _list_rows_of_pages(domain, batch, rows, cols) if over == "rows" else _list_pages(domain, batch, rows)
    lists = domain.listing(rows, cols) if over == "cols" else domain.transposed(rows, cols)
    found = _read_column_lists(lists, *((rows, cols) if over == "cols" else (cols, rows)))
    return _sort_items(found) if ordered else found


def _read_column_lists(lists: ColumnLists, kept_size: int, folded_size: int) -> Lists:
    offsets, items, entry = lists.offsets.long(), lists.items.long(), lists.entry
    start, length = offsets[:-1], offsets[1:] - offsets[:-1]
    unit = lists.col_block
    if folded_size % unit:
        unit, start, length, items, entry = _split_units(offsets, items, entry, unit, folded_size)
    blocks = -(-kept_size // lists.row_block)
    group = torch.arange(len(length), device=items.device)
    element, kept = (group // max(blocks, 1), group % max(blocks, 1)) if lists.batch else (group, group)
    return Lists(lists.batch, lists.row_block, kept_size, unit, element, kept, start, length, items, entry)


def _split_units(offsets: Tensor, items: Tensor, entry: Tensor | None, block: int, size: int) -> tuple:
    """Every item as smaller units that divide the axis."""
    unit = math.gcd(block, size)
    items = items[: int(offsets[-1])]
    each = block // unit
    count = (size // unit - items * each).clamp(max=each)
    ends = torch.zeros(len(items) + 1, dtype=torch.int64, device=items.device)
    ends[1:] = count.cumsum(0)
    source = torch.repeat_interleave(count)
    inside = torch.arange(len(source), device=items.device) - ends[source]
    moved = ends[offsets]
    entry = source if entry is None else entry[source]
    return unit, moved[:-1], moved[1:] - moved[:-1], items[source] * each + inside, entry


def _sort_items(lists: Lists) -> Lists:
    """The same lists, items in rising order."""
    owner = torch.repeat_interleave(lists.length)
    first = lists.length.cumsum(0) - lists.length
    at = lists.start[owner] + torch.arange(len(owner), device=owner.device) - first[owner]
    items = lists.items[at]
    order = items.argsort(stable=True)
    order = order[owner[order].argsort(stable=True)]
    items, entry = items[order], at[order] if lists.entry is None else lists.entry[at[order]]
    once = torch.ones(len(items), dtype=torch.bool, device=items.device)
    once[1:] = (items[1:] != items[:-1]) | (owner[1:] != owner[:-1])
    return Lists(
        lists.batch, lists.kept_block, lists.kept_size, lists.unit, lists.element, lists.kept, first, lists.length,
        items, entry, once,
    )  # fmt: skip


def check_numbers(lists: Lists) -> None:
    """Raise where a pair that is listed twice has two numbers: which of them a maximum's gradient belongs to cannot be
    said by the column alone."""
    if lists.once is not None and not bool(lists.once.all()):
        raise ArgumentError(
            detail="an edge is listed twice, each time with a number of its own, and a maximum's gradient is asked for",
            fix="List each edge once, or fold with mr.logsumexp",
        )


def _list_pages(domain: Pages, batch: tuple[int, ...], rows: int) -> Lists:
    """A list of all columns of each sequence, in the order of their positions."""
    length = domain.lengths.long() * min(rows, 1)
    start = length.cumsum(0) - length
    owner = torch.repeat_interleave(length)
    place = torch.arange(len(owner), device=owner.device) - start[owner]
    items = domain.table.long()[owner, place // domain.page] * domain.page + place % domain.page
    element = torch.arange(len(length), device=owner.device)
    return Lists(batch, max(rows, 1), rows, 1, element, torch.zeros_like(element), start, length, items)


def _list_rows_of_pages(domain: Pages, batch: tuple[int, ...], rows: int, cols: int) -> Lists:
    """A list with the rows of one sequence for each page of it."""
    element, slot = (domain._find_used_slots(domain.lengths)).nonzero().unbind(1)
    kept, zeros = domain.table.long()[element, slot], torch.zeros_like(element)
    items, limit = zeros.new_zeros(1), domain.lengths.long()[element]
    return Lists(
        batch, domain.page, cols, max(rows, 1), element, kept, zeros, zeros + min(rows, 1), items,
        position=slot * domain.page, limit=limit,
    )  # fmt: skip

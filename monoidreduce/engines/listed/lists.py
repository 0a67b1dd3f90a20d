"""Lists as the gathering engine reads them, cut into pieces that are small dense folds.

**Lists**, for one direction, with all that a piece needs to know of its list. A list belongs to one block of the kept
axis in one element of the domain's batch. Its items are blocks of the folded axis; a ragged last block makes the unit
smaller, so that every unit is whole.

**Pieces**: lists of any lengths are cut into pieces of few different lengths, and combined again. Pieces of equal
length make one dense batch, without masks. A length is cut into numbers of few significant bits: with three of them,
1000 is 896 + 104 and 104 is 96 + 8. Few bits are few different lengths and more pieces, so long lists in all allow more
bits. Pieces of one list are combined in a tree whose form depends on their number alone.

Where a batch costs more to begin than to run, lists of unequal lengths are one batch: the shorter ones are filled up,
and a condition hides what they were filled with.

**Leaves** of a batch of pieces are gathered from those of the whole call, along the axes that lists name. Batch
dimensions of the call that all lists share stay batch dimensions. Those that lists have (a list per head) are read by
index, together with the row or the column, and all pieces of a batch are one new dimension behind the others.

**The fold of one piece** (:func:`localize`) is over all pairs of a small dense problem. ``listed`` is true there,
indices and positions are leaves, and a gather at an index is again the sum that it was made of, since the index may be
listed several times or not at all.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from ...domains import ColumnLists, Pages
from ...errors import ArgumentError
from ...program import constructors
from ...program.constructors import ONE, apply
from ...program.expression import Expr, const, index, node, reduce_node, size, topological
from ...program.lower import Fold
from ...reductions import compares_results, kind_of, outputs_of
from ..common import bounded_cache
from ..common.evaluate import Sizes, restore_domain


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
    for kind, count in zip(kinds.tolist(), sizes.tolist(), strict=True):
        mine = order[at : at + count]
        filled = own[mine] if bool((own[mine] != units[mine]).any()) else None
        batches.append(Batch(kind // 2, bool(kind % 2), lists[mine], starts[mine], slot[mine], filled))
        at += count
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


@dataclass(frozen=True)
class Layout:
    """Which batch dimensions of a call are shared by all lists, which are the lists' own, and which are ``packed``:
    only rows have them (grouped queries), and they are more rows of a piece."""

    batch: tuple[int, ...]
    shared: tuple[int, ...]
    own: tuple[int, ...]
    packed: tuple[int, ...] = ()

    @staticmethod
    def of(batch: tuple[int, ...], lists: Lists, packed: tuple[int, ...] = ()) -> Layout:
        own = tuple(d for d, n in enumerate(lists.batch) if n != 1)
        return Layout(batch, tuple(d for d in range(len(batch)) if d not in (*own, *packed)), own, packed)

    @property
    def copies(self) -> int:
        """How many times the rows of a piece are there."""
        return math.prod(self.batch[d] for d in self.packed)

    @property
    def shared_sizes(self) -> tuple[int, ...]:
        return tuple(self.batch[d] for d in self.shared)


class FlatLeaf:
    """A leaf whose own batch dimensions and axes are one dimension, from which pieces are read; ``edges``: numbers per
    pair are numbers of edges. ``once``: of an expanded dimension one element is read; the gradient of a number per pair
    is not."""

    def __init__(self, value: Tensor, e: Expr, layout: Layout, edges: bool, once: bool = True):
        self.e, self.own, self.edges = e, layout.own, edges and e.is_pair
        behind = (1 if self.edges else e.rows + e.cols) + (e.feature is not None)
        value = value.reshape((1,) * (len(layout.batch) + behind - value.dim()) + tuple(value.shape))
        axes = list(range(len(layout.batch), len(layout.batch) + behind))
        tail = [axes.pop()] if e.feature is not None else []
        for d in layout.shared if once else ():
            value = value.narrow(d, 0, 1) if value.stride(d) == 0 and value.shape[d] > 1 else value
        shared = [value.shape[d] for d in layout.shared]
        self.batch, self.axes = [value.shape[d] for d in layout.own], [value.shape[d] for d in axes]
        self.packed = [(layout.batch[d], value.shape[d]) for d in layout.packed]
        moved = value.permute((*layout.shared, *layout.own, *layout.packed, *axes, *tail))
        flat = math.prod((*self.batch, *(n for _, n in self.packed), *self.axes))  # -1 is not known of an empty batch
        self.flat, self.dim = moved.reshape(*shared, flat, *(value.shape[d] for d in tail)), len(shared)

    def index(self, piece: Piece) -> Tensor | None:
        """Where the numbers of some pieces lie in the flat dimension; None: all pieces share the one that there is."""
        places = [piece.coordinates[d] if n != 1 else 0 for d, n in zip(self.own, self.batch, strict=True)]
        at: Any = flatten_index(places, self.batch)
        if isinstance(at, Tensor):
            at = at.view(-1, *(1,) * (2 if self.e.is_pair else self.e.rows + self.e.cols))
        if self.edges:
            edge = piece.edge
            if any(n != 1 for n in piece.lists.batch):  # counted within the batch element
                edge = edge - piece.lists.element[piece.list].unsqueeze(1) * self.axes[0]
            return at * self.axes[0] + edge.unsqueeze(2 if piece.over == "rows" else 1)
        if self.e.is_pair:
            rows, cols = self.axes  # of an axis of size 1 the one number stands for all, and is read for each
            at = at * rows + piece.rows.unsqueeze(2) * (rows != 1)
            at = at * cols + piece.cols.unsqueeze(1) * (cols != 1)
        elif self.e.rows and self.packed:
            at = (at.unsqueeze(1) if isinstance(at, Tensor) else at) * math.prod(n for _, n in self.packed)
            copy = torch.zeros((), dtype=torch.int64, device=piece.rows.device)
            for size, n in self.packed:
                here = torch.arange(size, device=copy.device) * (n != 1)
                copy = (copy.unsqueeze(-1) * n + here).flatten()
            at = ((at + copy.view(1, -1, 1)) * self.axes[0] + piece.rows.unsqueeze(1)).flatten(1)
        elif self.axes:
            at = at * self.axes[0] + (piece.rows if self.e.rows else piece.cols)
        return at if isinstance(at, Tensor) else None

    def read(self, piece: Piece) -> Tensor:
        """The leaf of a batch of pieces: ``[*shared, pieces, rows and columns of a piece, features]``."""
        at = self.index(piece)
        if at is None:
            return self.flat
        dim, places = 0 if self.in_front else self.dim, at.reshape(-1)
        if self.source.requires_grad:  # whose gradient is added up in a fixed order
            index: tuple[Any, ...] = (*(slice(None),) * dim, places)
            found = self.source[index]
        else:
            found = self.source.index_select(dim, places)
        return (found.movedim(0, self.dim) if self.in_front else found).unflatten(self.dim, at.shape)

    @functools.cached_property
    def in_front(self) -> bool:
        """Whether the flat dimension is the first in memory, as in pages [pages, page, heads, features]."""
        return not self.flat.is_contiguous() and self.flat.movedim(self.dim, 0).is_contiguous()

    @functools.cached_property
    def source(self) -> Tensor:
        """What is read, contiguous: else all of it would be copied for every batch of pieces."""
        return self.flat.movedim(self.dim, 0) if self.in_front else self.flat.contiguous()


@dataclass(frozen=True, eq=False)
class Piece:
    """Some pieces of one length. Everything is [pieces, indices]."""

    lists: Lists
    batch: Batch
    over: str
    first: int
    last: int

    @property
    def count(self) -> int:
        return self.last - self.first

    @functools.cached_property
    def list(self) -> Tensor:
        return self.batch.list[self.first : self.last]

    @functools.cached_property
    def slot(self) -> Tensor:
        return self.batch.slot[self.first : self.last]

    @property
    def length(self) -> Tensor | None:
        """The units of each piece that are not filled up; None: all."""
        return None if self.batch.length is None else self.batch.length[self.first : self.last]

    @functools.cached_property
    def coordinates(self) -> Sequence[Any]:
        return self.lists.coordinates(self.lists.element[self.list])

    @functools.cached_property
    def kept(self) -> Tensor:
        """The kept indices; beyond the axis, the last one again."""
        at = self.lists.kept[self.list]
        if self.lists.kept_block == 1:
            return at.unsqueeze(1)
        inside = torch.arange(self.lists.kept_block, device=at.device)
        return (at.unsqueeze(1) * self.lists.kept_block + inside).clamp(max=max(self.lists.kept_size - 1, 0))

    @functools.cached_property
    def place(self) -> Tensor:
        """The places of the pieces' units among all items."""
        start = self.batch.start[self.first : self.last]
        inside = torch.arange(self.batch.units, device=start.device)
        if self.length is not None:  # beyond the end of a list, its last one again
            inside = torch.minimum(inside, self.length.unsqueeze(1) - 1)
        return start.unsqueeze(1) + inside

    @functools.cached_property
    def folded(self) -> Tensor:
        """The folded indices."""
        items = self.lists.items[self.place]
        if self.lists.unit == 1:
            return items
        inside = torch.arange(self.lists.unit, device=items.device)
        return (items.unsqueeze(2) * self.lists.unit + inside).flatten(1)

    @property
    def rows(self) -> Tensor:
        return self.folded if self.over == "rows" else self.kept

    @property
    def cols(self) -> Tensor:
        return self.kept if self.over == "rows" else self.folded

    @functools.cached_property
    def edge(self) -> Tensor:
        """The numbers of the edges: a list of them for each row, or for each column."""
        return self.place if self.lists.entry is None else self.lists.entry[self.place].long()

    @functools.cached_property
    def position(self) -> Tensor:
        """The columns' positions in their sequences."""
        if self.over == "cols":
            return self.place - self.lists.start[self.list].unsqueeze(1)
        assert self.lists.position is not None
        inside = torch.arange(self.lists.kept_block, device=self.list.device)
        return self.lists.position[self.list].unsqueeze(1) + inside

    @property
    def listed(self) -> Tensor:
        """Which kept columns of a page belong to the sequence; which folded indices of a piece are not filled up."""
        if self.length is not None:
            inside = torch.arange(self.batch.units * self.lists.unit, device=self.length.device)
            return inside < (self.length * self.lists.unit).unsqueeze(1)
        assert self.lists.limit is not None
        return self.position < self.lists.limit[self.list].unsqueeze(1)

    @property
    def exists(self) -> Tensor:
        """Which kept indices lie on the axis: the last of them is repeated beyond its end."""
        inside = torch.arange(self.lists.kept_block, device=self.list.device)
        return self.lists.kept[self.list].unsqueeze(1) * self.lists.kept_block + inside < self.lists.kept_size

    @property
    def once(self) -> Tensor:
        """Whether an entry is the first of its list's equal ones."""
        assert self.lists.once is not None
        return self.lists.once[self.place].repeat_interleave(self.lists.unit, 1)

    def extra(self, name: str, sizes: Sizes) -> Any:
        """The value of a leaf that only pieces have."""
        if name in ("num_rows", "num_cols"):
            return sizes.of(name[4:])
        return {"row_index": lambda: self.rows, "col_index": lambda: self.cols}.get(name, lambda: getattr(self, name))()


@dataclass(frozen=True)
class LocalFold:
    """Some reductions of a fold for a piece: ``fold`` is run by the inner engine, ``plain`` are reductions of what has
    one axis only. ``leaves``: the leaves of both, ``extra`` those of them that the fold did not have, by what they
    hold."""

    places: tuple[int, ...]  # the reductions' places in the whole fold
    fold: Fold | None
    folded: tuple[int, ...]  # which of ``places`` the fold has; the others are plain
    plain: tuple[Expr, ...]
    leaves: tuple[Expr, ...]
    extra: tuple[tuple[str, Expr], ...]
    outputs: tuple[tuple[str | int | None, str], ...]  # feature and number class of every result


@functools.lru_cache(maxsize=1024)
def localize(fold: Fold, over: str, places: tuple[int, ...], hidden: str = "", ragged: bool = False) -> LocalFold:
    """The reductions at ``places``, which go over ``over`` (or are per pair, or of a table). ``hidden``: some ``kept``
    indices are not listed (the end of a page) or some ``folded`` ones (of a list that was filled up), and ``listed``
    stays a condition; ``ragged``: the last block of kept indices repeats one, which must not count twice in a table."""
    on_rows = (over == "rows") == (hidden == "folded")
    extra = {
        name: node("leaf", (), (f"_{name}",), rows=rows, cols=cols, feature=None, dtype=dtype)
        for name, rows, cols, dtype in (
            ("row_index", True, False, "int"),
            ("col_index", False, True, "int"),
            ("num_rows", False, False, "int"),
            ("num_cols", False, False, "int"),
            ("position", False, True, "int"),
            ("once", over == "rows", over != "rows", "bool"),
            ("listed", on_rows, not on_rows, "bool"),
            ("exists", over != "rows", over == "rows", "bool"),
        )
    }
    replaced: dict[Expr, Expr] = {
        index("row"): extra["row_index"],
        index("col"): extra["col_index"],
        size("rows"): extra["num_rows"],
        size("cols"): extra["num_cols"],
    }
    chosen = [fold.scaled[k] for k in places]
    for e in topological([r for r, _ in chosen]):
        if e.op == "listed":
            replaced[e] = extra["listed"] if hidden else const(True)
        elif e.op == "listed_once":
            replaced[e] = extra["once"]
        elif e.op == "listed_position":
            replaced[e] = extra["position"]
    inner: list[Expr] = []
    scales: list[Expr] = []
    folded: list[int] = []
    plain: list[Expr] = []
    for k, (r, scale) in zip(places, chosen, strict=True):
        (new,) = constructors.substitute((_write_as_sum(r),), replaced)
        if kind_of(new).both_axes and ragged:
            number, *rest = new.args
            new = constructors.rebuild(new, (apply("where", extra["exists"], number, 0.0), *rest))
        if (
            kind_of(new).per_pair
            or kind_of(new).both_axes
            or (any(a.rows for a in new.args) and any(a.cols for a in new.args))
        ):
            inner.append(new)
            scales.append(constructors.substitute((scale,), replaced)[0])
            folded.append(k)
        else:
            whole = constructors.rebuild(r, (apply("mul", r.args[0], scale),)) if scale is not ONE else r
            plain.append(constructors.substitute((_write_as_sum(whole),), replaced)[0])
    if any(map(compares_results, inner)) or Fold((), tuple(inner)).compares_results:
        inner = list(constructors.walk_products(tuple(inner)))  # pieces of rows and of columns have other shapes
    own = {*fold.leaves, *extra.values()}
    leaves = tuple(e for e in topological([*inner, *scales, *plain]) if e in own)
    used = () if all(s is ONE for s in scales) else tuple(scales)
    fed = tuple(e for e in leaves if e in set(topological([*inner, *scales])))
    whole_fold = Fold(fed, tuple(inner), used, raised=True, exact=fold.exact) if inner else None
    named = tuple((name, e) for name, e in extra.items() if e in leaves)
    outputs = tuple(o for k in places for o in outputs_of(fold.reductions[k]))
    return LocalFold(places, whole_fold, tuple(folded), tuple(plain), leaves, named, outputs)


def _write_as_sum(r: Expr) -> Expr:
    """A gather at an index as the sum of ``where(index == target, ...)``; any other reduction as it is."""
    if not kind_of(r).gathers:
        return r
    _, over, params = r.attrs
    target, value, vector = r.args
    hit = apply("where", apply("eq", index(params[0]), target), value, 0.0)
    if hit.feature is not None and r.attrs[0] == "pick":
        hit = constructors.fsum(hit)
    return reduce_node("sum", over, (), (hit if vector is ONE else apply("mul", hit, vector),))

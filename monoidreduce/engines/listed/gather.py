"""The leaves of a batch of pieces: gathered from those of the whole call, along the axes that lists name.

Batch dimensions of the call that all lists share stay batch dimensions. Those that lists have (a list per head) are
read by index, together with the row or the column, and all pieces of a batch are one new dimension behind the others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...program.expression import Expr
from ..common.evaluate import Sizes
from .lists import Lists, flatten_index
from .pieces import Batch


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
        found = self.source.index_select(0 if self.in_front else self.dim, at.reshape(-1))
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

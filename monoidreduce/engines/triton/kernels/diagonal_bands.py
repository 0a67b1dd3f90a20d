"""Bands: what pairs look up by a function of ``row_index - col_index``, once for every diagonal.

A kernel that reads a table by any index computes the index, compares it with both ends and loads an entry, for every
pair. Where the index is equal along diagonals, the entries of all diagonals are put in order before the launch, with
room for a tile beyond both ends: a pair then loads its entry from a place that is a constant away from its neighbours',
without a mask, and hand-scheduled kernels have it too.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ....program.constructors import apply, look_up, substitute
from ....program.diagonals import is_along_diagonals
from ....program.expression import Expr, index, node, size, topological
from ....program.lower import Fold
from ....reductions.histogram import add_at
from ...common.evaluate import Evaluator, Sizes
from ..codegen.lookups import BAND_ROOM, name_band

_MOST_PLACES = 64


class DiagonalIndex:
    """The entry of a table that each diagonal reads, from ``i - j = 1 - cols`` on."""

    def __init__(self, index: Expr, leaves: Sequence[Expr], sizes: Sizes, entries: int):
        self.index, self.leaves, self.sizes, self.entries = index, leaves, sizes, entries
        self.read = [e for e in topological([index]) if e.op == "leaf"]
        self.known: dict[tuple, slice | Tensor] = {}  # by the numbers that an index is made of

    def __call__(self, leaves: Sequence[Any]) -> slice | Tensor:
        """``[batch or 1, rows + cols - 1]``; a slice where all are in order and inside of the table."""
        given = {e: v for e, v in zip(self.leaves, leaves, strict=False) if e in self.read}
        numbers = all(not isinstance(v, Tensor) for v in given.values())
        key = tuple(given.values()) if numbers else None
        if key is not None and key in self.known:
            return self.known[key]
        device = torch.device("cpu") if numbers else self.sizes.device
        at = self._evaluate({str(e.attrs[0]): v for e, v in given.items()}, device)
        found: slice | Tensor = at.to(self.sizes.device)
        if key is not None:
            first = int(at[0, 0])
            ordered = torch.equal(at[0], torch.arange(first, first + at.shape[1]))
            if ordered and first >= 0 and first + at.shape[1] <= self.entries:
                found = slice(first, first + at.shape[1])
            self.known = {**(self.known if len(self.known) < _MOST_PLACES else {}), key: found}
        return found

    def _evaluate(self, leaves: dict[str, Any], device: torch.device) -> Tensor:
        rows, cols = self.sizes.rows, self.sizes.cols
        step = torch.arange(1 - cols, rows, device=device).view(*(1,) * (len(self.sizes.batch) + 1), -1)
        indices: dict[Expr, Any] = {index("row"): step.clamp(min=0), index("col"): (-step).clamp(min=0)}
        found = Evaluator(replace(self.sizes, device=device), leaves, indices)(self.index)
        whole = (*self.sizes.batch, 1, step.numel())
        return found.expand(whole).reshape(-1, step.numel()) if found.numel() > step.numel() else found.view(1, -1)


def add_diagonals(sums: Tensor, at: slice | Tensor, entries: int) -> Tensor:
    """The entries of a table from sums over every diagonal, ``[batch, rows + cols - 1]`` from the last column on."""
    total = sums.new_zeros(sums.shape[0], entries)
    if isinstance(at, slice):
        total[:, at] = sums
    else:
        add_at(total, sums, at)
    return total


@dataclass(frozen=True)
class Band:
    """A leaf of a rewritten fold: the entries of ``table`` at ``index``, for every diagonal."""

    table: Expr
    index: Expr
    leaf: Expr


class Bands:
    """The bands of a fold on leaves of given shapes: made in every call, in a few launches."""

    def __init__(self, fold: Fold, bands: Sequence[Band], sizes: Sizes):
        self.bands = [
            (fold.leaves.index(b.table), DiagonalIndex(b.index, fold.leaves, sizes, sizes.of(str(b.table.feature))))
            for b in bands
        ]
        self.length = 2 * (-(-(sizes.rows + sizes.cols - 1 + 2 * BAND_ROOM) // 2) * 2)
        letters = {**sizes.letters, **{str(b.leaf.feature): self.length for b in bands}}
        self.sizes = replace(sizes, letters=letters)

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves, and the bands after them. A diagonal that reads no entry of the table has NaN."""
        return [*leaves, *(self._make(leaves[at], places(leaves)) for at, places in self.bands)]

    def _make(self, table: Tensor, at: slice | Tensor) -> Tensor:
        """Two copies, the second of which begins one entry later: one of them has any two neighbours aligned."""
        found = table[..., at] if isinstance(at, slice) else self._gather(table, at.to(table.device))
        half, first = self.length // 2, BAND_ROOM
        band = table.new_zeros(*found.shape[:-1], self.length, dtype=self.sizes.compute)
        for begin in (first, half + first - 1):
            band[..., begin : begin + found.shape[-1]] = found
        return band

    def _gather(self, table: Tensor, at: Tensor) -> Tensor:
        """The entries of a table at these places, NaN where there is none."""
        size = table.shape[-1]
        known, entries = (at >= 0) & (at < size), at.clamp(0, max(size - 1, 0))
        if not size:
            return table.new_full((*table.shape[:-1], at.shape[-1]), torch.nan)
        if at.shape[0] == 1:
            return table[..., entries[0]].masked_fill(~known[0], torch.nan)
        batch = self.sizes.batch
        found = table.expand(*batch, -1).gather(-1, entries.view(*batch, -1))
        return found.masked_fill(~known.view(*batch, -1), torch.nan)


@functools.lru_cache(maxsize=1024)
def rewrite_fold(fold: Fold) -> tuple[Fold, tuple[Band, ...]]:
    """The fold with a band in place of each table that is read along diagonals, and these bands."""
    read = [e for e in topological(fold.reductions) if e.op == "lookup" and e.dtype == "float" and e.is_pair]
    bands, new = list[Band](), dict[Expr, Expr]()
    gap = apply("sub", index("row"), index("col"))
    place = apply("add", gap, apply("add", size("cols"), BAND_ROOM - 1))
    for e in read:
        table, at = e.args
        if table.op != "leaf" or not is_along_diagonals(at):
            continue
        name, feature = name_band(len(fold.leaves) + len(bands))
        leaf = node("leaf", (), (name,), rows=False, cols=False, feature=feature, dtype="float")
        bands.append(Band(table, at, leaf))
        new[e] = look_up(leaf, place)
    if not bands:
        return fold, ()
    made = substitute(fold.reductions, new)
    renamed: Mapping[Expr, Expr] = dict(zip(fold.reductions, made, strict=True))
    gradients = tuple((renamed[r], leaf) for r, leaf in fold.gradients)
    leaves = (*fold.leaves, *(b.leaf for b in bands))
    return replace(fold, leaves=leaves, reductions=made, gradients=gradients), tuple(bands)

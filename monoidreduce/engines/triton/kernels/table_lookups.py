"""Tables that pairs look up, put in order before a launch where the index allows it.

**Bands**: what is looked up by a function of ``row_index - col_index``, once for every diagonal. A kernel that reads a
table by any index computes the index, compares it with both ends and loads an entry, for every pair. Where the index is
equal along diagonals, the entries of all diagonals are put in order before the launch, with room for a tile beyond both
ends: a pair then loads its entry from a place that is a constant away from its neighbours', without a mask, and
hand-scheduled kernels have it too.

**Summed places**: an index that is a number of the row plus a number of the column (places of a picture, blocks of
pairs). Both numbers are computed before the launch, once for every row and column, and no pair reads outside of the
table: a pair adds two integers and loads an entry, without a mask.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ....program.constructors import apply, is_along_diagonals, look_up, split_index, substitute
from ....program.expression import Expr, index, node, size, topological
from ....program.lower import Fold
from ....reductions.histogram import add_at
from ...common.evaluate import Evaluator, Sizes
from ..codegen.lookups import BAND_ROOM, is_band, name_band, name_sum

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
            ordered = torch.equal(at[0], torch.arange(first, first + at.shape[1], device="cpu"))
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


def rewrite_bands(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> tuple[Fold, Bands | None]:
    """The fold with a band in place of each table that is read along diagonals, and what makes its leaves; None where
    it has none."""
    inner, bands = _rewrite_bands(fold)
    return inner, Bands(fold, bands, sizes) if bands else None


@functools.lru_cache(maxsize=1024)
def _rewrite_bands(fold: Fold) -> tuple[Fold, tuple[Band, ...]]:
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


_MOST_KNOWN = 64
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class _Sum:
    """A lookup as it was and as it is: its table, the numbers of rows and columns, and the leaves that they became."""

    table: Expr
    parts: tuple[Expr, Expr]
    leaves: tuple[Expr, Expr, Expr]  # of the table, of rows and of columns


class SummedPlaces:
    """The leaves that a rewritten fold has more: made in every call, from what is known of earlier ones."""

    def __init__(self, fold: Fold, sums: Sequence[_Sum], sizes: Sizes):
        self.fold, self.sums = fold, sums
        self.known: dict[tuple, tuple[Tensor, Tensor] | None] = {}
        letters = {str(s.leaves[0].feature): sizes.of(str(s.table.feature)) for s in sums}
        self.sizes = replace(sizes, letters={**sizes.letters, **letters})

    def __call__(self, leaves: Sequence[Any]) -> list[Any] | None:
        """The leaves, and the tables and places after them; None where a pair reads what is not there."""
        values = dict(zip(self.fold.leaves, leaves, strict=True))
        found: list[Any] = [*leaves]
        for one in self.sums:
            numbers = tuple(values[e] for e in _read(one.parts))
            key = one.parts, numbers
            if key not in self.known:
                self.known = {**(self.known if len(self.known) < _MOST_KNOWN else {})}
                self.known[key] = find_places(one, values, self.sizes)
            places, table = self.known[key], values[one.table]
            if places is None:
                return None
            found += [table.to(self.sizes.compute).contiguous(), *places]
        return found


def find_places(one: _Sum, values: Mapping[Expr, Any], sizes: Sizes) -> tuple[Tensor, Tensor] | None:
    """The numbers of all rows and of all columns, neither negative; None where some sum is outside of the table."""
    if not sizes.rows or not sizes.cols:
        return None
    given = {str(e.attrs[0]): values[e] for e in _read(one.parts)}
    rows, cols = (
        evaluate_places(e, axis, length, given, sizes)
        for e, axis, length in zip(one.parts, ("row", "col"), (sizes.rows, sizes.cols), strict=True)
    )
    least = cols.min()
    rows, cols = rows + least, cols - least
    if rows.min() < 0 or rows.max() + cols.max() >= sizes.of(str(one.table.feature)):
        return None
    shape = (1,) * len(sizes.batch)
    return tuple(t.to(sizes.device, torch.int32).view(*shape, -1) for t in (rows, cols))  # type: ignore[return-value]


def evaluate_places(e: Expr, axis: str, length: int, leaves: Mapping[str, Any], sizes: Sizes) -> Tensor:
    """A number of the row, or of the column, for indices from 0 up to ``length``; on a CPU."""
    at = torch.arange(length, device="cpu").view(*(1,) * (len(sizes.batch) + 1), -1)
    found = Evaluator(replace(sizes, device=_CPU), dict(leaves), {index(axis): at})(e)
    return torch.as_tensor(found).expand(at.shape).reshape(-1)


def _read(parts: Sequence[Expr]) -> list[Expr]:
    return [e for e in topological(parts) if e.op == "leaf"]


def rewrite_sums(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> tuple[Fold, SummedPlaces | None]:
    """The fold with sums of two numbers in place of such indices, and what makes its leaves; None where it has none."""
    values = dict(zip(fold.leaves, leaves, strict=True))
    sums, new = list[_Sum](), dict[Expr, Expr]()
    for e in topological(fold.reductions):
        if e.op != "lookup" or e.dtype != "float" or not e.is_pair or e.args[0].op != "leaf" or is_band(e.args[0]):
            continue
        parts = split_index(e.args[1])
        if parts is None or any(isinstance(values[n], Tensor) for n in _read(parts)):
            continue
        first = len(fold.leaves) + 3 * len(sums)
        forms = (False, False, name_sum(first), "float"), (True, False, None, "int"), (False, True, None, "int")
        table, row, col = (
            node("leaf", (), (f"x{first + k}",), rows=rows, cols=cols, feature=feature, dtype=dtype)
            for k, (rows, cols, feature, dtype) in enumerate(forms)
        )
        one = _Sum(e.args[0], parts, (table, row, col))
        if find_places(one, values, sizes) is None:
            continue
        sums.append(one)
        new[e] = look_up(table, apply("add", row, col))
    if not sums:
        return fold, None
    reductions = substitute(fold.reductions, new)
    renamed = dict(zip(fold.reductions, reductions, strict=True))
    inner = replace(
        fold,
        leaves=(*fold.leaves, *(e for s in sums for e in s.leaves)),
        reductions=reductions,
        gradients=tuple((renamed[r], leaf) for r, leaf in fold.gradients),
    )
    return inner, SummedPlaces(fold, sums, sizes)

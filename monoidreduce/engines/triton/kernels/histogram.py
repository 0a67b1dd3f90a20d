"""Tables that pairs look up: the kernels of their gradients, their launches, and tables put in order before a launch.

**Kernels of the gradient**: for every entry, the sum over the pairs that read it. No atomics, a fixed order. Where the
index is equal along diagonals, a program instance owns a band of them: it walks down the band, tile by tile, and the
same place of every tile lies on the same diagonal, so that tiles are added as they are. At the end the sum of all tiles
is skewed once, and added up along its diagonals. Where the index is a number of the row plus one of the column, tiles
that read the same entries at the same places are added as they are, too: those of all batch elements that share the
table and, where the index repeats itself along diagonals (places of a picture), those a period apart. At the end the
instance visits the entries between the least and the greatest of its tiles. For any other index a program instance owns
kept indices, as in other kernels, and some entries of the table; of each tile it visits the entries between the least
and the greatest that occur, and computes nothing where none does. Over lists (``cols=``) it is the same: an instance
owns every so many-th tile of kept indices, and walks their lists.

**Bands**: what is looked up by a function of ``row_index - col_index``, once for every diagonal. A kernel that reads a
table by any index computes the index, compares it with both ends and loads an entry, for every pair. Where the index is
equal along diagonals, the entries of all diagonals are put in order before the launch, with room for a tile beyond both
ends: a pair then loads its entry from a place that is a constant away from its neighbours', without a mask, and
hand-scheduled kernels have it too.

**Summed places**: an index that is a number of the row plus a number of the column (places of a picture, blocks of
pairs). Both numbers are computed before the launch, once for every row and column, and no pair reads outside of the
table: a pair adds two integers and loads an entry, without a mask.

**Launches**, and what makes one result of all program instances' parts, in a fixed order. :class:`DiagonalLaunch` has
the gradient with respect to rows and that of a band in one launch: both are sums of the same numbers per pair. The
warp-specialised kernel of the first also leaves their sums along the diagonals of every tile
(``schedules/diagonal_sums.py``), 128 numbers of 64 × 64 pairs; a small kernel adds those of all tiles.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ....plan import settings
from ....program.constructors import apply, is_along_diagonals, is_constant, look_up, split_index, substitute
from ....program.expression import Expr, index, node, size, topological
from ....program.lower import Fold
from ....reductions.histogram import add_at
from ...common.evaluate import Allocator, Evaluator, Sizes
from ..codegen import compiler, listed
from ..codegen.compiler import Kernel, write_prologue
from ..codegen.expressions import ExpressionWriter
from ..codegen.kernel_spec import Spec, Unsupported, pad_width
from ..codegen.lookups import BAND_ROOM, is_band, name_band, name_sum
from ..codegen.reductions import find_plain_sum, list_factors
from ..launch import driver
from ..launch.driver import Kernels
from ..schedules.diagonal_sums import SUMS
from ..schedules.gluon_parts import GROUP_ROWS
from ..schedules.kernel_plan import KernelPlan, Rendering, find_overriding_plan
from .fold_kernel import FoldLaunch, Layouts, Leaves, Merged, Then

_TILE = [
    "folded_at = start + tl.arange(0, FOLDED)",
    "folded_in = within(folded_at, folded_size, RAGGED)",
]


@functools.lru_cache(maxsize=1024)
def compile_histogram(spec: Spec, entries: int, alike: tuple[int, int] | None = None) -> Kernel:
    """The kernel of a spec whose one reduction is a histogram; raises Unsupported where there is none.

    ``entries``: how many a program instance holds, a power of two; 0: it walks along diagonals. ``alike``: it adds up
    tiles that are alike; after how many tiles along a diagonal the index repeats itself (0: never), and how many
    entries lie between the least and the greatest of a tile."""
    v = ExpressionWriter(spec)
    if alike is not None:
        body = _walk_alike(v, *alike)
    else:
        body = _walk_rows(v, entries) if entries else _walk_diagonals(v)
    return compiler.describe_kernel(v, compiler.write_function(spec, body), {}, False)


def _walk_alike(v: ExpressionWriter, period: int, width: int) -> list[str]:
    """``out0`` is ``[batch elements that share no table, classes of tiles, parts, width]``: the sums of ``width``
    entries from the least of a class on. Batch elements that share a table come first, and are divided into parts."""
    value, index, _ = v.spec.fold.reductions[0].args
    own = ("tile =", "kept_at =", "kept_in =", "batch =", "part =")
    fixed = [line for line in write_prologue(v.spec) if not line.startswith(own)]
    if period:  # a band of diagonals, and where on it: from there on in steps of a period
        pick = [
            f"band, turn = group // {period}, group % {period}",
            "shift = band - (kept_tiles - 1)  # from a kept tile to the folded tile that it meets",
            "begin = tl.maximum(0, -shift)",
            f"begin += (turn - begin % {period} + {period}) % {period}",
            "end = tl.minimum(kept_tiles, folded_tiles - shift)",
        ]
    else:
        pick = ["begin = group // folded_tiles", "shift = group % folded_tiles - begin", "end = begin + 1"]
    enter = [
        "kept_at = tile * KEPT + tl.arange(0, KEPT)",
        "kept_in = kept_at < kept_size",
        "start = (tile + shift) * FOLDED",
        *_TILE,
    ]
    places = ExpressionWriter(v.spec)
    places.loop(True)
    at = places.full(index)
    return [
        "part = tl.program_id(0) % parts",
        "group = tl.program_id(0) // parts % (tiles // parts)",
        "rests = tl.num_programs(0) // tiles",
        "sharing = batches // rests",
        "kept_tiles = tl.cdiv(kept_size, KEPT)",
        "folded_tiles = tl.cdiv(folded_size, FOLDED)",
        *pick,
        f"total = tl.zeros([KEPT, FOLDED], {v.float})",
        "for one in range(part, sharing, parts):",
        "    batch = one * rests + tl.program_id(0) // tiles",
        *(f"    {line}" for line in fixed),
        f"    for tile in range(begin, end, {period or 1}):",
        *(f"        {line}" for line in (*enter, *_add_tile(v, value))),
        "# the entries of a tile, those beyond the ends too: it is the same in all of them",
        "tile = begin",
        *(line for line in fixed if not line.startswith(("b", "rest"))),
        *enter,
        *places.before,
        *places.inside,
        f"place = {at}.to(tl.int32)",
        "first = tl.min(place)",
        f"out = out0 + tl.cast(tl.program_id(0), tl.int64) * {width}",
        f"for one in range(0, {width}):",
        "    tl.store(out + one, tl.sum(tl.sum(tl.where(place == first + one, total, 0), 1), 0))",
    ]


def _walk_diagonals(v: ExpressionWriter) -> list[str]:
    """``out0`` is ``[batch, bands, KEPT + 2, FOLDED]``: room for the sum of all tiles, then the sums along its
    diagonals, those at and below the main one first."""
    value = v.spec.fold.reductions[0].args[0]
    own = ("tile =", "kept_at =", "kept_in =")  # of the tile, which changes in the loop here
    fixed = [line for line in write_prologue(v.spec) if not line.startswith(own)]
    return [
        "band = tl.program_id(0) % tiles",
        *fixed,
        "kept_tiles = tl.cdiv(kept_size, KEPT)",
        "shift = band - (kept_tiles - 1)  # from a kept tile to the folded tile that it meets",
        f"total = tl.zeros([KEPT, FOLDED], {v.float})",
        "for tile in range(tl.maximum(0, -shift), tl.minimum(kept_tiles, tl.cdiv(folded_size, FOLDED) - shift)):",
        "    kept_at = tile * KEPT + tl.arange(0, KEPT)",
        "    kept_in = kept_at < kept_size",
        "    start = (tile + shift) * FOLDED",
        *(f"    {line}" for line in (*_TILE, *_add_tile(v, value))),
        "room = out0 + tl.cast(tl.program_id(0), tl.int64) * ((KEPT + 2) * FOLDED)",
        "row = tl.arange(0, KEPT)[:, None]",
        "lane = tl.arange(0, FOLDED)[None, :]",
        "tl.store(room + row * FOLDED + lane, total)",
        "tl.debug_barrier()",
        "below = tl.load(room + row * FOLDED + row - lane, mask=row >= lane, other=0)",
        "above = tl.load(room + row * FOLDED + row - lane + FOLDED, mask=row < lane, other=0)",
        "sums = room + KEPT * FOLDED + tl.arange(0, FOLDED)",
        "tl.store(sums, tl.sum(below, 0))",
        "tl.store(sums + FOLDED, tl.sum(above, 0))",
    ]


def _add_tile(v: ExpressionWriter, value: Expr) -> list[str]:
    """The lines that add a tile to ``total``; nothing is computed where a condition hides all of its pairs."""
    v.loop(True)
    condition = _find_condition(value)
    if condition is not None:
        seen = v.full(condition)
    known = [*v.before, *v.inside]
    text = v.bind_masked(v.full(value), "0")
    rest = [line for line in (*v.before, *v.inside) if line not in known]
    rest.append(f"total += tl.where(kept_in[:, None], {text}, 0)")
    if condition is None:
        return [*known, *rest]
    return [*known, f"if tl.max({seen}.to(tl.int32)) > 0:", *(f"    {line}" for line in rest)]


def _find_condition(value: Expr) -> Expr | None:
    """A condition without which a number is zero."""
    stack = [value]
    while stack:
        e = stack.pop()
        if e.op == "where" and is_constant(e.args[2], 0) and e.args[0].is_pair:
            return e.args[0]
        if e.op in ("mul", "neg", "cast"):
            stack += e.args
        elif e.op == "div":
            stack.append(e.args[0])
    return None


def _walk_rows(v: ExpressionWriter, entries: int) -> list[str]:
    """``out0`` is ``[batch, kept tiles, entries of the table]``; instances of a tile divide the entries."""
    fixed = [line for line in write_prologue(v.spec) if not line.startswith(("tile =", "batch ="))]
    tile = _EntriesOfTile(v)
    return [
        "tile = tl.program_id(0) % tiles",
        *_choose_entries(v, entries),
        *fixed,
        *tile.invariant,
        "for t in range(0, tl.cdiv(folded_size, FOLDED)):",
        "    start = t * FOLDED",
        *(f"    {line}" for line in (*_TILE, *tile.lines)),
        *_store_entries(v, "tile"),
    ]


def compile_listed_histogram(spec: Spec, entries: int) -> Kernel:
    """The same over lists. ``out0`` is ``[batch, parts, entries of the table]``: a part has every so many-th tile of
    kept indices, from its own number on; the kernel is given ``parts`` as the number of tiles."""
    v, size = listed.ListedWriter(spec), spec.listing.kept_block
    prologue = [line for line in write_prologue(spec) if not line.startswith(("tile =", "batch ="))]
    kept, tile_range = listed.write_kept(spec), listed.write_tile_range(v)
    tile, count = _EntriesOfTile(v), f"groups * (({size} + KEPT - 1) // KEPT)" if size else "tl.cdiv(kept_size, KEPT)"
    once = [*tile.invariant, *tile_range, *listed.join_loop(spec, tile.lines)]
    body = [
        "part = tl.program_id(0) % tiles",
        *_choose_entries(v, entries),
        *prologue[: len(prologue) - len(kept)],
        f"for tile in range(part, {count}, tiles):",
        *(f"    {line}" for line in (*kept, *once)),
        *_store_entries(v, "part"),
    ]
    return compiler.describe_kernel(v, compiler.write_function(spec, body), {}, False)


class _EntriesOfTile:
    """What a tile adds to the entries from ``first_entry`` on; ``invariant``: lines before the loop over tiles."""

    def __init__(self, v: ExpressionWriter):
        value, index, table = v.spec.fold.reductions[0].args
        v.loop(True)
        at = v.full(index)
        before, known = len(v.before), [*v.inside]
        number = v.full(value)
        self.invariant, rest = v.before[:before], [*v.before[before:], *v.inside[len(known) :]]
        self.lines = [
            *known,
            f"inside = kept_in[:, None] & folded_in[None, :] & ({at} >= first_entry) & ({at} < last_entry)",
            f"place = tl.where(inside, {at}, -1).to(tl.int32)",
            "last = tl.max(place)",
            "if last >= 0:",
            *(f"    {line}" for line in rest),
            f"    for one in range(tl.min(tl.where(inside, place, {table.attrs[0]}_n)), last + 1):",
            f"        this = tl.sum(tl.sum(tl.where(place == one, {number}, 0), 1), 0)",
            "        total += tl.where(entry == one, this, 0)",
        ]


def _choose_entries(v: ExpressionWriter, entries: int) -> list[str]:
    """The batch element of a program instance, and which entries of the table it sums up."""
    count = f"{v.spec.fold.reductions[0].args[2].attrs[0]}_n"
    return [
        f"shares = tl.cdiv({count}, {entries})",
        f"first_entry = tl.program_id(0) // tiles % shares * {entries}",
        "batch = tl.program_id(0) // tiles // shares",
        f"last_entry = tl.minimum(first_entry + {entries}, {count})",
        f"entry = first_entry + tl.arange(0, {entries})",
        f"total = tl.zeros([{entries}], {v.float})",
    ]


def _store_entries(v: ExpressionWriter, part: str) -> list[str]:
    count = f"{v.spec.fold.reductions[0].args[2].attrs[0]}_n"
    return [
        f"out = out0 + (tl.cast(batch, tl.int64) * tiles + {part}) * {count}",
        f"tl.store(out + entry, total, mask=entry < {count})",
    ]


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


MOST_ENTRIES = 1024  # that a program instance holds in registers, where it does not walk along diagonals
_LEAST_WIDTH = 8  # up to which they are visited in every tile: a map of blocks took 4.6 ms, by tiles alike 6.2 (H200)
_MOST_WIDTH = 1024  # entries between the least and the greatest of tiles that are alike, all of which are visited
_LONGEST = 16  # tiles, after which an index may repeat itself along a diagonal
_INSTANCES = 4  # of a multiprocessor, where batch elements that share a table can be divided


@dataclass(frozen=True)
class AlikeTiles:
    """Tiles that read the same entries at the same places, in classes."""

    period: int  # tiles along a diagonal after which the index repeats itself; 0: it does not
    sharing: int  # batch elements that share a table, and so the classes
    first: Tensor  # the least entry of each class
    width: int  # entries from the least to the greatest, of the class that has most


def find_alike_tiles(rows: Tensor, cols: Tensor, block: int, sharing: int) -> AlikeTiles | None:
    """The classes of tiles of ``block`` × ``block`` pairs that read the entries ``rows[i] + cols[j]``; None where no
    two tiles are alike, or where they read too many entries."""
    m, n = len(rows) // block, len(cols) // block
    period = next((p for p in range(1, min(_LONGEST + 1, max(m, n))) if _repeats(rows, cols, p * block)), 0)
    if not period and sharing == 1:
        return None
    low, high = ([t.view(-1, block) for t in (rows, cols)] for _ in range(2))
    (r_low, c_low), (r_high, c_high) = ([t.amin(1) for t in low], [t.amax(1) for t in high])
    if period:
        band = torch.arange((m + n - 1) * period, device="cpu")
        shift, turn = band // period - (m - 1), band % period
        begin = (-shift).clamp(min=0)
        begin = begin + (turn - begin % period) % period
    else:
        begin = torch.arange(m * n, device="cpu") // n
        shift = torch.arange(m * n, device="cpu") % n - begin
    empty = (begin >= m) | (begin + shift >= n)
    kept, folded = begin.clamp(max=m - 1), (begin + shift).clamp(0, n - 1)
    first = r_low[kept] + c_low[folded]
    width = int((r_high[kept] + c_high[folded] - first).masked_fill(empty, 0).max()) + 1
    return AlikeTiles(period, sharing, first, width) if _LEAST_WIDTH < width <= _MOST_WIDTH else None


def _repeats(rows: Tensor, cols: Tensor, step: int) -> bool:
    """True when the sum of both numbers is the same after ``step`` rows and as many columns."""
    more = [t[step:] - t[:-step] for t in (rows, cols) if len(t) > step]
    return len(more) == 2 and all((t == t[0]).all() for t in more) and bool(more[0][0] + more[1][0] == 0)


def default_plan(spec: Spec, asked: KernelPlan | None) -> KernelPlan:
    """The plan of a kernel that sums up entries of a table; ``asked``: what the user asks for, if anything."""
    if asked is not None:
        return replace(asked, splits=0, rendering=Rendering.LOADS)
    if spec.narrow is None:
        return KernelPlan(32, 32, 4, 1) if spec.compute == "float64" else KernelPlan(64, 64, 4, 1)
    # four operands are loaded anew for every tile, and fill an instance's shared memory: eight warps hide more of that
    # and spill nothing, where four spill at 128 features; 128 × 128 spills too (compiled, not measured)
    return KernelPlan(64, 64, 8, 2)


class HistogramLaunch(FoldLaunch):
    """The kernel of one histogram on tensors of given types, shapes, strides and alignment."""

    combines = True

    def __init__(self, fold: Fold, values: Leaves, batch: tuple[int, ...], sizes: Sizes, layouts: Layouts):
        _, self.index, self.table = fold.reductions[0].args
        self.table_size = sizes.of(str(self.table.feature))
        self.entries = 0 if is_along_diagonals(self.index) else min(MOST_ENTRIES, pad_width(self.table_size))
        self.places = DiagonalIndex(self.index, fold.leaves, sizes, self.table_size)
        self.read = [e for e in topological([self.index]) if e.op == "leaf"]
        self.numbers = self._numbers([values[e] for e in fold.leaves], fold)
        self.others: dict[tuple, HistogramLaunch] = {}  # by other numbers of the index
        self.entries_read: Tensor | None = None  # by classes of tiles that are alike
        super().__init__(fold, "cols", values, batch, sizes, layouts)

    def _numbers(self, leaves: Sequence[Any], fold: Fold) -> tuple:
        """The numbers that the index is made of, which say which tiles are alike."""
        if not self.entries:
            return ()
        found = (leaves[fold.leaves.index(e)] for e in self.read)
        return tuple(None if isinstance(v, Tensor) else v for v in found)

    def _choose_batch_and_plan(self, leaves: Leaves, plan: KernelPlan | None) -> None:
        self.spec = replace(self.spec, bounds=False, guess=False, precomputed_shifts=False)
        self.plan = plan or default_plan(self.spec, find_overriding_plan(self.over))
        if not self.entries or split_index(self.index) is not None:  # such tiles are square
            block = min(self.blocks)
            self.plan = replace(self.plan, block_kept=block, block_folded=block)
        self.count = math.prod(self.batch)
        self.alike = self._find_alike(leaves)
        if self.alike is not None:
            classes, self.beside = self.alike.first.numel(), 0
            rests = self.count // self.alike.sharing
            enough = -(-_INSTANCES * driver.count_processors(self.sizes.device) // max(1, rests * classes))
            self.splits = max(1, min(self.alike.sharing, enough))
            self.tiles = classes * self.splits
            self.grid, self.spec = self.tiles * rests, replace(self.spec, split=True)
            return
        kept, folded = (-(-n // b) for n, b in zip(self.lengths, self.blocks, strict=True))
        self.tiles, self.splits, self.beside = kept if self.entries else max(0, kept + folded - 1), 1, 0
        shares = -(-self.table_size // self.entries) if self.entries else 1
        self.grid = self.tiles * shares * self.count if min(self.lengths) else 0

    def _find_alike(self, leaves: Leaves) -> AlikeTiles | None:
        """Which tiles read the same entries at the same places; None where it is no two, or not known."""
        numbers = {str(e.attrs[0]): leaves[e] for e in self.read}
        parts = split_index(self.index) if self.entries and min(self.lengths) and self.count else None
        if parts is None or any(isinstance(v, Tensor) for v in numbers.values()):
            return None
        block, sharing = self.blocks[0], self._count_sharing()
        tiles = [-(-n // block) for n in self.lengths]
        rows, cols = (
            evaluate_places(e, axis, n * block, numbers, self.sizes)
            for e, axis, n in zip(parts, ("row", "col"), tiles, strict=True)
        )
        return find_alike_tiles(rows, cols, block, sharing)

    def _count_sharing(self) -> int:
        """How many batch elements share a table, where they are the first dimensions and its gradient may be summed."""
        layout = self.layouts.get((self.fold.reductions[0], 0))
        steps = [] if layout is None or not layout.summed else list(zip(self.batch, layout.steps, strict=False))
        shared = list(itertools.takewhile(lambda n_s: n_s[1] == 0, steps))
        rest = steps[len(shared) :]
        return 1 if any(s == 0 < n - 1 for n, s in rest) else math.prod(n for n, _ in shared)

    def _whole(self, outputs: list[Tensor]) -> list[Tensor]:
        return outputs

    def _write_kernel(self, leaves: Leaves) -> None:
        alike = self.alike and (self.alike.period, self.alike.width)
        self.kernel = compile_histogram(self.spec, self.entries, alike)

    def _lay_out_results(self) -> None:
        tail = (self.table_size,) if self.entries else (self.blocks[0] + 2, self.blocks[1])
        tail = tail if self.alike is None else (self.alike.width,)
        self.outputs = [((self.grid // max(1, self.tiles), self.tiles, *tail), self.sizes.compute)]
        self.allocators = [Allocator(self.outputs[0], self.sizes.device)]
        self.strides, self.types, self.split_lengths = [None], [self.sizes.compute], []

    @property
    def is_repeatable(self) -> bool:
        return False

    def recipe(self) -> None:
        return None  # torch combines the parts

    def __call__(self, leaves: Sequence[Any], merged: Merged, then: Then = None) -> list[Tensor]:
        assert then is None, "sums have no lists that are completed"
        if not self.grid:
            shape = (*self.sizes.batch, self.table_size)
            return [torch.zeros(shape, dtype=self.sizes.compute, device=self.sizes.device)]
        if self.entries and (numbers := self._numbers(leaves, self.fold)) != self.numbers:
            if numbers not in self.others:
                other = HistogramLaunch(self.fold, merged(), self.batch, self.sizes, self.layouts)
                self.others = {**self.others, numbers: other}
            return self.others[numbers](leaves, merged)
        (parts,) = super().__call__(leaves, merged)
        if self.alike is not None:
            return [self._add_alike(self.alike, parts)]
        found = parts.sum(1) if self.entries else self._add_bands(parts, leaves)
        return [found.view(*self.sizes.batch, self.table_size)]

    def _add_alike(self, alike: AlikeTiles, parts: Tensor) -> Tensor:
        """The entries of the table from those of every class of tiles, summed over batch elements that share it."""
        sums = parts.view(parts.shape[0], -1, self.splits, alike.width).sum(2)
        if self.entries_read is None:  # copied to the device once
            self.entries_read = (alike.first.view(1, -1, 1) + torch.arange(alike.width, device="cpu")).to(sums.device)
        total = sums.new_zeros(parts.shape[0], self.table_size)
        add_at(total, sums, self.entries_read)
        layout = self.layouts.get((self.fold.reductions[0], 0))
        return total.view(*self.sizes.batch, -1) if alike.sharing == 1 or layout is None else total.view(layout.shape)

    def _add_bands(self, parts: Tensor, leaves: Sequence[Any]) -> Tensor:
        """The entries of the table from the sums along diagonals of every band."""
        block, (rows, cols) = self.blocks[0], self.lengths
        below, above = (
            parts[:, :, block].flip(1),
            parts[:, :, block + 1].flip(1),
        )  # the first band has the largest i - j
        found = parts.new_zeros(self.count, self.tiles + 1, block)
        found[:, 1:] += below  # i - j from the band's own multiple of the block on, and those just before it
        found[:, :-1] += above
        first = -(-cols // block) * block - (cols - 1)
        sums = found.view(self.count, -1)[:, first : first + rows + cols - 1]  # i - j from 1 - cols on
        return add_diagonals(sums, self.places(leaves), self.table_size)


_MOST_BYTES = 2**28  # of the sums of all tiles: a sixteenth of what the pairs would take in 16 bits
_TEXT = """@triton.jit
def sum_tiles(out, parts, strips, tiles, HALF: tl.constexpr):
    # of 64 diagonals, those that begin at tile (strip, tile) with tile - strip = block - (strips - 1)
    block = tl.program_id(0) % (strips + tiles)
    batch = tl.program_id(0) // (strips + tiles)
    lane = tl.arange(0, HALF)
    base = parts + tl.cast(batch, tl.int64) * strips * tiles * (2 * HALF)
    total = tl.zeros([HALF], tl.float32)
    first = tl.maximum(0, strips - 1 - block)
    for strip in range(first, tl.minimum(strips, strips + tiles - block)):
        tile = block - (strips - 1) + strip
        place = base + (tl.cast(strip, tl.int64) * tiles + tile) * (2 * HALF) + lane
        total += tl.load(place, mask=lane * 0 + tile < tiles, other=0.0)
        total += tl.load(place - HALF, mask=lane * 0 + tile > 0, other=0.0)
    tl.store(out + tl.cast(tl.program_id(0), tl.int64) * HALF + lane, total)
"""
_kernels = Kernels("Sums along diagonals, from those of all tiles.", _TEXT)


class DiagonalLaunch(FoldLaunch):
    """The kernel of one sum over columns that also leaves the sums of a histogram along diagonals.

    Raises Unsupported where there is none."""

    combines = True

    def __init__(
        self, fold: Fold, histogram: Expr, values: Leaves, batch: tuple[int, ...], sizes: Sizes, layouts: Layouts
    ):
        value, index, table = histogram.args
        self.histogram, self.table_size = histogram, sizes.of(str(table.feature))
        self.number = find_shared_number(fold, value)
        bytes_ = math.prod(batch) * sizes.rows * sizes.cols * 4 * SUMS // GROUP_ROWS**2
        if (
            self.number is None
            or not is_along_diagonals(index)
            or bytes_ > _MOST_BYTES
            or settings.requested_budget() is not None
        ):
            raise Unsupported("a gradient of rows has no numbers in common with that of the table")
        self.places = DiagonalIndex(index, fold.leaves, sizes, self.table_size)
        super().__init__(fold, "cols", values, batch, sizes, layouts)

    @property
    def returned_outputs(self) -> tuple[tuple[Expr, int], ...]:
        return *self.fold.outputs, (self.histogram, 0)

    def _describe(self, values: Leaves) -> None:
        super()._describe(values)
        self.spec = replace(self.spec, diagonals=self.number)

    def _write_kernel(self, leaves: Leaves) -> None:
        super()._write_kernel(leaves)
        if "sum_antidiagonals" not in self.kernel.text:
            raise Unsupported("there is no warp-specialised kernel")

    def _lay_out_results(self) -> None:
        super()._lay_out_results()
        rows, cols = (-(-n // GROUP_ROWS) for n in (2 * GROUP_ROWS * self.tiles, self.lengths[1]))
        self.outputs.append(((math.prod(self.batch), rows, cols, SUMS), torch.float32))
        self.allocators.append(Allocator(self.outputs[-1], self.sizes.device))

    def recipe(self) -> None:
        return None  # the sums of tiles are added afterwards

    def __call__(self, leaves: Sequence[Any], merged: Merged, then: Then = None) -> list[Tensor]:
        assert then is None, "sums have no lists that are completed"
        outputs = [allocate() for allocate in self.allocators]
        if self.spec.bounds:  # tiles may be skipped
            outputs[-1].zero_()
        if not self.grid:
            outputs[-1] = outputs[-1].new_zeros(*self.sizes.batch, self.table_size)
            return outputs
        if not self.launch_into(outputs, leaves, merged):
            return self(leaves, merged)
        sums = sum_tiles(outputs.pop(), *self.lengths)
        found = add_diagonals(sums, self.places(leaves), self.table_size)
        return [*outputs, found.view(*self.sizes.batch, self.table_size)]


def sum_tiles(parts: Tensor, rows: int, cols: int) -> Tensor:
    """Sums over every diagonal, from ``i - j = 1 - cols`` on, of what tiles ``[batch, strips, tiles, 128]`` left.
    Number x of tile (s, t) is of ``i - j = 64 (s - t) + 63 - x``."""
    batch, strips, tiles, _ = parts.shape
    found = parts.new_empty(batch, (strips + tiles) * GROUP_ROWS)
    grid = (batch * (strips + tiles),)
    _kernels("sum_tiles", grid, (found, parts, strips, tiles), dict(HALF=GROUP_ROWS), dict(num_warps=2))
    last = strips * GROUP_ROWS
    return found[:, last - rows : last + cols - 1].flip(1)


def find_shared_number(fold: Fold, value: Expr) -> Expr | None:
    """What a histogram adds up, as the weight of a sum over columns times a number of the row; None where it is not."""
    if len(fold.reductions) != 1 or fold.reductions[0].attrs[:2] != ("sum", "cols"):
        return None
    if (found := find_plain_sum(fold.reductions[0])) is None:
        return None
    weight = found.weight
    rest = Counter(list_factors(value))
    rest.subtract(Counter(list_factors(weight)))
    if min(rest.values()) < 0:
        return None
    number = weight
    for e in rest.elements():
        if e.cols or any(n.op == "leaf" and n.feature is not None for n in topological([e])):
            return None
        number = apply("mul", number, e)
    return number

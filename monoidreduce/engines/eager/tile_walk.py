"""The eager engine's loop over tiles: one chunk of the batch, its accumulators, and the code that its tiles run."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...plan import schedule as plan
from ...program.constructors import Contraction, interval
from ...program.expression import Expr, index, letters, size, topological
from ...program.intervals import EITHER, NAN, known, may_be_nan
from ...program.lower import Fold, conditions, ranged
from ...program.several import MIX, folds, is_product
from ...program.trace import STORED
from ...reductions import kind_of, outputs_of
from ...reductions.base import Accumulator
from ..common import matmul, skip_small_tiles
from ..common.evaluate import Sizes, to_compute_dtype, unpack
from ..common.label_gather import run_pick
from .tile_code import FEW_FEATURES, Buffers, Reducer, TileCode, TileRun, compile_variant, feature_differences

# Accumulators of the eager engine: those of the kinds of reduction, with the arithmetic that is done to tiles here.


def make_accumulator(r: Expr, batch: int, length: int, sizes: Sizes, homes: Sequence[Tensor] = ()) -> Accumulator:
    """The accumulator of a reduction for ``length`` kept indices of ``batch`` problems. ``homes``: where its results
    will lie; totals that are results are kept there."""
    kind, widths = kind_of(r), [-1 if f.feature is None else sizes.of(str(f.feature)) for f in r.args]
    arithmetic = TileArithmetic(r.attrs[1])
    return kind.accumulator(kind, r, batch, length, widths, sizes.compute, sizes.device, homes, arithmetic)


class TileArithmetic:
    """What an accumulator asks of the engine: contractions of one sum, tile after tile, and exponentials."""

    exp_into = staticmethod(matmul.exp_into)

    def __init__(self, over: str):
        self.over, self.dim = over, -1 if over == "cols" else -2
        skips = skip_small_tiles.active() is not None
        self.accumulate = skip_small_tiles.SkippingContraction() if skips else matmul.accumulate

    def contract(self, total: Tensor, weight: Tensor, c: Contraction, tile: TileRun) -> None:
        """total += Σ weight × vector over the folded axis."""
        if c.walk and is_product(c.weight) and folds(c.weight.args[1], self.over):
            self._contract_products(total, weight, c.weight, tile)
        elif c.walk:
            for f in range(tile.width(c.weight)):
                part = tile.component(c.weight, f, reuse=True)
                total[..., f] += (part if weight is None else weight * part).expand(tile.tile).sum(self.dim)
        elif c.minus is not None:
            self._contract_gap(total, weight, c, tile)
        elif c.vector is None:
            total += weight.sum(self.dim)
        else:
            vector = tile.get(c.vector)
            weight = tile.round_weight(weight, vector.dtype)
            self.accumulate(total, weight if self.over == "cols" else weight.mT, vector)

    def _contract_products(self, total: Tensor, weight: Tensor | None, e: Expr, tile: TileRun) -> None:
        """total += Σ weight × numbers × vectors (``program/several.py``): one matrix product for each number."""
        numbers, vectors = e.args[0], tile.pieces(e.args[1])
        mixed = e.attrs[0] == MIX
        count, width = (tile.count(name) for name in letters((e.args[1] if mixed else e).feature))
        totals = [total] * count if mixed else total.unflatten(-1, (count, width)).unbind(-2)
        for a in range(count):
            part = tile.component(numbers, a, reuse=True).expand(tile.tile)
            part = tile.round_weight(part if weight is None else weight * part, vectors[0].dtype)
            self.accumulate(totals[a], part if self.over == "cols" else part.mT, vectors[a % len(vectors)])

    def _contract_gap(self, total: Tensor, weight: Tensor, c: Contraction, tile: TileRun) -> None:
        """total += Σ weight (x - y): feature by feature where few, else by a product of vectors centred on the tile."""
        assert c.vector is not None and c.minus is not None
        x, y = (tile.get(v).to(total.dtype) for v in (c.vector, c.minus))
        if x.shape[-1] <= FEW_FEATURES:
            gaps, gap = feature_differences(x, y), torch.empty(tile.tile, dtype=total.dtype, device=total.device)
            for f in range(x.shape[-1]):
                total[..., f] += gaps(f, gap).mul_(weight).sum(self.dim)
            return
        centre = y.mean(1, keepdim=True)
        kept, folded = (x - centre, centre - y) if self.over == "cols" else (centre - y, x - centre)
        total += weight.sum(self.dim).unsqueeze(-1) * kept
        matmul.accumulate(total, weight if self.over == "cols" else weight.mT, folded)


@dataclass
class FoldCode:
    """The compiled form of a fold: its conditions, and the code of each variant used so far."""

    fold: Fold
    scalars: frozenset[Expr]
    conditions: tuple[Expr, ...] = ()
    ranged: tuple[Expr, ...] = ()
    indices: frozenset[Expr] = frozenset()
    pairs: tuple[Expr, ...] = ()  # the leaves given per pair that are read
    variants: dict[tuple, TileCode | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.conditions = conditions(self.fold)
        self.ranged = ranged(self.fold)
        under = topological([a for r in self.fold.reductions for a in (r.args[:1] if r.is_pair else r.args)])
        self.indices = frozenset(e for e in under if e.op in ("row_index", "col_index"))
        self.pairs = tuple(e for e in under if e.op == "leaf" and e.is_pair)

    def variant(self, known: dict[Expr, tuple[float, float]]) -> TileCode | None:
        """The code for tiles on which values have these ranges; None if no reduction has anything to do."""
        return self.variant_for(self.truths(known))

    def truths(self, known: dict[Expr, tuple[float, float]]) -> tuple[tuple[float, float], ...]:
        """Per condition, what it may be on tiles on which values have these ranges: equal ends decide it."""
        return tuple([interval(c, known) for c in self.conditions])

    def variant_for(self, truths: tuple[tuple[float, float], ...]) -> TileCode | None:
        """The code for tiles with these truths."""
        if truths not in self.variants:
            decided = {c: t[0] == 1 for c, t in zip(self.conditions, truths, strict=True) if t[0] == t[1]}
            self.variants[truths] = compile_variant(self.fold, decided, self.scalars)
        return self.variants[truths]


@functools.lru_cache(maxsize=1024)
def compile_fold(fold: Fold, scalars: frozenset[Expr]) -> FoldCode:
    return FoldCode(fold, scalars)


class BatchChunk:
    """The fold of one chunk of the batch: its accumulators, and the walk over its tiles.

    With ``rows`` it covers these rows alone, and the leaves hold no others; ``kept`` are accumulators over rows that
    were started by earlier panels. ``homes``: the output tensors of each reduction.
    """

    def __init__(
        self,
        code: FoldCode,
        leaves: dict[Expr, Any],
        sizes: Sizes,
        tiles: plan.Tiles,
        batch: int,
        buffers: Buffers,
        rows: slice | None = None,
        kept: Mapping[int, Accumulator] | None = None,
        homes: Mapping[Expr, list[Tensor]] | None = None,
    ):
        self.code, self.leaves, self.sizes, self.tiles, self.batch = code, leaves, sizes, tiles, batch
        self.buffers = buffers
        self.rows = rows or slice(0, sizes.rows)
        vectors = [v for e, v in leaves.items() if e.feature is not None and isinstance(v, Tensor)]
        self.narrow = matmul.choose_16bit_type(vectors)
        self.accumulators: list[Accumulator | None] = []
        self.picked: dict[int, Tensor] = {}
        for place, r in enumerate(code.fold.reductions):
            length = self.rows.stop - self.rows.start if r.attrs[1] == "cols" else sizes.cols
            if kept and place in kept:
                self.accumulators.append(kept[place])
            elif not kind_of(r).walks(r, code.fold.reductions):
                self.accumulators.append(None)
                self.picked[place] = self._pick(r, length)
            else:
                accumulator = make_accumulator(r, batch, length, sizes, (homes or {}).get(r, ()))
                accumulator.into = leaves.get(r)
                accumulator.folded = sizes.cols if r.attrs[1] == "cols" else self.rows.stop - self.rows.start
                self.accumulators.append(accumulator)

    def _pick(self, r: Expr, length: int) -> Tensor:
        feature = outputs_of(r)[0][0]
        tail = () if feature is None else (self.sizes.of(str(feature)),)
        out = torch.zeros(self.batch, length, *tail, dtype=self.sizes.compute, device=self.sizes.device)
        run_pick(r, self.leaves, self.sizes, self.batch, out, plan.ELEMENTS)
        return out

    def run(self) -> list[Tensor]:
        self.fold_tiles()
        results: list[Tensor] = []
        for place, a in enumerate(self.accumulators):
            results += [self.picked[place]] if a is None else a.finish()
        return results

    def fold_tiles(self) -> None:
        """Fold every tile into the accumulators."""
        if not (self.batch and self.rows.stop > self.rows.start and self.sizes.cols):
            return
        if all(a is None for a in self.accumulators):
            return
        rows = split_range(self.rows.stop - self.rows.start, self.tiles.rows)
        cols = split_range(self.sizes.cols, self.tiles.cols)
        row_ranges, col_ranges, fixed = tile_ranges(
            self.code, self.leaves, (self.sizes.rows, self.sizes.cols), self.rows.start, rows, cols
        )
        hulls, counted = merge_ranges(col_ranges), skip_small_tiles.counters.get()
        for i, row in enumerate(rows):
            row_values = self.load_axis(row, True)
            for start, stop, code in decide_tiles(self.code, {**fixed, **row_ranges[i]}, hulls):
                for col in cols[start:stop]:
                    if counted:
                        pairs = self.batch, row.stop - row.start, col.stop - col.start
                        skip_small_tiles.count_tile(code is not None, *pairs)
                    if code is not None:
                        self._tile(code, row, col, row_values)

    def _tile(self, code: TileCode, row: slice, col: slice, row_values: dict[Expr, Any]) -> None:
        values = {**row_values, **self.load_axis(col, False)}
        values |= {e: to_compute_dtype(self.leaves[e][:, row, col], e, self.sizes.compute) for e in self.code.pairs}
        shape = (self.batch, row.stop - row.start, col.stop - col.start)
        begin = self.rows.start
        tile = TileRun(values, shape, self.buffers, (begin + row.start, col.start))

        def hand_over(reducer: Reducer, owned: tuple[bool, ...], tile: TileRun) -> None:
            accumulator = self.accumulators[reducer.place]
            assert accumulator is not None
            kept, offset = (row, col.start) if accumulator.over == "cols" else (col, begin + row.start)
            accumulator.step(reducer, owned, tile, kept, offset)

        tile.run(code, hand_over)

    def load_axis(self, which: slice | Tensor, rows: bool) -> dict[Expr, Any]:
        """The row leaves (or column leaves) of a tile, for a slice or for some indices: numbers shaped to broadcast,
        vectors in the type they are multiplied in."""
        values: dict[Expr, Any] = {}
        compute = self.sizes.compute
        for e, v in self.leaves.items():
            if not isinstance(v, Tensor) or e.is_pair:
                continue
            if not e.rows and not e.cols:
                if rows:
                    v = v.to(compute) if e.dtype == "float" else v
                    values[e] = v.unsqueeze(1) if e.feature is not None else v.view(-1, 1, 1)
            elif e.rows == rows and e.packing is not None:
                scale = self.leaves[e.args[0]][:, which] if e.args else None
                v = unpack(e.packing, self.sizes.of(str(e.feature)), v[:, which], scale, compute)
                values[e] = matmul.to_operand(v, compute, self.narrow)
            elif e.rows == rows:
                v = v[:, which].to(compute) if v.dtype in STORED and e.dtype == "float" else v[:, which]
                if e.feature is not None:
                    values[e] = matmul.to_operand(v, compute, self.narrow)
                else:
                    v = v.to(compute) if e.dtype == "float" else v
                    values[e] = v.unsqueeze(-1) if rows else v.unsqueeze(-2)
        position = index("row" if rows else "col")
        if position in self.code.indices:
            begin = self.rows.start if rows else 0
            if isinstance(which, slice):
                at = torch.arange(begin + which.start, begin + which.stop, device=self.sizes.device)
            else:
                at = which
            values[position] = (at.view(1, -1, 1) if rows else at.view(1, 1, -1)).expand(self.batch, -1, -1)
        return values


def tile_ranges(
    code: FoldCode,
    leaves: Mapping[Expr, Any],
    lengths: tuple[int, int],
    begin: int,
    rows: list[slice],
    cols: list[slice],
) -> tuple[list[dict], list[dict], dict]:
    """Minimum and maximum, per tile, of every index and leaf that a condition reads; one host read per leaf.
    ``lengths``: how many rows and columns there are in all; ``begin``: the index of the first row that the leaves
    hold."""
    row_ranges: list[dict] = [{index("row"): (begin + s.start, begin + s.stop - 1)} for s in rows]
    col_ranges: list[dict] = [{index("col"): (s.start, s.stop - 1)} for s in cols]
    fixed: dict[Expr, tuple[float, float]] = {size("rows"): (lengths[0],) * 2, size("cols"): (lengths[1],) * 2}
    for e in code.ranged:
        v = leaves[e]
        if not isinstance(v, Tensor):
            fixed[e] = (v, v) if e.dtype == "int" else (float(v), float(v))
            continue
        if e.is_pair or v.is_meta:  # reading it would cost as much as the tile, or there is nothing to read
            fixed[e] = EITHER if e.dtype == "bool" else NAN
            continue
        if not e.rows and not e.cols:
            blocks, ranges = [v], [fixed]
        else:
            extents, ranges = (rows, row_ranges) if e.rows else (cols, col_ranges)
            blocks = [v[:, s] for s in extents]
        kind = torch.int64 if e.dtype == "int" else torch.float64  # float64 would round integers beyond 2**53
        ends = torch.stack([torch.stack(torch.aminmax(p.to(kind))) for p in blocks]).tolist()
        for r, (low, high) in zip(ranges, ends, strict=True):
            r[e] = known(low, high)
    return row_ranges, col_ranges, fixed


Ranges = dict[Expr, tuple[float, float]]


def merge_ranges(ranges: list[Ranges]) -> list[list[Ranges]]:
    """The ranges of runs of 1, 2, 4, ... tiles: entry ``[k][n]`` covers the tiles from ``n * 2**k`` on.

    >>> x = index("col")
    >>> [[r[x] for r in level] for level in merge_ranges([{x: (0, 3)}, {x: (4, 7)}, {x: (8, 9)}])]
    [[(0, 3), (4, 7), (8, 9)], [(0, 7), (8, 9)], [(0, 9)]]
    """
    levels = [ranges]
    while len(levels[-1]) > 1:
        last = levels[-1]
        pairs = [last[n : n + 2] for n in range(0, len(last), 2)]
        levels.append([{e: _hull([r[e] for r in pair]) for e in pair[0]} for pair in pairs])
    return levels


def _hull(ranges: list[tuple[float, float]]) -> tuple[float, float]:
    if any(map(may_be_nan, ranges)):
        return NAN
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def decide_tiles(code: FoldCode, row: Ranges, levels: list[list[Ranges]]) -> Iterator[tuple[int, int, TileCode | None]]:
    """The code of every tile of a row of tiles, in order: (first tile, one past the last, code or None).

    A run of tiles on which every condition is decided is one answer, so a window over many columns costs the
    logarithm of their number. ``levels``: the columns' ranges, by :func:`merge_ranges`.
    """
    count = len(levels[0])
    waiting = [(len(levels) - 1, 0)]
    while waiting:
        level, n = waiting.pop()
        truths = code.truths({**row, **levels[level][n]})
        if level and any(low != high for low, high in truths):
            waiting += [(level - 1, m) for m in (2 * n + 1, 2 * n) if m < len(levels[level - 1])]
        else:
            yield n << level, min((n + 1) << level, count), code.variant_for(truths)


def compile_unconditional(fold: Fold, scalars: frozenset[Expr]) -> TileCode:
    """The code of tiles on which no condition is decided."""
    return compile_fold(fold, scalars).variant({}) or TileCode((), ())


def split_range(length: int, step: int) -> list[slice]:
    return [slice(at, min(at + step, length)) for at in range(0, length, step)]

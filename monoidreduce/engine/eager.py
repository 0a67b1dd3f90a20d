"""The eager engine: tiles in torch, on any device that torch has.

A fold runs tile by tile: rows outside, columns inside. Leaves are only ever sliced; arithmetic happens in place in a
few tile-sized buffers; both directions are folded in the same pass, so a gradient needs one recomputation of each
pair. Tiles on which every reduction would see its identity are found by interval analysis and never computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..plan import tiles as plan
from ..program.build import ONE
from ..program.contract import conditions, in_tiles, interval, ranged
from ..program.expr import Expr, index, size, topological
from ..program.intervals import EITHER, NAN, known
from ..program.lower import Fold
from . import batching, filtering, hardware, tally
from .accumulate import ACCUMULATORS, Accumulator
from .evaluate import Sizes, as_number, form, pair_form
from .pick import run_pick
from .tilecode import Code, Reducer, compile_variant
from .tilerun import Buffers, TileRun


@dataclass
class FoldCode:
    """What is compiled once per fold: its conditions and the code of each variant met so far."""

    fold: Fold
    scalars: frozenset[Expr]
    conditions: tuple[Expr, ...] = ()
    ranged: tuple[Expr, ...] = ()
    indices: frozenset[Expr] = frozenset()
    pairs: tuple[Expr, ...] = ()  # the leaves given per pair that are read
    variants: dict[tuple, Code | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.conditions = conditions(self.fold)
        self.ranged = ranged(self.fold)
        under = topological([a for r in self.fold.reductions for a in (r.args[:1] if r.is_pair else r.args)])
        self.indices = frozenset(e for e in under if e.op in ("row_index", "col_index"))
        self.pairs = tuple(e for e in under if e.op == "leaf" and e.is_pair)

    def variant(self, known: dict[Expr, tuple[float, float]]) -> Code | None:
        truths = tuple(interval(c, known) for c in self.conditions)
        if truths not in self.variants:
            decided = {c: t[0] == 1 for c, t in zip(self.conditions, truths, strict=True) if t[0] == t[1]}
            self.variants[truths] = compile_variant(self.fold, decided, self.scalars)
        return self.variants[truths]


@functools.lru_cache(maxsize=1024)
def code_of(fold: Fold, scalars: frozenset[Expr]) -> FoldCode:
    return FoldCode(fold, scalars)


Coder = Callable[[Fold, frozenset[Expr]], FoldCode]


def run(
    fold: Fold, leaves: list[Any], sizes: Sizes, tiles: plan.Tiles | None = None, coder: Coder = code_of
) -> list[Tensor]:
    """Run a fold. Leaves are ``[*batch, M or N, f]`` or Python numbers; results come back the same way."""
    fold = fold if filtering.now() is None else _unscaled(fold)
    scalars = frozenset(e for e, v in zip(fold.leaves, leaves, strict=True) if not isinstance(v, Tensor))
    code = coder(fold, scalars)
    given = {e: _whole(v, e, sizes) for e, v in zip(fold.leaves, leaves, strict=True) if isinstance(v, Tensor)}
    numbers = {e: v for e, v in zip(fold.leaves, leaves, strict=True) if not isinstance(v, Tensor)}
    written = {r: _zeros(leaves[fold.leaves.index(r.args[1])], sizes) for r in fold.reductions if r.attrs[0] == "pair"}
    whole = [_whole(t, r, sizes) for r, t in written.items()]
    shape, views = batching.merge(sizes.batch, [*given.values(), *whole])
    tiles = tiles or plan.choose(shape[-1], sizes.rows, sizes.cols, width(fold, sizes))
    tiles = replace(tiles, batch=max(1, min(tiles.batch, shape[-1])))
    kept = [(r, k) for r, k in fold.outputs if r not in written]
    outputs = [_empty(r, k, shape, sizes) for r, k in kept]
    constants = numbers | {size(axis): sizes.of(axis) for axis in ("rows", "cols", *sizes.letters)}
    elements = tiles.batch * min(tiles.rows, sizes.rows) * min(tiles.cols, sizes.cols)
    buffers = Buffers(elements, sizes.compute, sizes.device, constants)
    for where in batching.outer(shape):
        for b in range(0, max(shape[-1], 1), tiles.batch):
            chunk = slice(b, min(b + tiles.batch, shape[-1]))
            part = {e: v[where][chunk] for e, v in zip([*given, *written], views, strict=True)}
            homes = [o[where][chunk] for o in outputs]
            own = _by_reduction(kept, homes)
            results = Chunk(code, {**part, **numbers}, sizes, tiles, chunk.stop - chunk.start, buffers, homes=own).run()
            for home, value in zip(homes, results, strict=True):
                if value is not home:  # totals are kept where the result lies
                    home.copy_(value)
    _scale(fold, dict(zip(kept, outputs, strict=True)), dict(zip([*given, *written], views, strict=True)) | constants)
    folded = iter(o.view(*sizes.batch, *o.shape[len(shape) :]) for o in outputs)
    return [written[r] if r in written else next(folded) for r, _ in fold.outputs]


@functools.lru_cache(maxsize=1024)
def _unscaled(fold: Fold) -> Fold:
    """The same fold with its scales inside: what is small is decided by whole numbers of pairs."""
    return Fold(fold.leaves, fold.pure)


def _by_reduction(outputs: list[tuple[Expr, int]], homes: list[Tensor]) -> dict[Expr, list[Tensor]]:
    found: dict[Expr, list[Tensor]] = {}
    for (r, _), home in zip(outputs, homes, strict=True):
        found.setdefault(r, []).append(home)
    return found


def _whole(t: Tensor, e: Expr, sizes: Sizes) -> Tensor:
    """What is given per pair, viewed with all its rows and columns."""
    return t.expand(*t.shape[:-2], sizes.rows, sizes.cols) if e.is_pair else t


def _zeros(like: Tensor, sizes: Sizes) -> Tensor:
    """Where a number per pair is written."""
    shape, dtype = pair_form(like, sizes)
    return torch.zeros(shape, dtype=dtype, device=like.device)


def written(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> int:
    """Bytes of the results per pair, in the shape of the arguments they are gradients of."""
    pairs = [leaves[fold.leaves.index(r.args[1])] for r in fold.reductions if r.attrs[0] == "pair"]
    return sum(t.numel() * sizes.compute.itemsize for t in pairs)


def _scale(fold: Fold, outputs: dict[tuple[Expr, int], Tensor], values: dict[Expr, Any]) -> None:
    """Multiply the results that have a scale by it."""
    scale = {r: s for r, s in fold.scaled if s is not ONE}
    for (r, _), out in outputs.items():
        if r in scale:
            s = scale[r]
            factor = s.const if s.op == "const" else values[s]
            if isinstance(factor, Tensor):
                factor = factor.unsqueeze(-1) if s.rows or s.cols else factor.unsqueeze(-1).unsqueeze(-1)
            out *= factor


def width(fold: Fold, sizes: Sizes) -> int:
    """How many numbers a pair holds: more than one only for a user monoid's vectors, which are folded whole."""
    users = [a for r in fold.reductions if r.attrs[0] == "user" for a in r.args]
    return max([1, *(sizes.of(str(a.feature)) for a in users if a.feature is not None)])


def _empty(reduction: Expr, k: int, batch: tuple[int, ...], sizes: Sizes) -> Tensor:
    shape, dtype = form(reduction, k, sizes, batch)
    return torch.empty(shape, dtype=dtype, device=sizes.device)


class Chunk:
    """The fold of one chunk of the batch: its accumulators, and the walk over its tiles.

    With ``rows`` it covers that part of the rows alone, and the leaves hold no others; ``kept`` are accumulators over
    rows that were begun by the parts before. ``homes``: where each reduction's results will lie.
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
        self.narrow = hardware.narrow_type(vectors)
        self.accumulators: list[Accumulator | None] = []
        self.picked: dict[int, Tensor] = {}
        for place, r in enumerate(code.fold.reductions):
            kind, over, _ = r.attrs
            length = self.rows.stop - self.rows.start if over == "cols" else sizes.cols
            if kept and place in kept:
                self.accumulators.append(kept[place])
            elif kind == "pick" and not in_tiles(code.fold, r):
                self.accumulators.append(None)
                self.picked[place] = self._pick(r, length)
            else:
                widths = [-1 if f.feature is None else sizes.of(str(f.feature)) for f in r.args]
                own = (homes or {}).get(r, ())
                accumulator = ACCUMULATORS[kind](r, batch, length, widths, sizes.compute, sizes.device, own)
                accumulator.into = leaves.get(r)
                self.accumulators.append(accumulator)

    def _pick(self, r: Expr, length: int) -> Tensor:
        feature = r.args[2].feature
        tail = () if feature is None else (self.sizes.of(str(feature)),)
        out = torch.zeros(self.batch, length, *tail, dtype=self.sizes.compute, device=self.sizes.device)
        run_pick(r, self.leaves, self.sizes, self.batch, out, plan.ELEMENTS)
        return out

    def run(self) -> list[Tensor]:
        self.walk()
        results: list[Tensor] = []
        for place, a in enumerate(self.accumulators):
            results += [self.picked[place]] if a is None else a.finish()
        return results

    def walk(self) -> None:
        """Fold every tile into the accumulators."""
        if not (self.batch and self.rows.stop > self.rows.start and self.sizes.cols):
            return
        if all(a is None for a in self.accumulators):
            return
        rows = slices(self.rows.stop - self.rows.start, self.tiles.rows)
        cols = slices(self.sizes.cols, self.tiles.cols)
        row_ranges, col_ranges, fixed = self._ranges(rows, cols)
        for i, row in enumerate(rows):
            row_values = self._side(row, True)
            for j, col in enumerate(cols):
                code = self.code.variant({**fixed, **row_ranges[i], **col_ranges[j]})
                tally.tile(code is not None, self.batch, row.stop - row.start, col.stop - col.start)
                if code is not None:
                    self._tile(code, row, col, row_values)

    def _tile(self, code: Code, row: slice, col: slice, row_values: dict[Expr, Any]) -> None:
        values = {**row_values, **self._side(col, False)}
        values |= {e: as_number(self.leaves[e][:, row, col], e, self.sizes.compute) for e in self.code.pairs}
        shape = (self.batch, row.stop - row.start, col.stop - col.start)
        begin = self.rows.start
        tile = TileRun(values, shape, self.buffers, (begin + row.start, col.start))

        def hand_over(reducer: Reducer, owned: tuple[bool, ...], tile: TileRun) -> None:
            accumulator = self.accumulators[reducer.place]
            assert accumulator is not None
            kept, offset = (row, col.start) if accumulator.over == "cols" else (col, begin + row.start)
            accumulator.step(reducer, owned, tile, kept, offset)

        tile.run(code, hand_over)

    def _side(self, part: slice, rows: bool) -> dict[Expr, Any]:
        """The leaves of one side of a tile: numbers shaped to broadcast, vectors in the type they are multiplied in."""
        values: dict[Expr, Any] = {}
        compute = self.sizes.compute
        for e, v in self.leaves.items():
            if not isinstance(v, Tensor) or e.is_pair:
                continue
            if not e.rows and not e.cols:
                if rows:
                    v = v.to(compute) if e.dtype == "float" else v
                    values[e] = v.unsqueeze(1) if e.feature is not None else v.view(-1, 1, 1)
            elif e.rows == rows:
                v = v[:, part]
                if e.feature is not None:
                    values[e] = hardware.operand(v, compute, self.narrow)
                else:
                    v = v.to(compute) if e.dtype == "float" else v
                    values[e] = v.unsqueeze(-1) if rows else v.unsqueeze(-2)
        which = index("row" if rows else "col")
        if which in self.code.indices:
            begin = self.rows.start if rows else 0
            at = torch.arange(begin + part.start, begin + part.stop, device=self.sizes.device)
            values[which] = (at.view(1, -1, 1) if rows else at.view(1, 1, -1)).expand(self.batch, -1, -1)
        return values

    def _ranges(self, rows: list[slice], cols: list[slice]) -> tuple[list[dict], list[dict], dict]:
        """Least and greatest value, per tile, of every index and leaf that a condition looks at; one read per leaf."""
        begin = self.rows.start
        row_ranges: list[dict] = [{index("row"): (begin + s.start, begin + s.stop - 1)} for s in rows]
        col_ranges: list[dict] = [{index("col"): (s.start, s.stop - 1)} for s in cols]
        fixed: dict[Expr, tuple[float, float]] = {
            size("rows"): (self.sizes.rows,) * 2,
            size("cols"): (self.sizes.cols,) * 2,
        }
        for e in self.code.ranged:
            v = self.leaves[e]
            if not isinstance(v, Tensor):
                fixed[e] = (float(v), float(v))
                continue
            if e.is_pair:  # looking would cost as much as the tile
                fixed[e] = EITHER if e.dtype == "bool" else NAN
                continue
            if not e.rows and not e.cols:
                parts, ranges = [v], [fixed]
            else:
                side, ranges = (rows, row_ranges) if e.rows else (cols, col_ranges)
                parts = [v[:, s] for s in side]
            ends = torch.stack([torch.stack(torch.aminmax(p.double())) for p in parts]).tolist()
            for r, (low, high) in zip(ranges, ends, strict=True):
                r[e] = known(low, high)
        return row_ranges, col_ranges, fixed


def whole_code(fold: Fold, scalars: frozenset[Expr]) -> Code:
    """The code of tiles of which nothing is known beforehand."""
    return code_of(fold, scalars).variant({}) or Code((), ())


def slices(length: int, step: int) -> list[slice]:
    return [slice(at, min(at + step, length)) for at in range(0, length, step)]

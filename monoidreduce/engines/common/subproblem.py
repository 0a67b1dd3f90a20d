"""A fold over part of a larger problem: pieces of its rows and columns, each run by an engine where it stands.

A shard, a step of a ring and a chunk of a stream are all this: the leaves hold some rows and columns of the whole, and
the results are states (``combine.py``) that meet those of the other parts. Leaves are only ever sliced; what is given
per pair is sliced along both axes, and what a fold gives per pair is written where it belongs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...program.compile import Fed, offset_fold
from ...program.expression import Expr
from ...program.lower import Fold
from ...reductions import kind_of
from . import combine
from .combine import State
from .evaluate import Sizes
from .shard import Pieces

Engine = Callable[[Fold, list[Any], Sizes], list[Tensor]]


@dataclass(frozen=True)
class Part:
    """Which rows and columns of a whole of ``totals`` rows and columns the leaves hold; where ``wide``, what is given
    per pair holds all columns of the whole instead, in their order."""

    rows: Pieces
    cols: Pieces
    totals: tuple[int, int]
    wide: bool = False


def run(
    fold: Fold, leaves: list[Any], sizes: Sizes, part: Part, engine: Engine, into: dict[int, Tensor] | None = None
) -> list[State]:
    """The states of a part, one per reduction: for its rows (folded over its columns) or the other way round. Numbers
    per pair are added to ``into``, by the place of their reduction."""
    rows, cols = _stretches(part.rows), _stretches(part.cols)
    into = rooms(fold, leaves, sizes) if into is None and len(rows) * len(cols) > 1 else into
    grid: list[list[list[State]]] = []
    for row in rows:
        grid.append([])
        for col in cols:
            grid[-1].append(_block(fold, leaves, sizes, part, row, col, engine))
            for k, room in (into or {}).items():
                _write(room, grid[-1][-1][k][0].squeeze(0), row, col, part.wide)
                grid[-1][-1][k] = []
    states = []
    for k, r in enumerate(fold.reductions):
        if kind_of(r).per_pair:
            states.append([into[k].unsqueeze(0)] if into is not None else grid[0][0][k])
            continue
        lines = grid if r.attrs[1] == "cols" else list(zip(*grid, strict=True))
        kept = [combine.merged(r, [block[k] for block in line]) for line in lines]
        states.append(
            kept[0] if len(kept) == 1 else [torch.cat(ts, 1 + len(sizes.batch)) for ts in zip(*kept, strict=True)]
        )
    return states


def results(fold: Fold, states: list[State]) -> list[Tensor]:
    """States as an engine's results."""
    return [t for r, state in zip(fold.reductions, states, strict=True) for t in combine.closed(r, state)]


def rooms(fold: Fold, leaves: list[Any], sizes: Sizes) -> dict[int, Tensor]:
    """Where the numbers per pair that a fold gives are added up: each in the shape of the argument it belongs to."""
    found = {}
    for k, r in enumerate(fold.reductions):
        if kind_of(r).per_pair:
            like = leaves[fold.leaves.index(r.args[1])]
            once = like.shape == (*sizes.batch, sizes.rows, sizes.cols)  # else it is a sum, and kept as one
            found[k] = torch.zeros(like.shape, dtype=like.dtype if once else sizes.compute, device=like.device)
    return found


def _write(room: Tensor, value: Tensor, row: _Stretch, col: _Stretch, wide: bool) -> None:
    """Add a block's numbers per pair; along an axis of size 1 all blocks are added up."""
    for axis, at in ((-2, row.local), (-1, col.inside(wide))):
        if room.shape[axis] != 1:
            room = room.narrow(axis, at.start, at.stop - at.start)
    room += value


@dataclass(frozen=True)
class _Stretch:
    """One piece: where it lies in the part, and where it starts in the whole."""

    local: slice
    start: int

    def inside(self, wide: bool) -> slice:
        """Where it lies in what holds the part, or (``wide``) the whole."""
        return slice(self.start, self.start + self.local.stop - self.local.start) if wide else self.local


def _stretches(pieces: Pieces) -> list[_Stretch]:
    """The pieces, those that continue each other as one."""
    found: list[_Stretch] = []
    at = 0
    for start, stop in pieces:
        count = stop - start
        if found and (last := found[-1]).start + last.local.stop - last.local.start == start:
            found[-1] = _Stretch(slice(last.local.start, at + count), last.start)
        else:
            found.append(_Stretch(slice(at, at + count), start))
        at += count
    return found


def _block(
    fold: Fold, leaves: list[Any], sizes: Sizes, part: Part, row: _Stretch, col: _Stretch, engine: Engine
) -> list[State]:
    own = replace(sizes, rows=row.local.stop - row.local.start, cols=col.local.stop - col.local.start)
    placed, fed = offset_fold(fold)
    cut = [_cut(v, e, row, col, part.wide) for v, e in zip(leaves, fold.leaves, strict=True)]
    starts = {"row_start": row.start, "col_start": col.start}
    given = dict(zip(fold.leaves, cut, strict=True))
    cut += [_feed(f, given, starts, part.totals, own) for f in fed]
    found = [t.unsqueeze(0) for t in engine(placed, cut, own)]
    along = {"rows": (own.rows, row.start), "cols": (own.cols, col.start), "neither": (0, 0)}
    return [
        combine.opened(r, mine, [along[r.attrs[1]][0]], [along[r.attrs[1]][1]])
        for r, mine in combine.split(fold, found)
    ]


def _cut(value: Any, e: Expr, row: _Stretch, col: _Stretch, wide: bool) -> Any:
    """A leaf's rows and columns of a block; an axis of size 1 of what is given per pair is broadcast, and stays."""
    if not isinstance(value, Tensor):
        return value
    last = value.dim() - 1 - (e.feature is not None)
    cuts = [(last - e.cols, row.local)] if e.rows else []
    cuts += [(last, col.inside(wide and e.is_pair))] if e.cols else []
    for axis, at in cuts:
        if not e.is_pair or value.shape[axis] != 1:
            value = value.narrow(axis, at.start, at.stop - at.start)
    return value


def _feed(what: Fed, given: dict[Expr, Any], starts: dict[str, int], totals: tuple[int, int], sizes: Sizes) -> Any:
    if isinstance(what, str):
        return {**starts, "num_rows": totals[0], "num_cols": totals[1]}[what]
    away = starts[f"{what.axis}_start"]
    if what.of.op == "leaf":
        return given[what.of] - away
    own = "row" if what.of.op == "row_index" else "col"
    here = torch.arange(sizes.rows if own == "row" else sizes.cols, device=sizes.device)
    return (here + (starts[f"{own}_start"] - away)).view(*(1,) * len(sizes.batch), -1)

"""A fold over part of a larger problem: pieces of its rows and columns, each run by an engine where it stands.

A shard, a step of a ring and a chunk of a stream are all this: the leaves hold some rows and columns of the whole, and
the results are states (``combine.py``) that meet those of the other parts. Leaves are only ever sliced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..program.expr import Expr
from ..program.lower import Fold
from ..program.move import Fed, moved
from . import combine
from .combine import State
from .evaluate import Sizes
from .shard import Pieces

Engine = Callable[[Fold, list[Any], Sizes], list[Tensor]]


@dataclass(frozen=True)
class Part:
    """Which rows and columns of a whole of ``totals`` rows and columns the leaves hold."""

    rows: Pieces
    cols: Pieces
    totals: tuple[int, int]


def run(fold: Fold, leaves: list[Any], sizes: Sizes, part: Part, engine: Engine) -> list[State]:
    """The states of a part, one per reduction: for its rows (folded over its columns) or the other way round."""
    grid = [
        [_block(fold, leaves, sizes, part, row, col, engine) for col in _stretches(part.cols)]
        for row in _stretches(part.rows)
    ]
    states = []
    for k, r in enumerate(fold.reductions):
        lines = grid if r.attrs[1] == "cols" else list(zip(*grid, strict=True))
        kept = [combine.merged(r, [block[k] for block in line]) for line in lines]
        states.append(
            kept[0] if len(kept) == 1 else [torch.cat(ts, 1 + len(sizes.batch)) for ts in zip(*kept, strict=True)]
        )
    return states


def results(fold: Fold, states: list[State]) -> list[Tensor]:
    """States as an engine's results."""
    return [t for r, state in zip(fold.reductions, states, strict=True) for t in combine.closed(r, state)]


@dataclass(frozen=True)
class _Stretch:
    """One piece: where it lies in the part, and where it starts in the whole."""

    local: slice
    start: int


def _stretches(pieces: Pieces) -> list[_Stretch]:
    found, at = [], 0
    for start, stop in pieces:
        found.append(_Stretch(slice(at, at + stop - start), start))
        at += stop - start
    return found


def _block(
    fold: Fold, leaves: list[Any], sizes: Sizes, part: Part, row: _Stretch, col: _Stretch, engine: Engine
) -> list[State]:
    own = replace(sizes, rows=row.local.stop - row.local.start, cols=col.local.stop - col.local.start)
    placed, fed = moved(fold)
    cut = [_cut(v, e, row.local, col.local) for v, e in zip(leaves, fold.leaves, strict=True)]
    starts = {"row_start": row.start, "col_start": col.start}
    given = dict(zip(fold.leaves, cut, strict=True))
    cut += [_feed(f, given, starts, part.totals, own) for f in fed]
    found = [t.unsqueeze(0) for t in engine(placed, cut, own)]
    lengths, firsts = {"rows": own.rows, "cols": own.cols}, {"rows": row.start, "cols": col.start}
    return [
        combine.opened(r, mine, [lengths[r.attrs[1]]], [firsts[r.attrs[1]]]) for r, mine in combine.split(fold, found)
    ]


def _cut(value: Any, e: Expr, rows: slice, cols: slice) -> Any:
    if not isinstance(value, Tensor) or not (e.rows or e.cols):
        return value
    axis = value.dim() - 1 - (e.feature is not None)
    which = rows if e.rows else cols
    return value.narrow(axis, which.start, which.stop - which.start)


def _feed(what: Fed, given: dict[Expr, Any], starts: dict[str, int], totals: tuple[int, int], sizes: Sizes) -> Any:
    if isinstance(what, str):
        return {**starts, "num_rows": totals[0], "num_cols": totals[1]}[what]
    away = starts[f"{what.axis}_start"]
    if what.of.op == "leaf":
        return given[what.of] - away
    own = "row" if what.of.op == "row_index" else "col"
    here = torch.arange(sizes.rows if own == "row" else sizes.cols, device=sizes.device)
    return (here + (starts[f"{own}_start"] - away)).view(*(1,) * len(sizes.batch), -1)

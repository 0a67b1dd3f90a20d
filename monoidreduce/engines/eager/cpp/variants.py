"""Which variant of its code each tile of a fold has, decided before the walk.

A condition that the same interval analysis decides as elsewhere is no part of a tile's code; a tile on which every
reduction would see its identity has none.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ....program.expression import Expr, topological
from ....program.intervals import EITHER
from ....program.lower import Fold
from ...common import evaluate
from ...common.evaluate import Sizes
from ..tile_code import Reducer, TileCode
from ..tile_walk import FoldCode, decide_tiles, merge_ranges, split_range, tile_ranges
from .primitive_text import Unsupported

_CACHED_TILES = 4096  # of a table that is kept
_MOST = 16  # variants of one fold
_ANY_PAIR = torch.empty(0, device="cpu")  # in the place of a number per pair, which no table reads

Counts = collections.Counter[tuple[bool, int, int, int]]  # tiles, by whether they are computed, batch, rows and columns


@dataclass
class Tables:
    """The variants that tiles have, and for each outer batch index which tile has which (0: none)."""

    variants: tuple[tuple[Reducer, ...], ...]
    tables: list[Tensor]
    counts: Counts


def list_reducers(code: TileCode) -> tuple[Reducer, ...]:
    return tuple(s.reducer for s in code.steps if s.reducer is not None)


@functools.lru_cache(maxsize=1024)
def compile_tiles(fold: Fold, scalars: frozenset[Expr]) -> FoldCode:
    """The code of a fold, without conditions that are true of one pair in a row or column (``col_index == label``),
    unless tiles where they are not have nothing to do: deciding them reads labels and makes a table in every call."""
    code = FoldCode(fold, scalars)
    labels = {c for c in code.conditions if _compares_label(c)}
    if labels and code.variant_for(tuple((0, 0) if c in labels else EITHER for c in code.conditions)) is not None:
        code.conditions = tuple(c for c in code.conditions if c not in labels)
        read = set(topological(code.conditions))
        code.ranged = tuple(e for e in code.ranged if e in read)
        code.variants.clear()
    return code


def _compares_label(c: Expr) -> bool:
    indices = [a for a in c.args if a.op in ("row_index", "col_index")]
    data = any(e.op == "leaf" and (e.rows or e.cols) for e in topological(c.args))
    return c.op == "eq" and len(indices) == 1 and data


def reads_data(code: FoldCode, numbers: Container[Expr]) -> bool:
    """Whether conditions read numbers of rows or columns, so that tables are made in every call."""
    return any(e not in numbers and not e.is_pair for e in code.ranged)


def make_tables(
    code: FoldCode,
    parts: Mapping[Expr, Tensor],
    numbers: Mapping[Expr, Any],
    where_rows: tuple[Sizes, Sizes, int],
    shape: tuple[int, ...],
    block: tuple[int, int],
    swapped: bool,
) -> Tables:
    """The variants of a fold and its tables. ``where_rows``: the sizes of what is here and of all, and the first row
    that is here; ``block``: kept and folded indices of a tile. Raises Unsupported where no code can be written."""
    sizes, whole, begin = where_rows
    batch, rest = torch.Size(shape).numel(), (begin, block, swapped)
    if not code.conditions:
        only = code.variant({})
        if only is None:
            raise Unsupported("nothing to do")
        return Tables((list_reducers(only),), [], collections.Counter({(True, batch, sizes.rows, sizes.cols): 1}))
    lengths = (sizes.rows, sizes.cols, whole.rows, whole.cols)
    found: dict[TileCode, int] = {}
    counts: Counts = collections.Counter()
    if reads_data(code, numbers):
        tables = []
        for where in evaluate.iterate_outer(shape):
            own = [{e: v[where][b : b + 1] for e, v in parts.items()} | dict(numbers) for b in range(shape[-1])]
            tables.append(torch.stack([_make_table(code, t, found, counts, lengths, *rest, 1) for t in own]))
    else:
        named = tuple((e, numbers.get(e, _ANY_PAIR)) for e in code.ranged)
        small = sizes.rows * sizes.cols <= _CACHED_TILES * block[0] * block[1]
        make = _make_index_table if small else _make_index_table.__wrapped__
        table, found, counts = make(code.fold, code.scalars, named, lengths, *rest, batch)
        tables = [table] * torch.Size(shape[:-1]).numel()
    if not found or len(found) > _MOST:
        raise Unsupported("no variant, or too many")
    return Tables(tuple(map(list_reducers, found)), tables, counts)


def choose_tiles(tables: Tables, shape: tuple[int, ...], chosen: Tensor, tile: tuple[int, int]) -> Tables:
    """The same tables, without the tiles where ``chosen`` ([kept, folded tiles], or with the batch dimensions in front
    of them) is 0. ``tile``: its rows and columns; those at the ends of an axis are counted as whole ones."""
    found = []
    for n, where in enumerate(evaluate.iterate_outer(shape)):
        layer = chosen if chosen.dim() == 2 else chosen[where]
        found.append((tables.tables[n] * layer if tables.tables else layer).contiguous())
    many = sum(t.numel() * (shape[-1] if t.dim() == 2 else 1) for t in found)
    left = sum(int(t.count_nonzero()) * (shape[-1] if t.dim() == 2 else 1) for t in found)
    counts: Counts = collections.Counter({(True, 1, *tile): left, (False, 1, *tile): many - left})
    return replace(tables, tables=found, counts=counts)


@functools.lru_cache(maxsize=512)
def _make_index_table(
    fold: Fold, scalars: frozenset[Expr], named: tuple[tuple[Expr, Any], ...], *rest: Any
) -> tuple[Tensor, dict[TileCode, int], Counts]:
    """The table of a fold whose conditions read indices and ``named`` numbers alone, its variants and its tiles."""
    found: dict[TileCode, int] = {}
    counts: Counts = collections.Counter()
    return _make_table(compile_tiles(fold, scalars), dict(named), found, counts, *rest), found, counts


def _make_table(
    code: FoldCode,
    leaves: Mapping[Expr, Any],
    found: dict[TileCode, int],
    counts: Counts,
    lengths: tuple[int, int, int, int],
    begin: int,
    block: Sequence[int],
    swapped: bool,
    many: int,
) -> Tensor:
    """Which variant each tile has, in a table that all of ``many`` batch elements read; adds to ``found`` and
    ``counts``. ``lengths``: rows and columns that are here, and in all."""
    steps = block[::-1] if swapped else block
    rows, cols = split_range(lengths[0], steps[0]), split_range(lengths[1], steps[1])
    row_ranges, col_ranges, fixed = tile_ranges(code, leaves, lengths[2:], begin, rows, cols)
    table, hulls = [], merge_ranges(col_ranges)
    for i, row in enumerate(rows):
        line: list[int] = []
        height, last = row.stop - row.start, cols[-1].stop - cols[-1].start
        for start, stop, tile in decide_tiles(code, {**fixed, **row_ranges[i]}, hulls):
            line += [0 if tile is None else found.setdefault(tile, len(found) + 1)] * (stop - start)
            ends = int(stop == len(cols))  # the last tile may be narrower
            counts[tile is not None, many, height, steps[1]] += stop - start - ends
            counts[tile is not None, many, height, last] += ends
        table.append(line)
    layer = torch.tensor(table, dtype=torch.int8, device="cpu")
    return layer.mT.contiguous() if swapped else layer

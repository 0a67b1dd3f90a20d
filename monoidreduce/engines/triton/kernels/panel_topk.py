"""A top-k whose list does not fit in registers: pairs are written to a panel, and the best are selected from its rows.

Panels hold some rows and as many columns as memory allows, all if it can be; where columns come in several panels, the
lists of each are combined. Every pair is computed once, written once and read once (``select_rows.py``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....errors import BudgetError
from ....plan import budget
from ....program.constructors import find_listed
from ....program.expression import Expr, reduce_node
from ....program.lower import Fold
from ....reductions import kind_of, outputs_of
from ....reductions.best import worst
from ....reductions.topk import MOST_IN_REGISTERS
from ...common import combine, matmul
from ...common.evaluate import Sizes
from ...common.subproblem import run_block
from . import select_rows

Run = Callable[[Fold, list[Any], Sizes], list[Tensor]]
_LEAST = 4  # times k: columns of a panel, if memory is short
_QUARTER = 4  # panels, at least, where all pairs would take more than
_LITTLE = 2**26  # so many bytes: no call holds all pairs of a large problem at once


@functools.lru_cache(maxsize=1024)
def split(fold: Fold) -> tuple[Fold | None, tuple[Fold, ...]]:
    """What other kernels compute of a fold, and each of its reductions that is selected from panels, as a fold."""
    large = [r for r in fold.reductions if is_large(r)]
    rest = [(r, s) for r, s in fold.scaled if r not in large]
    kept = replace(fold, reductions=tuple(r for r, _ in rest), scales=tuple(s for _, s in rest)) if rest else None
    return kept, tuple(replace(fold, reductions=(r,), scales=()) for r in large)


def is_large(r: Expr) -> bool:
    """True for a top-k whose list does not fit in registers."""
    return r.attrs[0] == "topk" and r.attrs[2][0] > MOST_IN_REGISTERS


@functools.lru_cache(maxsize=1024)
def write_pairs(fold: Fold) -> Fold:
    """The fold that writes the pairs which the only reduction of ``fold`` selects from."""
    (r,) = fold.reductions
    _, over, params = r.attrs
    return replace(fold, reductions=(reduce_node("panel", over, params, r.args),))


def run(fold: Fold, leaves: list[Any], sizes: Sizes, launch: Run) -> list[Tensor]:
    """Run a fold with such reductions. ``launch``: runs a fold by its own kernels."""
    rest, large = split(fold)
    found = dict(zip(rest.outputs, launch(rest, leaves, sizes), strict=True)) if rest is not None else {}
    for one in large:
        found |= dict(zip(one.outputs, _select(one, leaves, sizes, launch), strict=True))
    return [found[o] for o in fold.outputs]


def _select(fold: Fold, leaves: list[Any], sizes: Sizes, launch: Run) -> list[Tensor]:
    (r,) = fold.reductions
    over = r.attrs[1]
    kept, folded = (sizes.rows, sizes.cols) if over == "cols" else (sizes.cols, sizes.rows)
    engine = functools.partial(_select_once, launch=launch)
    step, length = _panel_shape(r, sizes, kept, folded)
    if step >= kept and length >= folded:
        return engine(fold, leaves, sizes)
    parts = []
    for first in range(0, kept, step):
        own, states = slice(first, min(first + step, kept)), []
        for start in range(0, folded, length):
            other = slice(start, min(start + length, folded))
            rows, cols = (own, other) if over == "cols" else (other, own)
            states += run_block(fold, leaves, sizes, rows, cols, engine)
        parts.append(combine.closed(r, combine.merged(r, states)))
    return [torch.cat(ts, len(sizes.batch)) for ts in zip(*parts, strict=True)]


def _select_once(fold: Fold, leaves: list[Any], sizes: Sizes, launch: Run) -> list[Tensor]:
    """The best of all rows and columns at once; where there are fewer than k, the last slots are empty."""
    (r,) = fold.reductions
    _, over, (k, largest) = r.attrs
    (panel,) = launch(write_pairs(fold), leaves, sizes)
    there = min(k, sizes.here(over))
    found = select_rows.select(panel.flatten(0, -2), there, largest, sizes.compute)
    values, places = (t.view(*panel.shape[:-1], there) for t in found)
    if there < k:
        rest = (*panel.shape[:-1], k - there)
        values = torch.cat([values, values.new_full(rest, worst(values.dtype, largest))], -1)
        places = torch.cat([places, places.new_full(rest, -1)], -1)
    return [values, places]


def _panel_shape(r: Expr, sizes: Sizes, kept: int, folded: int) -> tuple[int, int]:
    """How many kept and folded indices a panel has; raises BudgetError where no panel fits."""
    k, batch = r.attrs[2][0], max(1, math.prod(sizes.batch))
    bytes_of = lambda length: batch * _row_bytes(r, sizes, length)
    least = bytes_of(min(folded, _LEAST * k))
    room = budget.allowed_bytes(lambda: matmul.free_memory(sizes.device), least)
    if room < least:
        raise BudgetError(given=budget.format_floor(room), least=budget.format_ceil(least), bytes=least)
    if bytes_of(folded) <= room:
        row = max(1, bytes_of(folded))
        most = kept if budget.requested() is not None else max(-(-kept // _QUARTER), _LITTLE // row)
        return max(1, min(kept, room // row, most)), max(folded, 1)
    length = max(min(folded, _LEAST * k), folded * room // bytes_of(folded))
    while bytes_of(length) > room:  # strips of short rows take more for each number
        length = max(min(folded, _LEAST * k), length * 7 // 8)
    return 1, length


def _row_bytes(r: Expr, sizes: Sizes, length: int) -> int:
    """Bytes that a row of a panel takes, and what is selected of it."""
    item = sizes.compute.itemsize if outputs_of(r)[0][1] == "float" else 8
    return length * item + select_rows.extra_bytes(length, r.attrs[2][0], item)


def estimate_bytes(fold: Fold, sizes: Sizes) -> int:
    """Bytes alive at once while the only reduction of ``fold`` is selected, its results included."""
    (r,) = fold.reductions
    kept, folded = (sizes.rows, sizes.cols) if r.attrs[1] == "cols" else (sizes.cols, sizes.rows)
    step, length = _panel_shape(r, sizes, kept, folded)
    item = sizes.compute.itemsize if outputs_of(r)[0][1] == "float" else 8
    results = math.prod(sizes.batch) * kept * r.attrs[2][0] * (item + 8)
    panels = math.prod(sizes.batch) * step * _row_bytes(r, sizes, length)
    return panels + results * (1 if step >= kept and length >= folded else 2)


def list_panel_folds(fold: Fold) -> Sequence[Fold]:
    """The folds whose kernels run ``fold``."""
    rest, large = split(fold)
    return [*([] if rest is None else [rest]), *map(write_pairs, large)]


def selects_from_panels(fold: Fold) -> bool:
    """True where a fold of all pairs has a top-k whose list does not fit in registers, and kernels for all else."""
    if not any(map(is_large, fold.reductions)) or find_listed(fold.reductions) is not None:
        return False
    return all(not kind_of(r).no_kernel(r) for f in list_panel_folds(fold) for r in f.reductions)

"""Kernels of few kept indices against many folded ones, as in decoding: what bounds them is reading the folded axis.

One loop visits every tile with masks, whose cost nobody sees beside the reads, so that all reads are pipelined; the
softmax keeps a running maximum. Which tiles are visited is found in the kernel, from limits such as
``col_index < lengths``: lengths change in every step of a decoder, and a table of ranges would be computed anew. All
splits share what is visited, however little of the axis that is.

A batch dimension along which no folded leaf varies (the query heads that share keys) may be part of the kept axis: kept
index k is then row k % period of group k // period, and each kept leaf has a stride for both.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from ....program.constructors import substitute
from ....program.expression import Expr, const, node
from ....program.lower import Fold, is_idle
from . import tile_ranges
from .expressions import ExpressionWriter

_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


class Limit(NamedTuple):
    """A condition on a folded index that hides all pairs beyond it: it is less (or more) than ``bound``, or equal."""

    op: str
    bound: Expr


@functools.lru_cache(maxsize=1024)
def find_limits(fold: Fold, over: str) -> tuple[Limit, ...] | None:
    """The limits that a fold's conditions are made of; None where some condition is not."""
    found: list[Limit] = []
    for c in tile_ranges.whole_tile_conditions(fold):
        limits = [_match(atom, over) for atom in _atoms(c)]
        if None in limits or not all(is_idle(r, {c: const(False)}) for r in fold.reductions):
            return None
        found += [limit for limit in limits if limit is not None]
    return tuple(dict.fromkeys(found))


def _atoms(condition: Expr) -> list[Expr]:
    """The conditions that all must hold."""
    if condition.op != "logical_and":
        return [condition]
    return [atom for a in condition.args for atom in _atoms(a)]


def _match(c: Expr, over: str) -> Limit | None:
    """A comparison of a folded index with an integer that does not vary along the folded axis."""
    if c.op not in _MIRRORED:
        return None
    index = f"{over[:3]}_index"
    for op, (j, bound) in ((c.op, c.args), (_MIRRORED[c.op], c.args[::-1])):
        if j.op == index and bound.dtype == "int" and not (bound.cols if over == "cols" else bound.rows):
            return Limit(op, bound)
    return None


def write_tile_range(v: ExpressionWriter, size: str = "folded_size", limited: bool = True) -> list[str]:
    """Lines that say which tiles this program instance visits: from ``begin`` to before ``end``.

    ``size``: how many folded indices there are to visit; ``limited``: whether limits of the folded index count."""
    spec = v.spec
    limits = (find_limits(spec.fold, spec.over) or ()) if limited else ()
    if not limits:
        lines = ["first = 0", f"visited = tl.cdiv({size}, FOLDED)"]
    else:
        lines = ["# the folded indices that some kept index sees", "first_at = 0", f"last_at = {size}"]
        for op, bound in limits:
            value = f"{v.number(bound)} + tl.zeros([KEPT, 1], tl.int64)"
            if op in ("lt", "le"):
                most = f"tl.max(tl.where(kept_in[:, None], {value}, 0))"
                lines.append(f"last_at = tl.minimum(last_at, {most}{' + 1' if op == 'le' else ''})")
            else:
                least = f"tl.min(tl.where(kept_in[:, None], {value}, {size}))"
                lines.append(f"first_at = tl.maximum(first_at, {least}{' + 1' if op == 'gt' else ''})")
        lines += [
            "first = (first_at // FOLDED).to(tl.int32)",
            "visited = tl.maximum(tl.cdiv(tl.maximum(last_at, 0), FOLDED).to(tl.int32) - first, 0)",
        ]
    if not spec.split:
        return [*lines, "begin = first", "end = first + visited"]
    share = "first + visited // parts * {0} + tl.minimum({0}, visited % parts)"
    return [*lines, f"begin = {share.format('part')}", f"end = {share.format('(part + 1)')}"]


def join_loop(tile: list[str]) -> list[str]:
    """The loop over all visited tiles; ``tile``: what one adds to the accumulators, with masks."""
    return [
        "for t in range(begin, end):",
        "    start = t * FOLDED",
        "    folded_at = start + tl.arange(0, FOLDED)",
        "    folded_in = within(folded_at, folded_size, RAGGED)",
        *(f"    {line}" for line in tile),
    ]


def vary_by_row(fold: Fold, over: str, leaves: list[Expr]) -> Fold:
    """The same fold with these numbers of batch elements given per kept index."""
    changed = {e: _per_kept(e, over) for e in leaves}
    reductions = substitute(fold.reductions, changed)
    return Fold(
        tuple(changed.get(e, e) for e in fold.leaves),
        reductions,
        substitute(fold.scales, changed),
        fold.raised,
        fold.exact,
    )


def _per_kept(e: Expr, over: str) -> Expr:
    rows, cols = over == "cols", over == "rows"
    return node(e.op, e.args, e.attrs, rows=rows, cols=cols, feature=e.feature, dtype=e.dtype)

"""The conditions of a fold that are decided tile by tile, from the ranges of its indices and numbers there."""

from __future__ import annotations

from ..reductions import kind_of
from .constructors import substitute
from .contract import interval
from .expression import Expr, topological
from .lower import Fold
from .philox import DRAWS
from .several import OF_VECTORS


def conditions(fold: Fold) -> tuple[Expr, ...]:
    """The conditions worth deciding per tile: those of ``where`` and those that are summed."""
    fields = [a for r in fold.reductions if not kind_of(r).gathers for a in r.args]
    under = topological(fields)
    found = [e.args[0] for e in under if e.op == "where"] + [f for f in fields if f.dtype == "bool"]
    number = [c for c in found if c.feature is None and (c.rows or c.cols)]
    open_ones = _undecidable(number)
    return tuple(c for c in dict.fromkeys(number) if c not in open_ones)


def is_idle(r: Expr, replace: dict[Expr, Expr]) -> bool:
    """Whether a reduction sees only its identity where conditions are replaced so."""
    return kind_of(r).idle(r.attrs[2], [interval(f, {}) for f in substitute(r.args, replace)])


def _undecidable(roots: list[Expr]) -> set[Expr]:
    """The nodes under ``roots`` of which a tile's index and number ranges can say nothing."""
    found: set[Expr] = set()
    for e in topological(roots):
        if e.op in (*OF_VECTORS, "lookup", *DRAWS) or not found.isdisjoint(e.args):
            found.add(e)
    return found


def ranged(fold: Fold) -> tuple[Expr, ...]:
    """The leaves whose least and greatest value per tile the conditions need."""
    return tuple(e for e in topological(conditions(fold)) if e.op == "leaf")

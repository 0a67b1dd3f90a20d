"""How a fold's sums are computed, and what its conditions say of a block of pairs: facts of the program alone.

A sum of number × vector is a matrix product (a *contraction*); a condition is decided on a block by interval
arithmetic. Engines compile these, the cost model counts them.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import intervals as iv
from .constructors import ONE, gap_form, terms
from .expression import Expr, topological
from .lower import Fold
from .philox import DRAWS
from .primitives import PRIMITIVES


@dataclass(frozen=True)
class Contraction:
    """Σ over one axis of ``weight`` × ``vector``: a plain sum (no vector), a product, or a walk over features.

    With ``minus`` the vector is the gap ``vector - minus`` between a row's and a column's, kept together for accuracy.
    """

    weight: Expr
    vector: Expr | None
    walk: bool = False
    minus: Expr | None = None


def contractions(value: Expr, over: str) -> tuple[Contraction, ...]:
    """How Σ value is computed: as products where the value is number × vector, else by walking its features."""
    if value.feature is None:
        return (Contraction(value, None),)
    if value.dtype != "float":  # matrix products are of floats, which would round integers
        return (Contraction(value, None, walk=True),)
    gap = gap_form(value)
    if gap is not None and gap[1].op == gap[2].op == "leaf":
        return (Contraction(gap[0], gap[1], minus=gap[2]),)
    parts = terms(value)
    side = 2 if over == "cols" else 1
    if parts is not None and all(p[3 - side] is None and p[side] is not None for p in parts):
        return tuple(Contraction(p[0], p[side]) for p in parts)
    return (Contraction(value, None, walk=True),)


def conditions(fold: Fold) -> tuple[Expr, ...]:
    """The conditions worth deciding per tile: those of ``where`` and those that are summed."""
    fields = [a for r in fold.reductions if r.attrs[0] != "pick" for a in r.args]
    under = topological(fields)
    found = [e.args[0] for e in under if e.op == "where"] + [f for f in fields if f.dtype == "bool"]
    number = [c for c in found if c.feature is None and (c.rows or c.cols)]
    open_ones = _undecidable(number)
    return tuple(c for c in dict.fromkeys(number) if c not in open_ones)


def _undecidable(roots: list[Expr]) -> set[Expr]:
    """The nodes under ``roots`` of which a tile's index and number ranges can say nothing."""
    found: set[Expr] = set()
    for e in topological(roots):
        if e.op in ("dot", "sqdist", "fsum", *DRAWS) or not found.isdisjoint(e.args):
            found.add(e)
    return found


def leaves_in_conditions(fold: Fold) -> tuple[Expr, ...]:
    """The leaves whose least and greatest value per tile the conditions need."""
    return tuple(e for e in topological(conditions(fold)) if e.op == "leaf")


def interval(e: Expr, memo: dict[Expr, iv.Interval]) -> iv.Interval:
    """The interval of an expression on a tile; ``memo`` holds the intervals of indices and leaves."""
    for n in topological([e], stop=memo.__contains__):
        if n in memo:
            continue
        if n.op == "const":
            memo[n] = (n.const, n.const) if n.dtype == "int" else (float(n.const), float(n.const))
        elif n.op in PRIMITIVES:
            p = PRIMITIVES[n.op]
            attributes = dict(zip(p.attributes, n.attrs, strict=True)) if n.op == "cast" else {}
            args = [memo[a] for a in n.args]
            if any(map(iv.may_be_nan, args)):
                memo[n] = iv.EITHER if n.dtype == "bool" else iv.NAN
                continue
            if any(a.dtype == "float" for a in n.args):  # integers that meet floats are rounded as those are
                args = [iv.rounded(x) if a.dtype == "int" else x for x, a in zip(args, n.args, strict=True)]
            found = p.interval(*args, **attributes)
            memo[n] = iv.int64(found) if n.dtype == "int" else found
        else:
            memo[n] = (0.0, iv.INF) if n.op == "sqdist" else iv.UNKNOWN
    return memo[e]


def is_read_from_tiles(fold: Fold, r: Expr) -> bool:
    """Whether a pick reads its number from tiles that are computed anyway: it then sees the same rounding."""
    _, over, (axis,) = r.attrs
    gathers = over.startswith(axis) and r.args[0].feature is None and r.args[2] is ONE and r.args[1].is_pair
    return gathers and any(other.attrs[0] != "pick" for other in fold.reductions)

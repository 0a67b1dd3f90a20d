"""How sums of expressions are computed, and the interval of an expression on a block of pairs.

A sum of number × vector is a matrix product (a *contraction*); a condition is decided for a whole tile
by interval arithmetic. Engines compile these, the cost model counts them.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import intervals as iv
from .constructors import gap_form, terms
from .expression import Expr, topological
from .primitives import PRIMITIVES
from .several import split_products


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
    products, rest = split_products(value)
    if products:
        return (*(Contraction(p, None, walk=True) for p in products), *(contractions(rest, over) if rest else ()))
    gap = gap_form(value)
    if gap is not None and gap[1].op == gap[2].op == "leaf":
        return (Contraction(gap[0], gap[1], minus=gap[2]),)
    parts = terms(value)
    side = 2 if over == "cols" else 1
    if parts is not None and all(p[3 - side] is None and p[side] is not None for p in parts):
        return tuple(Contraction(p[0], p[side]) for p in parts)
    return (Contraction(value, None, walk=True),)


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

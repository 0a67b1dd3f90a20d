"""How sums of expressions are computed, and the interval of an expression on a block of pairs.

A sum of number × vector is a matrix product (a *contraction*); a condition is decided for a whole tile
by interval arithmetic. Engines compile these, the cost model counts them.
"""

from __future__ import annotations

import functools
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


# Which indices are equal along every diagonal of the pairs: functions of ``row_index - col_index``.


@functools.lru_cache(maxsize=4096)
def is_along_diagonals(index: Expr) -> bool:
    """True for a function of ``row_index - col_index`` and numbers of no axis: equal along every diagonal."""
    slopes: dict[Expr, tuple[int, int] | None] = {}  # of sums of indices: how often each index; None: anything else
    found: set[Expr] = set()
    for e in topological([index], stop=lambda n: not (n.rows or n.cols)):
        slopes[e] = _slope(e, slopes)
        own = slopes[e]
        if own is not None:
            equal = own[0] == -own[1]
        else:
            equal = bool(e.args) and e.op not in ("dot", "sqdist", "lookup", "reduce") and found.issuperset(e.args)
        if equal:
            found.add(e)
    return index in found


def _slope(e: Expr, known: dict[Expr, tuple[int, int] | None]) -> tuple[int, int] | None:
    """How much a sum of indices grows from row to row, and from column to column."""
    if not (e.rows or e.cols):
        return 0, 0
    if e.op in ("row_index", "col_index"):
        return int(e.op == "row_index"), int(e.op == "col_index")
    args = [known[a] for a in e.args]
    if e.op == "neg" and args[0] is not None:
        return -args[0][0], -args[0][1]
    if e.op in ("add", "sub") and args[0] is not None and args[1] is not None:
        sign = 1 if e.op == "add" else -1
        return args[0][0] + sign * args[1][0], args[0][1] + sign * args[1][1]
    return None

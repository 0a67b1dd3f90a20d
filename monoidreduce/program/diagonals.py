"""Forms of the index by which pairs read a table: equal along every diagonal (functions of ``row_index - col_index``),
or a number of the row plus a number of the column (places of a picture, blocks of pairs)."""

from __future__ import annotations

import functools

from .constructors import apply
from .expression import Expr, const, topological


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


@functools.lru_cache(maxsize=4096)
def split_index(index: Expr) -> tuple[Expr, Expr] | None:
    """A number per row and one per column whose sum is the index; None where it is no such sum."""
    parts: dict[Expr, tuple[Expr, Expr] | None] = {}
    for e in topological([index], stop=lambda n: not n.is_pair):
        parts[e] = _split(e, [parts.get(a) for a in e.args])
    return parts[index]


def _split(e: Expr, args: list[tuple[Expr, Expr] | None]) -> tuple[Expr, Expr] | None:
    """The parts of a sum, given those of its arguments."""
    if not e.is_pair:
        return (const(0), e) if e.cols else (e, const(0))
    if e.dtype != "int" or e.op not in ("add", "sub", "neg", "mul") or None in args:
        return None
    one, other = args[0], args[-1]
    assert one is not None and other is not None
    if e.op == "neg":
        return apply("neg", one[0]), apply("neg", one[1])
    if e.op != "mul":
        return apply(e.op, one[0], other[0]), apply(e.op, one[1], other[1])
    number = next((a for a in e.args if not (a.rows or a.cols)), None)
    if number is None:
        return None
    own = one if e.args[1] is number else other
    return apply("mul", own[0], number), apply("mul", own[1], number)

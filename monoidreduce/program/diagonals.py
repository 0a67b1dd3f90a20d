"""Which indices are equal along every diagonal of the pairs: functions of ``row_index - col_index``."""

from __future__ import annotations

import functools

from .expression import Expr, topological


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

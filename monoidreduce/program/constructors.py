"""Smart constructors: every expression is built here, and is simplified as it is built.

The elementwise primitives are in ``expression.py``, products of several vectors in ``several.py``. Here are operations
on features: ``fsum`` (the sum over a vector's features), ``famax`` and ``famin``, ``dot`` (a row vector with a column
vector), ``sqdist`` and ``component``; and ``spread``, a number repeated over features. A vector per pair is written as
a sum of ``number × row vector × column vector`` where that is possible (:func:`terms`), so that ``⟨g, v_j - P_i⟩``
becomes one product and one number per row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import ShapeError, TraceError, UnreducedError, shown
from . import intervals as iv
from . import several
from .expression import (
    ONE,
    ZERO,
    Expr,
    Feature,
    apply,
    are_several,
    const,
    fit,
    is_constant,
    join,
    lift,
    node,
    reduce_node,
    size,
    topological,
    widest,
)
from .primitives import PRIMITIVES

__all__ = [
    "ONE",
    "ZERO",
    "apply",
    "apply_over_features",
    "component",
    "conditions_of",
    "dot",
    "feature_extreme",
    "find_listed",
    "fsum",
    "gap_form",
    "is_constant",
    "lift",
    "listed_node",
    "look_up",
    "normalize_vector",
    "rebuild",
    "spread",
    "sqdist",
    "substitute",
    "terms",
    "vector_norm",
]  # fmt: skip

Term = tuple[Expr, Expr | None, Expr | None]  # number × row vector × column vector

LISTED = ("listed", "listed_once", "listed_position")  # per pair, of the tensors of a domain (``domains/``)
_MOST_TERMS = 64  # a vector that would be a sum of more products is left as it is: engines walk its features
_MOST_WALKS = 8  # a sum over features that would be more walks than this is one walk of the whole
_LINEAR = ("add", "sub", "neg", "mul", "div", "where", "cast")  # what :func:`terms` looks into

# Operations on features -------------------------------------------------------------------------------------


def terms(x: Expr, known: dict[Expr, list[Term] | None] | None = None) -> list[Term] | None:
    """Write a vector as Σ number × row vector × column vector; None where it is not of that form, or of too many.

    ``known``: the terms of what was asked for before, to which those of ``x`` and all under it are added."""
    found = {} if known is None else known
    for e in topological([x], stop=lambda e: e in found or not _is_elementwise(e) or e.op not in _LINEAR):
        if e not in found:
            parts = _find_terms(e, found)
            found[e] = None if parts is None or len(parts) > _MOST_TERMS else parts
    return found[x]


def _find_terms(x: Expr, found: dict[Expr, list[Term] | None]) -> list[Term] | None:
    """The terms of a node, given those of its arguments."""
    if x.feature is None:
        return [(x, None, None)]
    if not x.is_pair:
        scale, x = split_scale(x)
        return [(scale, None, x)] if x.cols else [(scale, x, None)]
    if x.op == "spread":
        return [(x.args[0], None, None)]
    if x.op not in _LINEAR:
        return None
    left = found[x.args[1] if x.op == "where" else x.args[0]]
    if x.op == "neg":
        return left and _scale_terms(left, const(-1.0))
    if x.op == "cast":
        return left if x.args[0].dtype == "float" else None
    if x.op == "mul":
        return _multiply_terms(left, found[x.args[1]])
    if x.op == "div":
        divisor = x.args[1]
        whole = divisor.is_pair and divisor.feature is not None
        return None if whole else _multiply_terms(left, _find_terms(apply("reciprocal", divisor), {}))
    right = found[x.args[-1]]
    if left is None or right is None:
        return None
    if x.op != "where":
        return left + (_scale_terms(right, const(-1.0)) if x.op == "sub" else right)
    c = x.args[0]
    if c.feature is not None:
        return None
    chosen = [(apply("where", c, k, 0.0), u, v) for k, u, v in left if not is_constant(k, 0)]
    return chosen + [(apply("where", c, 0.0, k), u, v) for k, u, v in right if not is_constant(k, 0)]


def _multiply_terms(left: list[Term] | None, right: list[Term] | None) -> list[Term] | None:
    """The terms of a product; None where one of its factors has no terms, or there would be too many."""
    if not left or not right:
        return right if left else left
    return [_multiply_pair(a, b) for a in left for b in right] if len(left) * len(right) <= _MOST_TERMS else None


def gap_form(e: Expr) -> tuple[Expr, Expr, Expr] | None:
    """A vector per pair as number × (row vector - column vector), if it is one: the three of them."""
    factors: list[Expr | None] = []  # from the outside in; None: a change of sign
    while e.op in ("neg", "mul") and e.feature is not None:
        if e.op == "neg":
            factors.append(None)
            e = e.args[0]
            continue
        number, vector = e.args if e.args[0].feature is None else e.args[::-1]
        if number.feature is not None:
            return None
        factors.append(number)
        e = vector
    if e.op != "sub" or any(a.feature is None or a.is_pair for a in e.args):
        return None
    a, b = e.args
    if a.rows and b.cols:
        scale, row, col = ONE, a, b
    elif a.cols and b.rows:
        scale, row, col = const(-1.0), b, a
    else:
        return None
    for factor in reversed(factors):
        scale = apply("neg", scale) if factor is None else apply("mul", scale, factor)
    return scale, row, col


def _scale_terms(some: list[Term], factor: Expr) -> list[Term]:
    return [(apply("mul", k, factor), u, v) for k, u, v in some]


def _multiply_pair(a: Term, b: Term) -> Term:
    return apply("mul", a[0], b[0]), _multiply_vectors(a[1], b[1]), _multiply_vectors(a[2], b[2])


def _multiply_vectors(u: Expr | None, v: Expr | None) -> Expr | None:
    return u if v is None else v if u is None else apply("mul", u, v)


def fsum(x: Expr) -> Expr:
    """The sum over a vector's features; a number."""
    if x.feature is None:
        raise UnreducedError(
            detail=f"a sum over features was asked of {x!r}, which is one number",
            fix="To fold over columns or rows, use mr.sum(...)",
        )
    found: dict[Expr, Expr] = {}
    known: dict[Expr, list[Term] | None] = {}
    walked = 0  # parts that engines will walk feature by feature, each with all that it is made of
    for e in topological([x], stop=lambda e: not _is_split(e)):
        if e.feature is None:
            found[e] = apply("mul", e, size(str(x.feature)))
        elif _is_split(e):
            found[e] = apply(e.op, *(found[a] for a in e.args))
        else:
            found[e] = _sum_whole(e, known)
            walked += found[e].op == "fsum" and e.is_pair
        if walked > _MOST_WALKS:
            return _make_feature_node("fsum", x)
    return found[x]


def _is_split(x: Expr) -> bool:
    """Whether a vector is summed over its features part by part, which keeps each part in its best form."""
    return x.op in ("add", "sub") and x.is_pair and x.feature is not None


def _sum_whole(x: Expr, known: dict[Expr, list[Term] | None]) -> Expr:
    """The sum over the features of a vector that is not split."""
    if x.op == "spread":
        return apply("mul", x.args[0], size(str(x.feature)))
    if not x.is_pair:
        return _make_feature_node("fsum", x)
    if x.op == "square" and x.args[0].op == "sub":
        sides = _split_row_and_col(*x.args[0].args)
        if sides is not None:
            return sqdist(*sides)
    parts = terms(x, known)
    if parts is None:
        return _make_feature_node("fsum", x)
    total = ZERO
    for k, u, v in parts:
        if u is not None and v is not None:
            inner = dot(u, v)
        elif u is None and v is None:
            inner = size(str(x.feature))
        else:
            inner = _make_feature_node("fsum", u if u is not None else v)  # type: ignore[arg-type]
        total = apply("add", total, apply("mul", k, inner))
    return total


def _make_feature_node(op: str, x: Expr) -> Expr:
    return node(op, (x,), (), rows=x.rows, cols=x.cols, feature=None, dtype=x.dtype)


def _split_row_and_col(a: Expr, b: Expr) -> tuple[Expr, Expr] | None:
    """A row's vector and a column's over one letter, in that order; None for any other two."""
    if a.feature is None or not fit(a.feature, b.feature) or a.is_pair or b.is_pair:
        return None
    return (a, b) if a.rows and b.cols else (b, a) if a.cols and b.rows else None


def split_scale(x: Expr) -> tuple[Expr, Expr]:
    """A vector as (number, vector): the scale of a stored one and what is stored; (1, itself) of any other."""
    if x.op == "mul":
        for number, vector in (x.args, x.args[::-1]):
            if vector.feature is not None and number.feature is None:
                scale, inner = split_scale(vector)
                if inner.is_stored:
                    return number if scale is ONE else apply("mul", scale, number), inner
    return ONE, x


def dot(a: Expr, b: Expr) -> Expr:
    """⟨a, b⟩ over their common features."""
    for side in (a, b):
        if side.feature is None:
            raise ShapeError(
                detail=f"@ contracts two vectors, but {side!r} is one number",
                fix='Declare it as a vector, for example Row["f"], or use * for a product of numbers',
            )
    if not fit(a.feature, b.feature) and (are_several(a) or are_several(b)):
        return several.product(a, b)
    if not fit(a.feature, b.feature):
        raise ShapeError(
            detail=f'@ contracts a vector over "{a.feature}" with a vector over "{b.feature}"',
            fix="Give both the same letter",
        )
    if a.dtype != b.dtype and "float" in (a.dtype, b.dtype):  # torch multiplies matrices of one type alone
        a, b = (apply("cast", e, to="float") for e in (a, b))
    sides = _split_row_and_col(a, b)
    if sides is not None:
        (s, x), (t, y) = map(split_scale, sides)
        product = node("dot", (x, y), (), rows=True, cols=True, feature=None, dtype=widest(sides))
        for scale in (s, t):
            product = product if scale is ONE else apply("mul", product, scale)
        return product
    return fsum(apply("mul", a, b))


def sqdist(a: Expr, b: Expr) -> Expr:
    """|a - b|², with care for close points."""
    sides = _split_row_and_col(a, b)
    if sides is not None:
        return node("sqdist", sides, (), rows=True, cols=True, feature=None, dtype="float")
    return fsum(apply("square", apply("sub", a, b)))


def spread(x: Expr, feature: Feature) -> Expr:
    """A number, repeated over the features of a letter."""
    return node("spread", (x,), (feature,), rows=x.rows, cols=x.cols, feature=feature, dtype=x.dtype)


def component(x: Expr, k: int) -> Expr:
    """The k-th feature of a vector; of a pair vector, by taking the component of its parts."""
    found: dict[Expr, Expr] = {}
    for e in topological([x], stop=lambda e: not _is_elementwise(e)):
        if e.feature is None:
            found[e] = e
        elif _is_elementwise(e):
            attributes = dict(zip(PRIMITIVES[e.op].attributes, e.attrs, strict=True))
            found[e] = apply(e.op, *(found[a] for a in e.args), **attributes)
        elif e.op == "spread":
            found[e] = e.args[0]
        elif e.op == "einsum" and e.attrs[0] in several.DOTS:
            found[e] = dot(*(several.part(a, k) if are_several(a) else a for a in e.args))
        else:
            found[e] = node("component", (e,), (k,), rows=e.rows, cols=e.cols, feature=None, dtype=e.dtype)
    return found[x]


def _is_elementwise(x: Expr) -> bool:
    """Whether a vector per pair is made feature by feature."""
    return x.is_pair and x.feature is not None and x.op in PRIMITIVES


def feature_extreme(x: Expr, largest: bool) -> Expr:
    """The largest or smallest feature of a vector."""
    if x.feature is None:
        raise UnreducedError(
            detail=f"the largest or smallest feature was asked of {x!r}, which is one number",
            fix="To fold over columns or rows, use mr.max(...) or mr.min(...)",
        )
    return _make_feature_node("famax" if largest else "famin", x)


def vector_norm(x: Expr, p: Any = 2) -> Expr:
    """The p-norm; its slope at 0 is 0, as in torch, and for p below 1 that of a feature that is 0."""
    p = 2 if p in ("fro", None) else p
    if not isinstance(p, (int, float)):
        raise TraceError(detail=f"a norm was given p = {shown(p)}", fix="Give a number: 1, 2, math.inf")
    if p == 0:
        return fsum(apply("cast", apply("ne", x, 0), to="float"))
    size = apply("abs", x)
    if p == 1:
        return fsum(size)
    if math.isinf(p):
        return feature_extreme(size, p > 0)
    if p < 1:
        none = apply("eq", size, 0)
        total = fsum(apply("where", none, 0.0 if p > 0 else math.inf, apply("pow", apply("where", none, 1.0, size), p)))
    else:
        total = fsum(apply("square", x) if p == 2 else apply("pow", size, p))
    zero = apply("eq", total, 0)
    return apply("where", zero, 0.0, apply("pow", apply("where", zero, 1.0, total), 1.0 / p))


def normalize_vector(x: Expr, p: Any, eps: float) -> Expr:
    """x / max(norm, eps)."""
    return apply("div", x, apply("maximum", vector_norm(x, p), eps))


def apply_over_features(name: str, x: Expr) -> Expr:
    """``softmax``, ``log_softmax`` or ``logsumexp`` over a vector's features, less the largest of them first."""
    x = apply("cast", x, to="float")
    peak = apply("detach", feature_extreme(x, True))
    if name == "logsumexp":  # minus infinity, and not NaN, where all features are
        peak = apply("where", apply("isinf", peak), 0.0, peak)
    lowered = apply("sub", x, peak)
    raised = apply("exp", lowered)
    total = fsum(raised)
    if name == "softmax":
        return apply("div", raised, total)
    return (
        apply("sub", lowered, apply("log", total)) if name == "log_softmax" else apply("add", peak, apply("log", total))
    )


def conditions_of(e: Expr) -> list[Expr]:
    """The conditions without each of which ``where(c, x, 0)`` is 0: all that c joins; none of any other expression."""
    if e.op != "where" or not is_constant(e.args[2], 0):
        return []
    return topological([e.args[0]], stop=lambda c: c.op not in ("logical_and", "stretches"))


def look_up(table: Expr, index: Expr) -> Expr:
    """An entry of a table (a vector of no axis), by an integer."""
    return node("lookup", (table, index), (), rows=index.rows, cols=index.cols, feature=None, dtype=table.dtype)


def listed_node(op: str, form: tuple, tensors: tuple[Expr, ...]) -> Expr:
    """``listed`` or ``listed_once`` (truth values) or ``listed_position`` (a number) of every pair."""
    dtype = "int" if op == "listed_position" else "bool"
    return node(op, tensors, (form,), rows=True, cols=True, feature=None, dtype=dtype)


def find_listed(roots: Iterable[Expr]) -> Expr | None:
    """A node under some expressions that says which pairs are listed; None where they are of all pairs."""
    return next((e for e in topological(roots) if e.op in LISTED), None)


def rebuild(e: Expr, args: tuple[Expr, ...]) -> Expr:
    """The same operation on other arguments, simplified again."""
    if args == e.args:
        return e
    if e.op in PRIMITIVES:
        return apply(e.op, *args, **dict(zip(PRIMITIVES[e.op].attributes, e.attrs, strict=True)))
    if e.op == "dot":
        return dot(*args)
    if e.op == "sqdist":
        return sqdist(*args)
    if e.op == "fsum":
        return fsum(args[0]) if args[0].feature is not None else apply("mul", args[0], size(str(e.args[0].feature)))
    if e.op == "component":
        return component(args[0], e.attrs[0])
    if e.op in ("famax", "famin"):
        return args[0] if args[0].feature is None else feature_extreme(args[0], e.op == "famax")
    if e.op == "spread":
        return spread(args[0], e.attrs[0])
    if e.op == "einsum":
        return several.einsum(e.attrs[0], args[0], args[1], e.feature)
    if e.op == "reduce":
        return reduce_node(e.attrs[0], e.attrs[1], e.attrs[2], args)
    rows, cols, _ = (True, True, None) if e.op in LISTED else join(args)
    return node(e.op, args, e.attrs, rows=rows, cols=cols, feature=e.feature, dtype=e.dtype)


def substitute(roots: tuple[Expr, ...], replace: dict[Expr, Expr]) -> tuple[Expr, ...]:
    """Replace nodes (and everything above them is rebuilt and simplified)."""
    done: dict[Expr, Expr] = {}
    for e in topological(roots, stop=lambda e: e in replace):
        done[e] = replace[e] if e in replace else rebuild(e, tuple(done[a] for a in e.args))
    return tuple(done[r] for r in roots)


# How sums of expressions are computed, and the interval of an expression on a block of pairs.
# A sum of number × vector is a matrix product (a *contraction*); a condition is decided for a whole tile by interval
# arithmetic. Engines compile these, the cost model counts them.


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
    if any(n.op == "einsum" for n in topological([value], stop=lambda n: n.op not in _LINEAR)):
        products, rest = several.split_products(value)
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


# Forms of the index by which pairs read a table: equal along every diagonal (functions of ``row_index - col_index``),
# or a number of the row plus a number of the column (places of a picture, blocks of pairs).


@functools.lru_cache(maxsize=4096)
def is_along_diagonals(index: Expr) -> bool:
    """True for a function of ``row_index - col_index`` and numbers of no axis: equal along every diagonal."""
    slopes: dict[Expr, tuple[int, int] | None] = {}  # of sums of indices: how often each index; None: anything else
    found: set[Expr] = set()
    for e in topological([index], stop=lambda n: not (n.rows or n.cols)):
        slopes[e] = _find_slope(e, slopes)
        own = slopes[e]
        if own is not None:
            equal = own[0] == -own[1]
        else:
            equal = bool(e.args) and e.op not in ("dot", "sqdist", "lookup", "reduce") and found.issuperset(e.args)
        if equal:
            found.add(e)
    return index in found


def _find_slope(e: Expr, known: dict[Expr, tuple[int, int] | None]) -> tuple[int, int] | None:
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

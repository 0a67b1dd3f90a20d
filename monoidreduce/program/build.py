"""Smart constructors: every expression is built here, and is simplified as it is built.

Besides the elementwise primitives there are four operations on features: ``fsum`` (the sum over a vector's features),
``dot`` (a row vector with a column vector), ``sqdist`` and ``component``; and ``spread``, a number repeated over
features. A vector per pair is written as a sum of ``number × row vector × column vector`` where that is possible
(:func:`terms`), so that ``⟨g, v_j - P_i⟩`` becomes one product and one number per row.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..errors import ShapeError, UnreducedError
from .expr import Expr, Feature, const, is_whole_power, join, node, reduce_node, size, topological, widest
from .philox import DRAWS
from .primitives import PRIMITIVES

ZERO, ONE = const(0.0), const(1.0)
Term = tuple[Expr, Expr | None, Expr | None]  # number × row vector × column vector


def lift(value: Any) -> Expr:
    return value if isinstance(value, Expr) else const(value)


def apply(name: str, *values: Any, **attributes: Any) -> Expr:
    """An elementwise primitive on expressions or Python numbers, simplified."""
    args = tuple(lift(v) for v in values)
    features = {a.feature for a in args} - {None}
    if len(features) > 1:
        one, other = sorted(map(str, features))
        raise ShapeError(
            detail=f'{name} combines a vector over "{one}" with a vector over "{other}"',
            fix="Elementwise arithmetic needs equal letters; use @ to contract, or declare both with one letter",
        )
    primitive = PRIMITIVES[name]
    attrs = tuple(attributes.get(key, default) for key, default in primitive.attributes.items())
    simple = _simplify(name, args, attrs)
    if simple is not None:
        return simple
    if all(a.op == "const" for a in args) and name not in (*DRAWS, "detach"):
        return _fold_constants(name, args, attrs)
    whole = name == "pow" and is_whole_power(*args)
    if primitive.result == "float" and widest(args) != "float" and name not in (*DRAWS, "cast") and not whole:
        args = tuple(apply("cast", a, to="float") for a in args)  # torch would take log(3) of integers in float32
    rows, cols, feature = join(args)
    if primitive.result == "same" or whole:
        dtype = widest(args[1:] if name == "where" else args)
    else:
        dtype = attrs[0] if name == "cast" else primitive.result
    return node(name, args, attrs, rows=rows, cols=cols, feature=feature, dtype=dtype)


def _fold_constants(name: str, args: tuple[Expr, ...], attrs: tuple) -> Expr:
    if name == "cast":
        return const({"float": float, "int": int, "bool": bool}[attrs[0]](args[0].const))
    primitive = PRIMITIVES[name]
    kinds = {"bool": torch.bool, "int": torch.int64, "float": torch.float64}
    tensors = [torch.tensor(a.const, dtype=kinds[a.dtype], device="cpu") for a in args]
    return const(primitive.torch(*tensors, **dict(zip(primitive.attributes, attrs, strict=True))).item())


def _is(e: Expr, value: float) -> bool:
    return e.op == "const" and e.dtype != "bool" and e.attrs[0] == value


def _shaped(e: Expr, like: tuple[Expr, ...]) -> bool:
    """Whether ``e`` already has all the axes and the number class of the result of combining ``like``."""
    return e.axes == join(like) and e.dtype == widest(like)


def _simplify(name: str, args: tuple[Expr, ...], attrs: tuple) -> Expr | None:
    rule = _RULES.get(name)
    return rule(args, attrs) if rule else None


def _add(args: tuple[Expr, ...], attrs: tuple) -> Expr | None:
    a, b = args
    for one, other in ((a, b), (b, a)):
        if _is(one, 0) and _shaped(other, args):
            return other
    if b.op == "neg":
        return apply("sub", a, b.args[0])
    if a.op == "neg":
        return apply("sub", b, a.args[0])
    return None


def _sub(args: tuple[Expr, ...], attrs: tuple) -> Expr | None:
    a, b = args
    if _is(b, 0) and _shaped(a, args):
        return a
    if _is(a, 0) and _shaped(b, args):
        return apply("neg", b)
    return apply("add", a, b.args[0]) if b.op == "neg" else None


def _mul(args: tuple[Expr, ...], attrs: tuple) -> Expr | None:
    a, b = args
    if a is b:
        return apply("square", a)
    for one, other in ((a, b), (b, a)):
        if _is(one, 0) and _shaped(one, args):
            return one
        if _is(one, 1) and _shaped(other, args):
            return other
        if _is(one, -1) and _shaped(other, args):
            return apply("neg", other)
        if one.op == "neg":
            return apply("neg", apply("mul", one.args[0], other))
        if (
            other.op == "where" and not one.is_pair and one.feature is None and _is(other.args[2], 0)
        ):  # push factors under a mask
            return apply("where", other.args[0], apply("mul", other.args[1], one), other.args[2])
        if other.op == "mul" and other.is_pair and not one.is_pair and one.feature is None and one.dtype == "float":
            for pair, number in (other.args, other.args[::-1]):
                if pair.is_pair and _joins(number, one):  # one factor per pair instead of two
                    return apply("mul", pair, apply("mul", number, one))
    return None


def _joins(a: Expr, b: Expr) -> bool:
    """Whether two numbers are multiplied once, outside the pairs; a ``decay`` stays beside its exponential."""
    if a.is_pair or a.feature is not None or a.dtype != "float" or "decay" in (a.op, b.op):
        return False
    return not ((a.rows and b.cols) or (a.cols and b.rows))


def _div(args: tuple[Expr, ...], attrs: tuple) -> Expr | None:
    a, b = args
    if _is(a, 0) and _shaped(a, args):
        return ZERO
    return a if _is(b, 1) and _shaped(a, args) and a.dtype == "float" else None


def _neg(args: tuple[Expr, ...], attrs: tuple) -> Expr | None:
    (x,) = args
    if x.op == "neg":
        return x.args[0]
    return apply("sub", x.args[1], x.args[0]) if x.op == "sub" else None


def _pow(args: tuple[Expr, ...], attrs: tuple) -> Expr | None:
    x, n = args
    simple = {2: "square", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
    x = apply("cast", x, to="float") if n.dtype == "float" and x.op != "const" else x
    if n.op == "const" and n.const in simple:
        return apply(simple[n.const], x)
    if x.dtype == "int" and n.dtype == "int" and n.const in range(2, 9):  # whole numbers stay whole
        return apply("mul", x, apply("pow", x, n.const - 1))
    return x if _is(n, 1) else None


def _where(args: tuple[Expr, ...], attrs: tuple) -> Expr | None:
    c, a, b = args
    if c.dtype != "bool":
        return apply("where", apply("cast", c, to="bool"), a, b)
    chosen = {True: a, False: b}.get(c.const) if c.op == "const" else a if a is b and a.axes == join(args) else None
    if chosen is not None and chosen.dtype == widest((a, b)):
        return chosen
    if a.op == "where" and a.args[0] is c:
        return apply("where", c, a.args[1], b)
    if b.op == "where" and b.args[0] is c:
        return apply("where", c, a, b.args[2])
    if _is(b, -math.inf) and a.op == "where" and _is(a.args[2], -math.inf) and _joined(c) and _joined(a.args[0]):
        return apply("where", apply("logical_and", c, a.args[0]), a.args[1], b)  # hidden twice is hidden once
    return None


def _joined(c: Expr) -> bool:
    """Whether a condition may become one with another: both are known of whole tiles, and neither is a gather's."""
    given = any((e.is_pair and e.op not in PRIMITIVES) or e.op in DRAWS for e in topological([c]))
    gathers = c.op == "eq" and any(a.op in ("row_index", "col_index") for a in c.args)
    return c.feature is None and not given and not gathers


def _logical(neutral: bool) -> Any:
    def rule(args: tuple[Expr, ...], attrs: tuple) -> Expr | None:
        for one, other in (args, args[::-1]):
            if one.op == "const":
                return other if bool(one.const) is neutral else const(not neutral)
        return args[0] if args[0] is args[1] else None

    return rule


_RULES = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "neg": _neg,
    "pow": _pow,
    "where": _where,
    "logical_and": _logical(True),
    "logical_or": _logical(False),
    "logical_not": lambda args, attrs: args[0].args[0] if args[0].op == "logical_not" else None,
    "cast": lambda args, attrs: args[0] if args[0].dtype == attrs[0] else None,
}


# Operations on features -------------------------------------------------------------------------------------


def terms(x: Expr) -> list[Term] | None:
    """Write a vector as Σ number × row vector × column vector; None where it is not of that form."""
    if x.feature is None:
        return [(x, None, None)]
    if not x.is_pair:
        return [(ONE, None, x)] if x.cols else [(ONE, x, None)]
    if x.op in ("add", "sub"):
        left, right = terms(x.args[0]), terms(x.args[1])
        if left is None or right is None:
            return None
        return left + (_scaled(right, const(-1.0)) if x.op == "sub" else right)
    if x.op == "neg":
        inner = terms(x.args[0])
        return inner and _scaled(inner, const(-1.0))
    if x.op == "mul":
        left, right = terms(x.args[0]), terms(x.args[1])
        return left and right and [_times(a, b) for a in left for b in right]
    if x.op == "div":
        left = terms(x.args[0])
        right = terms(apply("reciprocal", x.args[1]))
        return left and right and [_times(a, b) for a in left for b in right]
    if x.op == "where" and x.args[0].feature is None:
        c, left, right = x.args[0], terms(x.args[1]), terms(x.args[2])
        if left is None or right is None:
            return None
        chosen = [(apply("where", c, k, 0.0), u, v) for k, u, v in left if not _is(k, 0)]
        return chosen + [(apply("where", c, 0.0, k), u, v) for k, u, v in right if not _is(k, 0)]
    if x.op == "spread":
        return [(x.args[0], None, None)]
    if x.op == "cast" and x.args[0].dtype == "float":
        return terms(x.args[0])
    return None


def gap_form(e: Expr) -> tuple[Expr, Expr, Expr] | None:
    """A vector per pair as number × (row vector - column vector), if it is one: the three of them."""
    if e.op == "neg":
        inner = gap_form(e.args[0])
        return inner and (apply("neg", inner[0]), inner[1], inner[2])
    if e.op == "mul":
        for number, vector in (e.args, e.args[::-1]):
            inner = gap_form(vector) if number.feature is None else None
            if inner is not None:
                return apply("mul", inner[0], number), inner[1], inner[2]
    if e.op == "sub" and all(a.feature is not None and not a.is_pair for a in e.args):
        a, b = e.args
        if a.rows and b.cols:
            return ONE, a, b
        if a.cols and b.rows:
            return const(-1.0), b, a
    return None


def _scaled(some: list[Term], factor: Expr) -> list[Term]:
    return [(apply("mul", k, factor), u, v) for k, u, v in some]


def _times(a: Term, b: Term) -> Term:
    return apply("mul", a[0], b[0]), _vector_product(a[1], b[1]), _vector_product(a[2], b[2])


def _vector_product(u: Expr | None, v: Expr | None) -> Expr | None:
    return u if v is None else v if u is None else apply("mul", u, v)


def fsum(x: Expr) -> Expr:
    """The sum over a vector's features; a number."""
    if x.feature is None:
        raise UnreducedError(
            detail=f"a sum over features was asked of {x!r}, which is one number",
            fix="To fold over columns or rows, use mr.sum(...)",
        )
    if x.op == "spread":
        return apply("mul", x.args[0], size(str(x.feature)))
    if not x.is_pair:
        return _feature_node("fsum", x)
    if x.op == "square" and x.args[0].op == "sub":
        sides = _row_and_col(*x.args[0].args)
        if sides is not None:
            return sqdist(*sides)
    if x.op in ("add", "sub"):  # splitting keeps each part in its best form
        left, right = (fsum(a if a.feature is not None else spread(a, x.feature)) for a in x.args)
        return apply(x.op, left, right)
    parts = terms(x)
    if parts is None:
        return _feature_node("fsum", x)
    total = ZERO
    for k, u, v in parts:
        if u is not None and v is not None:
            inner = dot(u, v)
        elif u is None and v is None:
            inner = size(str(x.feature))
        else:
            inner = _feature_node("fsum", u if u is not None else v)  # type: ignore[arg-type]
        total = apply("add", total, apply("mul", k, inner))
    return total


def _feature_node(op: str, x: Expr) -> Expr:
    return node(op, (x,), (), rows=x.rows, cols=x.cols, feature=None, dtype=x.dtype)


def _row_and_col(a: Expr, b: Expr) -> tuple[Expr, Expr] | None:
    """A row's vector and a column's over one letter, in that order; None for any other two."""
    if a.feature is None or a.feature != b.feature or a.is_pair or b.is_pair:
        return None
    return (a, b) if a.rows and b.cols else (b, a) if a.cols and b.rows else None


def dot(a: Expr, b: Expr) -> Expr:
    """⟨a, b⟩ over their common features."""
    for side in (a, b):
        if side.feature is None:
            raise ShapeError(
                detail=f"@ contracts two vectors, but {side!r} is one number",
                fix='Declare it as a vector, for example Row["f"], or use * for a product of numbers',
            )
    if a.feature != b.feature:
        raise ShapeError(
            detail=f'@ contracts a vector over "{a.feature}" with a vector over "{b.feature}"',
            fix="Give both the same letter",
        )
    sides = _row_and_col(a, b)
    if sides is not None:
        return node("dot", sides, (), rows=True, cols=True, feature=None, dtype=widest(sides))
    return fsum(apply("mul", a, b))


def sqdist(a: Expr, b: Expr) -> Expr:
    """|a - b|², with care for close points."""
    sides = _row_and_col(a, b)
    if sides is not None:
        return node("sqdist", sides, (), rows=True, cols=True, feature=None, dtype="float")
    return fsum(apply("square", apply("sub", a, b)))


def spread(x: Expr, feature: Feature) -> Expr:
    """A number, repeated over the features of a letter."""
    return node("spread", (x,), (feature,), rows=x.rows, cols=x.cols, feature=feature, dtype=x.dtype)


def component(x: Expr, k: int) -> Expr:
    """The k-th feature of a vector; of a pair vector, by taking the component of its parts."""
    if x.feature is None:
        return x
    if x.is_pair and x.op in PRIMITIVES:
        names = PRIMITIVES[x.op].attributes
        return apply(x.op, *(component(a, k) for a in x.args), **dict(zip(names, x.attrs, strict=True)))
    if x.op == "spread":
        return x.args[0]
    return node("component", (x,), (k,), rows=x.rows, cols=x.cols, feature=None, dtype=x.dtype)


def feature_extreme(x: Expr, largest: bool) -> Expr:
    """The largest or smallest feature of a one-sided vector."""
    if x.is_pair:
        raise UnreducedError(
            detail="the largest feature of a vector per pair was asked for",
            fix="Only sums walk the features of a pair; take the extreme of a row or column vector, or use .sum()",
        )
    return _feature_node("famax" if largest else "famin", x)


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
    if e.op == "reduce":
        return reduce_node(e.attrs[0], e.attrs[1], e.attrs[2], args)
    rows, cols, _ = join(args)
    return node(e.op, args, e.attrs, rows=rows, cols=cols, feature=e.feature, dtype=e.dtype)


def substitute(roots: tuple[Expr, ...], replace: dict[Expr, Expr]) -> tuple[Expr, ...]:
    """Replace nodes (and everything above them is rebuilt and simplified)."""
    done: dict[Expr, Expr] = {}
    for e in topological(roots, stop=lambda e: e in replace):
        done[e] = replace[e] if e in replace else rebuild(e, tuple(done[a] for a in e.args))
    return tuple(done[r] for r in roots)

"""Expressions: the nodes of a traced pair program, and nothing about how they run; elementwise ones are simplified as
they are built.

A node knows which axes it lives on (rows, columns, features) and which class of number it is. Nodes are interned:
equal expressions are the same object, so sharing needs no separate pass and ``is`` is equality. Operators are *not*
overloaded here (that is ``symbol.py``'s business), so nodes are safe in sets and as keys.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..errors import ShapeError
from .philox import DRAWS
from .primitives import PRIMITIVES

Feature = str | int | None  # the letter (or the fixed size) of a vector's features; None for one number


def letters(feature: Feature) -> tuple[str, ...]:
    """The letters of a feature: none of a number, one of a vector, two of several vectors (``several.py``).

    >>> letters(None), letters("f"), letters("h*f")
    ((), ('f',), ('h', 'f'))
    """
    return () if feature is None else tuple(str(feature).split("*"))


def are_several(e: Expr) -> bool:
    """Whether a value is several vectors."""
    return "*" in str(e.feature)


_SHOWN = 200  # characters of an expression in a message
_CLASS_ORDER = {"bool": 0, "int": 1, "float": 2}


class Expr:
    """One node: ``op`` applied to ``args`` with static ``attrs``; its axes, number class and depth are derived once."""

    __slots__ = ("__weakref__", "args", "attrs", "cols", "depth", "dtype", "feature", "op", "rows")

    op: str
    args: tuple[Expr, ...]
    attrs: tuple[Any, ...]
    rows: bool
    cols: bool
    feature: Feature
    dtype: str
    depth: int  # nodes on the longest path down to a node without arguments

    @property
    def is_pair(self) -> bool:
        return self.rows and self.cols

    @property
    def is_stored(self) -> bool:
        """Whether it is a vector stored as small numbers, which engines widen tile by tile (``stored_vectors.py``)."""
        return self.op in ("input", "leaf") and len(self.attrs) > 1

    @property
    def packing(self) -> tuple[int, int] | None:
        """Of a stored vector that has not 8 bits and one scale: its bits, and how many features have a scale of their
        own, which is its argument (0: all have the same, which is not)."""
        return (self.attrs[2], self.attrs[3]) if self.is_stored and len(self.attrs) > 2 else None

    @property
    def axes(self) -> tuple[bool, bool, Feature]:
        return self.rows, self.cols, self.feature

    @property
    def const(self) -> Any:
        """The Python value of a constant, else None."""
        return self.attrs[0] if self.op == "const" else None

    def __repr__(self) -> str:
        """The expression as text, cut after ``_SHOWN`` characters: written out, shared nodes repeat without bound."""
        text = ""
        waiting: list[Expr | str] = [self]
        while waiting and len(text) <= _SHOWN:
            item = waiting.pop()
            if isinstance(item, str):
                text += item
            elif item.op == "const":
                text += repr(item.attrs[0])
            elif item.op in ("input", "leaf"):
                text += str(item.attrs[0])
            else:
                inside: list[Expr | str] = [*item.args, *(str(a) for a in item.attrs if a is not None)]
                commas: list[Expr | str] = [part for one in inside for part in (", ", one)]
                waiting += reversed([f"{item.op}(", *commas[1:], ")"])
        return text if not waiting and len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


_lock = threading.Lock()
_interned: weakref.WeakValueDictionary[tuple, Expr] = weakref.WeakValueDictionary()


def node(
    op: str, args: tuple[Expr, ...] = (), attrs: tuple = (), *, rows: bool, cols: bool, feature: Feature, dtype: str
) -> Expr:
    """The one constructor: returns the existing equal node if there is one."""
    typed_attrs = tuple((type(a), a) for a in attrs)  # 1, 1.0 and True are different constants
    key = (op, tuple(map(id, args)), typed_attrs, rows, cols, feature, dtype)
    with _lock:
        found = _interned.get(key)
        if found is None:
            found = object.__new__(Expr)
            found.op, found.args, found.attrs = op, args, attrs
            found.rows, found.cols, found.feature, found.dtype = rows, cols, feature, dtype
            found.depth = 1 + max((a.depth for a in args), default=0)
            _interned[key] = found
        return found


def const(value: float | int | bool) -> Expr:
    dtype = "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float"
    if value != value:  # NaN is not equal to itself: give it a name that is
        return node("nan", (), (), rows=False, cols=False, feature=None, dtype="float")
    if dtype == "float" and value == 0.0:
        value = 0.0  # -0.0 and 0.0 would be equal keys
    return node("const", (), (value,), rows=False, cols=False, feature=None, dtype=dtype)


def size(axis: str) -> Expr:
    """The length of ``rows``, ``cols`` or of a feature letter, known when the op is called."""
    return node("size", (), (axis,), rows=False, cols=False, feature=None, dtype="int")


def index(axis: str) -> Expr:
    """``row_index``, ``col_index`` or ``batch_index``."""
    return node(f"{axis}_index", (), (), rows=axis == "row", cols=axis == "col", feature=None, dtype="int")


def join(args: Iterable[Expr]) -> tuple[bool, bool, Feature]:
    """The axes of an elementwise result: the union of the arguments' axes."""
    rows = cols = False
    feature: Feature = None
    for a in args:
        rows, cols = rows or a.rows, cols or a.cols
        if a.feature is not None and (feature is None or not is_counted(a.feature)):
            feature = a.feature
    return rows, cols, feature


def is_counted(feature: Feature) -> bool:
    """Whether features are the places of a top-k: as many as were asked for, and of no letter of their own."""
    return isinstance(feature, str) and feature.startswith("#")


def fit(one: Feature, other: Feature) -> bool:
    """Whether two vectors may be combined feature by feature: those over the places of a top-k fit any letter of that
    size, which a call checks where the letter is a name."""
    if one == other:
        return True
    counted, letter = (one, other) if is_counted(one) else (other, one)
    return is_counted(counted) and not is_counted(letter) and str(letter) in (str(counted)[1:], *_split_letter(letter))


def _split_letter(letter: Feature) -> tuple[str, ...]:
    return () if letter is None or str(letter).isdigit() else (str(letter),)


def widest(args: Iterable[Expr]) -> str:
    """The number class of an arithmetic result."""
    return max((a.dtype for a in args), key=_CLASS_ORDER.__getitem__)


def is_whole_power(x: Expr, n: Expr) -> bool:
    """Whether x ** n is an integer, as torch's power of integer tensors is: not where the exponent is known to be
    negative, and not for two numbers given at the call, which Python would raise to a fraction."""
    if widest((x, n)) != "int":
        return False
    return n.const >= 0 if n.op == "const" else any(join((x, n))[:2])


def reduce_node(kind: str, over: str, params: tuple, fields: tuple[Expr, ...]) -> Expr:
    """A reduction of ``fields`` over ``"cols"``, ``"rows"`` or ``"both"``; its results are reached through
    :func:`result`."""
    rows, cols, _ = (True, True, None) if kind in ("pick", "picks") else join(fields)  # the other side is read by index
    return node(
        "reduce",
        fields,
        (kind, over, params),
        rows=rows and over not in ("rows", "both"),
        cols=cols and over not in ("cols", "both"),
        feature=None,
        dtype="float",
    )


def result(reduction: Expr, k: int, feature: Feature, dtype: str) -> Expr:
    """The k-th result of a reduction."""
    return node("result", (reduction,), (k,), rows=reduction.rows, cols=reduction.cols, feature=feature, dtype=dtype)


def topological(roots: Iterable[Expr], stop: Callable[[Expr], bool] | None = None) -> list[Expr]:
    """Every node under ``roots`` once, arguments first; nodes where ``stop`` holds are listed but not entered."""
    entered: set[Expr] = set()
    order: dict[Expr, None] = {}
    stack = list(roots)[::-1]
    while stack:
        e = stack.pop()
        if e in entered:  # all its arguments are listed, or it is itself
            order[e] = None
            continue
        entered.add(e)
        if not e.args or (stop is not None and stop(e)):
            order[e] = None
        else:
            stack.append(e)
            stack += e.args[::-1]
    return list(order)


# Elementwise operations, simplified as they are built.
#
# :func:`apply` is the one constructor of elementwise nodes. It folds constants, drops neutral elements and moves
# factors to where they cost least. A rule looks at a bounded number of nodes, so that building an expression of n
# operations takes O(n) time however its subexpressions are shared. The operations on features are in
# ``constructors.py``.


ZERO, ONE = const(0.0), const(1.0)
_NESTED = 4  # a factor is pushed under at most so many nested masks: each of them is built again


def lift(value: Any) -> Expr:
    return value if isinstance(value, Expr) else const(value)


def apply(name: str, *values: Any, **attributes: Any) -> Expr:
    """An elementwise primitive on expressions or Python numbers, simplified."""
    args = tuple(lift(v) for v in values)
    features = list(dict.fromkeys(a.feature for a in args if a.feature is not None))
    if len(features) > 1 and not all(fit(a, b) for a, b in itertools.combinations(features, 2)):
        one, other = sorted(map(str, features))[:2]
        raise ShapeError(
            detail=f'{name} combines a vector over "{one}" with a vector over "{other}"',
            fix="Elementwise arithmetic needs equal letters; use @ to contract, or declare both with one letter"
            + (", or multiply the products: w * (x @ y)" if "*" in one + other else ""),
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


def is_constant(e: Expr, value: float) -> bool:
    """Whether an expression is this number."""
    return e.op == "const" and e.dtype != "bool" and e.attrs[0] == value


def _has_result_shape(e: Expr, like: tuple[Expr, ...]) -> bool:
    """Whether ``e`` already has all the axes and the number class of the result of combining ``like``."""
    return e.axes == join(like) and e.dtype == widest(like)


def _simplify(name: str, args: tuple[Expr, ...], attrs: tuple) -> Expr | None:
    rule = _RULES.get(name)
    return rule(args, attrs) if rule else None


def _are_all_bool(args: tuple[Expr, ...]) -> bool:
    return all(a.dtype == "bool" for a in args)


def _add(args: tuple[Expr, ...], attrs: tuple) -> Expr | None:
    a, b = args
    if _are_all_bool(args):
        return apply("logical_or", a, b)
    for one, other in ((a, b), (b, a)):
        if is_constant(one, 0) and _has_result_shape(other, args):
            return other
    if b.op == "neg":
        return apply("sub", a, b.args[0])
    if a.op == "neg":
        return apply("sub", b, a.args[0])
    if _is_mask(a) and _is_mask(b) and a.args[0] is b.args[0] and _hides_pairs(a.args[0], a):
        return apply("where", a.args[0], apply("add", a.args[1], b.args[1]), a.args[2])
    return None


def _sub(args: tuple[Expr, ...], attrs: tuple) -> Expr | None:
    a, b = args
    if is_constant(b, 0) and _has_result_shape(a, args):
        return a
    if is_constant(a, 0) and _has_result_shape(b, args):
        return apply("neg", b)
    if _is_mask(a) and _is_mask(b) and a.args[0] is b.args[0] and _hides_pairs(a.args[0], a):
        return apply("where", a.args[0], apply("sub", a.args[1], b.args[1]), a.args[2])
    return apply("add", a, b.args[0]) if b.op == "neg" else None


def _mul(args: tuple[Expr, ...], attrs: tuple) -> Expr | None:
    a, b = args
    if _are_all_bool(args):
        return apply("logical_and", a, b)
    if a is b:
        return apply("square", a)
    for one, other in ((a, b), (b, a)):
        if is_constant(one, 0) and _has_result_shape(one, args):
            return one
        if is_constant(one, 1) and _has_result_shape(other, args):
            return other
        if is_constant(one, -1) and _has_result_shape(other, args):
            return apply("neg", other)
        if one.op == "neg":
            return apply("neg", apply("mul", one.args[0], other))
        hides = _is_mask(other) and (not one.is_pair or _hides_pairs(other.args[0], one))
        if one.feature is None and hides:  # push factors under a mask
            return apply("where", other.args[0], apply("mul", other.args[1], one), other.args[2])
        if other.op == "mul" and other.is_pair and not one.is_pair and one.feature is None and one.dtype == "float":
            for pair, number in (other.args, other.args[::-1]):
                if pair.is_pair and _can_multiply_first(number, one):  # one factor per pair instead of two
                    return apply("mul", pair, apply("mul", number, one))
    return None


def _hides_pairs(c: Expr, value: Expr) -> bool:
    """True for a condition that says which pairs exist (listed ones, or those of one packed sequence), where ``value``
    may be infinite or NaN for a pair that does not: the 0 that stands for such a pair is not to be multiplied by it."""
    if c.op in ("logical_and", "stretches"):
        return any(_hides_pairs(a, value) for a in c.args)
    sides = [(a.rows, a.cols) for a in c.args if a.op in ("leaf", "input") and a.dtype == "int" and a.feature is None]
    exists = c.op == "listed" or (c.op == "eq" and sides == [(True, False), (False, True)])
    return exists and not _is_bounded(value)


# What a number may be where what users give is finite: a few units, any finite number, infinite, or NaN.
_BOUNDED, _FINITE, _INFINITE, _NAN = range(4)
_FUNCTIONS = ("tanh", "sigmoid", "erf", "sign")
_worst: weakref.WeakKeyDictionary[Expr, int] = weakref.WeakKeyDictionary()  # answers of :func:`_find_worst`


def _is_bounded(value: Expr) -> bool:
    """Whether an expression is a small number whatever rows and columns meet, also such as have no other pair: results
    of theirs may be infinite."""
    for e in topological([value], stop=_worst.__contains__):
        if e not in _worst:
            _worst[e] = _find_worst(e)
    return _worst[value] == _BOUNDED


def _find_worst(e: Expr) -> int:
    args = [_worst[a] for a in e.args]
    most = max(args, default=_BOUNDED)
    if e.dtype != "float":
        return _BOUNDED
    if e.op == "const":
        return _BOUNDED if math.isfinite(e.const) else _INFINITE
    if e.op in ("dot", "sqdist"):  # of vectors, which users give
        return _FINITE
    if not args:  # what is given for a row or a column may be a result of an earlier pass
        return _INFINITE if e.rows or e.cols else _FINITE
    if e.op in _FUNCTIONS:
        return _BOUNDED if most < _NAN else _NAN
    if e.op in ("sin", "cos"):
        return _BOUNDED if most <= _FINITE else _NAN
    if e.op == "exp":
        return _INFINITE if most < _NAN else _NAN
    if e.op in ("neg", "where"):
        return most
    if e.op in ("add", "sub"):
        return _NAN if args.count(_INFINITE) > 1 else most
    if not (e.rows or e.cols):  # of numbers that users give
        return _FINITE
    if e.op == "div" and not (e.args[1].rows or e.args[1].cols):
        return args[0]
    scaled = e.op == "mul" and any(a.op == "const" and a.const for a in e.args)
    return most if e.op in ("mul", "square") and (most <= _FINITE or scaled) else _NAN


def _is_mask(e: Expr) -> bool:
    """True for ``where(c, x, 0)`` that is not nested too deeply for a factor to be moved inside."""
    if e.op != "where" or not is_constant(e.args[2], 0):
        return False
    nested = 0
    while e.op == "where" and is_constant(e.args[2], 0) and nested <= _NESTED:
        e, nested = e.args[1], nested + 1
    return nested <= _NESTED


def _can_multiply_first(a: Expr, b: Expr) -> bool:
    """True where two numbers can be multiplied once, outside the pairs. A ``decay`` stays beside its exponential."""
    if a.is_pair or a.feature is not None or a.dtype != "float" or "decay" in (a.op, b.op):
        return False
    return not ((a.rows and b.cols) or (a.cols and b.rows))


def _div(args: tuple[Expr, ...], attrs: tuple) -> Expr | None:
    a, b = args
    if b.is_pair and b.feature is None and _is_mask(a) and _hides_pairs(a.args[0], b):
        return apply("where", a.args[0], apply("div", a.args[1], b), a.args[2])
    if is_constant(a, 0) and _has_result_shape(a, args):
        return ZERO
    return a if is_constant(b, 1) and _has_result_shape(a, args) and a.dtype == "float" else None


def _neg(args: tuple[Expr, ...], attrs: tuple) -> Expr | None:
    (x,) = args
    if x.op == "neg":
        return x.args[0]
    if _is_mask(x) and _hides_pairs(x.args[0], x):
        return apply("where", x.args[0], apply("neg", x.args[1]), x.args[2])
    return apply("sub", x.args[1], x.args[0]) if x.op == "sub" else None


def _pow(args: tuple[Expr, ...], attrs: tuple) -> Expr | None:
    x, n = args
    simple = {2: "square", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
    x = apply("cast", x, to="float") if n.dtype == "float" and x.op != "const" else x
    if n.op == "const" and n.const in simple:
        return apply(simple[n.const], x)
    if x.dtype == "int" and n.dtype == "int" and n.const in range(2, 9):  # whole numbers stay whole
        return apply("mul", x, apply("pow", x, n.const - 1))
    return x if is_constant(n, 1) else None


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
    hidden_twice = a.op == "where" and is_constant(b, -math.inf) and is_constant(a.args[2], -math.inf)
    if hidden_twice and _can_join_conditions(c) and _can_join_conditions(a.args[0]):
        return apply("where", apply("logical_and", c, a.args[0]), a.args[1], b)
    return None


def _can_join_conditions(c: Expr) -> bool:
    """True where a condition can be joined with another: its range on a tile is known, and it is not a gather's."""
    gathers = c.op == "eq" and any(a.op in ("row_index", "col_index") for a in c.args)
    return c.feature is None and not gathers and _has_known_range(c)


_known: weakref.WeakKeyDictionary[Expr, bool] = weakref.WeakKeyDictionary()  # answers of :func:`_has_known_range`


def _has_known_range(c: Expr) -> bool:
    """Whether an expression is arithmetic on what lives on one side, so that its range on a tile is known."""
    for e in topological([c], stop=_known.__contains__):
        if e not in _known:
            given = (e.is_pair and e.op not in PRIMITIVES) or e.op in DRAWS
            _known[e] = not given and all(_known[a] for a in e.args)
    return _known[c]


def _logical(neutral: bool) -> Any:
    def rule(args: tuple[Expr, ...], attrs: tuple) -> Expr | None:
        for one, other in (args, args[::-1]):
            if one.op == "const":
                return other if bool(one.const) is neutral else const(not neutral)
        return args[0] if args[0] is args[1] else None

    return rule


def _truths_as(name: str) -> Any:
    """An operation that is a logical one where all its arguments are truth values."""
    return lambda args, attrs: apply(name, *args) if _are_all_bool(args) else None


_RULES = {
    "relu": lambda args, attrs: apply("maximum", args[0], 0) if args[0].dtype == "int" else None,
    "minimum": _truths_as("logical_and"),
    "maximum": _truths_as("logical_or"),
    "sign": lambda args, attrs: args[0] if _are_all_bool(args) else None,
    "square": lambda args, attrs: apply("square", apply("cast", args[0], to="int")) if _are_all_bool(args) else None,
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
    **{f"bitwise_{name}": _truths_as(f"logical_{name}") for name in ("and", "or", "xor", "not")},
    "cast": lambda args, attrs: args[0] if args[0].dtype == attrs[0] else None,
}

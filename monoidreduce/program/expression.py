"""Expressions: the nodes of a traced pair program, and nothing about how they run.

A node knows which axes it lives on (rows, columns, features) and which class of number it is. Nodes are interned:
equal expressions are the same object, so sharing needs no separate pass and ``is`` is equality. Operators are *not*
overloaded here (that is ``symbol.py``'s business), so nodes are safe in sets and as keys.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

Feature = str | int | None  # the letter (or the fixed size) of a vector's features; None for one number

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
    return is_counted(counted) and not is_counted(letter) and str(letter) in (str(counted)[1:], *_names(letter))


def _names(letter: Feature) -> tuple[str, ...]:
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
    rows, cols, _ = (True, True, None) if kind in ("pick", "picks") else join(fields)  # the other side is met by index
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

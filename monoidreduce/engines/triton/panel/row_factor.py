"""Weights taken apart: what is known of a pair at once, and what of its row only when all of the row was seen.

A gradient through a softmax has weights exp(s - peak) / total × g - [column = target] × g. The exponential can be
written as soon as its product is there, measured from a guess of the peak; the total, and all that is made of it, comes
late. Since it is one number per row it can multiply the other operands of the sums instead of the pairs, and what
stands in one column alone is added to the sums (``label_corrections.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from ....program.constructors import ONE, ZERO, apply, substitute
from ....program.expression import Expr, const, index, topological
from .fuse_stages import Joint, counted

_MANY = 16  # terms, beyond which nothing is distributed


@dataclass(frozen=True)
class Late:
    """A weight as ``late`` × ``early``, plus ``hit`` in the column ``target``; ``power``: exp(logit - peak).

    In that column both parts may nearly cancel: their sum is taken where it is exact, and not among the others."""

    early: Expr  # per pair, of leaves and the power
    power: Expr
    late: Expr  # per row
    target: Expr | None
    hit: Expr | None


@dataclass(frozen=True)
class Own:
    """What stands in each row's own column, ``target``: the whole weight there, some of it in no other column."""

    weight: Expr
    target: Expr


def distinct(target: Expr | None) -> bool:
    """Whether no two rows have the same target: it is the row's own index."""
    return target is not None and target in (index("row"), *counted("row").values())


def apart(weight: Expr) -> tuple[Expr, Own] | None:
    """A weight without each row's own column, and what stands there; None where rows have none, or several."""
    hits = [e for e in topological([weight]) if _is_hit(e)]
    targets = {_target(e) for e in hits}
    if len(targets) != 1:
        return None
    target = targets.pop()
    (others,) = substitute((weight,), dict.fromkeys(hits, ZERO))
    return apply("where", apply("eq", index("col"), target), ZERO, others), Own(weight, target)


@dataclass(frozen=True)
class _Term:
    pairs: tuple[Expr, ...] = ()
    rows: tuple[Expr, ...] = ()


@functools.lru_cache(maxsize=1024)
def late(whole: Joint) -> Late | None:
    """The one weight of some stages taken apart, if their folds are a softmax of numbers and picks."""
    folds = [r for fold in whole.folds for r in fold]
    soft = [r for r in folds if r.attrs[0] == "soft"]
    if len(whole.weights) != 1 or len(soft) != 1 or len(soft[0].args) != 1 or soft[0] is not whole.folds[0][0]:
        return None
    if any(whole.folds[1:]) or any(r.attrs[0] not in ("soft", "pick") for r in folds):
        return None
    results = {n for names in whole.names for n in names}
    power = apply("exp", apply("sub", soft[0].args[0], whole.names[0][2]))
    terms = _terms(whole.weights[0], power, results)
    if terms is None:
        return None
    hits = [t for t in terms if len(t.pairs) == 1 and _is_hit(t.pairs[0])]
    others = [t for t in terms if t not in hits]
    targets = {_target(t.pairs[0]) for t in hits} | {r.args[0] for r in folds if r.attrs[0] == "pick"}
    if len(others) != 1 or len(targets) > 1 or power not in others[0].pairs or any(map(_is_hit, others[0].pairs)):
        return None
    hit = [_product((t.pairs[0].args[1], *t.rows)) for t in hits]
    return Late(
        _product(others[0].pairs),
        power,
        _product(others[0].rows),
        targets.pop() if targets else None,
        functools.reduce(lambda a, b: apply("add", a, b), hit) if hit else None,
    )


def _terms(e: Expr, power: Expr, results: set[Expr]) -> tuple[_Term, ...] | None:
    """An expression as a sum of products, each of numbers per pair that need no result and of numbers per row."""
    dependent: set[Expr] = set()  # what needs a result
    for n in topological([e]):
        if n in results or not dependent.isdisjoint(n.args):
            dependent.add(n)
    found: dict[Expr, tuple[_Term, ...] | None] = {}
    for n in topological([e], stop=lambda n: n is power or not _is_sum(n)):
        terms = _terms_of(n, power, n in dependent, found)
        found[n] = None if terms is None or len(terms) >= _MANY else terms
    return found[e]


def _is_sum(e: Expr) -> bool:
    """Whether the terms of an expression are made of those of its arguments."""
    inside = e.op in ("add", "sub", "mul", "neg") or (e.op == "div" and not e.args[1].cols)
    return inside and (e.is_pair or e.cols)


def _terms_of(
    e: Expr, power: Expr, dependent: bool, found: dict[Expr, tuple[_Term, ...] | None]
) -> tuple[_Term, ...] | None:
    """The terms of a node, given those of its arguments."""
    if not e.is_pair and not e.cols:
        return (_Term(rows=(e,)),)
    if e is power or _is_hit(e):
        return (_Term(pairs=(e,)),)
    if not _is_sum(e):
        return None if dependent else (_Term(pairs=(e,)),)
    first = found[e.args[0]]
    if first is None or e.op == "neg":
        return first and tuple(map(_negated, first))
    if e.op == "div":
        part = apply("div", ONE, e.args[1])
        return tuple(_Term(t.pairs, (*t.rows, part)) for t in first)
    second = found[e.args[1]]
    if second is None:
        return None
    if e.op != "mul":
        return (*first, *(second if e.op == "add" else map(_negated, second)))
    if len(first) * len(second) >= _MANY:
        return None
    return tuple(_Term(s.pairs + t.pairs, s.rows + t.rows) for s in first for t in second)


def _negated(t: _Term) -> _Term:
    return _Term(t.pairs, (*t.rows, const(-1.0)))


def _is_hit(e: Expr) -> bool:
    """Whether an expression is a row's number in one column, and 0 in all others."""
    if e.op != "where" or e.args[2].const != 0 or e.args[1].cols or e.args[0].op != "eq":
        return False
    return any(a.op == "col_index" and not b.cols for a, b in (e.args[0].args, e.args[0].args[::-1]))


def _target(hit: Expr) -> Expr:
    a, b = hit.args[0].args
    return b if a.op == "col_index" else a


def _product(factors: Sequence[Expr]) -> Expr:
    return functools.reduce(lambda a, b: apply("mul", a, b), factors, ONE)

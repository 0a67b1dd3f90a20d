"""Weights of gradients as few numbers per row: ``w × (a₁ x₁ + a₂ x₂ + … + k)``.

Where a layer has several results of one softmax (attention beside its entropy and the expected distance), the cotangent
of a pair is a sum of terms ``w (g (x - mean))``, and each brings two numbers of its row. Multiplied out, all means are
one number, which is computed once a row: fewer numbers to load for every tile, and one multiplication a term.

``g x - g mean`` loses digits that ``g (x - mean)`` keeps where x is near its mean, so only gradients of 16-bit vectors
are written so: their weights are rounded to 16 bits afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

from .constructors import ONE, ZERO, apply, rebuild
from .expression import Expr, topological

_MANY = 8  # terms of a weight, at most


@dataclass(frozen=True)
class _Linear:
    """``factor × (Σ coefficient × atom + rest)``: atoms are numbers of pairs, coefficients and rest of one side."""

    factor: Expr | None
    atoms: tuple[tuple[Expr, Expr], ...] = ()
    rest: Expr = ZERO

    def scaled(self, by: Expr) -> _Linear:
        return _Linear(self.factor, tuple((a, apply("mul", c, by)) for a, c in self.atoms), apply("mul", self.rest, by))

    def added(self, other: _Linear, sign: str) -> _Linear:
        found = dict(self.atoms)
        for a, c in other.atoms:
            found[a] = apply(sign, found.get(a, ZERO), c)
        return _Linear(self.factor, tuple(found.items()), apply(sign, self.rest, other.rest))

    def numbers(self) -> set[Expr]:
        return {c for c in (*(c for _, c in self.atoms), self.rest) if c.rows or c.cols}

    def write(self) -> Expr:
        total = self.rest
        for a, c in self.atoms:
            total = apply("add", total, apply("mul", c, a))
        return total if self.factor is None else apply("mul", self.factor, total)


def collect_weights(roots: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """Write the weights of sums with as few numbers per row or column as there are terms, where that is fewer."""
    done: dict[Expr, Expr] = {}
    for e in topological(roots):
        args = tuple(done[a] for a in e.args)
        if e.op == "reduce" and e.attrs[0] == "sum":
            args = tuple(map(_collect_sum, args))
        done[e] = rebuild(e, args)
    return tuple(done[r] for r in roots)


def _collect_sum(e: Expr) -> Expr:
    """What is summed: a weight, or a weight times a vector."""
    if e.feature is None:
        return _collect(e)
    if e.op == "mul" and e.args[0].feature is None and e.args[0].is_pair:
        return apply("mul", _collect(e.args[0]), e.args[1])
    return e


def _collect(e: Expr) -> Expr:
    forms: dict[Expr, _Linear | None] = {}
    for n in topological([e], stop=lambda n: not n.is_pair or _is_weight(n)):
        forms[n] = _decompose(n, [forms.get(a) for a in n.args])
    found = forms[e]
    if found is None or found.factor is None or not 2 <= len(found.atoms) <= _MANY:
        return e
    sides = {(n.rows, n.cols) for n in found.numbers()}
    under = topological([e], stop=lambda n: n is found.factor or not n.is_pair)
    before = {n for n in under if not n.is_pair and (n.rows or n.cols) and n is not found.factor}
    return found.write() if len(sides) == 1 and len(found.numbers()) < len(before) else e


def _decompose(e: Expr, parts: list[_Linear | None]) -> _Linear | None:
    """The form of an expression, given that of its arguments; None where it has none."""
    if not e.is_pair:
        return _Linear(None, (), e)
    if e.dtype != "float":
        return None
    if _is_weight(e):
        return _Linear(e, (), ONE)
    if e.op not in ("add", "sub", "mul", "neg"):
        return _Linear(None, ((e, ONE),))
    a, b = parts[0], parts[-1]
    if a is None or b is None or len(a.atoms) + len(b.atoms) > 2 * _MANY:
        return None
    if e.op == "neg":
        return a.scaled(apply("neg", ONE))
    if e.op in ("add", "sub"):
        return a.added(b, e.op) if a.factor is b.factor else None
    if (a.factor is not None and b.factor is not None) or (a.atoms and b.atoms):
        return None
    found = a.scaled(b.rest) if a.atoms else b.scaled(a.rest)
    return _Linear(a.factor or b.factor, found.atoms, found.rest)


def _is_weight(e: Expr) -> bool:
    """True for a softmax's weight: an exponential, and what it is divided by."""
    return e.op == "exp" or (e.op == "mul" and e.args[0].op == "exp" and e.args[1].op == "decay")

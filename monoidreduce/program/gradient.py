"""Gradients by closure: the backward of a fold is a fold, written in the same language.

Each reduction's pullback turns the cotangents of its results into cotangents of one pair's fields (Theorem 2.1);
``reverse_mode.py`` takes them back to the leaves; there they are summed over the axes that the leaf does not have, as
reductions (Corollary 2.1.1), those of what was given per pair are written out, and those of numbers that were looked
up in a table are summed entry by entry (``histogram``). The results ``P`` and their
cotangents are just more inputs, so the gradient program is again a program.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from ..reductions import KINDS, make
from . import constructors
from .constructors import ONE, ZERO, apply, rebuild
from .expression import Expr, node, topological
from .lower import Fold, find_same_sequence
from .reverse_mode import backpropagate
from .symbol import Symbol, calls_torch


@dataclass(frozen=True)
class FoldGradient:
    """The gradient of a fold, to be compiled: a program of its leaves, its results and their cotangents.

    ``wanted[k]``: whether leaf k's gradient is wanted; ``given[k]``: whether result k has a cotangent."""

    fold: Fold
    wanted: tuple[bool, ...]
    given: tuple[bool, ...]

    @functools.cached_property
    def _parts(self) -> tuple[list[Expr], list[Expr], list[Expr | None]]:
        return differentiate_fold(self.fold.pure, self.fold.leaves, self.wanted, self.given)

    @property
    def results(self) -> tuple[str, ...]:
        """The names of the inputs that stand for the fold's results."""
        return tuple(e.attrs[0] for e in self._parts[0])

    @property
    def cotangents(self) -> tuple[str, ...]:
        """The names of the inputs that stand for the cotangents of the results."""
        return tuple(e.attrs[0] for e in self._parts[1])

    @property
    def present(self) -> tuple[bool, ...]:
        """For each leaf, whether it has a gradient: wanted, and not known to be zero."""
        return tuple(e is not None for e in self._parts[2])

    @property
    def outputs(self) -> tuple[Expr, ...]:
        """The gradients of the leaves that have one."""
        return tuple(e for e in self._parts[2] if e is not None)


@calls_torch
def differentiate_fold(
    reductions: Sequence[Expr], leaves: Sequence[Expr], wanted: Sequence[bool], given: Sequence[bool]
) -> tuple[list[Expr], list[Expr], list[Expr | None]]:
    """The gradient program of a fold.

    ``wanted[k]``: whether leaf k's gradient is wanted; ``given[k]``: whether result k's cotangent is not known to be
    zero. Returns the inputs that stand for the results, those for the cotangents (in the order of the results), and one
    output expression per leaf (None where not wanted, or where it is zero)."""
    results: list[Expr] = []
    cotangents: list[Expr] = []
    seeds: list[tuple[Expr, Expr]] = []
    for r in reductions:
        kind, over, params = r.attrs
        outs = [
            node("leaf", (), (f"P{len(results) + k}",), rows=r.rows, cols=r.cols, feature=feature, dtype=dtype)
            for k, (feature, dtype) in enumerate(KINDS[kind].outputs(r.args, params))
        ]
        gs = [
            node("leaf", (), (f"g{len(results) + k}",), rows=r.rows, cols=r.cols, feature=o.feature, dtype="float")
            for k, o in enumerate(outs)
        ]
        moves = [o.dtype == "float" and KINDS[kind].is_differentiable(k, len(outs)) for k, o in enumerate(outs)]
        live = [Symbol(g) if given[len(results) + k] and moves[k] else None for k, g in enumerate(gs)]
        if any(g is not None for g in live):
            pulled = KINDS[kind].pullback(over, params, list(map(Symbol, r.args)), list(map(Symbol, outs)), live)
            for field, p in zip(r.args, pulled, strict=True):
                if p is not None and field.dtype == "float":
                    seeds.append((field, p.expr if isinstance(p, Symbol) else constructors.lift(p)))
        results += outs
        cotangents += gs
    wrt = [leaf for leaf, want in zip(leaves, wanted, strict=True) if want]
    lookups: list[tuple[Expr, Expr]] = []
    pulled_leaves = dict(zip(wrt, backpropagate(seeds, wrt, lookups=lookups), strict=True))
    same = find_same_sequence(tuple(reductions))
    gradients = {leaf: _sum_to_leaf(leaf, _hide_others(pulled_leaves.get(leaf), same)) for leaf in leaves}
    for lookup, g in lookups:
        table, index = lookup.args
        counted = _hide_others(g, same)
        assert counted is not None
        (own,) = make("histogram", "both", (), (counted, index, table))
        before = gradients[table]
        gradients[table] = own if before is None else constructors.apply("add", before, own)
    return results, cotangents, [gradients[leaf] for leaf in leaves]


def _hide_others(g: Expr | None, same: Expr | None) -> Expr | None:
    """A cotangent with 0 for pairs of two packed sequences, whose fields may be infinite or NaN: what a row that sees
    no column has is. Of a vector, its factors are hidden; numbers that are hidden already stay as they are."""
    if g is None or same is None:
        return g
    hidden: dict[Expr, Expr] = {}
    for e in topological([g], stop=lambda e: not _is_split(e)):
        number = next((a for a in e.args if a.feature is None and a.is_pair), None)
        if _is_split(e) and (e.op != "mul" or number is not None):
            hidden[e] = apply(e.op, *(hidden[a] if e.op != "mul" or a is number else a for a in e.args))
        else:
            hidden[e] = e if _is_hidden(e, same) else apply("where", same, e, 0.0)
    return hidden[g]


def _is_split(e: Expr) -> bool:
    return e.is_pair and e.feature is not None and e.op in ("add", "sub", "neg", "mul")


def _is_hidden(e: Expr, same: Expr) -> bool:
    while found := constructors.conditions_of(e):
        if same in found:
            return True
        e = e.args[1]
    return False


def _sum_to_leaf(leaf: Expr, g: Expr | None) -> Expr | None:
    """A leaf's gradient: its cotangent at every pair, summed over the axes that it does not have."""
    if g is None:
        return None
    if leaf.feature is not None and g.feature is None:
        g = constructors.spread(g, leaf.feature)
    if leaf.is_pair:
        return make("pair", "neither", (), (g, leaf))[0]
    if not leaf.cols:
        (g,) = make("sum", "cols", (), (g,))
    if not leaf.rows:
        (g,) = make("sum", "rows", (), (g,))
    return g


# Weights of gradients as few numbers per row: ``w × (a₁ x₁ + a₂ x₂ + … + k)``.
#
# Where a layer has several results of one softmax (attention beside its entropy and the expected distance), the
# cotangent of a pair is a sum of terms ``w (g (x - mean))``, and each brings two numbers of its row. Multiplied out,
# all means are one number, which is computed once a row: fewer numbers to load for every tile, and one multiplication a
# term.
#
# ``g x - g mean`` loses digits that ``g (x - mean)`` keeps where x is near its mean, so only gradients of 16-bit
# vectors are written so: their weights are rounded to 16 bits afterwards.

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


def collect_weights(gradients: Sequence[Expr | None]) -> list[Expr | None]:
    """Write the weights of sums with as few numbers per row or column as there are terms, where that is fewer."""
    done: dict[Expr, Expr] = {}
    for e in topological([e for e in gradients if e is not None]):
        args = tuple(done[a] for a in e.args)
        if e.op == "reduce" and e.attrs[0] == "sum":
            args = tuple(map(_collect_sum, args))
        done[e] = rebuild(e, args)
    return [None if e is None else done[e] for e in gradients]


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

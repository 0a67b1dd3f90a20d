"""Gradients by closure: the backward of a fold is a fold, written in the same language.

Each reduction's pullback turns the cotangents of its results into cotangents of one pair's fields (Theorem 2.1);
``reverse_mode.py`` takes them back to the leaves; there they are summed over the axes that the leaf does not have, as
reductions (Corollary 2.1.1), those of what was given per pair are written out, and those of numbers that were looked
up in a table are summed entry by entry (``histogram``). The results ``P`` and their cotangents are just more inputs, so
the gradient program is again a program.

Of a whole program, what comes before and after the passes over pairs is differentiated too.
:func:`compile_loss_and_gradient` is for scalar losses (a sum or mean over rows). Each row's cotangent is then known
before anything runs, so the gradient expressions can stand beside the forward in one program, and a schedule that
holds whole rows of pairs computes both from the same pairs. :func:`differentiate_program` gives the backward of a
program of one pass as one program, so that nothing is written and read between its parts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..reductions import KINDS, kind_of, make, outputs_of
from . import constructors
from .constructors import ONE, ZERO, apply, contractions, rebuild, substitute
from .expression import Expr, index, node, result, topological
from .lower import Fold, Lowered, Pass, compile_program, factors, find_same_sequence, number_factor
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


# Whole programs


@dataclass(frozen=True)
class LossAndGradient:
    """A program of numbers per row, followed by one gradient of the sum of one of them for each ``present`` input."""

    program: Lowered
    loss: int  # the output whose sum over rows has gradients
    present: tuple[bool, ...]  # which of the wanted inputs it depends on


@functools.lru_cache(maxsize=1024)
def compile_loss_and_gradient(outputs: tuple[Expr, ...], wrt: tuple[Expr, ...]) -> LossAndGradient | None:
    """Compile numbers per row together with the gradients of the sum over rows of the one that has gradients.

    ``wrt``: the inputs whose gradients are wanted. None where a row depends on other rows (a reduction over rows),
    or where none or several of the numbers have gradients. Raises NoGradientError where an expression has no symbolic
    derivative."""
    forward = compile_program(outputs)
    if any(e.op == "reduce" and e.attrs[1] != "cols" for e in topological(forward.outputs)):
        return None
    if any(not e.rows or e.cols or e.feature is not None for e in outputs):
        return None
    wanted = set(wrt)
    floats = [k for k, e in enumerate(forward.outputs) if e.dtype == "float"]
    found = []
    for k in (k for k in floats if not wanted.isdisjoint(topological([forward.outputs[k]]))):
        grads = backpropagate_outputs(forward, [(forward.outputs[k], ONE)], wrt)
        if any(g is not None for g in grads):
            found.append((k, grads))
    if len(found) != 1:
        return None
    ((k, grads),) = found
    program = compile_program((*outputs, *(g for g in grads if g is not None)))
    if any(kind_of(r).per_pair for p in program.passes for r in p.fold.reductions):  # as large as the pairs
        return None
    return LossAndGradient(program, k, tuple(g is not None for g in grads))


def backpropagate_outputs(forward: Lowered, seeds: list[tuple[Expr, Expr]], wrt: Sequence[Expr]) -> list[Expr | None]:
    """The gradients of ``wrt``, given ``seeds``: outputs with their cotangents. Passes are differentiated last first.

    Where a gradient needs the results of a pass, it refers to the nodes that the forward computes."""
    targets = [*wrt, *(n for p in forward.passes for users in p.results for n in users)]
    cotangents: dict[Expr, Expr] = {}
    _add_cotangents(cotangents, seeds, targets)
    for p in reversed(forward.passes):
        _add_cotangents(cotangents, _feed_cotangents(p, cotangents, targets), targets)
    return [cotangents.get(e) for e in wrt]


def _add_cotangents(cotangents: dict[Expr, Expr], seeds: list[tuple[Expr, Expr]], targets: list[Expr]) -> None:
    """Add to ``cotangents`` what the seeds give to the targets, each seed by itself and summed over missing axes."""
    for seed in seeds:
        for target, g in zip(targets, backpropagate([seed], targets), strict=True):
            if g is not None:
                part = _sum_missing_axes(g, seed[0], target)
                old = cotangents.get(target)
                cotangents[target] = part if old is None else constructors.apply("add", old, part)


def _sum_missing_axes(g: Expr, root: Expr, target: Expr) -> Expr:
    """A cotangent pulled from a one-sided root, summed over the root's axis where the target does not have it."""
    if target.feature is not None and g.feature is None:
        g = constructors.spread(g, target.feature)
    for axis in ("rows", "cols"):
        if getattr(root, axis) and not getattr(target, axis):
            (g,) = make("sum", axis, (), (g,))
    return g


def list_pass_results(p: Pass) -> list[Expr]:
    """A pass's results as the program's own nodes."""
    reductions = substitute(p.fold.pure, dict(zip(p.fold.leaves, p.feeds, strict=True)))
    made = [result(r, k, feature, dtype) for r in reductions for k, (feature, dtype) in enumerate(outputs_of(r))]
    return [users[0] if users else m for users, m in zip(p.results, made, strict=True)]


def _feed_cotangents(p: Pass, cotangents: dict[Expr, Expr], targets: list[Expr]) -> list[tuple[Expr, Expr]]:
    """The cotangents of what is fed to a pass, given those of its results."""
    pulled = [[cotangents[n] for n in users if n in cotangents] for users in p.results]
    given = [functools.reduce(lambda a, b: constructors.apply("add", a, b), gs) if gs else None for gs in pulled]
    if all(g is None for g in given):
        return []
    wanted = [e.dtype == "float" and not set(targets).isdisjoint(topological([e])) for e in p.feeds]
    results, grads, outputs = differentiate_fold(p.fold.pure, p.fold.leaves, wanted, [g is not None for g in given])
    replace = dict(zip(p.fold.leaves, p.feeds, strict=True))
    replace |= dict(zip(results, list_pass_results(p), strict=True))
    replace |= {leaf: g for leaf, g in zip(grads, given, strict=True) if g is not None}
    found = [(feed, g) for feed, g in zip(p.feeds, outputs, strict=True) if g is not None]
    return list(zip([f for f, _ in found], substitute(tuple(g for _, g in found), replace), strict=True))


def number_leaves(letter: str, exprs: Sequence[Expr]) -> tuple[Expr, ...]:
    """Leaves named ``letter`` and a number, one for each expression, of its shape and number class."""
    return tuple(
        node("leaf", (), (f"{letter}{k}",), rows=e.rows, cols=e.cols, feature=e.feature, dtype=e.dtype)
        for k, e in enumerate(exprs)
    )


@functools.lru_cache(maxsize=4096)
def differentiate_program(
    forward: Lowered, inputs: tuple[Expr, ...], wanted: tuple[bool, ...], given: tuple[bool, ...]
) -> tuple[Expr | None, ...]:
    """One gradient per input (None where not wanted, or zero); ``given``: the outputs that have a cotangent.

    In the answer the inputs are leaves ``x0``, ``x1``, ..., the results of the pass, which the forward keeps, ``P0``,
    ``P1``, ..., and the cotangents of the outputs ``c0``, ``c1``, .... Raises NoGradientError where an expression has
    no symbolic derivative."""
    (one,) = forward.passes
    cotangents = number_leaves("c", forward.outputs)
    pairs = zip(forward.outputs, cotangents, given, strict=True)
    seeds = [(e, c) for e, c, there in pairs if there and e.dtype == "float"]
    wrt = [e for e, want in zip(inputs, wanted, strict=True) if want]
    found = dict(zip(wrt, backpropagate_outputs(forward, seeds, wrt), strict=True))
    results = list_pass_results(one)
    replace = dict(zip(results, number_leaves("P", results), strict=True))
    for users, leaf in zip(one.results, replace.values(), strict=True):
        replace |= dict.fromkeys(users, leaf)
    replace |= dict(zip(inputs, number_leaves("x", inputs), strict=True))
    there = [e for e in inputs if found.get(e) is not None]
    made = dict(zip(there, substitute(tuple(g for e in there if (g := found[e]) is not None), replace), strict=True))
    return tuple(made.get(e) for e in inputs)


# Row gradients without a second pass over the columns: the forward folds what they need.
#
# Of a logsumexp over columns the gradient of a row's vector is g Σ_j p_j v_j, with p the softmax and v_j = ∂s_j/∂x: the
# cotangent, one number, times a mean that the forward can save beside the logsumexp, from the same exponentials. This
# takes two matrix products instead of three, and leaves only the column gradients to the backward.
#
# A loss also subtracts the logit of one column t. Softmax and one-hot nearly cancel there, so the mean leaves t out;
# with r = Σ_{j≠t} p_j, which keeps the digits of 1 - p_t, the gradient is g Σ_{j≠t} p_j v_j + (g + h - g r) v_t, where
# h is the cotangent of the logit at t. Where v = c u with numbers c that leave the sums, each of the three meets its
# own.
#
# Of a sum of numbers over columns the gradient of a row's vector is g Σ_j ∂f_j/∂x, whatever the function f: the forward
# saves that sum.


@dataclass(frozen=True)
class Mean:
    """What the gradient of one leaf is made of: g × ``factor`` × ``mean``, and at the target (g × factor + h ×
    ``picked`` - g × factor × the rest) × ``there``."""

    place: int
    factor: Expr
    mean: Expr
    picked: Expr = ONE
    there: Expr = ONE


@dataclass(frozen=True, eq=False)
class SavingFold:
    """A fold that also saves what the gradients of rows need, and how gradients are computed from it.

    The saved results are leaves ``E0``, ``E1``, ..., of the gradient, beside P and g of ``gradient.py``."""

    fold: Fold
    feeds: tuple[int, ...]  # which of the plain fold's leaves it takes
    own: tuple[int, ...]  # which of its results are the plain fold's
    more: tuple[int, ...]  # and which are saved for gradients
    means: tuple[Mean, ...]
    rest: Expr | None  # the weight of all columns but the target, where there is one
    soft: int  # the place of the logsumexp (or of the sum of numbers) among the plain fold's results
    pick: int  # and of the logit at the target
    target: Expr | None
    plain: bool = False  # a sum of numbers: there is no logsumexp

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the leaves that stand for the saved results."""
        return tuple(f"E{k}" for k in range(len(self.more)))


@functools.lru_cache(maxsize=1024)
def fold_saving_row_gradients(fold: Fold, wanted: tuple[bool, ...]) -> SavingFold | None:
    """The fold that also saves what the gradients of rows' vectors need; ``wanted``: the leaves that want a gradient.

    None unless the fold is one logsumexp, of a logit that is linear in these vectors, with at most one column's logit
    beside it, or one sum of numbers. None too where a number per row, or a plain number, asks for a gradient: that
    takes a pass over the columns anyway."""
    places = [k for k, e in enumerate(fold.leaves) if wanted[k] and not e.cols]
    kinds = [r.attrs[0] for r in fold.reductions]
    if not places or any(not fold.leaves[k].rows or fold.leaves[k].feature is None for k in places):
        return None
    if kinds == ["sum"] and not fold.scales:
        return _save_sums(fold, places)
    if sorted(kinds) not in (["soft"], ["pick", "soft"]) or fold.scales:
        return None
    soft, pick = fold.reductions[kinds.index("soft")], fold.reductions[kinds.index("pick")] if kinds[1:] else None
    if soft.attrs[1] != "cols" or len(soft.args) > 1 or (pick is not None and not _is_number(pick)):
        return None
    target = None if pick is None else pick.args[0]
    vectors = _find_linear_derivatives(soft.args[0], fold, places)
    picked = vectors if pick is None else _find_linear_derivatives(pick.args[1], fold, places)
    if not vectors or any(picked.get(k, (ONE, ONE))[1] is not v for k, (_, v) in vectors.items()):
        return None
    outputs = [result(r, n, *form) for r in fold.reductions for n, form in enumerate(outputs_of(r))]
    saved = [_make_softmax_mean_without(soft.args[0], v, target) for _, v in vectors.values()]
    saved += [] if target is None else [_make_softmax_mean_without(soft.args[0], ONE, target)]
    made = _compile_one_fold(fold, (*outputs, *saved), len(outputs))
    if made is None:
        return None
    saving, feeds, own, more, leaves = made
    means = tuple(
        Mean(k, factor, m, picked[k][0], _gather_at(v, target))
        for (k, (factor, v)), m in zip(vectors.items(), leaves, strict=False)
    )
    place = outputs.index
    at = (
        place(result(soft, 0, *outputs_of(soft)[0])),
        -1 if pick is None else place(result(pick, 0, *outputs_of(pick)[0])),
    )
    rest = None if target is None else leaves[-1]
    return SavingFold(saving, feeds, own, more, means, rest, soft=at[0], pick=at[1], target=target)


def _save_sums(fold: Fold, places: list[int]) -> SavingFold | None:
    """The same for a sum of numbers over columns, where that stays one fold."""
    (r,) = fold.reductions
    if r.attrs[1] != "cols" or r.args[0].dtype != "float" or r.args[0].feature is not None:
        return None
    pulled = backpropagate([(r.args[0], ONE)], [fold.leaves[k] for k in places])
    if any(v is None or not v.is_pair or contractions(v, "cols")[0].walk for v in pulled):
        return None
    saved = [make("sum", "cols", (), (v,))[0] for v in pulled if v is not None]
    made = _compile_one_fold(fold, (result(r, 0, *outputs_of(r)[0]), *saved), 1)
    if made is None:
        return None
    saving, feeds, own, more, leaves = made
    means = tuple(Mean(k, ONE, m) for k, m in zip(places, leaves, strict=True))
    return SavingFold(saving, feeds, own, more, means, None, soft=0, pick=-1, target=None, plain=True)


def _is_number(pick: Expr) -> bool:
    """Whether a number of one column is picked for every row."""
    return pick.attrs[1:] == ("cols", ("col",)) and pick.args[0].feature is None and pick.args[2] is ONE


def _find_linear_derivatives(number: Expr, fold: Fold, places: list[int]) -> dict[int, tuple[Expr, Expr]]:
    """The derivatives of a number per pair by rows' vectors, as (what leaves a sum over columns, the rest); nothing
    where one of them is not a number times a vector as it was given."""
    found = {}
    for k, v in zip(places, backpropagate([(number, ONE)], [fold.leaves[k] for k in places]), strict=True):
        parts = () if v is None or v.feature is None else contractions(v, "cols")
        if len(parts) != 1 or parts[0].walk or parts[0].minus is not None or parts[0].vector is None:
            return {}
        free, alone, mid = factors(parts[0].weight, "cols")
        number, vector = number_factor(parts[0].vector) or (ONE, parts[0].vector)
        found[k] = apply("mul", free, number), apply("mul", mid, apply("mul", vector, alone))
    return found


def _make_softmax_mean_without(logit: Expr, value: Expr, target: Expr | None) -> Expr:
    """The softmax mean of a value, 0 at the target."""
    value = value if target is None else apply("where", apply("eq", index("col"), target), 0.0, value)
    return make("soft", "cols", (), (logit, value))[1]


def _gather_at(vector: Expr, target: Expr | None) -> Expr:
    """A vector per pair at the target: a gather."""
    if target is None:
        return ONE
    return make("sum", "cols", (), (apply("where", apply("eq", index("col"), target), vector, 0.0),))[0]


def _compile_one_fold(fold: Fold, outputs: tuple[Expr, ...], own: int) -> tuple | None:
    """One fold of all outputs, by places, and those that are not its own written with E; None if it takes several."""
    program = compile_program(outputs)
    if len(program.passes) != 1 or not set(program.passes[0].feeds) <= set(fold.leaves):
        return None
    (whole,) = program.passes
    place = {e: k for k, nodes in enumerate(whole.results) for e in nodes}
    mine = [place[e] for e in program.outputs[:own]]
    more = [k for k in range(len(whole.results)) if k not in mine]
    leaves = {e: _make_leaf(f"E{more.index(k)}", e.feature) for e, k in place.items() if k in more}
    feeds = tuple(map(fold.leaves.index, whole.feeds))
    return replace(whole.fold, raised=True), feeds, tuple(mine), tuple(more), substitute(program.outputs[own:], leaves)


def _make_leaf(name: str, feature: Any = None) -> Expr:
    return node("leaf", (), (name,), rows=True, cols=False, feature=feature, dtype="float")


@functools.lru_cache(maxsize=1024)
def row_gradients(form: SavingFold, given: tuple[bool, ...]) -> tuple[tuple[int, Expr], ...]:
    """The gradients of rows' vectors, by place of their leaves; ``given``: the results that have a cotangent."""
    if form.plain:
        g = _make_symbol(f"g{form.soft}")
        return tuple((m.place, (g * _as_symbol(m.mean)).expr) for m in form.means) if given[form.soft] else ()
    cotangents = [_make_symbol(f"g{k}") for k in (form.soft, form.soft + 1) if given[k]]
    if not cotangents:
        return ()
    seen = _make_symbol(f"P{form.soft + 1}") != -math.inf  # else no column has a weight
    g = torch.where(seen, sum(cotangents[1:], cotangents[0]), 0.0)
    found = []
    for m in form.means:
        mine = g * _as_symbol(m.factor)
        value = mine * _as_symbol(m.mean)
        if form.rest is not None:
            at = mine + _make_symbol(f"g{form.pick}") * _as_symbol(m.picked) if given[form.pick] else mine
            value = value + (at - mine * _as_symbol(form.rest)) * _as_symbol(m.there)
        found.append((m.place, value.expr))
    return tuple(found)


def _as_symbol(e: Expr) -> Any:
    """An expression as a symbol, for torch's functions and operators."""
    return Symbol(e)


def _make_symbol(name: str) -> Any:
    return Symbol(_make_leaf(name))

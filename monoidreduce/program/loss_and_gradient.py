"""Gradients of whole programs: what comes before and after the passes over pairs is differentiated too.

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

from ..reductions import kind_of, make, outputs_of
from . import constructors
from .constructors import ONE, apply, contractions, substitute
from .expression import Expr, index, node, result, topological
from .gradient import differentiate_fold
from .lower import Fold, Lowered, Pass, compile_program, factors, number_factor
from .reverse_mode import backpropagate
from .symbol import Symbol


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

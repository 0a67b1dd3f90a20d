"""Row gradients that need no second walk: what they are made of is folded in the forward.

Of a logsumexp over columns the gradient of a row's vector is g Σ_j p_j v_j, with p the softmax and v_j = ∂s_j/∂x: the
cotangent, one number, times a mean that the forward can keep beside the logsumexp, from the same exponentials. Two
products are done instead of three, and only the column gradients are left for the backward.

A loss also subtracts the logit of one column t. There softmax and one-hot nearly cancel, so the mean leaves t out; with
r = Σ_{j≠t} p_j, which keeps the digits of 1 - p_t, the gradient is g Σ_{j≠t} p_j v_j + (g + h - g r) v_t, where h is
the cotangent of the logit at t. Where v = c u with numbers c that leave the sums, each of the three meets its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..reductions import make, outputs_of
from .constructors import ONE, apply, substitute
from .contract import contractions
from .expression import Expr, index, node, result
from .lower import Fold, lower
from .normal_form import factors, number_factor
from .reverse_mode import pull
from .symbol import Symbol


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
class Early:
    """A fold that keeps more, and what gradients make of it: one object for a fold and what is asked.

    What is kept comes to gradients as leaves ``E0``, ``E1``, ..., beside P and g as ``gradient.py`` names them."""

    fold: Fold
    feeds: tuple[int, ...]  # which of the plain fold's leaves it takes
    own: tuple[int, ...]  # which of its results are the plain fold's
    more: tuple[int, ...]  # and which are kept
    means: tuple[Mean, ...]
    rest: Expr | None  # the weight of all columns but the target, where there is one
    soft: int  # the place of the logsumexp among the plain fold's results
    pick: int  # and of the logit at the target
    target: Expr | None

    @property
    def names(self) -> tuple[str, ...]:
        """Of the leaves that stand for what is kept."""
        return tuple(f"E{k}" for k in range(len(self.more)))


@functools.lru_cache(maxsize=1024)
def early(fold: Fold, asked: tuple[bool, ...]) -> Early | None:
    """The fold that also keeps what the gradients of rows' vectors need; ``asked``: the leaves whose is wanted.

    None where there is no such form: it has one logsumexp, of a logit that is linear in these vectors, and beside it
    at most one column's logit. Nor where a number of rows, or of no side, asks for a gradient: that takes a walk over
    columns anyway."""
    places = [k for k, e in enumerate(fold.leaves) if asked[k] and not e.cols]
    kinds = [r.attrs[0] for r in fold.reductions]
    if not places or any(not fold.leaves[k].rows or fold.leaves[k].feature is None for k in places):
        return None
    if sorted(kinds) not in (["soft"], ["pick", "soft"]) or fold.scales:
        return None
    soft, pick = fold.reductions[kinds.index("soft")], fold.reductions[kinds.index("pick")] if kinds[1:] else None
    if soft.attrs[1] != "cols" or len(soft.args) > 1 or (pick is not None and not _is_number(pick)):
        return None
    target = None if pick is None else pick.args[0]
    vectors = _vectors(soft.args[0], fold, places)
    picked = vectors if pick is None else _vectors(pick.args[1], fold, places)
    if not vectors or any(picked.get(k, (ONE, ONE))[1] is not v for k, (_, v) in vectors.items()):
        return None
    outputs = [result(r, n, *form) for r in fold.reductions for n, form in enumerate(_outputs(r))]
    wanted = [_mean(soft.args[0], v, target) for _, v in vectors.values()]
    wanted += [] if target is None else [_mean(soft.args[0], ONE, target)]
    made = _folded(fold, (*outputs, *wanted), len(outputs))
    if made is None:
        return None
    whole, feeds, own, more, kept = made
    means = tuple(
        Mean(k, factor, m, picked[k][0], _there(v, target))
        for (k, (factor, v)), m in zip(vectors.items(), kept, strict=False)
    )
    place = outputs.index
    at = place(result(soft, 0, *_outputs(soft)[0])), -1 if pick is None else place(result(pick, 0, *_outputs(pick)[0]))
    rest = None if target is None else kept[-1]
    return Early(whole, feeds, own, more, means, rest, soft=at[0], pick=at[1], target=target)


def _outputs(r: Expr) -> Sequence[Any]:
    return outputs_of(r)


def _is_number(pick: Expr) -> bool:
    """Whether a number of one column is picked for every row."""
    return pick.attrs[1:] == ("cols", ("col",)) and pick.args[0].feature is None and pick.args[2] is ONE


def _vectors(number: Expr, fold: Fold, places: list[int]) -> dict[int, tuple[Expr, Expr]]:
    """The derivatives of a number per pair by rows' vectors, as (what leaves a sum over columns, the rest); nothing
    where one of them is not a number times a vector as it was given."""
    found = {}
    for k, v in zip(places, pull([(number, ONE)], [fold.leaves[k] for k in places]), strict=True):
        parts = () if v is None or v.feature is None else contractions(v, "cols")
        if len(parts) != 1 or parts[0].walk or parts[0].minus is not None or parts[0].vector is None:
            return {}
        free, alone, mid = factors(parts[0].weight, "cols")
        number, vector = number_factor(parts[0].vector) or (ONE, parts[0].vector)
        found[k] = apply("mul", free, number), apply("mul", mid, apply("mul", vector, alone))
    return found


def _mean(logit: Expr, value: Expr, target: Expr | None) -> Expr:
    """The softmax mean of a value, 0 at the target."""
    value = value if target is None else apply("where", apply("eq", index("col"), target), 0.0, value)
    return make("soft", "cols", (), (logit, value))[1]


def _there(vector: Expr, target: Expr | None) -> Expr:
    """A vector per pair at the target: a gather."""
    if target is None:
        return ONE
    return make("sum", "cols", (), (apply("where", apply("eq", index("col"), target), vector, 0.0),))[0]


def _folded(fold: Fold, outputs: tuple[Expr, ...], own: int) -> tuple | None:
    """One fold of all outputs, by places, and those that are not its own written with E; None if it takes several."""
    program = lower(outputs)
    if len(program.passes) != 1 or not set(program.passes[0].feeds) <= set(fold.leaves):
        return None
    (whole,) = program.passes
    place = {e: k for k, nodes in enumerate(whole.results) for e in nodes}
    mine = [place[e] for e in program.outputs[:own]]
    more = [k for k in range(len(whole.results)) if k not in mine]
    leaves = {e: _leaf(f"E{more.index(k)}", e.feature) for e, k in place.items() if k in more}
    feeds = tuple(map(fold.leaves.index, whole.feeds))
    return replace(whole.fold, raised=True), feeds, tuple(mine), tuple(more), substitute(program.outputs[own:], leaves)


def _leaf(name: str, feature: Any = None) -> Expr:
    return node("leaf", (), (name,), rows=True, cols=False, feature=feature, dtype="float")


@functools.lru_cache(maxsize=1024)
def gradients(form: Early, given: tuple[bool, ...]) -> tuple[tuple[int, Expr], ...]:
    """The gradients of rows' vectors, by place of their leaves; ``given``: the results that have a cotangent."""
    cotangents = [_symbol(f"g{k}") for k in (form.soft, form.soft + 1) if given[k]]
    if not cotangents:
        return ()
    seen = _symbol(f"P{form.soft + 1}") != -math.inf  # else no column has a weight
    g = torch.where(seen, sum(cotangents[1:], cotangents[0]), 0.0)
    found = []
    for m in form.means:
        mine = g * _of(m.factor)
        value = mine * _of(m.mean)
        if form.rest is not None:
            at = mine + _symbol(f"g{form.pick}") * _of(m.picked) if given[form.pick] else mine
            value = value + (at - mine * _of(form.rest)) * _of(m.there)
        found.append((m.place, value.expr))
    return tuple(found)


def _of(e: Expr) -> Any:
    """What torch's functions and operators take for a tensor."""
    return Symbol(e)


def _symbol(name: str) -> Any:
    return Symbol(_leaf(name))

"""A row's number and the gradients of its sum over rows, as one program.

Where rows end in a scalar loss (a sum, a mean) every row's cotangent is known before anything runs. The gradient
expressions of ``gradient.py`` can then stand beside the forward in one program, and a schedule that holds whole rows
of pairs takes both from the same pairs. Nothing is written per layer: passes are pulled back one by one, last first.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from ..reductions import kind_of, make, outputs_of
from . import constructors
from .constructors import ONE, substitute
from .expression import Expr, result, topological
from .gradient import gradient
from .lower import Lowered, Pass, lower
from .reverse_mode import pull


@dataclass(frozen=True)
class Total:
    """A program of numbers per row, followed by one gradient of the sum of one of them for each ``present`` input."""

    program: Lowered
    moving: int  # the number per row whose sum has gradients
    present: tuple[bool, ...]  # which of the asked inputs it depends on


@functools.lru_cache(maxsize=1024)
def total(outputs: tuple[Expr, ...], wrt: tuple[Expr, ...]) -> Total | None:
    """The program of numbers per row, and of the gradients of the sum of the one of them that has any.

    None where rows are not alone (a row that needs nothing of the others but its columns is: every reduction is over
    columns), or where none or several of the numbers have gradients. Raises NoGradientError where an expression has no
    symbolic derivative."""
    forward = lower(outputs)
    if any(e.op == "reduce" and e.attrs[1] != "cols" for e in topological(forward.outputs)):
        return None
    if any(not e.rows or e.cols or e.feature is not None for e in outputs):
        return None
    asked = set(wrt)
    floats = [k for k, e in enumerate(forward.outputs) if e.dtype == "float"]
    moving = [k for k in floats if not asked.isdisjoint(topological([forward.outputs[k]]))]
    found = []
    for k in moving:
        grads = pulled(forward, [(forward.outputs[k], ONE)], wrt)
        if any(g is not None for g in grads):
            found.append((k, grads))
    if len(found) != 1:
        return None
    ((k, grads),) = found
    program = lower((*outputs, *(g for g in grads if g is not None)))
    if any(kind_of(r).per_pair for p in program.passes for r in p.fold.reductions):  # as large as the pairs
        return None
    return Total(program, k, tuple(g is not None for g in grads))


def pulled(forward: Lowered, seeds: list[tuple[Expr, Expr]], wrt: Sequence[Expr]) -> list[Expr | None]:
    """The gradients of inputs, given cotangents of outputs: passes are pulled back one by one, last first.

    What they need of a pass's results stands there as the forward computes it."""
    targets = [*wrt, *(n for p in forward.passes for users in p.results for n in users)]
    cotangents: dict[Expr, Expr] = {}
    _pull_into(cotangents, seeds, targets)
    for p in reversed(forward.passes):
        _pull_into(cotangents, _of_feeds(p, cotangents, targets), targets)
    return [cotangents.get(e) for e in wrt]


def _pull_into(cotangents: dict[Expr, Expr], seeds: list[tuple[Expr, Expr]], targets: list[Expr]) -> None:
    """Add to ``cotangents`` what the seeds give to the targets, each seed by itself and summed over missing axes."""
    for seed in seeds:
        for target, g in zip(targets, pull([seed], targets), strict=True):
            if g is not None:
                part = _summed(g, seed[0], target)
                old = cotangents.get(target)
                cotangents[target] = part if old is None else constructors.apply("add", old, part)


def _summed(g: Expr, root: Expr, target: Expr) -> Expr:
    """A cotangent pulled from a one-sided root, summed over the root's axis where the target does not have it."""
    if target.feature is not None and g.feature is None:
        g = constructors.spread(g, target.feature)
    for axis in ("rows", "cols"):
        if getattr(root, axis) and not getattr(target, axis):
            (g,) = make("sum", axis, (), (g,))
    return g


def of_pass(p: Pass) -> list[Expr]:
    """A pass's results as the program's own nodes."""
    reductions = substitute(p.fold.pure, dict(zip(p.fold.leaves, p.feeds, strict=True)))
    made = [result(r, k, feature, dtype) for r in reductions for k, (feature, dtype) in enumerate(outputs_of(r))]
    return [users[0] if users else m for users, m in zip(p.results, made, strict=True)]


def _of_feeds(p: Pass, cotangents: dict[Expr, Expr], targets: list[Expr]) -> list[tuple[Expr, Expr]]:
    """The cotangents of what is fed to a pass, given those of its results."""
    pulled = [[cotangents[n] for n in users if n in cotangents] for users in p.results]
    given = [functools.reduce(lambda a, b: constructors.apply("add", a, b), gs) if gs else None for gs in pulled]
    if all(g is None for g in given):
        return []
    asked = [e.dtype == "float" and not set(targets).isdisjoint(topological([e])) for e in p.feeds]
    results, grads, outputs = gradient(p.fold.pure, p.fold.leaves, asked, [g is not None for g in given])
    replace = dict(zip(p.fold.leaves, p.feeds, strict=True))
    replace |= dict(zip(results, of_pass(p), strict=True))
    replace |= {leaf: g for leaf, g in zip(grads, given, strict=True) if g is not None}
    found = [(feed, g) for feed, g in zip(p.feeds, outputs, strict=True) if g is not None]
    return list(zip([f for f, _ in found], substitute(tuple(g for _, g in found), replace), strict=True))

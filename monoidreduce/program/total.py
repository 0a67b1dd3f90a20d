"""A row's number and the gradients of its sum over rows, as one program.

Where rows end in a scalar loss (a sum, a mean) every row's cotangent is known before anything runs. The gradient
expressions of ``gradient.py`` can then stand beside the forward in one program, and a schedule that holds whole rows
of pairs takes both from the same pairs. Nothing is written per layer: passes are pulled back one by one, last first.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from . import build
from .build import ONE, substitute
from .expr import Expr, result, topological
from .gradient import gradient
from .lower import Lowered, Pass, lower
from .pull import pull
from .reductions import KINDS, make


@dataclass(frozen=True)
class Total:
    """A program whose first output is the number per row, followed by one gradient for each ``present`` input."""

    program: Lowered
    present: tuple[bool, ...]  # which of the asked inputs the sum depends on


@functools.lru_cache(maxsize=1024)
def total(output: Expr, wrt: tuple[Expr, ...]) -> Total | None:
    """The program of ``output``, one number per row, and of the gradients of its sum; None where rows are not alone.

    Rows are alone where every reduction is over columns: a row then needs nothing of the others but its columns.
    Raises NoGradientError where an expression has no symbolic derivative."""
    forward = lower((output,))
    if any(e.op == "reduce" and e.attrs[1] == "rows" for e in topological(forward.outputs)):
        return None
    if not output.rows or output.cols or output.feature is not None or output.dtype != "float":
        return None
    nodes = [n for p in forward.passes for users in p.results for n in users]
    cotangents: dict[Expr, Expr] = {}
    _pull_into(cotangents, [(forward.outputs[0], ONE)], [*wrt, *nodes])
    for p in reversed(forward.passes):
        _pull_into(cotangents, _of_feeds(p, cotangents, [*wrt, *nodes]), [*wrt, *nodes])
    grads = [cotangents.get(e) for e in wrt]
    program = lower((output, *(g for g in grads if g is not None)))
    return Total(program, tuple(g is not None for g in grads))


def _pull_into(cotangents: dict[Expr, Expr], seeds: list[tuple[Expr, Expr]], targets: list[Expr]) -> None:
    """Add to ``cotangents`` what the seeds give to the targets, each seed by itself and summed over missing axes."""
    for seed in seeds:
        for target, g in zip(targets, pull([seed], targets), strict=True):
            if g is not None:
                part = _summed(g, seed[0], target)
                old = cotangents.get(target)
                cotangents[target] = part if old is None else build.apply("add", old, part)


def _summed(g: Expr, root: Expr, target: Expr) -> Expr:
    """A cotangent pulled from a one-sided root, summed over the root's axis where the target does not have it."""
    if target.feature is not None and g.feature is None:
        g = build.spread(g, target.feature)
    for axis in ("rows", "cols"):
        if getattr(root, axis) and not getattr(target, axis):
            (g,) = make("sum", axis, (), (g,))
    return g


def _of_feeds(p: Pass, cotangents: dict[Expr, Expr], targets: list[Expr]) -> list[tuple[Expr, Expr]]:
    """The cotangents of what is fed to a pass, given those of its results."""
    pulled = [[cotangents[n] for n in users if n in cotangents] for users in p.results]
    given = [functools.reduce(lambda a, b: build.apply("add", a, b), gs) if gs else None for gs in pulled]
    if all(g is None for g in given):
        return []
    asked = [e.dtype == "float" and not set(targets).isdisjoint(topological([e])) for e in p.feeds]
    results, grads, outputs = gradient(p.fold.pure, p.fold.leaves, asked, [g is not None for g in given])
    replace = dict(zip(p.fold.leaves, p.feeds, strict=True))
    reductions = substitute(p.fold.pure, replace)
    made = [
        result(r, k, feature, dtype)
        for r in reductions
        for k, (feature, dtype) in enumerate(KINDS[r.attrs[0]].outputs(r.args, r.attrs[2]))
    ]
    replace |= {leaf: users[0] if users else m for leaf, users, m in zip(results, p.results, made, strict=True)}
    replace |= {leaf: g for leaf, g in zip(grads, given, strict=True) if g is not None}
    found = [(feed, g) for feed, g in zip(p.feeds, outputs, strict=True) if g is not None]
    return list(zip([f for f, _ in found], substitute(tuple(g for _, g in found), replace), strict=True))

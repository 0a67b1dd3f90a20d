"""Gradients of whole programs: what comes before and after the passes over pairs is differentiated too.

:func:`compile_loss_and_gradient` is for scalar losses (a sum or mean over rows). Each row's cotangent is then known
before anything runs, so the gradient expressions can stand beside the forward in one program, and a schedule that
holds whole rows of pairs computes both from the same pairs. :func:`differentiate_program` gives the backward of a
program of one pass as one program, so that nothing is written and read between its parts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from ..reductions import kind_of, make, outputs_of
from . import constructors
from .compile import compile_program
from .constructors import ONE, substitute
from .expression import Expr, node, result, topological
from .gradient import differentiate_fold
from .lower import Lowered, Pass
from .reverse_mode import pull


@dataclass(frozen=True)
class LossAndGradient:
    """A program of numbers per row, followed by one gradient of the sum of one of them for each ``present`` input."""

    program: Lowered
    moving: int  # the number per row whose sum has gradients
    present: tuple[bool, ...]  # which of the asked inputs it depends on


@functools.lru_cache(maxsize=1024)
def compile_loss_and_gradient(outputs: tuple[Expr, ...], wrt: tuple[Expr, ...]) -> LossAndGradient | None:
    """Compile numbers per row together with the gradients of the sum over rows of the one that has gradients.

    ``wrt``: the inputs whose gradients are asked for. None where a row depends on other rows (a reduction over rows),
    or where none or several of the numbers have gradients. Raises NoGradientError where an expression has no symbolic
    derivative."""
    forward = compile_program(outputs)
    if any(e.op == "reduce" and e.attrs[1] != "cols" for e in topological(forward.outputs)):
        return None
    if any(not e.rows or e.cols or e.feature is not None for e in outputs):
        return None
    asked = set(wrt)
    floats = [k for k, e in enumerate(forward.outputs) if e.dtype == "float"]
    moving = [k for k in floats if not asked.isdisjoint(topological([forward.outputs[k]]))]
    found = []
    for k in moving:
        grads = pull_outputs_back(forward, [(forward.outputs[k], ONE)], wrt)
        if any(g is not None for g in grads):
            found.append((k, grads))
    if len(found) != 1:
        return None
    ((k, grads),) = found
    program = compile_program((*outputs, *(g for g in grads if g is not None)))
    if any(kind_of(r).per_pair for p in program.passes for r in p.fold.reductions):  # as large as the pairs
        return None
    return LossAndGradient(program, k, tuple(g is not None for g in grads))


def pull_outputs_back(forward: Lowered, seeds: list[tuple[Expr, Expr]], wrt: Sequence[Expr]) -> list[Expr | None]:
    """The gradients of ``wrt``, given ``seeds``: outputs with their cotangents. Passes are differentiated last first.

    Where a gradient needs the results of a pass, it refers to the nodes that the forward computes."""
    targets = [*wrt, *(n for p in forward.passes for users in p.results for n in users)]
    cotangents: dict[Expr, Expr] = {}
    _pull_into(cotangents, seeds, targets)
    for p in reversed(forward.passes):
        _pull_into(cotangents, _pull_to_feeds(p, cotangents, targets), targets)
    return [cotangents.get(e) for e in wrt]


def _pull_into(cotangents: dict[Expr, Expr], seeds: list[tuple[Expr, Expr]], targets: list[Expr]) -> None:
    """Add to ``cotangents`` what the seeds give to the targets, each seed by itself and summed over missing axes."""
    for seed in seeds:
        for target, g in zip(targets, pull([seed], targets), strict=True):
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


def _pull_to_feeds(p: Pass, cotangents: dict[Expr, Expr], targets: list[Expr]) -> list[tuple[Expr, Expr]]:
    """The cotangents of what is fed to a pass, given those of its results."""
    pulled = [[cotangents[n] for n in users if n in cotangents] for users in p.results]
    given = [functools.reduce(lambda a, b: constructors.apply("add", a, b), gs) if gs else None for gs in pulled]
    if all(g is None for g in given):
        return []
    asked = [e.dtype == "float" and not set(targets).isdisjoint(topological([e])) for e in p.feeds]
    results, grads, outputs = differentiate_fold(p.fold.pure, p.fold.leaves, asked, [g is not None for g in given])
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
    forward: Lowered, inputs: tuple[Expr, ...], asked: tuple[bool, ...], given: tuple[bool, ...]
) -> tuple[Expr | None, ...]:
    """One gradient per input (None where not asked, or zero); ``given``: the outputs that have a cotangent.

    In the answer the inputs are leaves ``x0``, ``x1``, ..., the results of the pass, which the forward keeps, ``P0``,
    ``P1``, ..., and the cotangents of the outputs ``c0``, ``c1``, .... Raises NoGradientError where an expression has
    no symbolic derivative."""
    (one,) = forward.passes
    cotangents = number_leaves("c", forward.outputs)
    pairs = zip(forward.outputs, cotangents, given, strict=True)
    seeds = [(e, c) for e, c, there in pairs if there and e.dtype == "float"]
    wrt = [e for e, want in zip(inputs, asked, strict=True) if want]
    found = dict(zip(wrt, pull_outputs_back(forward, seeds, wrt), strict=True))
    results = list_pass_results(one)
    replace = dict(zip(results, number_leaves("P", results), strict=True))
    for users, leaf in zip(one.results, replace.values(), strict=True):
        replace |= dict.fromkeys(users, leaf)
    replace |= dict(zip(inputs, number_leaves("x", inputs), strict=True))
    there = [e for e in inputs if found.get(e) is not None]
    made = dict(zip(there, substitute(tuple(g for e in there if (g := found[e]) is not None), replace), strict=True))
    return tuple(made.get(e) for e in inputs)

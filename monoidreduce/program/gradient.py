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
from .expression import Expr, node
from .lower import Fold
from .reverse_mode import pull
from .symbol import Symbol, calls_torch


@dataclass(frozen=True)
class FoldGradient:
    """The gradient of a fold, to be compiled: a program of its leaves, its results and their cotangents.

    ``asked[k]``: whether leaf k's gradient is wanted; ``given[k]``: whether result k has a cotangent."""

    fold: Fold
    asked: tuple[bool, ...]
    given: tuple[bool, ...]

    @functools.cached_property
    def _parts(self) -> tuple[list[Expr], list[Expr], list[Expr | None]]:
        return differentiate_fold(self.fold.pure, self.fold.leaves, self.asked, self.given)

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
        """For each leaf, whether it has a gradient: asked for, and not known to be zero."""
        return tuple(e is not None for e in self._parts[2])

    @property
    def outputs(self) -> tuple[Expr, ...]:
        """The gradients of the leaves that have one."""
        return tuple(e for e in self._parts[2] if e is not None)


@calls_torch
def differentiate_fold(
    reductions: Sequence[Expr], leaves: Sequence[Expr], asked: Sequence[bool], given: Sequence[bool]
) -> tuple[list[Expr], list[Expr], list[Expr | None]]:
    """The gradient program of a fold.

    ``asked[k]``: whether leaf k's gradient is wanted; ``given[k]``: whether result k's cotangent is not known to be
    zero. Returns the inputs that stand for the results, those for the cotangents (in the order of the results), and one
    output expression per leaf (None where not asked, or where it is zero)."""
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
        moves = [o.dtype == "float" and KINDS[kind].moves(k, len(outs)) for k, o in enumerate(outs)]
        live = [Symbol(g) if given[len(results) + k] and moves[k] else None for k, g in enumerate(gs)]
        if any(g is not None for g in live):
            pulled = KINDS[kind].pullback(over, params, list(map(Symbol, r.args)), list(map(Symbol, outs)), live)
            for field, p in zip(r.args, pulled, strict=True):
                if p is not None and field.dtype == "float":
                    seeds.append((field, p.expr if isinstance(p, Symbol) else constructors.lift(p)))
        results += outs
        cotangents += gs
    wrt = [leaf for leaf, want in zip(leaves, asked, strict=True) if want]
    lookups: list[tuple[Expr, Expr]] = []
    pulled_leaves = dict(zip(wrt, pull(seeds, wrt, lookups=lookups), strict=True))
    gradients = {leaf: _sum_to_leaf(leaf, pulled_leaves.get(leaf)) for leaf in leaves}
    for lookup, g in lookups:
        table, index = lookup.args
        (own,) = make("histogram", "both", (), (g, index, table))
        before = gradients[table]
        gradients[table] = own if before is None else constructors.apply("add", before, own)
    return results, cotangents, [gradients[leaf] for leaf in leaves]


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

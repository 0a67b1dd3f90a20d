"""Gradients by closure: the backward of a fold is a fold, written in the same language.

:func:`pull` is reverse-mode differentiation of expressions: cotangents walk from the roots to the leaves through the
table's derivatives; where an argument has fewer axes than its user, the cotangent is summed over the missing ones (over
features at once; over rows and columns when the leaf is reached, as a reduction). :func:`gradient` applies it to one fold:
the results ``P`` and their cotangents are just more inputs, so the gradient program is again a program (Corollary 2.1.1).
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import NoGradientError
from . import build
from .expr import Expr, node, topological
from .primitives import PRIMITIVES
from .reductions import KINDS, make
from .symbol import Symbol


def pull(seeds: Sequence[tuple[Expr, Expr]], wrt: Sequence[Expr]) -> list[Expr | None]:
    """Cotangents of ``wrt`` (each pulled through to, not past) given cotangents of some roots."""
    cotangent: dict[Expr, Expr] = {}
    targets = set(wrt)

    def give(e: Expr, g: Expr) -> None:
        if e.dtype != "float" or (g.op == "const" and g.const == 0):
            return
        if e.feature is None and g.feature is not None:
            g = build.fsum(g)
        cotangent[e] = build.apply("add", cotangent[e], g) if e in cotangent else g

    for root, g in seeds:
        give(root, g)
    useful = _depends([root for root, _ in seeds], targets)
    for e in reversed(topological([root for root, _ in seeds], stop=lambda e: e in targets)):
        if e in targets or e not in cotangent or not e.args:
            continue
        for arg, g in zip(e.args, _local(e, cotangent[e]), strict=True):
            if g is not None and arg in useful:
                if arg.feature is None and e.feature is not None and g.feature is None:
                    g = build.spread(g, e.feature)
                give(arg, g)
    return [cotangent.get(e) for e in wrt]


def _depends(roots: list[Expr], targets: set[Expr]) -> set[Expr]:
    """The nodes that depend on a target: only these need a cotangent."""
    found: set[Expr] = set()
    for e in topological(roots, stop=lambda e: e in targets):
        if e in targets or any(a in found for a in e.args):
            found.add(e)
    return found


def _local(e: Expr, g: Expr) -> Sequence[Expr | None]:
    """The cotangents of one node's arguments."""
    if e.op == "dot":
        x, y = e.args
        return build.apply("mul", g, y), build.apply("mul", g, x)
    if e.op == "sqdist":
        x, y = e.args
        gap = build.apply("mul", build.apply("mul", g, 2.0), build.apply("sub", x, y))
        return gap, build.apply("neg", gap)
    if e.op == "fsum":
        return [build.spread(g, e.args[0].feature)]
    if e.op == "spread":
        return [g]
    primitive = PRIMITIVES.get(e.op)
    if primitive is None or primitive.derivative is None:
        raise NoGradientError(detail=f"{e.op} has no derivative inside a pair expression", fix="Take it out of the pair expression")
    attributes = dict(zip(primitive.attributes, e.attrs, strict=True))
    pulled = primitive.derivative(Symbol(g), Symbol(e), *map(Symbol, e.args), **attributes)
    return [p.expr if isinstance(p, Symbol) else p if p is None else build.lift(p) for p in pulled]


def gradient(
    reductions: Sequence[Expr], leaves: Sequence[Expr], asked: Sequence[bool], given: Sequence[bool]
) -> tuple[list[Expr], list[Expr], list[Expr | None]]:
    """The gradient program of a fold.

    ``asked[k]``: whether leaf k's gradient is wanted; ``given[k]``: whether result k's cotangent is not known to be zero.
    Returns the inputs that stand for the results, those for the cotangents (in the order of the results), and one
    output expression per leaf (None where not asked, or where it is zero).
    """
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
        live = [Symbol(g) if given[len(results) + k] and outs[k].dtype == "float" else None for k, g in enumerate(gs)]
        if any(g is not None for g in live):
            pulled = KINDS[kind].pullback(over, params, list(map(Symbol, r.args)), list(map(Symbol, outs)), live)
            for field, p in zip(r.args, pulled, strict=True):
                if p is not None and field.dtype == "float":
                    seeds.append((field, p.expr if isinstance(p, Symbol) else build.lift(p)))
        results += outs
        cotangents += gs
    wrt = [leaf for leaf, want in zip(leaves, asked, strict=True) if want]
    pulled_leaves = dict(zip(wrt, pull(seeds, wrt), strict=True))
    return results, cotangents, [_gather(leaf, pulled_leaves.get(leaf)) for leaf in leaves]


def _gather(leaf: Expr, g: Expr | None) -> Expr | None:
    """A leaf's gradient: its cotangent at every pair, summed over the axes that it does not have."""
    if g is None:
        return None
    if leaf.feature is not None and g.feature is None:
        g = build.spread(g, leaf.feature)
    if not leaf.cols:
        (g,) = make("sum", "cols", (), (g,))
    if not leaf.rows:
        (g,) = make("sum", "rows", (), (g,))
    return g

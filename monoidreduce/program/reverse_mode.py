"""Reverse-mode differentiation of expressions.

Cotangents are propagated from the roots to the leaves with the derivatives of the primitives table. Where an argument
is a number and its user a vector, the cotangent is summed over features at once. Rows and
columns are summed when a leaf is reached (``gradient.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import NoGradientError
from . import constructors, several
from .expression import Expr, topological
from .primitives import PRIMITIVES
from .symbol import Symbol

Derivatives = Mapping[str, Callable[..., Sequence[Any]]]  # by primitive, as in the table


def backpropagate(
    seeds: Sequence[tuple[Expr, Expr]],
    wrt: Sequence[Expr],
    instead: Derivatives | None = None,
    lookups: list[tuple[Expr, Expr]] | None = None,
) -> list[Expr | None]:
    """The cotangents of ``wrt``, given ``seeds``: roots with their cotangents. Propagation stops at each of ``wrt``.

    ``instead``: derivatives that are written otherwise than in the table of primitives. To ``lookups`` are added the
    lookups in tables of ``wrt``, with their cotangents, which belong to single entries."""
    cotangent: dict[Expr, Expr] = {}
    targets = set(wrt)

    def give(e: Expr, g: Expr) -> None:
        if e.dtype != "float" or (g.op == "const" and g.const == 0):
            return
        if e.feature is None and g.feature is not None:
            g = constructors.fsum(g)
        cotangent[e] = constructors.apply("add", cotangent[e], g) if e in cotangent else g

    for root, g in seeds:
        give(root, g)
    useful = _find_nodes_above([root for root, _ in seeds], targets)
    for e in reversed(topological([root for root, _ in seeds], stop=lambda e: e in targets)):
        if e in targets or e not in cotangent or not e.args or e.is_stored:
            continue  # scales of blocks of features have no gradients
        if e.op == "lookup" and lookups is not None:
            if e.args[0] in targets:
                lookups.append((e, cotangent[e]))
            continue
        for arg, pulled in zip(e.args, _find_node_cotangents(e, cotangent[e], instead or {}), strict=True):
            if pulled is not None and arg in useful:
                g = pulled
                if arg.feature is None and e.feature is not None and g.feature is None:
                    g = constructors.spread(g, e.feature)
                give(arg, g)
    return [cotangent.get(e) for e in wrt]


def _find_nodes_above(roots: list[Expr], targets: set[Expr]) -> set[Expr]:
    """The nodes that depend on a target: only these need a cotangent."""
    found: set[Expr] = set()
    for e in topological(roots, stop=lambda e: e in targets):
        if e in targets or any(a in found for a in e.args):
            found.add(e)
    return found


def _find_node_cotangents(e: Expr, g: Expr, instead: Derivatives) -> Sequence[Expr | None]:
    """The cotangents of one node's arguments."""
    if e.op == "dot":
        x, y = e.args
        return constructors.apply("mul", g, y), constructors.apply("mul", g, x)
    if e.op == "sqdist":
        x, y = e.args
        gap = constructors.apply("mul", constructors.apply("mul", g, 2.0), constructors.apply("sub", x, y))
        return gap, constructors.apply("neg", gap)
    if e.op == "fsum":
        return [constructors.spread(g, e.args[0].feature)]
    if e.op == "spread":
        return [g]
    if e.op == "einsum":
        return several.einsum_cotangents(e, g)
    if e.op in ("famax", "famin"):  # equal features share it, as in torch
        extreme = constructors.apply("cast", constructors.apply("eq", e.args[0], e), to="float")
        return [constructors.apply("mul", extreme, constructors.apply("div", g, constructors.fsum(extreme)))]
    primitive = PRIMITIVES.get(e.op)
    derivative = instead.get(e.op) or (None if primitive is None else primitive.derivative)
    if primitive is None or derivative is None:
        raise NoGradientError(
            detail=f"{e.op} has no derivative inside a pair expression", fix="Take it out of the pair expression"
        )
    attributes = dict(zip(primitive.attributes, e.attrs, strict=True))
    pulled = derivative(Symbol(g), Symbol(e), *map(Symbol, e.args), **attributes)
    return [p.expr if isinstance(p, Symbol) else p if p is None else constructors.lift(p) for p in pulled]

"""A fold over lists as its kernels run it: a pair is an entry of a list, and is folded as often as it is listed.

Labels are sums over all pairs, since a listed column may be its label several times, or never. The gradient of a table
is two numbers for each entry: what is added, and where.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ....program import constructors
from ....program.constructors import ONE
from ....program.expression import Expr, const, index, node, reduce_node, topological
from ....program.lower import Fold
from ..codegen.listed import ONCE

FIRST = node("leaf", (), (ONCE,), rows=True, cols=True, feature=None, dtype="bool")  # which of equal entries it is
_LOCAL: dict[int, tuple[Fold, LocalFold | None]] = {}
_MOST = 1024


class LocalFold(NamedTuple):
    """A fold as a kernel over lists runs it, the places of its leaves in those of the whole fold, whether it reads
    positions along lists, whether its last leaf says which of equal entries of a list are the first, and for each
    reduction of the whole fold which of its reductions that is: two for the gradient of a table, whose numbers and
    indices are written for each entry of the lists."""

    fold: Fold
    places: tuple[int, ...]
    logical: bool
    once: bool
    parts: tuple[tuple[int, ...], ...]


def localize(fold: Fold) -> LocalFold | None:
    """The fold with every pair listed, positions along a list as the columns' indices, and labels that count as often
    as they are listed. None where numbers of pairs are not numbers of entries, or where equal entries of a list have
    numbers of their own and are told apart, which is an error if there are any."""
    known = _LOCAL.get(id(fold))
    if known is None:
        if len(_LOCAL) >= _MOST:
            _LOCAL.clear()
        known = _LOCAL[id(fold)] = (fold, _localize(fold))  # the fold is held, so that its id stays its own
    return known[1]


def _localize(fold: Fold) -> LocalFold | None:
    nodes = topological([*fold.reductions, *fold.scales])
    once = [e for e in nodes if e.op == "listed_once"]
    edges = fold.domain is not None and fold.domain.attrs[0][0] == "edges"
    if any(e.is_pair for e in fold.leaves) and (once or not edges):
        return None
    positions = {e: index("col") for e in nodes if e.op == "listed_position"}
    changed = {**{e: const(True) for e in nodes if e.op == "listed"}, **positions, **{e: FIRST for e in once}}
    scaled = zip(constructors.substitute(fold.reductions, changed), fold.scaled, strict=True)
    found: dict[Expr, Expr] = {}  # reductions and their scales
    parts = []
    for r, (_, scale) in scaled:
        own = [_as_kernels_fold(r)] if r.attrs[0] != "histogram" else [_per_entry(a) for a in r.args[:2]]
        if (len(own) == 1 and own[0] in found) or (len(own) == 2 and not edges):
            return None
        parts.append(tuple([*found, *(o for o in own if o not in found)].index(o) for o in own))
        found |= dict.fromkeys(own, constructors.substitute((scale,), changed)[0])
    reductions, scales = tuple(found), tuple(found.values()) if fold.scales else ()
    used = {*topological([*reductions, *scales])}
    places = tuple(k for k, e in enumerate(fold.leaves) if e in used)
    mapped = {r: reductions[own[0]] for r, own in zip(fold.reductions, parts, strict=True)}
    gradients = tuple((mapped[r], e) for r, e in fold.gradients if r in mapped and e in used)
    leaves = (*(fold.leaves[k] for k in places), *([FIRST] if once else []))
    made = replace(fold, leaves=leaves, reductions=reductions, scales=scales, gradients=gradients)
    return LocalFold(made, places, bool(positions), bool(once), tuple(parts))


def _per_entry(number: Expr) -> Expr:
    """A number for each entry of the lists."""
    return reduce_node("pair", "cols", (), (number,))


def _as_kernels_fold(r: Expr) -> Expr:
    """A label's number as a sum over all pairs: a listed column may be its label several times, or never. Numbers of
    entries are written where rows walk their lists."""
    if r.attrs[0] == "pair":
        return reduce_node("pair", "cols", r.attrs[2], r.args)
    if r.attrs[0] != "pick":
        return r
    target, value, vector = r.args
    _, over, (axis,) = r.attrs
    number = constructors.apply("where", constructors.apply("eq", index(axis), target), value, const(0.0))
    number = number if number.feature is None else constructors.fsum(number)
    return reduce_node("sum", over, (), (number if vector is ONE else constructors.apply("mul", number, vector),))

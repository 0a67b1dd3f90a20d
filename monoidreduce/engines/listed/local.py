"""A fold over listed pairs as the fold of one piece: all pairs of a small dense problem, in a batch of such.

``listed`` is true there, indices and positions are leaves, and a gather at an index is again the sum that it was made
of, since the index may be listed several times or not at all.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ...program import constructors
from ...program.constructors import ONE, apply
from ...program.expression import Expr, const, index, node, reduce_node, size, topological
from ...program.lower import Fold
from ...reductions import kind_of, outputs_of


@dataclass(frozen=True)
class LocalFold:
    """Some reductions of a fold for a piece: ``fold`` is run by the inner engine, ``plain`` are reductions of what has
    one axis only. ``leaves``: the leaves of both, ``extra`` those of them that the fold did not have, by what they
    hold."""

    places: tuple[int, ...]  # the reductions' places in the whole fold
    fold: Fold | None
    folded: tuple[int, ...]  # which of ``places`` the fold has; the others are plain
    plain: tuple[Expr, ...]
    leaves: tuple[Expr, ...]
    extra: tuple[tuple[str, Expr], ...]
    outputs: tuple[tuple[str | int | None, str], ...]  # feature and number class of every result


@functools.lru_cache(maxsize=1024)
def localize(fold: Fold, over: str, places: tuple[int, ...], hidden: str = "", ragged: bool = False) -> LocalFold:
    """The reductions at ``places``, which go over ``over`` (or are per pair, or of a table). ``hidden``: some ``kept``
    indices are not listed (the end of a page) or some ``folded`` ones (of a list that was filled up), and ``listed``
    stays a condition; ``ragged``: the last block of kept indices repeats one, which must not count twice in a table."""
    on_rows = (over == "rows") == (hidden == "folded")
    extra = {
        name: node("leaf", (), (f"_{name}",), rows=rows, cols=cols, feature=None, dtype=dtype)
        for name, rows, cols, dtype in (
            ("row_index", True, False, "int"),
            ("col_index", False, True, "int"),
            ("num_rows", False, False, "int"),
            ("num_cols", False, False, "int"),
            ("position", False, True, "int"),
            ("once", over == "rows", over != "rows", "bool"),
            ("listed", on_rows, not on_rows, "bool"),
            ("exists", over != "rows", over == "rows", "bool"),
        )
    }
    replaced: dict[Expr, Expr] = {
        index("row"): extra["row_index"],
        index("col"): extra["col_index"],
        size("rows"): extra["num_rows"],
        size("cols"): extra["num_cols"],
    }
    chosen = [fold.scaled[k] for k in places]
    for e in topological([r for r, _ in chosen]):
        if e.op == "listed":
            replaced[e] = extra["listed"] if hidden else const(True)
        elif e.op == "listed_once":
            replaced[e] = extra["once"]
        elif e.op == "listed_position":
            replaced[e] = extra["position"]
    inner: list[Expr] = []
    scales: list[Expr] = []
    folded: list[int] = []
    plain: list[Expr] = []
    for k, (r, scale) in zip(places, chosen, strict=True):
        (new,) = constructors.substitute((_write_as_sum(r),), replaced)
        if kind_of(new).both_axes and ragged:
            number, *rest = new.args
            new = constructors.rebuild(new, (apply("where", extra["exists"], number, 0.0), *rest))
        if (
            kind_of(new).per_pair
            or kind_of(new).both_axes
            or (any(a.rows for a in new.args) and any(a.cols for a in new.args))
        ):
            inner.append(new)
            scales.append(constructors.substitute((scale,), replaced)[0])
            folded.append(k)
        else:
            whole = constructors.rebuild(r, (apply("mul", r.args[0], scale),)) if scale is not ONE else r
            plain.append(constructors.substitute((_write_as_sum(whole),), replaced)[0])
    own = {*fold.leaves, *extra.values()}
    leaves = tuple(e for e in topological([*inner, *scales, *plain]) if e in own)
    used = () if all(s is ONE for s in scales) else tuple(scales)
    fed = tuple(e for e in leaves if e in set(topological([*inner, *scales])))
    whole_fold = Fold(fed, tuple(inner), used, raised=True, exact=fold.exact) if inner else None
    named = tuple((name, e) for name, e in extra.items() if e in leaves)
    outputs = tuple(o for k in places for o in outputs_of(fold.reductions[k]))
    return LocalFold(places, whole_fold, tuple(folded), tuple(plain), leaves, named, outputs)


def _write_as_sum(r: Expr) -> Expr:
    """A gather at an index as the sum of ``where(index == target, ...)``; any other reduction as it is."""
    if not kind_of(r).gathers:
        return r
    _, over, params = r.attrs
    target, value, vector = r.args
    hit = apply("where", apply("eq", index(params[0]), target), value, 0.0)
    if hit.feature is not None and r.attrs[0] == "pick":
        hit = constructors.fsum(hit)
    return reduce_node("sum", over, (), (hit if vector is ONE else apply("mul", hit, vector),))

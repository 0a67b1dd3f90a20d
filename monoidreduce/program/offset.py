"""Folds moved to their place: a part of a larger problem, written so that any engine can run it as it is.

A part knows its rows and columns from zero. Where the program speaks of an index or of the number of rows or columns,
the whole problem is meant: the part's first row and column, and the whole lengths, become numbers fed to the fold, and
what an index is compared with (a label, a top-k's places) is moved the other way, so that gathers stay gathers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ..reductions import kind_of
from . import constructors
from .expression import Expr, index, node, reduce_node, size, topological
from .lower import Fold
from .normal_form import hot_condition


@dataclass(frozen=True)
class Target:
    """A leaf that stands for ``of`` (a leaf or an index), counted from the first ``row`` or ``col`` of the part."""

    of: Expr
    axis: str


Fed = str | Target  # "row_start", "col_start", "num_rows", "num_cols", or a target


@functools.lru_cache(maxsize=1024)
def moved(fold: Fold) -> tuple[Fold, tuple[Fed, ...]]:
    """The fold for a part, and what must be fed to it behind its own leaves (nothing where no place is asked for)."""
    fed: dict[Fed, Expr] = {}

    def number(name: str) -> Expr:
        return fed.setdefault(name, node("leaf", (), (name,), rows=False, cols=False, feature=None, dtype="int"))

    def target(of: Expr, axis: str) -> Expr:
        name = f"{of if of.op == 'leaf' else of.op}_from_{axis}"
        leaf = node("leaf", (), (name,), rows=of.rows, cols=of.cols, feature=of.feature, dtype="int")
        return fed.setdefault(Target(of, axis), leaf)

    fields = [f for r in fold.reductions for f in (r.args[1:] if kind_of(r).gathers else r.args)]
    replace: dict[Expr, Expr] = {}
    for e in topological(fields):
        hot = hot_condition(e)[0] if e.op == "eq" else None
        if hot is not None and not hot[1].args:
            replace[e] = constructors.apply("eq", index(hot[0]), target(hot[1], hot[0]))
    for e in topological([*fields, *fold.scales], stop=replace.__contains__):
        if e.op in ("row_index", "col_index"):
            replace[e] = constructors.apply("add", e, number(e.op.replace("index", "start")))
        elif e in (size("rows"), size("cols")):
            replace[e] = number(f"num_{e.attrs[0]}")
    reductions = []
    for r in fold.reductions:
        kind, over, params = r.attrs
        if kind_of(r).gathers:
            args = (target(r.args[0], params[0]), *constructors.substitute(r.args[1:], replace))
        else:
            args = constructors.substitute(r.args, replace)
        reductions.append(reduce_node(kind, over, params, args))
    scales = constructors.substitute(fold.scales, replace)
    return Fold((*fold.leaves, *fed.values()), tuple(reductions), scales, exact=fold.exact), tuple(fed)

"""What products that write weights are asked for, and the words that all of their kernels share."""

from __future__ import annotations

from dataclasses import dataclass

from ....program.expression import Expr, topological
from ..codegen.expressions import ExpressionWriter
from .row_factor import Late, Own

PLACES = [
    "b0 = tl.cast(0, tl.int64)",
    "kept_at = tile * KEPT + tl.arange(0, KEPT)",
    "kept_in = kept_at < kept_size",
    "kept_lane = tl.arange(0, KEPT).to(INT)",
    "folded_lane = tl.arange(0, FOLDED).to(INT)",
    "folded_at = start + tl.arange(0, FOLDED)",
    "folded_in = folded_at < folded_size",
]


@dataclass(frozen=True)
class Task:
    """What is to be written, in some leaves: per pair a weight, which may be known late only."""

    leaves: tuple[Expr, ...]
    folds: tuple[Expr, ...]  # a softmax and picks, where the weight needs them
    names: tuple[Expr, ...]  # of their results
    weight: Expr
    late: Late | None = None
    own: Own | None = None  # what is left out of it, each row's own column


def product(task: Task) -> Expr:
    return next(e for e in topological([task.weight]) if e.op == "dot")


def sides(product: Expr) -> tuple[Expr, Expr]:
    """What is multiplied, the rows' side first."""
    x, y = product.args
    return (x, y) if x.rows else (y, x)


def cut(v: ExpressionWriter) -> list[str]:
    """What was bound since the last time."""
    found, v.before = v.before, []
    return found

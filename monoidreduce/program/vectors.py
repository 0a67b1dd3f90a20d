"""torch's functions of one axis, over the features of a vector: norms, and softmax and its relatives."""

from __future__ import annotations

import math
from typing import Any

from . import constructors
from .constructors import apply
from .expression import Expr


def norm(x: Expr, p: Any = 2) -> Expr:
    """The p-norm; its slope at 0 is 0, as in torch."""
    if p in (2, 2.0, "fro", None):
        square = constructors.fsum(apply("square", x))
        zero = apply("eq", square, 0)
        return apply("where", zero, 0.0, apply("sqrt", apply("where", zero, 1.0, square)))
    size = apply("abs", x)
    if p == 1:
        return constructors.fsum(size)
    if p == math.inf:
        return constructors.feature_extreme(size, True)
    return apply("pow", constructors.fsum(apply("pow", size, p)), 1.0 / p)


def normalize(x: Expr, p: float, eps: float) -> Expr:
    """x / max(norm, eps)."""
    return apply("div", x, apply("maximum", norm(x, p), eps))


def over_features(name: str, x: Expr) -> Expr:
    """``softmax``, ``log_softmax`` or ``logsumexp`` of a row's or a column's vector, less its largest feature first."""
    x = apply("cast", x, to="float")
    peak = apply("detach", constructors.feature_extreme(x, True))
    if name == "logsumexp":  # minus infinity, and not NaN, where all features are
        peak = apply("where", apply("isinf", peak), 0.0, peak)
    lowered = apply("sub", x, peak)
    raised = apply("exp", lowered)
    total = constructors.fsum(raised)
    if name == "softmax":
        return apply("div", raised, total)
    return (
        apply("sub", lowered, apply("log", total)) if name == "log_softmax" else apply("add", peak, apply("log", total))
    )

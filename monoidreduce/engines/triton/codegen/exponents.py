"""Constant factors of exponents, taken out so that pairs do not pay for them.

``exp(scale * s)`` becomes ``exp2(s * factor)`` with ``factor = scale * log2(e)``, a number that is known before the
loop. The functions here are symbolic; ``expressions.py`` writes what they find.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ....program.constructors import apply
from ....program.expression import Expr, const
from .kernel_spec import Spec

LOG2E = math.log2(math.e)
_DEEPEST = 128  # nodes under an exponent, up to which factors are taken out of its sums and conditions


def literal(value: float | int | bool) -> str:
    """A Python number as it is written in a kernel."""
    if isinstance(value, float) and (math.isinf(value) or math.isnan(value)):
        return f'float("{value}")'
    return repr(value)


class Factored(NamedTuple):
    """An expression as ``core * constant``, times (or divided by, where True) numbers that no pair changes."""

    core: Expr
    constant: float
    numbers: list[tuple[Expr, bool]]


def factor_out(e: Expr, spec: Spec, positive: bool) -> Factored:
    """Take every factor that does not depend on the pair out of ``e``; with ``positive``, only those above zero."""
    constant = 1.0
    numbers: list[tuple[Expr, bool]] = []
    while True:
        if e.op == "neg" and not positive:
            e, constant = e.args[0], -constant
            continue
        masks = e.op == "where" and e.args[2].op == "const" and e.depth <= _DEEPEST
        if masks and e.args[2].const == -math.inf:  # a positive factor leaves -inf as it is
            inner = factor_out(e.args[1], spec, positive=True)
            core = apply("where", e.args[0], inner.core, e.args[2])
            return Factored(core, constant * inner.constant, [*numbers, *inner.numbers])
        if e.op in ("add", "sub") and (both := _factor_out_of_sum(e, spec)) is not None:
            return Factored(both.core, constant * both.constant, [*numbers, *both.numbers])
        k = None
        if e.op in ("mul", "div"):
            k = next((a for a in (e.args if e.op == "mul" else e.args[1:]) if _is_factor(a, spec, positive)), None)
        if k is None:
            return Factored(e, constant, numbers)
        rest = e.args[1] if k is e.args[0] else e.args[0]
        if k.op == "const":
            constant = constant / k.const if e.op == "div" else constant * k.const
        else:
            numbers.append((k, e.op == "div"))
        e = rest


def _factor_out_of_sum(e: Expr, spec: Spec) -> Factored | None:
    """``scale * s + slope * d`` as ``scale * (s + (slope / scale) * d)``: the quotient is computed before the loop."""
    first, other = e.args
    if e.depth > _DEEPEST or not first.is_pair or other.op != "mul" or not other.is_pair:
        return None
    number, rest = other.args if not other.args[0].is_pair else other.args[::-1]
    core, factor, numbers = factor_out(first, spec, positive=True)
    if number.is_pair or spec.folds(number) or number.feature is not None or core is first:
        return None
    by: Expr = const(factor)
    for k, divides in numbers:
        by = apply("div" if divides else "mul", by, k)
    return Factored(apply(e.op, core, apply("mul", apply("div", number, by), rest)), factor, numbers)


def _is_factor(k: Expr, spec: Spec, positive: bool) -> bool:
    """True for a number that is the same for all pairs: a constant, or a float given at the call."""
    if k.op == "const" and k.dtype != "bool":
        return k.const > 0 if positive else k.const != 0
    if k.dtype != "float" or k.rows or k.cols or k.feature is not None:
        return False
    return k.op == "leaf" and (not positive or spec.type_of[k] == "positive")

"""What is known of a kernel's numbers before its text is written: constant factors of exponents, widths of integers.

``exp(scale * s)`` becomes ``exp2(s * factor)`` with ``factor = scale * log2(e)``, a number that is known before the
loop: pairs do not pay for it. Integers have 64 bits in a body. In a kernel, indices, small data and what stays small
are computed in 32, which is faster: an operation whose result may not fit is given its arguments in 64. Bounds follow
from types and constants. All of this is symbolic; ``expressions.py`` writes what is found.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from ....program.constructors import apply
from ....program.expression import Expr, const, topological
from .kernel_spec import Spec

LOG2E = math.log2(math.e)
_DEEPEST = 128  # nodes under an exponent, up to which factors are taken out of its sums and conditions

BITS = ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "bitwise_left_shift", "bitwise_right_shift")
_GROWS = ("add", "sub", "mul", "square", "neg", "abs", "floor_divide")  # results may be larger than the arguments
_MEETS = ("where", "eq", "ne", "lt", "le", "gt", "ge")  # a constant beyond 32 bits beside an argument of 32
SMALL = 2**28  # lengths are below this; so are a call's integers and the offsets inside a tile, or all have 64 bits
_ANY = 2**63
_MOST = {"bool": 1, "int8": 2**7, "uint8": 2**8, "int16": 2**15, "int32": 2**31, "number": SMALL}
_RULES: dict[str, Callable[..., int]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "square": lambda x: x * x,
    "floor_divide": lambda x, y: x,
    "bitwise_right_shift": lambda x, n: x,
    "remainder": lambda x, y: y,
    "fmod": min,
    "popcount": lambda x: 64,
    "where": lambda c, x, y: max(x, y),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor"), lambda x, y: 1 << max(x, y).bit_length()),
    "bitwise_not": lambda x: x + 1,
    **dict.fromkeys(("neg", "abs", "detach", "floor", "ceil", "round", "trunc", "sign", "spread"), lambda x: x),
    **dict.fromkeys(("minimum", "maximum"), max),
}


def literal(value: float | int | bool) -> str:
    """A Python number as it is written in a kernel."""
    if isinstance(value, float) and (math.isinf(value) or math.isnan(value)):
        return f'float("{value}")'
    return repr(value)


class FactoredExpression(NamedTuple):
    """An expression as ``core * constant``, times (or divided by, where True) numbers that no pair changes."""

    core: Expr
    constant: float
    numbers: list[tuple[Expr, bool]]


def factor_out(e: Expr, spec: Spec, positive: bool) -> FactoredExpression:
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
            return FactoredExpression(core, constant * inner.constant, [*numbers, *inner.numbers])
        if e.op in ("add", "sub") and (both := _factor_out_of_sum(e, spec)) is not None:
            return FactoredExpression(both.core, constant * both.constant, [*numbers, *both.numbers])
        k = None
        if e.op in ("mul", "div"):
            k = next((a for a in (e.args if e.op == "mul" else e.args[1:]) if _is_factor(a, spec, positive)), None)
        if k is None:
            return FactoredExpression(e, constant, numbers)
        rest = e.args[1] if k is e.args[0] else e.args[0]
        if k.op == "const":
            constant = constant / k.const if e.op == "div" else constant * k.const
        else:
            numbers.append((k, e.op == "div"))
        e = rest


def _factor_out_of_sum(e: Expr, spec: Spec) -> FactoredExpression | None:
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
    return FactoredExpression(apply(e.op, core, apply("mul", apply("div", number, by), rest)), factor, numbers)


def _is_factor(k: Expr, spec: Spec, positive: bool) -> bool:
    """True for a number that is the same for all pairs: a constant, or a float given at the call."""
    if k.op == "const" and k.dtype != "bool":
        return k.const > 0 if positive else k.const != 0
    if k.dtype != "float" or k.rows or k.cols or k.feature is not None:
        return False
    return k.op == "leaf" and (not positive or spec.type_of[k] == "positive")


class IntegerBounds:
    """The largest magnitude of every integer of a kernel, as far as it is known before the numbers are."""

    def __init__(self, spec: Spec):
        self.spec = spec
        self.known: dict[Expr, int] = {}
        self.wide: set[Expr] = set()  # what was written so far and has 64 bits

    def arguments(self, e: Expr, args: list[str]) -> list[str]:
        """The texts of an operation's arguments, in 64 bits where its result, or a constant, needs them."""
        if e.op in _GROWS:
            widens = e.dtype == "int" and (e.op in ("mul", "square") or self.most(e) >= 2**31)
        else:
            widens = e.op in _MEETS and any(map(_is_beyond_int32, e.args))
        beside = any(self.spec.type_of.get(a) == "int64" or a in self.wide for a in e.args)
        if e.op in _GROWS and e.dtype == "int" and (widens or beside):
            self.wide.add(e)
        if not widens or beside:  # Triton widens what stands beside 64 bits
            return args
        whole = [a.op != "const" and a.dtype != "float" and (e.op != "where" or k > 0) for k, a in enumerate(e.args)]
        return [f"{text}.to(tl.int64)" if w else text for text, w in zip(args, whole, strict=True)]

    def most(self, e: Expr) -> int:
        for n in topological([e], stop=self.known.__contains__):
            if n not in self.known:
                self.known[n] = min(self._find(n), _ANY)
        return self.known[e]

    def _find(self, e: Expr) -> int:
        if e.dtype == "bool":
            return 1
        if e.op == "const":
            return int(abs(e.const)) if e.dtype == "int" else _ANY
        if e.op in ("row_index", "col_index", "size"):
            return SMALL
        if e.op == "leaf":
            return _MOST.get(self.spec.type_of.get(e, ""), _ANY)
        rule = _RULES.get(e.op) if e.dtype == "int" else None
        if e.op == "cast":
            return 1 if e.args[0].dtype == "bool" else _ANY
        return rule(*(self.known[a] for a in e.args)) if rule is not None else _ANY


def _is_beyond_int32(e: Expr) -> bool:
    """True for an integer constant that int32 does not hold: Triton refuses it beside an int32 tensor."""
    return e.op == "const" and e.dtype == "int" and not -(2**31) <= e.const < 2**31

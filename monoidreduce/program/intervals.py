"""Interval rules: what is known of a value on a whole tile before the tile is computed.

An interval is ``(low, high)``. Truth values are ``(0, 0)``, ``(1, 1)`` or ``(0, 1)``. ``(-inf, -inf)`` means
*exactly* minus infinity; an infinite end of a wider interval means unbounded but finite, so ``-inf`` minus an unknown
number is still ``-inf`` and zero times an unknown number is still zero. ``NAN`` says that NaN may be among the values:
it spreads through arithmetic and every question about it has an open answer, so NaN is never promised away.

The ends of an integer's interval are Python integers, which are exact: float64 cannot tell 2**53 from 2**53 + 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable

Interval = tuple[float, float]

INF = math.inf
UNKNOWN: Interval = (-INF, INF)
NAN: Interval = (math.nan, math.nan)  # anything, NaN included
TRUE: Interval = (1.0, 1.0)
FALSE: Interval = (0.0, 0.0)
EITHER: Interval = (0.0, 1.0)
MINUS_INF: Interval = (-INF, -INF)


def known(low: float, high: float) -> Interval:
    return NAN if low != low or high != high else (low, high)


def may_be_nan(x: Interval) -> bool:
    return x[0] != x[0]


def _exactly_infinite(x: Interval) -> bool:
    return x[0] == x[1] and math.isinf(x[0])


def unknown(*args: Interval) -> Interval:
    """A function that nothing is known of: at infinity it may be NaN."""
    return NAN if any(map(_exactly_infinite, args)) else UNKNOWN


def anything(*_: Interval) -> Interval:
    return NAN


def monotone(
    f: Callable[[float], float], low: float = -INF, high: float = INF, domain: float = -INF
) -> Callable[[Interval], Interval]:
    """The rule of an increasing function whose values lie between ``low`` and ``high``; below ``domain`` it is NaN."""

    def rule(x: Interval) -> Interval:
        if x[0] < domain:
            return NAN
        return known(max(low, _safe(f, x[0], low)), min(high, _safe(f, x[1], high)))

    return rule


def falling(f: Callable[[float], float], low: float = -INF, high: float = INF) -> Callable[[Interval], Interval]:
    """The same of a decreasing function."""
    rule = monotone(lambda x: -f(x), -high, -low)
    return lambda x: neg(rule(x))


def _safe(f: Callable[[float], float], x: float, otherwise: float) -> float:
    try:
        return f(x)
    except (OverflowError, ValueError):
        return otherwise


def bounded(low: float, high: float) -> Callable[[Interval], Interval]:
    return lambda x: (low, high)


def add(x: Interval, y: Interval) -> Interval:
    for one, other in ((x, y), (y, x)):
        if _exactly_infinite(one):  # plus anything finite
            return NAN if other[0] == other[1] == -one[0] else one
    return known(x[0] + y[0], x[1] + y[1])


def neg(x: Interval) -> Interval:
    return -x[1], -x[0]


def sub(x: Interval, y: Interval) -> Interval:
    return add(x, neg(y))


def mul(x: Interval, y: Interval) -> Interval:
    for one, other in ((x, y), (y, x)):
        if _exactly_infinite(one) and other[0] <= 0 <= other[1]:
            return NAN
    if FALSE in (x, y):
        return FALSE
    ends = [_times(a, b) for a in x for b in y]
    return known(min(ends), max(ends))


def _times(a: float, b: float) -> float:
    return 0.0 if a == 0.0 or b == 0.0 else a * b


def wave(x: Interval) -> Interval:
    """Sine and cosine."""
    return NAN if _exactly_infinite(x) else (-1.0, 1.0)


def cast(x: Interval, to: str) -> Interval:
    if to == "bool":
        return to_bool(x)
    return monotone(lambda v: v if math.isinf(v) else math.trunc(v))(x) if to == "int" else rounded(x)


def rounded(x: Interval) -> Interval:
    """Integers as floating-point numbers. An engine may round them to float32: beyond 2**24 the interval is widened."""
    low, high = (float(v) for v in x)
    if isinstance(x[0], int) and abs(low) > 2**24:
        low -= abs(low) * 2.0**-23
    if isinstance(x[1], int) and abs(high) > 2**24:
        high += abs(high) * 2.0**-23
    return low, high


def int64(x: Interval) -> Interval:
    """The interval of an integer result: int64 wraps around, so that beyond its ends nothing is known."""
    return x if x[0] >= -(2**63) and x[1] < 2**63 else UNKNOWN


def div(x: Interval, y: Interval) -> Interval:
    if _exactly_infinite(x) or _exactly_infinite(y):
        return NAN
    if y[0] > 0 or y[1] < 0:
        return mul(x, (0.0 if math.isinf(y[1]) else 1 / y[1], 0.0 if math.isinf(y[0]) else 1 / y[0]))
    return NAN if y[0] <= 0 <= y[1] and x[0] <= 0 <= x[1] else UNKNOWN


def absolute(x: Interval) -> Interval:
    if x[0] >= 0:
        return x
    return neg(x) if x[1] <= 0 else (0.0, max(-x[0], x[1]))


def square(x: Interval) -> Interval:
    low, high = absolute(x)
    return _times(low, low), _times(high, high)


def minimum(x: Interval, y: Interval) -> Interval:
    return min(x[0], y[0]), min(x[1], y[1])


def maximum(x: Interval, y: Interval) -> Interval:
    return max(x[0], y[0]), max(x[1], y[1])


def where(c: Interval, x: Interval, y: Interval) -> Interval:
    c = to_bool(c)
    if c == TRUE:
        return x
    return y if c == FALSE else (min(x[0], y[0]), max(x[1], y[1]))


def _truth(surely: bool, surely_not: bool) -> Interval:
    return TRUE if surely else FALSE if surely_not else EITHER


def less(x: Interval, y: Interval) -> Interval:
    return _truth(x[1] < y[0], x[0] >= y[1])


def less_equal(x: Interval, y: Interval) -> Interval:
    return _truth(x[1] <= y[0], x[0] > y[1])


def greater(x: Interval, y: Interval) -> Interval:
    return less(y, x)


def greater_equal(x: Interval, y: Interval) -> Interval:
    return less_equal(y, x)


def equal(x: Interval, y: Interval) -> Interval:
    return _truth(x[0] == x[1] == y[0] == y[1], x[1] < y[0] or x[0] > y[1])


def logical_not(x: Interval) -> Interval:
    low, high = to_bool(x)
    return 1 - high, 1 - low


def not_equal(x: Interval, y: Interval) -> Interval:
    return logical_not(equal(x, y))


def logical_and(x: Interval, y: Interval) -> Interval:
    return minimum(to_bool(x), to_bool(y))


def logical_or(x: Interval, y: Interval) -> Interval:
    return maximum(to_bool(x), to_bool(y))


def logical_xor(x: Interval, y: Interval) -> Interval:
    x, y = to_bool(x), to_bool(y)
    return EITHER if EITHER in (x, y) else _truth(x != y, x == y)


def _are_whole(*args: Interval) -> bool:
    """Whether all ends are integers, which no rounding changes."""
    return all(isinstance(end, int) for x in args for end in x)


def floor_divide(x: Interval, y: Interval) -> Interval:
    """Of integers by a positive one: it rises with the dividend, and is nearest to 0 for the largest divisor."""
    if not _are_whole(x, y) or y[0] <= 0:
        return unknown(x, y)
    ends = [a // b for a in x for b in y]
    return min(ends), max(ends)


def inside(low: float, high: float, rule: Callable[[Interval], Interval]) -> Callable[[Interval], Interval]:
    """The rule of a function that is NaN outside of [low, high]."""
    return lambda x: rule(x) if low <= x[0] and x[1] <= high else NAN


def hypot(x: Interval, y: Interval) -> Interval:
    (a, b), (c, d) = absolute(x), absolute(y)
    return known(math.hypot(a, c), math.hypot(b, d))


def copysign(x: Interval, sign: Interval) -> Interval:
    low, high = absolute(x)
    return known(low, high) if sign[0] > 0 else known(-high, -low) if sign[1] < 0 else known(-high, high)


# Whole numbers, as int64 holds them. What an end does not bound is unknown.


def bitwise_and(x: Interval, y: Interval) -> Interval:
    ends = [a[1] for a in (x, y) if a[0] >= 0]
    return (0, min(ends)) if ends else UNKNOWN


def bitwise_or(x: Interval, y: Interval) -> Interval:
    """Of | and ^: two numbers from 0 give none with more bits."""
    most = max(x[1], y[1])
    return (0, (1 << int(most).bit_length()) - 1) if min(x[0], y[0]) >= 0 and most < INF else UNKNOWN


def shift_left(x: Interval, count: Interval) -> Interval:
    if count[0] != count[1] or not 0 <= count[0] < 64:
        return UNKNOWN
    return mul(x, (1 << int(count[0]),) * 2)


def shift_right(x: Interval, count: Interval) -> Interval:
    if count[0] != count[1] or not 0 <= count[0] < 64 or UNKNOWN[0] in x or UNKNOWN[1] in x:
        return UNKNOWN
    return int(x[0]) >> int(count[0]), int(x[1]) >> int(count[0])


def remainder(x: Interval, y: Interval) -> Interval:
    if _exactly_infinite(x) or y[0] <= 0 <= y[1]:
        return NAN
    if _are_whole(x, y) and y[0] > 0:
        return x if x[0] >= 0 and x[1] < y[0] else (0, y[1] - 1)
    return (0.0, y[1]) if y[0] > 0 else UNKNOWN


def fmod(x: Interval, y: Interval) -> Interval:
    if _exactly_infinite(x) or y[0] <= 0 <= y[1]:
        return NAN
    most = min(absolute(x)[1], absolute(y)[1])
    return (0 if x[0] >= 0 else -most), (0 if x[1] <= 0 else most)


def to_bool(x: Interval) -> Interval:
    return _truth(x[0] > 0 or x[1] < 0, x == FALSE)

"""C++ texts of the primitives: what a generated loop computes for one pair.

``{0}``, ``{1}`` ... are the arguments, already in one type; attributes by name. The functions that a text calls are in
``support.py``. A primitive that is not in the table has no C++ form, and tiles of torch calls run the folds that
use it.
"""

from __future__ import annotations

import math
import re
from typing import Any

from ....program.expression import Expr
from ....program.primitives import PRIMITIVES


class Unsupported(Exception):
    """A fold has no C++ form; the message says why."""


# texts that hold for every type of number
_PLAIN = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "neg": "-{0}",
    "abs": "({0} < 0 ? -{0} : {0})",
    "sign": "sign_({0})",
    "square": "{0} * {0}",
    "sqrt": "sqrt_({0})",
    "rsqrt": "(F)1 / sqrt_({0})",
    "reciprocal": "(F)1 / {0}",
    "exp": "exp_({0})",
    "decay": "decay_({0})",
    "relu": "({0} <= 0 ? (F)0 : {0})",
    "leaky_relu": "({0} > 0 ? {0} : {0} * {negative_slope})",
    "minimum": "minimum_({0}, {1})",
    "maximum": "maximum_({0}, {1})",
    "where": "({0} ? {1} : {2})",
    "floor": "floor_({0})",
    "ceil": "ceil_({0})",
    "round": "round_({0})",
    "trunc": "trunc_({0})",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "logical_and": "{0} & {1}",
    "logical_or": "{0} | {1}",
    "logical_xor": "{0} ^ {1}",
    "logical_not": "!{0}",
    "isnan": "{0} != {0}",
    "isinf": "(({0} < 0 ? -{0} : {0}) == INF)",
    "cast": "{0}",
    "detach": "{0}",
    "stretches": "{0}",
    "nan_to_num": "nan_to_num_({0}, (F){nan}, (F){posinf}, (F){neginf})",
    "bitwise_and": "{0} & {1}",
    "bitwise_or": "{0} | {1}",
    "bitwise_xor": "{0} ^ {1}",
    "bitwise_not": "~{0}",
    "bitwise_left_shift": "shift_left_({0}, {1})",
    "bitwise_right_shift": "shift_right_({0}, {1})",
    "popcount": "popcount_({0}, {bits})",
}
# texts whose functions exist for float alone: torch's own are as good in double
_SINGLE = {
    "exp2": "exp2_({0})",
    "expm1": "expm1_({0})",
    "log": "log_({0})",
    "log2": "(float)(log_({0}) * 1.4426950408889634)",
    "log1p": "log1p_({0})",
    "sinh": "0.5f * (expm1_({0}) - expm1_(-{0}))",
    "cosh": "0.5f * (exp_({0}) + exp_(-{0}))",
    "xlogy": "({0} == 0 && {1} == {1} ? 0.0f : {0} * log_({1}))",
    "erf": "erf_({0})",
    "erfc": "erfc_({0})",
    "sin": "quick_sin_({0})",  # where loops have asked (``tile_text.py``); elsewhere without "quick_"
    "cos": "quick_cos_({0})",
    "tanh": "tanh_({0})",
    "mish_gate": "mish_gate_({0})",
    "pow": "pow_({0}, {1})",
    "sigmoid": "sigmoid_({0})",
    "gate": "sigmoid_({0})",
    "normal_gate": "normal_gate_({0})",
    "silu": "{0} * sigmoid_({0})",
    "gelu": "gelu_{approximate}({0})",
    "softplus": "softplus_({0}, {beta}, {threshold})",
    "logsigmoid": "logsigmoid_({0})",
    "logaddexp": "logaddexp_({0}, {1})",
    **{name: f"{name}_({{0}})" for name in ("log10", "logit", "atan", "asin", "acos", "asinh", "acosh", "atanh")},
    **{name: f"{name}_({{0}})" for name in ("erfinv", "sinc", "lgamma", "digamma")},
    **{name: f"{name}_({{0}}, {{1}})" for name in ("atan2", "hypot", "copysign")},
    "polygamma": "polygamma_{n}({0})",
}
_WHOLE = {  # of integers
    **{name: f"{name}_({{0}}, {{1}})" for name in ("floor_divide", "remainder", "fmod")},
    "pow": "power_({0}, {1})",
    "relu": "({0} <= 0 ? (I)0 : {0})",
}
_COMPARES = ("eq", "ne", "lt", "le", "gt", "ge")
NUMBER = {"float": "F", "int": "I", "bool": "bool"}
_ORDER = {"bool": 0, "int": 1, "float": 2}


def literal(value: Any, dtype: str) -> str:
    """A Python number as C++, of a class of number."""
    if dtype == "bool":
        return "true" if value else "false"
    if dtype == "int":
        return f"(I){value}LL" if value > -(2**63) else "INT64_MIN"
    if value != value:
        return "NaN"
    if math.isinf(value):
        return "INF" if value > 0 else "(-INF)"
    return f"(F){float(value)!r}"


def write_primitive(e: Expr, args: list[str], single: bool) -> str:
    """The text of a node from those of its arguments; ``single``: arithmetic is done in float."""
    name = e.op
    whole = e.dtype == "int" or (name in _COMPARES and all(a.dtype != "float" for a in e.args))
    text = _WHOLE.get(name) if whole else None
    text = text or _PLAIN.get(name) or (_SINGLE.get(name) if single else None)
    if text is None or (name == "polygamma" and e.attrs[0] != 1):
        raise Unsupported(f"{name} has no C++ form")
    classes = [a.dtype for a in e.args]
    widest = max(classes, key=_ORDER.__getitem__)
    if name == "where":
        wanted = ["bool", e.dtype, e.dtype]
    elif name in _COMPARES:
        wanted = [widest] * 2
    elif name in ("logical_and", "logical_or", "logical_xor", "logical_not"):
        wanted = ["bool"] * len(args)
    elif name in ("isnan", "isinf", "cast", "detach", "stretches"):
        wanted = classes
    else:
        wanted = [e.dtype] * len(args)
    if e.dtype == "int" and name in ("add", "sub", "mul"):  # torch's integers wrap around, C++'s must not overflow
        return f"(I)((uint64_t){args[0]} {text[4]} (uint64_t){args[1]})"
    given = [a if w == c else f"({NUMBER[w]})({a})" for a, w, c in zip(args, wanted, classes, strict=True)]
    return f"({NUMBER[e.dtype]})({text.format(*given, **_attributes(e, single))})"


def _attributes(e: Expr, single: bool) -> dict[str, str]:
    found = dict(zip(PRIMITIVES[e.op].attributes, e.attrs, strict=True))
    if e.op == "nan_to_num":
        most = "3.4028234663852886e38" if single else "1.7976931348623157e308"
        found["posinf"] = most if found["posinf"] is None else repr(float(found["posinf"]))
        found["neginf"] = f"-{most}" if found["neginf"] is None else repr(float(found["neginf"]))
        found["nan"] = repr(float(found["nan"] or 0.0))
        if any("n" in v for v in found.values()):  # an infinity or NaN written as Python does
            raise Unsupported("nan_to_num to an infinity has no C++ form")
        return found
    written = {
        k: literal(v, "float") for k, v in found.items() if isinstance(v, (float, int)) and k not in ("n", "bits")
    }
    return {k: str(v) for k, v in found.items()} | written


# Inverse, gamma and error functions of float, and bits of whole numbers, in C++: more of ``support.py``.
#
# They are part of a generated file where it calls one of them. As there they are branch-free; they compute in double,
# where polynomials of a relative error below 1e-8 leave all digits of a float.

FUNCTIONS = """
INLINE double log_any(double x) {  // of any number, as torch has it
  const double y = log_(x), z = x == 0.0 ? -(double)__builtin_inf() : x < 0.0 ? __builtin_nan("") : y;
  return (x == (double)__builtin_inf()) | (x != x) ? x : z;
}
INLINE double root(double x) { return __builtin_sqrt(x); }
INLINE float log10_(float x) { return (float)(0.4342944819032518 * log_any(x < 1e-37f ? (double)x * 1e10 : (double)x)
                                              - (x < 1e-37f ? 10.0 : 0.0)); }
INLINE float logit_(float x) { const double d = x; return (float)log_any((x < 0) | (x > 1) ? -1.0 : d / (1.0 - d)); }
INLINE float copysign_(float a, float b) {
  return bits<float>((bits<U>(a) & 0x7fffffffu) | (bits<U>(b) & 0x80000000u));
}
INLINE double atan_unit(double y) {  // of |y| <= 1
  const double q = y * y;
  double p = polynomial(q, 0.001091114046245701, -0.007199398203125328, 0.02227437998948465, -0.04435751698234764,
    0.06716108379682273, -0.08798772083089684, 0.11054501136804236, -0.14279159611491257, 0.1999960463438745,
    -0.3333332393519831, 0.9999999996282283);
  return p * y;
}
INLINE double atan_wide(double x) {
  const double a = x < 0.0 ? -x : x;
  const bool big = a > 1.0;
  const double y = atan_unit(big ? 1.0 / x : x), half = x < 0.0 ? -1.5707963267948966 : 1.5707963267948966;
  return big ? half - y : y;
}
INLINE float atan_(float x) {
  const float a = x < 0.0f ? -x : x;
  const bool big = a > 1.0f;
  const float t = big ? -1.0f / a : a, q = t * t;
  float p = polynomial(q, -0.00179362833f, 0.0109146358f, -0.0311779026f, 0.0579576492f, -0.0840345398f,
    0.109521873f, -0.142642424f, 0.199985489f, -0.333332986f);
  const float rest = t * q * p, y = big ? 1.57079637f + (t + (rest - 4.37113883e-8f)) : t + rest;
  return copysign_(y, x);
}
INLINE float asin_(float x) { const double d = x; return (float)atan_wide(d / root((1.0 - d) * (1.0 + d))); }
INLINE float acos_(float x) { const double d = x; return (float)(2.0 * atan_wide(root((1.0 - d) / (1.0 + d)))); }
INLINE float atan2_(float y, float x) {
  const double a = x < 0 ? -(double)x : (double)x, b = y < 0 ? -(double)y : (double)y;
  const double high = a > b ? a : b, low = a > b ? b : a;
  const double ratio = high == 0.0 ? 0.0 : low == (double)__builtin_inf() ? 1.0 : low / high;
  double t = atan_unit(ratio);
  t = b > a ? 1.5707963267948966 - t : t;
  t = bits<int32_t>(x) < 0 ? 3.141592653589793 - t : t;
  t = bits<int32_t>(y) < 0 ? -t : t;
  return (x != x) | (y != y) ? x + y : (float)t;
}
INLINE float hypot_(float a, float b) {
  const float y = (float)root((double)a * a + (double)b * b), inf = (float)INF;
  return (a == inf) | (a == -inf) | (b == inf) | (b == -inf) ? inf : y;
}
INLINE float asinh_(float x) {
  const double a = x < 0 ? -(double)x : (double)x, y = a < 1e-4 ? a - a * a * a / 6.0 : log_any(a + root(a * a + 1.0));
  return (float)(x < 0 ? -y : y);
}
INLINE float acosh_(float x) {
  const double d = x;
  return (float)log_any(x < 1 ? -1.0 : d + root((d - 1.0) * (d + 1.0)));
}
INLINE float atanh_(float x) {
  const double a = x < 0 ? -(double)x : (double)x, y = 0.5 * log_any(a > 1.0 ? -1.0 : (1.0 + a) / (1.0 - a));
  const double z = a < 1e-3 ? a + a * a * a * (1.0 / 3 + a * a / 5.0) : y;
  return (float)(x < 0 ? -z : z);
}
INLINE float erfinv_(float x) {  // polynomials of -log(1 - x^2)
  const double d = x, w = -log_any((1.0 - d) * (1.0 + d)), u = w - 2.5, v = root(w) - 3.0;
  double p = polynomial(u, -8.791017955699019e-09, 2.323262378098054e-08, 4.661701325271363e-07,
    -3.462704506937595e-06, -4.963345425858762e-06, 0.0002183444384696857, -0.0012527418825182273,
    -0.0041773867799402755, 0.24664028615527028, 1.5014093592822946);
  double q = polynomial(v, 0.00010098725450490267, -0.0002941746953460838, -3.620811473143733e-05,
    0.0014656826719516812, -0.0036079340035103445, 0.00569451649670237, -0.007635036980693811,
    0.009444386239345879, 1.0016748227725842, 2.8329768164819673);
  const float y = (float)(d * (w < 5.0 ? p : q));
  return (x == 1.0f) | (x == -1.0f) ? x * (float)INF : y;
}
INLINE double half_sine(double r) {  // sin(pi r) for |r| <= 1/2
  const double q = r * r;
  double p = polynomial(q, -0.0070221634076570024, 0.08204647875654367, -0.599251330090059, 2.5501632403160635,
    -5.167712762115735, 3.141592653523345);
  return p * r;
}
INLINE double sine_of_pi(double x) {
  const double n = __builtin_floor(x + 0.5), y = half_sine(x - n), half = 0.5 * n;
  return __builtin_floor(half) != half ? -y : y;
}
INLINE float sinc_(float x) {
  const double d = x, y = sine_of_pi(d) / (d * 3.141592653589793);
  return x == 0.0f ? 1.0f : (float)y;
}
// The gamma function as in the Triton engine's special_functions.py: reflection, ten above, Stirling's series.
INLINE float lgamma_(float x) {
  const double d = x, y = d < 0.5 ? 1.0 - d : d;
  const bool low = y < 10.0;
  const double u = low ? y * (y + 9.0) : 1.0, below = u * (u + 8.0) * (u + 14.0) * (u + 18.0) * (u + 20.0);
  const double z = low ? y + 10.0 : y, r = 1.0 / z, q = r * r;
  const double s = 1.0 / 12 - q * (1.0 / 360 - q * (1.0 / 1260 - q * (1.0 / 1680 - q / 1188)));
  const double t = (z - 0.5) * (log_(z) - 1.0) + 0.4189385332046727 + r * s - (low ? log_(below) : 0.0);
  const double sine = sine_of_pi(d), size = sine < 0.0 ? -sine : sine, inf = __builtin_inf();
  const double w = d < 0.5 ? (size == 0.0 ? inf : 1.1447298858494002 - log_(size) - t) : t;
  const float v = (x == 1.0f) | (x == 2.0f) ? 0.0f : (float)w;
  return (d == inf) | (d == -inf) ? (float)INF : x != x ? x : v;
}
INLINE float digamma_(float x) {
  const double d = x, y = d < 0.5 ? 1.0 - d : d;
  const bool low = y < 10.0;
  const double b = low ? y : 1.0, u = b * (b + 9.0), below = u * (u + 8.0) * (u + 14.0) * (u + 18.0) * (u + 20.0);
  const double slope = 40320.0 + u * (24352.0 + u * (3924.0 + u * (240.0 + u * 5.0)));
  const double z = low ? y + 10.0 : y, r = 1.0 / z, q = r * r;
  const double s = q * (1.0 / 12 - q * (1.0 / 120 - q * (1.0 / 252 - q * (1.0 / 240 - q / 132))));
  const double t = log_any(z) - 0.5 * r - s - (low ? (2.0 * b + 9.0) * slope / below : 0.0);
  const double rest = d - __builtin_floor(d + 0.5), size = rest < 0.0 ? -rest : rest;
  const double w = d < 0.5 ? t - 3.141592653589793 * half_sine(0.5 - size) / half_sine(rest) : t;
  return (x < 0.0f) & (rest == 0.0) ? (float)NaN : (float)w;
}
INLINE float polygamma_1(float x) {
  const double d = x, y = d < 0.5 ? 1.0 - d : d;
  const bool low = y < 10.0;
  const double b = low ? y : 1.0, u = b * (b + 9.0), square = (2.0 * b + 9.0) * (2.0 * b + 9.0);
  double below = (square - 2.0 * u) / (u * u);
  below += (square - 2.0 * (u + 8.0)) / ((u + 8.0) * (u + 8.0));
  below += (square - 2.0 * (u + 14.0)) / ((u + 14.0) * (u + 14.0));
  below += (square - 2.0 * (u + 18.0)) / ((u + 18.0) * (u + 18.0));
  below += (square - 2.0 * (u + 20.0)) / ((u + 20.0) * (u + 20.0));
  const double z = low ? y + 10.0 : y, r = 1.0 / z, q = r * r;
  const double s = 1.0 / 6 - q * (1.0 / 30 - q * (1.0 / 42 - q * (1.0 / 30 - q * 5.0 / 66)));
  const double t = r + 0.5 * q + r * q * s + (low ? below : 0.0), sine = sine_of_pi(d);
  return (float)(d < 0.5 ? 9.869604401089358 / (sine * sine) - t : t);
}
INLINE float pow_(float a, float b) {
  const double size = a < 0 ? -(double)a : (double)a, p = (double)b * log_any(size), y = exp_(p);
  const float whole = __builtin_floorf(b), half = 0.5f * b;
  const bool odd = (whole == b) & (__builtin_floorf(half) != half);
  const double z = (bits<int32_t>(a) < 0) & odd ? -y : y;
  const float w = (a < 0) & (whole != b) & (size != (double)__builtin_inf()) ? (float)NaN : (float)z;
  return (a == 1.0f) | (b == 0.0f) | ((size == 1.0) & ((b == (float)INF) | (b == -(float)INF))) ? 1.0f : w;
}
INLINE I shift_left_(I x, I count) { return (count < 0) | (count > 63) ? 0 : (I)((uint64_t)x << (count & 63)); }
INLINE I shift_right_(I x, I count) { return x >> ((count < 0) | (count > 63) ? 63 : count); }
INLINE I popcount_(I x, int width) { return __builtin_popcountll((uint64_t)x << (64 - width)); }
"""
_NAMES = re.findall(r"INLINE \w+ (\w+_\d?)\(", FUNCTIONS)


def used_by(text: str) -> bool:
    """Whether a generated text calls one of the functions."""
    return any(f"{name}(" in text for name in _NAMES)

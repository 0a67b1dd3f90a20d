"""C++ texts of the primitives: what a generated loop computes for one pair.

``{0}``, ``{1}`` ... are the arguments, already in one type; attributes by name. The functions that a text calls are in
``support.py``. A primitive that is not in the table has no C++ form, and tiles of torch calls run the folds that
use it.
"""

from __future__ import annotations

import math
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
    "exp2": "exp_({0} * 0.69314718f)",
    "expm1": "expm1_({0})",
    "log": "log_({0})",
    "log2": "(float)(log_({0}) * 1.4426950408889634)",
    "log1p": "log1p_({0})",
    "sinh": "0.5f * (expm1_({0}) - expm1_(-{0}))",
    "cosh": "0.5f * (exp_({0}) + exp_(-{0}))",
    "xlogy": "({0} == 0 && {1} == {1} ? 0.0f : {0} * log_({1}))",
    "erf": "erf_({0})",
    "erfc": "erfc_({0})",
    "tanh": "tanh_({0})",
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
_WHOLE = {name: f"{name}_({{0}}, {{1}})" for name in ("floor_divide", "remainder", "fmod")}  # of integers
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
        k: literal(v, "float") for k, v in found.items() if isinstance(v, float | int) and k not in ("n", "bits")
    }
    return {k: str(v) for k, v in found.items()} | written

"""Which arithmetic of integers a kernel does in 64 bits.

Integers have 64 bits in a body. In a kernel, indices, small data and what stays small are computed in 32, which is
faster: an operation whose result may not fit is given its arguments in 64. Bounds follow from types and constants.
"""

from __future__ import annotations

from collections.abc import Callable

from ....program.expression import Expr, topological
from .kernel_spec import Spec

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

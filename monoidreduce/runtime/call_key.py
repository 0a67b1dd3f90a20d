"""What a call is found again by: all that its checks and its kernels look at, and nothing else.

A key is read by a function that is written for how a call is spelt and for the types of its values, so that no value
is asked what it is: another type is another function. Whatever a key cannot say (a tensor subclass, a NumPy number) has
none, and goes the long way through every check.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..engines import triton
from ..engines.ranks import agreement
from . import autocast, gradient_programs, registry

STATIC, WHOLE, NUMBER, CHOICE = "static", "int", "", "choice"  # what is declared of a value; CHOICE: nothing is
_LARGEST = 2**63
_MOST = 1024
_CHOICES = frozenset({bool, int, str, type(None), types.FunctionType, types.BuiltinFunctionType})
_ON_KERNELS = ("{0}.dtype", "{0}.shape", "{0}.device", "{0}.stride()", "{0}.data_ptr() & 15")
_ELSEWHERE = ("{0}.dtype", "{0}.shape", "{0}.device", "{0}.layout")


class Reader(NamedTuple):
    """Reads the keys of calls whose values have the same types: where kernels run, strides and alignment too."""

    on_kernels: Callable[..., tuple | None]
    elsewhere: Callable[..., tuple | None]
    first: int | None  # which value is the first tensor


class Readers:
    """Of one op or layer. ``declared`` says of each value of a call that gives so many by position, and these by name,
    what it is declared as; None where such a call does not fit."""

    def __init__(self, declared: Callable[[int, Iterable[str]], Sequence[str] | None]):
        self.declared = declared
        self.known: dict[tuple, Reader] = {}

    def key(self, count: int, names: Mapping[str, Any], values: Sequence[Any], asked: str = "") -> tuple | None:
        """The key of an ordinary call that gives ``count`` values by position; ``asked``: what else it depends on."""
        reader = self.known.get((count, *names, *map(type, values))) or self._met(count, names, values)
        if reader is None or not gradient_programs.straight() or autocast.anywhere() or agreement.is_divided():
            return None
        on_kernels, elsewhere, first = reader
        read = elsewhere if first is None or not triton.runs_on(values[first].device) else on_kernels
        try:
            return read(registry.engine(), asked, *values)
        except RuntimeError:  # one is not dense, or has no memory of its own
            return None

    def _met(self, count: int, names: Mapping[str, Any], values: Sequence[Any]) -> Reader | None:
        """The reader of a call like this, written; None where there is none."""
        declared, kinds = self.declared(count, names), tuple(map(type, values))
        if declared is None:
            return None
        form = (count, *names, *kinds)
        made = [_written(form, kinds, declared, tensors) for tensors in (_ON_KERNELS, _ELSEWHERE)]
        if made[0] is None or made[1] is None:
            return None
        if len(self.known) >= _MOST:
            self.known.clear()
        first = next((k for k, one in enumerate(zip(kinds, declared, strict=True)) if _is_tensor(*one)), None)
        return self.known.setdefault(form, Reader(made[0], made[1], first))


def _written(form: tuple, kinds: Sequence[type], declared: Sequence[str], tensors: Sequence[str]) -> Callable | None:
    parts, checked = ["form", "engine", "asked"], []
    for k, (kind, said) in enumerate(zip(kinds, declared, strict=True)):
        name = f"v{k}"
        found = _looked(kind, said, tensors)
        if found is None:
            return None
        parts += [part.format(name) for part in found]
        if kind is int and said in (WHOLE, NUMBER):  # what is larger is looked at each time
            checked.append(f"    if not {-_LARGEST} < {name} < {_LARGEST}:\n        return None\n")
    given = ", ".join(["engine", "asked", *(f"v{k}" for k in range(len(kinds)))])
    scope: dict[str, Any] = {"form": form}
    exec(f"def key({given}):\n{''.join(checked)}    return ({', '.join(parts)})", scope)
    return scope["key"]


def _is_tensor(kind: type, said: str) -> bool:
    return kind in gradient_programs.PLAIN and said != STATIC


def _looked(kind: type, said: str, tensors: Sequence[str]) -> Sequence[str] | None:
    """What is looked at in a value of this type, besides that; None where this cannot be said cheaply."""
    if said == STATIC:
        return ("{0}",) if kind.__hash__ is not None else None
    if kind in gradient_programs.PLAIN:
        return tensors
    if said == CHOICE:
        return ("{0}.hex()",) if kind is float else ("{0}",) if kind in _CHOICES else None  # 0.0 is not -0.0
    return () if kind in (bool, int, type(None)) or (kind is float and said != WHOLE) else None

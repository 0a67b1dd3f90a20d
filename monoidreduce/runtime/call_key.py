"""The key of a call: all that its checks and its kernels look at, and nothing else.

Types, shapes, devices, choices and, where kernels run, strides and alignment; values are no part of it, so a new
temperature is the same key. A key is read by a function that is generated for how the call is spelt and for the types
of its values, so that no value is asked what it is: another type is another function. Whatever a key cannot say (a
tensor subclass, a NumPy number) has none, and every check is run.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..engines.common.bounded_cache import BoundedCache
from ..engines.common.generated_code import define
from ..engines.ranks import agreement
from ..plan import settings
from . import call_context

STATIC, WHOLE, NUMBER, CHOICE = "static", "int", "", "choice"  # how a value is declared; CHOICE: it is not
_LARGEST = 2**63
_FORMS = 1024  # ways in which calls of one op are spelt
_CHOICES = frozenset({bool, int, str, type(None), types.FunctionType, types.BuiltinFunctionType})
_ON_KERNELS = ("{0}.dtype", "{0}.shape", "{0}.device", "{0}.stride()", "{0}.data_ptr() & 15")
_ELSEWHERE = ("{0}.dtype", "{0}.shape", "{0}.device", "{0}.layout")


class _KeyReader(NamedTuple):
    """Reads the keys of calls whose values have the same types: where kernels run, strides and alignment too."""

    on_kernels: Callable[..., tuple | None]
    elsewhere: Callable[..., tuple | None]
    first: int | None  # which value is the first tensor


class CallKeys:
    """The keys of calls of one op or layer. ``declared`` says how each value is declared in a call that gives so many
    by position and these by name; None where such a call does not fit. ``launches``: where kernels run, the settings
    that decide which ones are a part of the key, in place of the engine alone."""

    def __init__(self, declared: Callable[[int, Iterable[str]], Sequence[str] | None], launches: bool = False):
        self.declared, self.launches = declared, launches
        self.readers: BoundedCache[tuple, _KeyReader] = BoundedCache(_FORMS)

    def key(self, count: int, names: Mapping[str, Any], values: Sequence[Any], asked: Any = "") -> tuple | None:
        """The key of a call that gives ``count`` values by position, if it is an ordinary one; ``asked``: what else it
        depends on."""
        reader = self.readers.get((count, *names, *map(type, values))) or self._make_reader(count, names, values)
        if reader is None or not call_context.is_untraced():
            return None
        if torch._C._is_any_autocast_enabled() or agreement.layout_in_force.get() is not None:
            return None
        on_kernels, elsewhere, first = reader
        there = first is not None and (values[first].is_cuda or settings.interprets_kernels())
        launches = call_context.launch_key() if there and self.launches else None
        try:
            if launches is not None:
                return on_kernels(launches, asked, *values)
            return (on_kernels if there else elsewhere)(settings.now().engine, asked, *values)
        except RuntimeError:  # one is not dense, or has no memory of its own
            return None

    def _make_reader(self, count: int, names: Mapping[str, Any], values: Sequence[Any]) -> _KeyReader | None:
        """Generate the reader of a call like this; None where it has no key."""
        declared, kinds = self.declared(count, names), tuple(map(type, values))
        if declared is None:
            return None
        form = (count, *names, *kinds)
        made = [_generate_reader(form, kinds, declared, tensors) for tensors in (_ON_KERNELS, _ELSEWHERE)]
        if made[0] is None or made[1] is None:
            return None
        first = next((k for k, one in enumerate(zip(kinds, declared, strict=True)) if _is_tensor(*one)), None)
        return self.readers.keep(form, _KeyReader(made[0], made[1], first))


def _generate_reader(
    form: tuple, kinds: Sequence[type], declared: Sequence[str], tensors: Sequence[str]
) -> Callable | None:
    parts, checks = ["form", "engine", "asked"], []
    for k, (kind, said) in enumerate(zip(kinds, declared, strict=True)):
        name = f"v{k}"
        found = _key_parts(kind, said, tensors)
        if found is None:
            return None
        parts += [part.format(name) for part in found]
        if kind is int and said in (WHOLE, NUMBER):  # a larger one is checked in every call
            checks += [f"if not {-_LARGEST} < {name} < {_LARGEST}:", "    return None"]
    given = ["engine", "asked", *(f"v{k}" for k in range(len(kinds)))]
    return define("key", given, [*checks, f"return ({', '.join(parts)})"], {"form": form})


def _is_tensor(kind: type, said: str) -> bool:
    return kind in call_context.PLAIN and said != STATIC


def _key_parts(kind: type, said: str, tensors: Sequence[str]) -> Sequence[str] | None:
    """What is read of a value of this type, besides the type; None where that cannot be said cheaply."""
    if said == STATIC:
        return ("{0}",) if kind.__hash__ is not None else None
    if kind in call_context.PLAIN:
        return tensors
    if said == CHOICE:
        return ("{0}.hex()",) if kind is float else ("{0}",) if kind in _CHOICES else None  # 0.0 is not -0.0
    return () if kind in (bool, int, type(None)) or (kind is float and said != WHOLE) else None

"""The plans of an op: which of them serves a call, found by how the call is written and by the kind of its values."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..program.declarations import Parameter
from .call import Form, Plan
from .call_key import NUMBER, STATIC, WHOLE, Readers

_PLANS = 1024
_CHOICES = 32  # plans of one kind of call, by the numbers they were traced with


class Plans:
    """Of an op with these parameters and this signature."""

    def __init__(self, parameters: Mapping[str, Parameter], signature: inspect.Signature):
        self.parameters, given = parameters, list(parameters.values())
        kinds = [p.kind for p in signature.parameters.values()]
        self.positional = sum(k is not inspect.Parameter.KEYWORD_ONLY for k in kinds)
        named = [kind is not inspect.Parameter.POSITIONAL_ONLY for kind in kinds]
        self.places = {name: at for at, name in enumerate(parameters) if named[at]}
        self.needed = tuple(at for at, p in enumerate(given) if p.default is ...)
        self.kinds = tuple(STATIC if p.axis == "static" else WHOLE if p.python is int else NUMBER for p in given)
        self.readers = Readers(self._declared)
        self.kept: dict[tuple, tuple[Plan, ...]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """How many kinds of calls are known."""
        return len(self.kept)

    def form(self, count: int, names: Iterable[str]) -> Form | None:
        """How a call with so many values by position, and these by name, is read; None where it does not fit, which
        binding explains."""
        places = [*range(count), *(self.places.get(n, -1) for n in names)]
        fits = count <= self.positional and all(at >= count for at in places[count:])
        if not fits or any(at not in places for at in self.needed):
            return None
        order = tuple(list(self.parameters)[at] for at in places)
        vectors = tuple(k for k, name in enumerate(order) if self.parameters[name].feature is not None)
        return Form(order, tuple(self.kinds[at] for at in places), vectors)

    def _declared(self, count: int, names: Iterable[str]) -> Sequence[str] | None:
        form = self.form(count, names)
        return None if form is None else form.kinds

    def find(
        self, count: int, names: Mapping[str, Any], values: Sequence[Any], asked: str = ""
    ) -> tuple[tuple | None, Plan | None]:
        """The key of an ordinary call, and its plan where there is one; no key for what is out of the ordinary."""
        key = self.readers.key(count, names, values, asked)
        for plan in () if key is None else self.kept.get(key, ()):
            if plan.serves(values):
                return key, plan
        return key, None

    def keep(self, key: tuple, plan: Plan) -> None:
        with self._lock:
            while len(self.kept) >= _PLANS:
                del self.kept[next(iter(self.kept))]
            self.kept[key] = (plan, *self.kept.get(key, ())[: _CHOICES - 1])

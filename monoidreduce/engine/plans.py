"""The plans of an op: which of them serves a call, found by how the call is written and by the kind of its values."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from ..program.declare import Parameter
from . import agree, autocast, gradients, registry
from .calls import Form, Plan, key_of

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
        self.kinds = tuple("static" if p.axis == "static" else "int" if p.python is int else "" for p in given)
        self.forms: dict[tuple, Form] = {}
        self.kept: dict[tuple, tuple[Plan, ...]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """How many kinds of calls are known."""
        return len(self.kept)

    def form(self, args: tuple, kwargs: Mapping[str, Any]) -> Form | None:
        """How a call is read; None where it does not fit, which binding explains."""
        return self.forms.get((len(args), *kwargs)) or self._form(len(args), *kwargs)

    def _form(self, count: int, *names: str) -> Form | None:
        places = [*range(count), *(self.places.get(n, -1) for n in names)]
        fits = count <= self.positional and all(at >= count for at in places[count:])
        if not fits or any(at not in places for at in self.needed):
            return None
        order = tuple(list(self.parameters)[at] for at in places)
        vectors = tuple(k for k, name in enumerate(order) if self.parameters[name].feature is not None)
        found = self.forms[(count, *names)] = Form(order, tuple(self.kinds[at] for at in places), vectors)
        return found

    def find(self, form: Form | None, values: Sequence[Any], *more: Any) -> tuple[tuple | None, Plan | None]:
        """The key of an ordinary call, and its plan where there is one; no key for what is out of the ordinary."""
        if form is None or not gradients.straight() or autocast.anywhere() or agree.current() is not None:
            return None, None
        key = key_of(values, form.kinds, registry.engine(), form.order, *more)
        for plan in () if key is None else self.kept.get(key, ()):
            if plan.serves(values):
                return key, plan
        return key, None

    def keep(self, key: tuple, plan: Plan) -> None:
        with self._lock:
            while len(self.kept) >= _PLANS:
                del self.kept[next(iter(self.kept))]
            self.kept[key] = (plan, *self.kept.get(key, ())[: _CHOICES - 1])

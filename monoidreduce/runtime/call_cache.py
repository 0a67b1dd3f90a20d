"""The calls of an op that were made before: the program and the plan that serve a call like them.

Two things are cached: the traced program, which is the same for all shapes (:class:`Programs`), and the plan
(``call.py``), which is made for one key (``layer_replay.py``). A call that is found goes straight to its plan; a wrong
one finds none, and is explained by the checks of binding.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..engines.common.bounded_cache import BoundedCache
from ..program.closure import watch
from ..program.declarations import Parameter
from ..program.domain import inputs_of
from ..program.trace import Traced, trace
from .bind import number_class
from .call import CallForm, CallPlan
from .layer_replay import NUMBER, STATIC, WHOLE, CallKeys

_PLANS = 1024  # kinds of calls of one op
_FIXED = 32  # plans or programs of one kind of call, by the numbers they were traced with
_TRACES = 256


class Plans:
    """The plans of an op with these parameters and this signature."""

    def __init__(self, parameters: Mapping[str, Parameter], signature: inspect.Signature):
        self.parameters, given = parameters, list(parameters.values())
        kinds = [p.kind for p in signature.parameters.values()]
        self.positional = sum(k is not inspect.Parameter.KEYWORD_ONLY for k in kinds)
        named = [kind is not inspect.Parameter.POSITIONAL_ONLY for kind in kinds]
        self.places = {name: at for at, name in enumerate(parameters) if named[at]}
        self.needed = tuple(at for at, p in enumerate(given) if p.default is ...)
        self.kinds = tuple(STATIC if p.axis == "static" else WHOLE if p.python is int else NUMBER for p in given)
        self.keys = CallKeys(self._declared)
        self.known: BoundedCache[tuple, tuple[CallPlan, ...]] = BoundedCache(_PLANS)

    def __len__(self) -> int:
        """How many kinds of calls are known."""
        return len(self.known)

    def form(self, count: int, names: Iterable[str]) -> CallForm | None:
        """How a call with so many values by position, and these by name, is read; None where it does not fit, which
        binding explains."""
        places = [*range(count), *(self.places.get(n, -1) for n in names)]
        fits = count <= self.positional and all(at >= count for at in places[count:])
        if not fits or any(at not in places for at in self.needed):
            return None
        order = tuple(list(self.parameters)[at] for at in places)
        vectors = tuple(k for k, name in enumerate(order) if self.parameters[name].feature is not None)
        return CallForm(order, tuple(self.kinds[at] for at in places), vectors)

    def _declared(self, count: int, names: Iterable[str]) -> Sequence[str] | None:
        form = self.form(count, names)
        return None if form is None else form.kinds

    def find(
        self, count: int, names: Mapping[str, Any], values: Sequence[Any], asked: str = ""
    ) -> tuple[tuple | None, CallPlan | None]:
        """The key of a call, None if it is out of the ordinary; and the plan that serves it, if there is one."""
        key = self.keys.key(count, names, values, asked)
        for plan in () if key is None else self.known.find(key, ()):
            if plan.serves(values):
                return key, plan
        return key, None

    def keep(self, key: tuple, plan: CallPlan) -> None:
        """Cache a plan in front of others with its key, which were made for other numbers."""
        self.known.keep(key, (plan, *self.known.get(key, ())[: _FIXED - 1]))


TracedFor = tuple[Traced, dict[str, Any]]  # a program, and the numbers that it was traced with


class Programs:
    """The traced programs of an op.

    A new shape is the same program; a new number class, a fixed choice, a left-out argument or the value of a number
    that the body looked at is another one. So is a new value of something that the body, or a function given as a
    choice, reads besides its arguments (``program/closure.py``)."""

    def __init__(self, function: Any, parameters: dict[str, Parameter], domain: tuple | None = None):
        self.function, self.parameters, self.domain = function, parameters, domain
        hidden = () if domain is None else [name for name, _ in inputs_of(domain)]
        self.body = {n: p for n, p in parameters.items() if n not in hidden}
        self.traces: BoundedCache[tuple, list[TracedFor]] = BoundedCache(_TRACES)
        self._lock = threading.Lock()

    def trace(self, values: dict[str, Any]) -> Traced:
        """The program for these arguments; whole numbers among them become ``int``."""
        dtypes, plain = self._kinds(values)
        choices = tuple((n, v) for n, v in plain.items() if n not in dtypes)
        key = (tuple(sorted(dtypes.items())), choices)
        for found in self.traces.get(key, ()):
            traced, fixed = found
            same = all(n in plain and plain[n] == v and type(plain[n]) is type(v) for n, v in fixed.items())
            if same and (traced.watched is None or traced.watched.holds()):
                self._keep(key, found)
                return traced
        watched = watch(self.function, *(v for _, v in choices if callable(v)))
        traced = trace(self.function, self.body, dtypes, plain, watched, self.domain)
        self._keep(key, (traced, {n: plain[n] for n in traced.fixed}))
        return traced

    def _keep(self, key: tuple, used: TracedFor) -> None:
        """Put a program, new or found, in front of all others."""
        with self._lock:
            known = [one for one in self.traces.get(key, ()) if one is not used]
            self.traces.keep(key, [used, *known[: _FIXED - 1]])

    def _kinds(self, values: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
        """The number class of each argument, and the Python values of those that are no tensors."""
        dtypes: dict[str, str] = {}
        plain: dict[str, Any] = {}
        for name, value in values.items():
            p = self.parameters[name]
            if p.axis == "static" or value is None:
                plain[name] = value
            elif isinstance(value, Tensor):
                dtypes[name] = "float" if p.stored else number_class(value.dtype)
            elif isinstance(value, torch.SymInt):  # a length that the compiler leaves open
                dtypes[name] = "float" if p.python is float else "int"
            else:
                plain[name] = value.item() if hasattr(value, "item") else value
                if p.python is int and not isinstance(plain[name], bool):
                    plain[name] = values[name] = int(plain[name])
                as_float = p.python is float and not isinstance(plain[name], bool)
                dtypes[name] = "bool" if isinstance(plain[name], bool) else "float" if as_float else "int"
        return dtypes, plain

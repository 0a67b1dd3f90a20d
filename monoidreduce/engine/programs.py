"""The programs of an op: its body traced for one kind of arguments, found again for calls of that kind.

A new shape is the same program; a new number class, a fixed choice, a left-out argument or the value of a number that
the body looked at is another one. So is a new value of something that the body reads besides its arguments
(``program/closure.py``): programs and plans are kept together, one :class:`State` for each set of such values. Nothing
here grows without bound: what was not used for longest is dropped.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..program.closure import Watched, watch
from ..program.declare import Parameter
from ..program.trace import Traced, trace
from .arguments import number_class
from .plans import Plans

_KINDS = 256  # kinds of calls whose programs are kept
_NUMBERS = 32  # programs of one kind of call, by the numbers that were fixed in them
_STATES = 16  # sets of values that a body reads besides its arguments, besides the last


class State:
    """Programs and plans, which hold while everything that the body reads besides its arguments stays as it is."""

    def __init__(self, parameters: dict[str, Parameter], signature: inspect.Signature):
        self.plans = Plans(parameters, signature)
        self.traces: dict[tuple, list[tuple[Traced, dict[str, Any]]]] = {}
        self.watched: Watched | None = None  # None: nothing has been traced yet
        self.holds: Callable[[], bool] | None = None  # whether values are what they were; None: there are none


class Programs:
    """Of one op."""

    def __init__(self, function: Any, parameters: dict[str, Parameter], signature: inspect.Signature):
        self.function, self.parameters, self.signature = function, parameters, signature
        self.last = State(parameters, signature)  # of the last call
        self.others: list[State] = []  # for when values are again what they were, the last used first
        self._lock = threading.Lock()

    def state(self) -> State:
        """The state for the values that the body would read now."""
        last = self.last
        return last if last.holds is None or last.holds() else self._another()

    def _another(self) -> State:
        with self._lock:
            found = next((s for s in self.others if s.holds is not None and s.holds()), None)
            found = State(self.parameters, self.signature) if found is None else found
            self.others = [self.last, *(s for s in self.others if s is not found)][:_STATES]
            self.last = found
            return found

    def traced(self, values: dict[str, Any]) -> Traced:
        """The program for these arguments; whole numbers among them become ``int``."""
        dtypes, plain = self._kinds(values)
        key = (tuple(sorted(dtypes.items())), tuple((n, v) for n, v in plain.items() if n not in dtypes))
        state = self.state()
        for found in state.traces.get(key, ()):
            traced, fixed = found
            if all(n in plain and plain[n] == v and type(plain[n]) is type(v) for n, v in fixed.items()):
                self._keep(state, key, found)
                return traced
        watched = watch(self.function) if state.watched is None else state.watched
        traced = trace(self.function, self.parameters, dtypes, plain, watched.tensors)
        state.watched, state.holds = watched, watched.holds if watched else None
        self._keep(state, key, (traced, {n: plain[n] for n in traced.fixed}))
        return traced

    def _keep(self, state: State, key: tuple, used: tuple[Traced, dict[str, Any]]) -> None:
        """Put a program, new or found, in front of all others."""
        with self._lock:
            known = [one for one in state.traces.pop(key, ()) if one is not used]
            while len(state.traces) >= _KINDS:
                del state.traces[next(iter(state.traces))]
            state.traces[key] = [used, *known[: _NUMBERS - 1]]

    def _kinds(self, values: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
        """The number class of each argument, and the Python values of those that are no tensors."""
        dtypes: dict[str, str] = {}
        plain: dict[str, Any] = {}
        for name, value in values.items():
            p = self.parameters[name]
            if p.axis == "static" or value is None:
                plain[name] = value
            elif isinstance(value, Tensor):
                dtypes[name] = number_class(value.dtype)
            elif isinstance(value, torch.SymInt):  # a length that the compiler leaves open
                dtypes[name] = "float" if p.python is float else "int"
            else:
                plain[name] = value.item() if hasattr(value, "item") else value
                if p.python is int and not isinstance(plain[name], bool):
                    plain[name] = values[name] = int(plain[name])
                as_float = p.python is float and not isinstance(plain[name], bool)
                dtypes[name] = "bool" if isinstance(plain[name], bool) else "float" if as_float else "int"
        return dtypes, plain

"""The programs of an op: its body traced for one kind of arguments, found again for calls of that kind.

A new shape is the same program; a new number class, a fixed choice, a left-out argument or the value of a number that
the body looked at is another one. So is a new value of something that the body, or a function given as a choice, reads
besides its arguments (``program/closure.py``). Nothing here grows without bound: what was not used for longest is
dropped.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from ..program.closure import watch
from ..program.declarations import Parameter
from ..program.trace import Traced, trace
from .bind import number_class

_KINDS = 256  # kinds of calls whose programs are kept
_NUMBERS = 32  # programs of one kind of call, by the numbers that were fixed in them

Found = tuple[Traced, dict[str, Any]]  # a program, and the numbers that were fixed in it


class Programs:
    """Of one op."""

    def __init__(self, function: Any, parameters: dict[str, Parameter]):
        self.function, self.parameters = function, parameters
        self.traces: dict[tuple, list[Found]] = {}
        self._lock = threading.Lock()

    def traced(self, values: dict[str, Any]) -> Traced:
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
        traced = trace(self.function, self.parameters, dtypes, plain, watched)
        self._keep(key, (traced, {n: plain[n] for n in traced.fixed}))
        return traced

    def _keep(self, key: tuple, used: Found) -> None:
        """Put a program, new or found, in front of all others."""
        with self._lock:
            known = [one for one in self.traces.pop(key, ()) if one is not used]
            while len(self.traces) >= _KINDS:
                del self.traces[next(iter(self.traces))]
            self.traces[key] = [used, *known[: _NUMBERS - 1]]

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

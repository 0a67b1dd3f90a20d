"""Python functions that are written as text: the one place that compiles and runs such text.

A call that is known to be the same sequence of operations every time is written out as one straight-line function:
no look-ups, no loops, no checks. Used for a program between its passes (``torch_code.py``), for the key of a call
(``runtime/call_cache.py``), for a layer's Python (``runtime/layer_replay.py``), for recorded launches
(``engines/triton/launch/replay.py``) and for the modules of Triton kernels (``engines/triton/launch/jit_module.py``).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any


def run_text(text: str, scope: dict[str, Any], path: str = "<generated>") -> None:
    """Run the definitions in ``text`` with the names in ``scope``, where what they define is found afterwards."""
    exec(_compile(text, path), scope)


@functools.lru_cache(maxsize=512)
def _compile(text: str, path: str) -> types.CodeType:
    """The code of a text. Calls of another length have the same text, with other numbers in their scope."""
    return compile(text, path, "exec")


def define(name: str, parameters: Iterable[str], lines: Sequence[str], scope: dict[str, Any]) -> Callable[..., Any]:
    """The function ``name`` with these parameters and lines; ``scope``: the objects that the lines name."""
    run_text(function_text(name, parameters, lines), scope)
    return scope[name]


def function_text(name: str, parameters: Iterable[str], lines: Sequence[str]) -> str:
    """The text of a function with these parameters and lines."""
    return "\n    ".join([f"def {name}({', '.join(parameters)}):", *lines])


def tuple_text(names: Iterable[str]) -> str:
    """A tuple of names (one name too) as it is written."""
    return f"({''.join(f'{name}, ' for name in names)})"


class FunctionWriter:
    """Collects the lines of a function, and the objects that have no text (``scope``) under names of their own."""

    def __init__(self, **scope: Any):
        self.lines: list[str] = []
        self.scope: dict[str, Any] = scope
        self._names: dict[Any, str] = {}

    def hold(self, thing: Any, key: Any = None) -> str:
        """A name for an object; the same name for the same ``key``, where one is given."""
        if key is not None and key in self._names:
            return self._names[key]
        name = f"k{len(self.scope)}"
        self.scope[name] = thing
        if key is not None:
            self._names[key] = name
        return name

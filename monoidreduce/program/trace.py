"""Tracing: run the body once on symbols, and keep what it returned as a program.

The body is traced twice and the two programs compared, so that a body with a side effect on itself (a counter, a
random number) is caught. Numbers stay symbols, so a new temperature or seed is the same program; when the body asks
for a number's Python value (``if causal:``, ``mr.topk(x, k)``), it is traced again with that number fixed.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import torch

from ..algebra import Monoid
from ..errors import ImpureError, MonoidReduceError, NotReducedError, TraceError, UnreducedError, shown
from .closure import Watched
from .declarations import Parameter
from .domain import restrict
from .expression import Expr, const, topological
from .several import are_several
from .symbol import NeedValue, Symbol, Trace, calls_torch, current_trace, expr_of

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))


@dataclass(frozen=True)
class Traced:
    """A program: its output expressions, how to give them back in the body's own shape, and which numbers were
    fixed."""

    outputs: tuple[Expr, ...]
    pack: Callable[[Sequence[Any]], Any]
    fixed: frozenset[str]
    watched: Watched | None = None  # what was read besides arguments; None: nothing that may change


@calls_torch
def trace(
    function: Any,
    parameters: Mapping[str, Parameter],
    dtypes: Mapping[str, str],
    values: Mapping[str, Any],
    watched: Watched | None = None,
    domain: tuple | None = None,
) -> Traced:
    """Trace ``function``; ``dtypes`` gives the number class of each input, ``values`` the Python values that may be
    fixed, ``watched`` what it reads besides its arguments, ``domain`` the form of the pairs that exist."""
    tensors = {} if watched is None else watched.tensors
    fixed: frozenset[str] = frozenset()
    while True:
        try:
            outputs, pack = _trace_once(function, parameters, dtypes, values, fixed, tensors, domain)
            again, _ = _trace_once(function, parameters, dtypes, values, fixed, tensors, domain)
        except NeedValue as need:
            unknown = [n for n in need.names if n not in values]
            if unknown or need.names <= fixed:
                raise TraceError(
                    detail=f"{function.__name__} looks at the value of {', '.join(unknown)}, which is a tensor",
                    fix="Give a plain number, or use torch.where",
                ).at(find_place(function, need.__traceback__)) from None
            fixed |= need.names
            continue
        if outputs != again:
            raise ImpureError(detail=f"{function.__name__} gave two different programs when traced twice").at(
                find_place(function)
            )
        return Traced(outputs, pack, fixed, watched or None)


def _trace_once(
    function: Any,
    parameters: Mapping[str, Parameter],
    dtypes: Mapping[str, str],
    values: Mapping[str, Any],
    fixed: frozenset[str],
    tensors: Mapping[int, str],
    domain: tuple | None,
) -> tuple[tuple[Expr, ...], Callable]:
    token = current_trace.set(Trace(tensors, domain))
    try:
        arguments: dict[str, Any] = {}
        for name, p in parameters.items():
            if p.axis == "static" or name not in dtypes:
                arguments[name] = values.get(name)
            elif name in fixed:
                arguments[name] = Symbol(
                    const(values[name])
                )  # still a symbol, but one that answers if, int() and float()
            else:
                arguments[name] = Symbol(p.expr(dtypes[name]))
        leaves: list[Symbol] = []
        returned = function(**arguments)
        try:
            pack = _unpack(returned, leaves)
            outputs = tuple(expr_of(leaf) for leaf in leaves)
            outputs = outputs if domain is None else restrict(outputs, domain)
            _check_outputs(function, outputs)
        except MonoidReduceError as error:
            raise error.at(_return_place(function, arguments)) from None
        return outputs, pack
    except MonoidReduceError as error:
        raise error.at(find_place(function, error.__traceback__)) from None
    finally:
        current_trace.reset(token)


def _check_outputs(function: Any, outputs: tuple[Expr, ...]) -> None:
    if not any(e.op == "reduce" for e in topological(outputs)):
        raise NotReducedError(name=function.__name__)
    for e in outputs:
        if e.is_pair:
            raise UnreducedError(
                detail=f"{function.__name__} returns {Symbol(e)!r}, a value for every pair",
                fix="Fold it over columns or rows first, for example with mr.sum(...)",
            )
        if are_several(e):
            raise TraceError(
                detail=f"{function.__name__} returns {Symbol(e)!r}",
                fix='Return one vector: declare what is folded with one letter, as in Col["d"], and view the result',
            )


def _unpack(value: Any, leaves: list[Any]) -> Callable[[Sequence[Any]], Any]:
    """Collect the symbols of a returned value and give back the function that rebuilds its shape."""
    if isinstance(value, Symbol | int | float | bool):
        at = len(leaves)
        leaves.append(value if isinstance(value, Symbol) else Symbol(const(value)))
        return lambda results: results[at]
    if isinstance(value, Monoid):
        parts = {n: _unpack(getattr(value, n), leaves) for n in type(value).fields()}
        return lambda results: type(value)(**{n: f(results) for n, f in parts.items()})
    if isinstance(value, dict):
        items = {k: _unpack(v, leaves) for k, v in value.items()}
        return lambda results: type(value)({k: f(results) for k, f in items.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        named = [_unpack(v, leaves) for v in value]
        return lambda results: type(value)(*(f(results) for f in named))
    if isinstance(value, list | tuple):
        inner = [_unpack(v, leaves) for v in value]
        return lambda results: type(value)(f(results) for f in inner)
    raise TraceError(
        detail=f"the body returned {shown(value)}" + (" (Tensor)" if isinstance(value, torch.Tensor) else ""),
        fix="Return a reduction, or a tuple, list, dict or NamedTuple of them",
    )


def _return_place(function: Any, arguments: dict[str, Any]) -> str:
    """The line at which a body returns: it is run again and watched."""
    code, lines = function.__code__, [function.__code__.co_firstlineno]

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "return" and frame.f_code is code:
            lines.append(frame.f_lineno)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function(**arguments)
    finally:
        sys.setprofile(before)
    return _describe_place(function, code.co_filename, lines[-1])


def find_place(function: Any, traceback: TracebackType | None = None) -> str:
    """Where in the user's source something happened: the innermost frame that is neither ours nor torch's."""
    code = function.__code__
    name, line = code.co_filename, code.co_firstlineno
    while traceback is not None:
        frame = traceback.tb_frame
        file = os.path.abspath(frame.f_code.co_filename)
        if frame.f_code is code or not file.startswith((_PACKAGE + os.sep, _TORCH + os.sep)):
            name, line = frame.f_code.co_filename, traceback.tb_lineno
        traceback = traceback.tb_next
    return _describe_place(function, name, line)


def _describe_place(function: Any, name: str, line: int) -> str:
    text = linecache.getline(name, line).strip()
    return f"in {function.__name__}, {os.path.basename(name)}:{line}" + (f": {text}" if text else "")

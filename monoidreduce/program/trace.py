"""Tracing: run the body once on symbols, and keep what it returned as a program.

The body is traced twice and the two programs compared, so that a body with a side effect on itself (a counter, a
random number) is caught. Numbers stay symbols, so a new temperature or seed is the same program; when the body asks
for a number's Python value (``if causal:``, ``mr.topk(x, k)``), it is traced again with that number fixed.
"""

from __future__ import annotations

import dis
import functools
import inspect
import linecache
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import FrameType, TracebackType
from typing import Any

import torch

from ..algebra import Monoid
from ..errors import ImpureError, MonoidReduceError, NotReducedError, TraceError, UnreducedError, shown
from .declarations import Parameter, restrict
from .expression import Expr, are_several, const, topological
from .symbol import NeedValue, Symbol, Trace, calls_torch, current_trace, expr_of

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))


@dataclass(frozen=True)
class TracedBody:
    """A program: its output expressions, how to give them back in the body's own shape, and which numbers were
    fixed."""

    outputs: tuple[Expr, ...]
    pack: Callable[[Sequence[Any]], Any]
    fixed: frozenset[str]
    watched: WatchedPlaces | None = None  # what was read besides arguments; None: nothing that may change


@calls_torch
def trace(
    function: Any,
    parameters: Mapping[str, Parameter],
    dtypes: Mapping[str, str],
    values: Mapping[str, Any],
    watched: WatchedPlaces | None = None,
    domain: tuple | None = None,
) -> TracedBody:
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
        return TracedBody(outputs, pack, fixed, watched or None)


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
        returned = _run(function, arguments)
        try:
            pack = _unpack(returned, leaves)
            outputs = tuple(expr_of(leaf) for leaf in leaves)
            _check_outputs(function, outputs)
            outputs = outputs if domain is None else _restrict_outputs(function, outputs, domain)
        except MonoidReduceError as error:
            raise error.at(_return_place(function, arguments)) from None
        return outputs, pack
    except MonoidReduceError as error:
        raise error.at(find_place(function, error.__traceback__)) from None
    finally:
        current_trace.reset(token)


def _run(function: Any, arguments: Mapping[str, Any]) -> Any:
    """A body's result; what it takes by position alone is given so."""
    kinds = inspect.signature(function).parameters
    first = [n for n in arguments if kinds[n].kind is inspect.Parameter.POSITIONAL_ONLY]
    return function(*(arguments[n] for n in first), **{n: v for n, v in arguments.items() if n not in first})


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


def _restrict_outputs(function: Any, outputs: tuple[Expr, ...], domain: tuple) -> tuple[Expr, ...]:
    """The outputs of a body over the pairs that a domain lists."""
    found = restrict(outputs, domain)
    for said, e in zip(outputs, found, strict=True):
        if e.is_pair:
            raise UnreducedError(
                detail=f"{function.__name__} returns {Symbol(said)!r}, which over listed pairs (cols=) has a value for "
                "every pair: what is one number of all pairs, such as a count, is one for each row or column of lists",
                fix="Return what is over columns and what is over rows separately",
            )
    return found


def _unpack(value: Any, leaves: list[Any]) -> Callable[[Sequence[Any]], Any]:
    """Collect the symbols of a returned value and give back the function that rebuilds its shape."""
    if isinstance(value, (Symbol, int, float, bool)):
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
    if isinstance(value, (list, tuple)):
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
        _run(function, arguments)
    finally:
        sys.setprofile(before)
    return _describe_place(function, code.co_filename, lines[-1])


def find_place(function: Any, traceback: TracebackType | None = None) -> str:
    """Where in the user's source something happened: the innermost frame that is neither ours nor torch's. A body that
    we wrote around the user's names that as ``user_body``."""
    code = getattr(function, "user_body", function).__code__
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


# The Python numbers that a body reads besides its arguments: from its closure, from globals and from attributes.
#
# A body is traced once and its program cached, so a number that it reads from outside would keep its first value.
# :func:`watch` lists the places that a body, and the functions it calls, can read such a number from. They are found in
# the bytecode: names of globals and of the closure, each followed by attributes and constant subscripts
# (``config.scale``, ``settings["window"]``). Where such a name leads to no number but to a list, a dictionary or an
# object (``for w in weights``, ``helper(config, s)``), all that is plain in it is one place, and so is a function of
# torch. :meth:`WatchedPlaces.holds` compares them with what they were; where one has changed, the body is traced again.
# A tensor in such a place is no number: :attr:`WatchedPlaces.tensors` has its name.

_MISSING = object()
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum)
_FIXED_PACKAGES = ("monoidreduce", "torch", "numpy", "math", "cmath", "operator", "functools", "itertools", "builtins")
_NOT_SETTINGS = tuple(n for n in _FIXED_PACKAGES if n not in ("numpy", "builtins"))
_MOST = 4096  # instructions and objects looked at: a body that reaches more is not followed further
_CHAIN = 16  # instructions after a name that may be attributes and subscripts of it
_LONGEST = 16  # items of a tuple that is compared as a value
_CONTENT = 256  # values looked at in a list, a dictionary or an object, in all
_READERS = ("get", "items", "values", "keys", "index", "count", "copy", "union", "intersection", "difference")

Read = functools.partial[Any]  # gives what is at a place now; its second argument is the last name of the place


@dataclass
class WatchedPlaces:
    """Places outside of a body that it reads, with what was there when the body was looked at."""

    names: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)  # globals
    cells: list[tuple[types.CellType, Any]] = field(default_factory=list)  # of closures
    others: list[tuple[Read, Any]] = field(default_factory=list)  # attributes and items, read from their root
    tensors: dict[int, str] = field(default_factory=dict)  # by identity: how the body names it

    def __bool__(self) -> bool:
        return bool(self.names or self.cells or self.others)

    def holds(self) -> bool:
        """True where every watched place still has the value it had when the body was traced."""
        for scope, name, then in self.names:
            now = scope.get(name, _MISSING)
            if now is not then and not _is_same(now, then):
                return False
        for cell, then in self.cells:
            now = _read_content(cell)
            if now is not then and not _is_same(now, then):
                return False
        for read, then in self.others:
            now = _read_value(read)
            if now is not then and not _is_same(now, then):
                return False
        return True


def watch(*functions: Any) -> WatchedPlaces:
    """The places that these functions, and the functions they call, read; this package's own functions are skipped."""
    found = WatchedPlaces()
    _Search(found).functions([f for f in functions if not _is_fixed_package(f)])
    return found


def _read_content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _MISSING


def _read_value(read: Read) -> Any:
    try:
        return read()
    except Exception:
        return _MISSING


def _is_same(now: Any, then: Any) -> bool:
    """Whether two values mean the same to a trace; by their text, which tells -0.0 from 0.0 and knows NaN again."""
    if type(now) is not type(then):
        return False
    if isinstance(now, types.MethodType):
        return now.__func__ is then.__func__ and now.__self__ is then.__self__
    return _is_plain(now) and (now == then or now != now) and repr(now) == repr(then)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return len(value) <= _LONGEST and all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _is_fixed_package(function: Any) -> bool:
    """Whether a function or module is this package's, torch's or the language's own, whose values do not change."""
    if isinstance(function, functools.partial):
        return False
    named = function.__name__ if isinstance(function, types.ModuleType) else getattr(function, "__module__", None)
    return str(named).split(".")[0] in _FIXED_PACKAGES


class _Search:
    """Searches the bytecode of functions, each function once."""

    def __init__(self, found: WatchedPlaces):
        self.found = found
        self.seen: set[int] = set()
        self.held: list[Any] = []  # what was seen, so that identities stay their own
        self.left = _MOST
        self.contents: list[Read] = []
        self.stored: set[Any] = set()  # attributes, globals and cells that a function writes: counters, no settings

    def functions(self, waiting: list[Any]) -> None:
        """Functions, methods, partials, modules or any other objects that can be called."""
        while waiting and self.left > 0:
            waiting += self._search_function(waiting.pop())
        found = self.found
        found.names = [one for one in found.names if (id(one[0]), one[1]) not in self.stored]
        found.cells = [one for one in found.cells if id(one[0]) not in self.stored]
        found.others = [one for one in found.others if one[0].args[1] not in self.stored]
        found.others += [(one, _read_value(one)) for one in self.contents if one.args[1] not in self.stored]

    def _search_function(self, called: Any) -> list[Any]:
        """Search one function; returns the functions that it names."""
        owner = _MISSING
        if isinstance(called, functools.partial):
            return [called.func, *(a for a in (*called.args, *called.keywords.values()) if callable(a))]
        if isinstance(called, torch.nn.Module):
            called = called.forward
        elif not isinstance(called, (types.FunctionType, types.MethodType)):
            called = getattr(called, "__call__", None)  # noqa: B004 - the method itself is looked through
        if isinstance(called, types.MethodType):
            owner, called = called.__self__, called.__func__
        if hasattr(called, "__wrapped__") and not isinstance(called, types.FunctionType):
            called = called.__wrapped__
        if not isinstance(called, types.FunctionType) or id(called) in self.seen or _is_fixed_package(called):
            return []
        self.seen.add(id(called))
        self.held.append(called)
        return list(self._names(called, called.__code__, owner))

    def _names(self, function: types.FunctionType, code: types.CodeType, owner: Any) -> Iterator[Any]:
        """Note every place that a function's code reads; yield the functions that it calls."""
        steps = list(dis.get_instructions(code))
        self.left -= len(steps)
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        self.stored |= {s.argval for s in steps if s.opname == "STORE_ATTR"}
        self.stored |= {(id(function.__globals__), s.argval) for s in steps if s.opname == "STORE_GLOBAL"}
        self.stored |= {id(cells[s.argval]) for s in steps if s.opname == "STORE_DEREF" and s.argval in cells}
        first = code.co_varnames[0] if code.co_argcount and owner is not _MISSING else None
        for at, step in enumerate(steps):
            name = step.argval
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and name in function.__globals__:
                root = function.__globals__[name]
                read: Read = functools.partial(function.__globals__.__getitem__, name)
                note: Callable[[], None] = functools.partial(
                    self.found.names.append, (function.__globals__, name, root)
                )
            elif step.opname in ("LOAD_DEREF", "LOAD_CLASSDEREF") and name in cells:
                root = _read_content(cells[name])
                read = functools.partial(getattr, cells[name], "cell_contents")
                note = functools.partial(self.found.cells.append, (cells[name], root))
            elif step.opname.startswith("LOAD_FAST") and first is not None and name == first:
                root, read, note = owner, functools.partial(_return_value, owner), lambda: None
            else:
                continue
            yield from self._place(str(name), root, read, note, steps[at + 1 : at + 1 + _CHAIN])
        for inner in code.co_consts:  # lambdas and comprehensions
            if isinstance(inner, types.CodeType):
                yield from self._names(function, inner, _MISSING)

    def _place(self, name: str, value: Any, read: Read, note: Callable[[], None], steps: list[Any]) -> Iterator[Any]:
        """A name, and the attributes and constant subscripts that follow it, as far as they lead to something plain."""
        while value is not _MISSING:
            if isinstance(value, torch.Tensor):
                self.found.tensors[id(value)] = name
                self.held.append(value)
                return
            if _is_plain(value):
                note()
                return
            following = _read_following(steps)
            if _is_followed(value, steps, following is not None):
                note()
                yield value
            elif following is None and isinstance(value, _FUNCTIONS) and _is_fixed_package(value):
                note()
            elif following is None and _has_content(value, steps):
                self.contents.append(functools.partial(_describe_content, read, name, self.stored))
            if following is None or (isinstance(value, types.ModuleType) and _is_fixed_package(value)):
                return
            key, is_item, count = following
            name = f"{name}[{key!r}]" if is_item else f"{name}.{key}"
            read = functools.partial(_read_item if is_item else _read_attribute, read, key)
            value, steps = _read_value(read), steps[count:]
            note = functools.partial(self.found.others.append, (read, value))


def _is_followed(value: Any, steps: list[Any], goes_on: bool) -> bool:
    """Whether what a name stands for is looked through: a function, or an object that may be called at this place."""
    if not callable(value) or isinstance(value, type) or _is_fixed_package(value):
        return False
    if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
        return True
    if not isinstance(getattr(type(value), "__call__", None), types.FunctionType):  # noqa: B004 - one of Python's own
        return False
    copied = bool(steps) and steps[0].opname in ("COPY", "DUP_TOP")  # an attribute of it is written
    return not goes_on and not copied


_CONTAINERS = (list, tuple, dict, set, frozenset)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)


def _has_content(value: Any, steps: list[Any]) -> bool:
    """Whether a body may read plain values of what a name stands for: of a list, a dictionary, a set or an object."""
    if isinstance(value, types.BuiltinMethodType):  # a method of a list or a dictionary
        return isinstance(value.__self__, _CONTAINERS) and value.__name__ in _READERS
    written = bool(steps) and steps[0].opname in ("STORE_ATTR", "STORE_SUBSCR", "COPY", "DUP_TOP")
    return not (written or isinstance(value, (types.ModuleType, type, torch.Tensor, *_FUNCTIONS)))


def _describe_content(read: Read, name: str, skipped: set[Any]) -> str:
    """A text of all that is plain in a list, a dictionary or an object. ``skipped``: attributes that are counters."""
    left = _CONTENT

    def describe(value: Any, depth: int) -> str:
        nonlocal left
        left -= 1
        if left < 0 or isinstance(value, torch.Tensor):
            return ""
        if isinstance(value, types.BuiltinMethodType) and isinstance(value.__self__, _CONTAINERS):
            value = value.__self__
        if isinstance(value, (*_PLAIN, *_FUNCTIONS)):
            return repr(value)
        kind = type(value)
        if depth == 0 or kind.__module__.split(".")[0] in _NOT_SETTINGS:
            return ""
        if kind.__module__ == "numpy":  # a number, or an array
            return repr(value)
        if isinstance(value, dict):
            return "{" + ", ".join(f"{describe(k, 1)}: {describe(v, depth - 1)}" for k, v in value.items()) + "}"
        if isinstance(value, _CONTAINERS):
            return kind.__name__ + str([describe(v, depth - 1) for v in value])
        held = {n: getattr(value, n, None) for n in getattr(kind, "__slots__", ())} | getattr(value, "__dict__", {})
        return ", ".join(f"{n}={describe(v, depth - 1)}" for n, v in held.items() if n not in skipped)

    return describe(read(), 4)


def _return_value(value: Any) -> Any:
    return value


def _read_attribute(read: Read, key: str) -> Any:
    return getattr(read(), key)


def _read_item(read: Read, key: Any) -> Any:
    return read()[key]


def _read_following(steps: list[Any]) -> tuple[Any, bool, int] | None:
    """What instructions read of the value before them: an attribute, or an item (True), and how many they are."""
    if not steps:
        return None
    first, *rest = steps[:2]
    if first.opname in ("LOAD_ATTR", "LOAD_METHOD"):
        return first.argval, False, 1
    constant = first.opname in ("LOAD_CONST", "LOAD_SMALL_INT") and isinstance(first.argval, (str, int))
    if constant and rest and (rest[0].opname == "BINARY_SUBSCR" or rest[0].argrepr == "[]"):
        return first.argval, True, 2
    return None

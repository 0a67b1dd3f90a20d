"""A layer's own Python, done once for calls of one kind.

Between a layer's arguments and its ops stand checks, defaults and views, all of them decided by types, shapes and
choices, none by the numbers in a tensor. So a call that is met for the second time is watched: what it asks of torch
and of its ops is written down as one function, straight from the arguments to the result, and the calls after it run
that. A layer that does anything else (it looks at a number, draws a seed, takes gradients off) has no outline, and is
called as it is.
"""

from __future__ import annotations

import contextvars
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .call_key import CHOICE, Readers

_MOST = 256  # kinds of calls of a layer
_LONGEST = 32  # steps of an outline: what takes more is no plain layer
_got = lambda *names: {getattr(Tensor, name).__get__ for name in names}
_methods = lambda *names: {getattr(Tensor, name) for name in names}

# What is decided by the kind of a tensor
_ASKED = frozenset(
    _got("device", "dtype", "is_cuda", "layout", "ndim", "shape")
    | _methods("__len__", "dim", "is_complex", "is_floating_point", "numel", "size")
    | _methods("data_ptr", "stride")  # asked for an op's key, which holds them where they decide anything
)
# What makes a tensor of tensors, in a form that their kinds decide
_DONE = frozenset(
    _methods("__add__", "__eq__", "__ge__", "__gt__", "__le__", "__lt__", "__mul__", "__ne__", "__neg__", "__radd__")
    | _methods("__rmul__", "__rsub__", "__rtruediv__", "__sub__", "__truediv__", "add", "div", "mul", "sub")
    | _methods("argmax", "clamp", "detach", "double", "expand", "flatten", "float", "log", "long", "mean", "neg")
    | _methods("new_full", "new_zeros", "reshape", "squeeze", "sum", "to", "transpose", "unflatten", "unsqueeze")
    | {torch.full, torch.ones_like, torch.zeros_like}
)


class Planned(Protocol):
    """A plan of an op (``call.py``)."""

    @property
    def traced(self) -> Any: ...
    @property
    def given(self) -> Sequence[tuple[int, Callable[[Any], Any] | None]]: ...
    def of(self, *inputs: Any) -> list[Tensor]: ...


class Outline(TorchFunctionMode):
    """Watches one call of a layer with these values."""

    def __init__(self, values: Sequence[Any]):
        super().__init__()
        tensors = [v for v in values if isinstance(v, Tensor)]
        self.values, self.names = values, {id(v): f"v{k}" for k, v in enumerate(values) if isinstance(v, Tensor)}
        self.broken = len(self.names) < len(tensors)  # of one given twice it is not known which is which
        self.met: list[Any] = []  # held, so that ids stay their own
        self.lines: list[str] = []
        self.scope: dict[str, Any] = {}
        self.grads, self.inside = torch.is_grad_enabled(), False

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not self.inside and func not in _ASKED:
            if func in _DONE and isinstance(found, Tensor):
                self.named(found, self._write(func, args, kwargs or {}))
            else:
                self.broken = True
        return found

    def ran(self, plan: Planned, values: Sequence[Any]) -> Any:
        """An op's plan is run: one step, whatever it does; what it reads besides its values is looked at each time."""
        self.broken = self.broken or plan.traced.watched is not None
        inputs = [values[at] if view is None else self.done(view, (values[at],)) for at, view in plan.given]
        with self._apart():
            found = plan.of(*inputs)
        name = self._write(plan.of, inputs, {})
        for k, result in enumerate(found):
            self.named(result, f"{name}[{k}]")
        return plan.traced.pack(found)

    def done(self, run: Callable[..., Any], given: Sequence[Any], ready: Ready | None = None) -> Any:
        """A function of ours is called: one step likewise, unless it makes no tensor. ``ready``: see :func:`step`."""
        with self._apart():
            found = run(*given)
            again = None if ready is None else ready(*given)
        if isinstance(found, Tensor):
            self.named(found, self._write(again or run, given, {}))
        return found

    def function(self, result: Any) -> Callable[..., Any] | None:
        """The call as a function of its values; None where it is no outline."""
        closing = f"    return {self._said(result)}"
        if self.broken or len(self.lines) > _LONGEST:
            return None
        given = ", ".join(f"v{k}" for k in range(len(self.values)))
        exec("\n".join([f"def call({given}):", *self.lines, closing]), self.scope)
        return self.scope["call"]

    def named(self, found: Tensor, name: str) -> None:
        self.names[id(found)] = name
        self.met.append(found)

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """What happens inside is not written."""
        self.inside, before = True, self.inside
        try:
            yield
        finally:
            self.inside = before

    def _write(self, run: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        self.broken = self.broken or torch.is_grad_enabled() != self.grads
        name = f"r{len(self.lines)}"
        given = [*map(self._said, args), *(f"{key}={self._said(value)}" for key, value in kwargs.items())]
        self.lines.append(f"    {name} = {self._held(run)}({', '.join(given)})")
        return name

    def _said(self, value: Any) -> str:
        """A value in the text: what is known by name, or put together of such, or fixed."""
        if isinstance(value, Tensor):
            self.broken = self.broken or id(value) not in self.names
            return self.names.get(id(value), "None")
        if isinstance(value, dict):
            return f"{{{', '.join(f'{self._held(k)}: {self._said(v)}' for k, v in value.items())}}}"
        if isinstance(value, tuple | list):
            parts = "".join(f"{self._said(v)}, " for v in value)
            named = isinstance(value, tuple) and hasattr(value, "_fields")
            if named:
                return f"{self._held(type(value))}({parts})"
            return f"[{parts}]" if isinstance(value, list) else f"({parts})"
        return self._held(value)

    def _held(self, thing: Any) -> str:
        name = f"k{len(self.scope)}"
        self.scope[name] = thing
        return name


watching: contextvars.ContextVar[Outline | None] = contextvars.ContextVar("watching", default=None)


def spoil() -> None:
    """What is done now depends on more than the kind of a call."""
    watched = watching.get()
    if watched is not None:
        watched.broken = True


Ready = Callable[..., Callable[..., Tensor] | None]


def step(run: Callable[..., Tensor], ready: Ready | None = None) -> Callable[..., Tensor]:
    """A function of ours that makes a tensor, of a form that the kind of its arguments decides. ``ready`` says of some
    arguments what does the same for others like them, if anything does it faster."""

    @functools.wraps(run)
    def noted(*given: Any) -> Tensor:
        watched = None if torch.compiler.is_dynamo_compiling() else watching.get()
        return run(*given) if watched is None else watched.done(run, given, ready)

    return noted


class Outlines:
    """The outlines of a layer, by the keys of its calls."""

    def __init__(self, layer: Callable[..., Any]):
        self.layer = layer
        self.readers = Readers(lambda count, names: (CHOICE,) * (count + len([*names])))
        self.seen: set[tuple] = set()  # once: numbers that change in every call are not worth an outline
        self.kept: dict[tuple, Callable[..., Any]] = {}
        self._lock = threading.Lock()

    def __call__(self, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        values = (*args, *kwargs.values()) if kwargs else args
        key = self.readers.key(len(args), kwargs, values)
        if key is None:
            return self.layer(*args, **kwargs)
        call = self.kept.get(key)
        return self._met(key, args, kwargs) if call is None else call(*values)

    def _met(self, key: tuple, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """A call of a kind that has no outline yet; one that is wrong leaves nothing behind."""
        if key not in self.seen:
            result = self.layer(*args, **kwargs)
            with self._lock:
                if len(self.seen) >= _MOST:
                    self.seen.clear()
                self.seen.add(key)
            return result
        outline = Outline((*args, *kwargs.values()))
        token = watching.set(outline)
        try:
            with outline:
                result = self.layer(*args, **kwargs)
        finally:
            watching.reset(token)
        call = outline.function(result) or self._plainly(len(args), tuple(kwargs))
        with self._lock:
            while len(self.kept) >= _MOST:
                del self.kept[next(iter(self.kept))]
            self.kept[key] = call
        return result

    def _plainly(self, count: int, names: tuple[str, ...]) -> Callable[..., Any]:
        """The layer itself, called as it was."""
        return lambda *values: self.layer(*values[:count], **dict(zip(names, values[count:], strict=True)))

"""A layer's own Python, recorded once for calls of one kind and replayed.

Between a layer's arguments and its ops stand checks, defaults and views, all of them decided by types, shapes and
choices, none by the numbers in a tensor. So the second call of a kind is recorded: what it asks of torch and of its ops
is written as one function, straight from the arguments to the result, and later calls run that. A layer that does
anything else (it reads a number, draws a seed, takes gradients off) cannot be recorded, and is called as it is.

Unlike ``engines/triton/launch/replay.py``, which records storages and addresses under autograd, this records the calls
that autograd sees: the replay is differentiable.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..arrays import call_with_tensors, has_arrays
from ..domains import Blocks, Edges, Jagged, Pages
from ..engines.common.bounded_cache import BoundedCache
from ..engines.common.generated_code import FunctionWriter, define, tuple_text
from ..plan import settings
from .call_key import CHOICE, CallKeys

_MOST = 1024  # kinds of calls of a layer: packed or bucketed sequences have hundreds of lengths
_DOMAINS = frozenset({Blocks, Edges, Jagged, Pages})
_LONGEST = 32  # steps of a recording: what takes more is no plain layer
_got = lambda *names: {getattr(Tensor, name).__get__ for name in names}
_methods = lambda *names: {getattr(Tensor, name) for name in names}

# Functions whose answer is decided by the kind of a tensor
_READS = frozenset(
    _got("device", "dtype", "is_cuda", "is_nested", "is_quantized", "is_sparse", "layout", "ndim", "shape")
    | _methods("__len__", "dim", "is_complex", "is_floating_point", "numel", "size")
    | _methods("data_ptr", "stride")  # read for an op's key, which holds them where they decide anything
)
# Functions that make a tensor of tensors, in a form that their kinds decide
_MAKES = frozenset(
    _methods("__add__", "__eq__", "__ge__", "__gt__", "__le__", "__lt__", "__mul__", "__ne__", "__neg__", "__radd__")
    | _methods("__rmul__", "__rsub__", "__rtruediv__", "__sub__", "__truediv__", "add", "div", "mul", "sub")
    | _methods("argmax", "clamp", "detach", "double", "expand", "flatten", "float", "log", "long", "mean", "neg")
    | _methods("movedim", "new_full", "new_zeros", "reshape", "squeeze", "sum", "to", "transpose", "unflatten")
    | _methods("unsqueeze", "view")
    | {torch.full, torch.ones_like, torch.zeros_like}
)


class Planned(Protocol):
    """A plan of an op (``call.py``)."""

    @property
    def traced(self) -> Any: ...
    @property
    def given(self) -> Sequence[tuple[int, Callable[[Any], Any] | None]]: ...
    def of(self, *inputs: Any) -> Sequence[Tensor]: ...
    def fix(self, inputs: Sequence[Any]) -> Callable[..., Sequence[Tensor]] | None: ...


class LayerRecorder(TorchFunctionMode):
    """Records one call of a layer with these values."""

    def __init__(self, values: Sequence[Any]):
        super().__init__()
        tensors = [v for v in values if isinstance(v, Tensor)]
        self.values, self.names = values, {id(v): f"v{k}" for k, v in enumerate(values) if isinstance(v, Tensor)}
        self.failed = len(self.names) < len(tensors)  # a tensor given twice: it is not known which is which
        self.held: list[Any] = []  # results, so that ids stay their own
        self.writer = FunctionWriter()
        self.grads, self.inside = torch.is_grad_enabled(), False

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not self.inside and func not in _READS:
            if func in _MAKES and isinstance(found, Tensor):
                self._name(found, self._write(func, args, kwargs or {}))
            else:
                self.failed = True
        return found

    def run_plan(self, plan: Planned, values: Sequence[Any]) -> Any:
        """Run an op's plan: one step, whatever it does. What it reads besides its values is checked in each call."""
        self.failed = self.failed or plan.traced.watched is not None
        inputs = [values[at] if view is None else self.run_step(view, (values[at],)) for at, view in plan.given]
        with self._apart():
            found, fixed = plan.of(*inputs), plan.fix(inputs)
        name = self._write(fixed or plan.of, inputs, {})
        for k, result in enumerate(found):
            self._name(result, f"{name}[{k}]")
        return plan.traced.pack(found)

    def run_step(self, run: Callable[..., Any], given: Sequence[Any], faster: Faster | None = None) -> Any:
        """Run a function of ours: one step likewise, unless it makes no tensor. ``faster``: see :func:`step`."""
        with self._apart():
            found = run(*given)
            again = None if faster is None else faster(*given)
        if isinstance(found, Tensor):
            self._name(found, self._write(again or run, given, {}))
        return found

    def function(self, result: Any) -> Callable[..., Any] | None:
        """The call as a function of its values; None where it cannot be replayed."""
        lines = [*self.writer.lines, f"return {self._text(result)}"]
        if self.failed or len(self.writer.lines) > _LONGEST:
            return None
        return define("call", [f"v{k}" for k in range(len(self.values))], lines, self.writer.scope)

    def _name(self, found: Tensor, name: str) -> None:
        self.names[id(found)] = name
        self.held.append(found)

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """What happens inside is not recorded."""
        self.inside, before = True, self.inside
        try:
            yield
        finally:
            self.inside = before

    def _write(self, run: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        self.failed = self.failed or torch.is_grad_enabled() != self.grads
        name = f"r{len(self.writer.lines)}"
        given = [*map(self._text, args), *(f"{key}={self._text(value)}" for key, value in kwargs.items())]
        self.writer.lines.append(f"{name} = {self.writer.hold(run)}({', '.join(given)})")
        return name

    def _text(self, value: Any) -> str:
        """A value in the text: known by name, or put together of such, or fixed."""
        if isinstance(value, Tensor):
            self.failed = self.failed or id(value) not in self.names
            return self.names.get(id(value), "None")
        if isinstance(value, dict):
            return f"{{{', '.join(f'{self.writer.hold(k)}: {self._text(v)}' for k, v in value.items())}}}"
        if isinstance(value, tuple | list):
            parts = tuple_text(map(self._text, value))
            named = isinstance(value, tuple) and hasattr(value, "_fields")
            if named:
                return f"{self.writer.hold(type(value))}{parts}"
            return f"[{parts[1:-1]}]" if isinstance(value, list) else parts
        return self.writer.hold(value)


recording: contextvars.ContextVar[LayerRecorder | None] = contextvars.ContextVar("recording", default=None)


def fail_recording() -> None:
    """Say that what is done now depends on more than the kind of a call."""
    recorder = recording.get()
    if recorder is not None:
        recorder.failed = True


Faster = Callable[..., Callable[..., Tensor] | None]


def step(run: Callable[..., Tensor], faster: Faster | None = None) -> Callable[..., Tensor]:
    """A function of ours that makes a tensor, in a form that the kind of its arguments decides: recorded as one step.

    ``faster(*arguments)`` is a function that does the same for arguments like these, or None."""

    @functools.wraps(run)
    def recorded(*given: Any) -> Tensor:
        recorder = None if torch.compiler.is_dynamo_compiling() else recording.get()
        return run(*given) if recorder is None else recorder.run_step(run, given, faster)

    return recorded


def _not_recorded(*values: Any) -> Any:
    """Stands for a call over a domain that cannot be replayed."""
    raise AssertionError("the layer is called instead")


class LayerReplay:
    """A layer, with the recordings of its calls by their keys; ``unkeyed`` is called in its place for calls without a
    key, such as those on subclasses of tensors."""

    def __init__(self, layer: Callable[..., Any], unkeyed: Callable[..., Any] | None = None):
        self.layer, self.unkeyed = layer, unkeyed or layer
        self.keys = CallKeys(lambda count, names: (CHOICE,) * (count + len([*names])), launches=True)
        self.seen: BoundedCache[tuple, bool] = BoundedCache(_MOST)  # once: a number that always changes is no kind
        self.known: BoundedCache[tuple, Callable[..., Any]] = BoundedCache(_MOST)

    def __call__(self, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        if recording.get() is not None:
            return self.layer(*args, **kwargs)  # inside another layer that is being recorded, this one is a part of it
        values = (*args, *kwargs.values()) if kwargs else args
        for at, value in enumerate(values):
            if type(value) in _DOMAINS:
                return self._over_domain(at, value, values, args, kwargs)
        key = self.keys.key(len(args), kwargs, values)
        if key is None:
            if has_arrays(values):
                return self.call_with_arrays(args, kwargs)
            return self.unkeyed(*args, **kwargs)
        call = self.known.find(key)
        return self._record(key, args, kwargs) if call is None else call(*values)

    def _over_domain(self, at: int, domain: Any, values: tuple, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """A call over a domain: its tensors are values like all others, its form is a part of the key. Where the
        numbers of lists are looked at in every call, nothing is replayed."""
        tensors = domain.tensors()
        flat = (*values[:at], *values[at + 1 :], *tensors)
        key = None
        if not settings.now().check and (tensors[0].is_cuda or settings.interprets_kernels()):
            key = self.keys.key(len(flat), {}, flat, (len(args), *kwargs, at, domain.form))
        if key is None:
            return self.unkeyed(*args, **kwargs)
        call = self.known.find(key)
        if call is None:
            return self._record(key, args, kwargs, flat)
        return self.layer(*args, **kwargs) if call is _not_recorded else call(*flat)

    def call_with_arrays(self, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """A call with arrays of other libraries: one with tensors, which is recorded as any other."""
        call = lambda *given, **named: self(given, named)
        return call_with_tensors(call, list(inspect.signature(self.layer).parameters), args, kwargs)

    def _record(self, key: tuple, args: tuple, kwargs: Mapping[str, Any], flat: tuple | None = None) -> Any:
        """Record the second call of a kind; one that raises leaves nothing behind. ``flat``: its values with the
        tensors of a domain in place of that."""
        if key not in self.seen:
            result = self.layer(*args, **kwargs)
            self.seen.keep(key, True)
            return result
        recorder = LayerRecorder((*args, *kwargs.values()) if flat is None else flat)
        token = recording.set(recorder)
        try:
            with recorder:
                result = self.layer(*args, **kwargs)
        finally:
            recording.reset(token)
        otherwise = self._call_layer(len(args), tuple(kwargs)) if flat is None else _not_recorded
        self.known.keep(key, recorder.function(result) or otherwise)
        return result

    def _call_layer(self, count: int, names: tuple[str, ...]) -> Callable[..., Any]:
        """The layer itself, called as it was."""
        return lambda *values: self.layer(*values[:count], **dict(zip(names, values[count:], strict=True)))

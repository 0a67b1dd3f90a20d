"""A layer's own Python, recorded once for calls of one kind and replayed.

Between a layer's arguments and its ops stand checks, defaults and views, all of them decided by types, shapes and
choices, none by the numbers in a tensor. So the second call of a kind is recorded: what it asks of torch and of its ops
is written as one function, straight from the arguments to the result, and later calls run that. A layer that does
anything else (it reads a number, draws a seed, takes gradients off) cannot be recorded, and is called as it is.

The keys by which a call of any op or layer is recognised are built here too (``CallKeys``).

Unlike ``engines/triton/launch/replay.py``, which records storages and addresses under autograd, this records the calls
that autograd sees: the replay is differentiable.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..arrays import call_with_tensors, has_arrays
from ..domains import Blocks, Edges, Jagged, Pages
from ..engines.common.bounded_cache import BoundedCache
from ..engines.common.torch_code import define
from ..plan import settings
from ..program.trace import Watched
from ..stored_vectors import Scaled
from . import call_context
from .replay import CallViews, View, Views
from .torch_replay import TorchRecorder, tensors_in

# The key of a call: all that its checks and its kernels look at, and nothing else.
#
# Types, shapes, devices, choices and, where kernels run, strides and alignment; values are no part of it, so a new
# temperature is the same key. A key is read by a function that is generated for how the call is spelt and for the types
# of its values, so that no value is asked what it is: another type is another function. Whatever a key cannot say (a
# tensor subclass, a NumPy number) has none, and every check is run.

STATIC, WHOLE, NUMBER, CHOICE = "static", "int", "", "choice"  # how a value is declared; CHOICE: it is not
_LARGEST = 2**63
_FORMS = 1024  # ways in which calls of one op are spelt
_CHOICES = frozenset({bool, int, str, type(None), types.FunctionType, types.BuiltinFunctionType})
_ON_KERNELS = ("{0}.dtype", "{0}.shape", "{0}.device", "{0}.stride()", "{0}.data_ptr() & 15")
_ELSEWHERE = ("{0}.dtype", "{0}.shape", "{0}.device", "{0}.layout")


class _KeyReader(NamedTuple):
    """Reads the keys of calls whose values have the same types: where kernels run, strides and alignment too."""

    on_kernels: Callable[..., tuple | None]
    elsewhere: Callable[..., tuple | None]
    first: int | None  # which value is the first tensor


_NO_KEY = _KeyReader(lambda *given: None, lambda *given: None, None)  # of types that have none


class CallKeys:
    """The keys of calls of one op or layer. ``declared`` says how each value is declared in a call that gives so many
    by position and these by name; None where such a call does not fit. ``launches``: where kernels run, the settings
    that decide which ones are a part of the key, in place of the engine alone."""

    def __init__(self, declared: Callable[[int, Iterable[str]], Sequence[str] | None], launches: bool = False):
        self.declared, self.launches = declared, launches
        self.readers: BoundedCache[tuple, _KeyReader] = BoundedCache(_FORMS)

    def key(self, count: int, names: Mapping[str, Any], values: Sequence[Any], asked: Any = "") -> tuple | None:
        """The key of a call that gives ``count`` values by position, if it is an ordinary one; ``asked``: what else it
        depends on."""
        reader = self.readers.get((count, *names, *map(type, values))) or self._make_reader(count, names, values)
        if reader is None or not call_context.is_untraced():
            return None
        if torch._C._is_any_autocast_enabled() or settings.layout.get() is not None:
            return None
        on_kernels, elsewhere, first = reader
        there = first is not None and (values[first].is_cuda or settings.interprets_kernels())
        launches = call_context.launch_key() if there and self.launches else None
        try:
            if launches is not None:
                return on_kernels(launches, asked, *values)
            return (on_kernels if there else elsewhere)(settings.now().engine, asked, *values)
        except RuntimeError:  # one is not dense, or has no memory of its own
            return None

    def _make_reader(self, count: int, names: Mapping[str, Any], values: Sequence[Any]) -> _KeyReader | None:
        """Generate the reader of a call like this; None where it has no key."""
        declared, kinds = self.declared(count, names), tuple(map(type, values))
        if declared is None:
            return None
        form = (count, *names, *kinds)
        made = [_generate_reader(form, kinds, declared, tensors) for tensors in (_ON_KERNELS, _ELSEWHERE)]
        if made[0] is None or made[1] is None:
            return self.readers.keep(form, _NO_KEY)
        first = next((k for k, one in enumerate(zip(kinds, declared, strict=True)) if _is_tensor(*one)), None)
        return self.readers.keep(form, _KeyReader(made[0], made[1], first))


def _generate_reader(
    form: tuple, kinds: Sequence[type], declared: Sequence[str], tensors: Sequence[str]
) -> Callable | None:
    parts, checks = ["form", "engine", "asked"], []
    for k, (kind, said) in enumerate(zip(kinds, declared, strict=True)):
        name = f"v{k}"
        found = _key_parts(kind, said, tensors)
        if found is None:
            return None
        parts += [part.format(name) for part in found]
        if kind is int and said in (WHOLE, NUMBER):  # a larger one is checked in every call
            checks += [f"if not {-_LARGEST} < {name} < {_LARGEST}:", "    return None"]
    given = ["engine", "asked", *(f"v{k}" for k in range(len(kinds)))]
    return define("key", given, [*checks, f"return ({', '.join(parts)})"], {"form": form})


def _is_tensor(kind: type, said: str) -> bool:
    return kind in call_context.PLAIN and said != STATIC


def _key_parts(kind: type, said: str, tensors: Sequence[str]) -> Sequence[str] | None:
    """What is read of a value of this type, besides the type; None where that cannot be said cheaply."""
    if said == STATIC:
        return ("{0}",) if kind.__hash__ is not None else None
    if kind in call_context.PLAIN:
        return tensors
    if said == CHOICE:
        return ("{0}.hex()",) if kind is float else ("{0}",) if kind in _CHOICES else None  # 0.0 is not -0.0
    return () if kind in (bool, int, type(None)) or (kind is float and said != WHOLE) else None


_MOST = 1024  # kinds of calls of a layer: packed or bucketed sequences have hundreds of lengths
_DOMAINS = frozenset({Blocks, Edges, Jagged, Pages})
_IN_PARTS = _DOMAINS | {Scaled}  # arguments that are several values
_CHANGED = object()  # a replay's answer where a body would read something else
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
    def fix(
        self, inputs: Sequence[Any], given: Sequence[Any] = (), views: CallViews | None = None
    ) -> Callable[..., Sequence[Tensor]] | None: ...


@dataclass(eq=False)
class _Step:
    """One step of a recording: what runs, on what, and the tensors that it made. ``view``: it is one of its first
    argument; ``plan``: it is an op's."""

    run: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    made: Sequence[Tensor]
    view: View | None = None
    plan: Planned | None = None


class LayerRecorder(TorchRecorder):
    """Records one call of a layer with these values."""

    def __init__(self, values: Sequence[Any]):
        super().__init__(values)
        tensors = [v for v in values if isinstance(v, Tensor)]
        self.names = {id(v): f"v{k}" for k, v in enumerate(values) if isinstance(v, Tensor)}
        self.failed = len(self.names) < len(tensors)  # a tensor given twice: it is not known which is which
        self.steps: list[_Step] = []  # they hold what they made, so that ids stay their own
        self.makers: dict[int, _Step] = {}  # of tensors, by id
        self.watched: list[Watched] = []  # what bodies read besides their values
        self.grads, self.inside = torch.is_grad_enabled(), False

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not self.inside and func not in _READS:
            if func in _MAKES and isinstance(found, Tensor):
                with self._apart():
                    view = None if kwargs else View.of(func, args, found)
                self._add(_Step(func, args, kwargs or {}, (found,), view))
            else:
                self.failed = True
        return found

    def run_plan(self, plan: Planned, values: Sequence[Any]) -> Any:
        """Run an op's plan: one step, whatever it does. What its body reads elsewhere is checked in each call."""
        if plan.traced.watched is not None:
            self.watched.append(plan.traced.watched)
        inputs = [values[at] if view is None else self._run_view(view, values[at]) for at, view in plan.given]
        with self._apart():
            found = plan.of(*inputs)
        self._add(_Step(plan.of, inputs, {}, tuple(found), plan=plan))
        return plan.traced.pack(found)

    def run_step(self, run: Callable[..., Any], given: Sequence[Any], faster: Faster | None = None) -> Any:
        """Run a function of ours: one step likewise, unless it makes no tensor. ``faster``: see :func:`step`."""
        with self._apart():
            found = run(*given)
            again = None if faster is None else faster(*given)
        if isinstance(found, Tensor):
            self._add(_Step(again or run, given, {}, (found,)))
        return found

    def _run_view(self, run: Callable[[Any], Any], value: Any) -> Any:
        """An argument as its op's input, with all batch dimensions."""
        with self._apart():
            found = run(value)
            view = View.of(run, (value,), found, reshapes=True) if isinstance(found, Tensor) else None
        if isinstance(found, Tensor):
            self._add(_Step(run, (value,), {}, (found,), view))
        return found

    def function(self, result: Any) -> Callable[..., Any] | None:
        """The call as a function of its values, which returns ``_CHANGED`` where a body would read something else; None
        where it cannot be replayed."""
        self.failed = self.failed or any(id(t) not in self.names for t in tensors_in(result))
        if self.failed or len(self.steps) > _LONGEST:
            return None
        for step in self.steps:
            if step.plan is not None:
                self._fix(step, step.plan, result)
        lines, needed = [f"return {self.text(result)}"], {*map(id, tensors_in(result))}
        for step in reversed(self.steps):
            if step.plan is not None or not needed.isdisjoint(map(id, step.made)):
                lines.append(f"r{self.steps.index(step)} = {self.call_text(step.run, step.args, step.kwargs)}")
                needed |= {*map(id, tensors_in((step.args, step.kwargs)))}
        for watched in self.watched:
            lines += [f"    return {self.writer.hold(_CHANGED)}", f"if not {self.writer.hold(watched.holds)}():"]
        return None if self.failed else self.define("call", lines)

    def _fix(self, step: _Step, plan: Planned, result: Any) -> None:
        """Run an op's recorded launches without a look-up, straight from what its inputs are views of to the views that
        are made of its results."""
        before = [self._look_through(value) for value in step.args]
        after = [self._follow(t, result) for t in step.made]
        views = CallViews(
            tuple(chain for _, chain in before), tuple(tuple(s.view for s in users if s.view) for users in after)
        )
        given = [value for value, _ in before]
        fixed = plan.fix(step.args, given, views) if any(views.inputs) or any(views.outputs) else None
        if fixed is None:
            step.run = plan.fix(step.args) or step.run
            return
        step.run, step.args = fixed, given
        for t, users in zip(step.made, after, strict=True):
            for user in users:  # the step makes what this one did
                (last,), user.made = user.made, ()
                self.names[id(last)] = self.names[id(t)]
                step.made = (*step.made, last)

    def _look_through(self, value: Any) -> tuple[Any, Views]:
        """What a value is a view of, and the views in between."""
        found: list[View] = []
        while isinstance(value, Tensor) and (step := self.makers.get(id(value))) is not None and step.view is not None:
            found.append(step.view)
            value = step.args[0]
        return value, tuple(found[::-1])

    def _follow(self, t: Tensor, result: Any) -> list[_Step]:
        """The views, one after the other, through which alone a result of an op is used."""
        found: list[_Step] = []
        while id(t) not in {*map(id, tensors_in(result))}:
            users = [s for s in self.steps for given in tensors_in((s.args, s.kwargs)) if given is t]
            if len(users) != 1 or users[0].view is None:
                break
            found += users
            (t,) = users[0].made
        return found

    def _add(self, step: _Step) -> None:
        given = tensors_in((step.args, step.kwargs))
        self.failed = (
            self.failed or torch.is_grad_enabled() != self.grads or any(id(t) not in self.names for t in given)
        )
        if step.plan is None and all(id(t) in self.names for t in step.made):
            return  # ``x.float()`` of a float tensor is x
        name = f"r{len(self.steps)}"
        for k, t in enumerate(step.made):
            self.names[id(t)] = name if step.plan is None else f"{name}[{k}]"
            self.makers[id(t)] = step
        self.steps.append(step)

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """What happens inside is not recorded."""
        self.inside, before = True, self.inside
        try:
            yield
        finally:
            self.inside = before

    def name(self, t: Tensor) -> str | None:
        return self.names.get(id(t))


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
    """Stands for a call over a domain, or with stored vectors, that cannot be replayed."""
    raise AssertionError("the layer is called instead")


def _split_values(values: Sequence[Any]) -> tuple[tuple, tuple] | None:
    """The values of a call with those of domains and stored vectors in their places, each tensor once; and what says
    how they were put together. None where the call must not be replayed."""
    flat: list[Any] = []
    forms: list[Any] = []
    for at, value in enumerate(values):
        if type(value) is Scaled:
            if value.asks:  # its vectors are made whole under autograd
                return None
            flat += (value.values, value.scale)
            forms += (at, value.wide, value.bits, value.block)
        elif type(value) in _DOMAINS:
            tensors = value.tensors()
            if settings.now().check or not (tensors[0].is_cuda or settings.interprets_kernels()):
                return None
            flat += tensors
            forms += (at, value.form)
        else:
            flat.append(value)
    given = [v for v in flat if isinstance(v, Tensor)]
    if True in (asking := [v.requires_grad for v in given]):  # plans are made for those who ask for gradients
        forms += (torch.is_grad_enabled(), *asking)
    if len({*map(id, given)}) < len(given):  # several share a scale: the key says which
        places = {id(v): k for k, v in enumerate(flat) if isinstance(v, Tensor)}
        forms.append(tuple(places.get(id(v), -1) for v in flat))
        flat = [v for k, v in enumerate(flat) if places.get(id(v), k) == k]
    return tuple(flat), tuple(forms)


def _set_apart(args: tuple, kwargs: Mapping[str, Any]) -> tuple[tuple, Mapping[str, Any]]:
    """The same arguments, each a tensor of its own: a recording tells them apart by what they are."""
    seen: set[int] = set()

    def apart(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value.view_as(value) if id(value) in seen else value
        seen.add(id(value))
        return value

    return tuple(map(apart, args)), {name: apart(value) for name, value in kwargs.items()}


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
        if not _IN_PARTS.isdisjoint(map(type, values)):
            return self._call_in_parts(values, args, kwargs)
        key = self.keys.key(len(args), kwargs, values)
        if key is None:
            if has_arrays(values):
                return self.call_with_arrays(args, kwargs)
            return self.unkeyed(*args, **kwargs)
        call = self.known.find(key)
        found = _CHANGED if call is None else call(*values)
        return self._record(key, args, kwargs) if found is _CHANGED else found

    def _call_in_parts(self, values: tuple, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """A call over a domain, or with stored vectors: their tensors and numbers are values like all others, their
        forms are a part of the key. Where the numbers of lists are looked at in every call, nothing is replayed."""
        found = _split_values(values)
        key = None if found is None else self.keys.key(len(found[0]), {}, found[0], (len(args), *kwargs, found[1]))
        if found is None or key is None:
            if has_arrays(values) and _DOMAINS.isdisjoint(map(type, values)):
                return self.call_with_arrays(args, kwargs)
            return self.unkeyed(*args, **kwargs)
        call, flat = self.known.find(key), found[0]
        if call is _not_recorded:
            return self.layer(*args, **kwargs)
        result = _CHANGED if call is None else call(*flat)
        if result is not _CHANGED:
            return result
        without = lambda v: v.without_master() if type(v) is Scaled else v
        return self._record(key, tuple(map(without, args)), {n: without(v) for n, v in kwargs.items()}, flat)

    def call_with_arrays(self, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """A call with arrays of other libraries: one with tensors, which is recorded as any other."""
        call = lambda *given, **named: self(given, named)
        return call_with_tensors(call, list(inspect.signature(self.layer).parameters), args, kwargs)

    def _record(self, key: tuple, args: tuple, kwargs: Mapping[str, Any], flat: tuple | None = None) -> Any:
        """Record the second call of a kind; one that raises leaves nothing behind. ``flat``: its values with
        those of domains and stored vectors in their places."""
        if self.known.pop(key, None) is not None:
            self.seen.pop(key, None)  # what a body reads has changed, and may in every call
        if key not in self.seen:
            result = self.layer(*args, **kwargs)
            self.seen.keep(key, True)
            return result
        if flat is None:
            args, kwargs = _set_apart(args, kwargs)
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

"""Replay of a layer's own Python, and the keys by which a call of any op or layer is recognised.

Between a layer's arguments and its ops stand checks, defaults and views, all of them decided by types, shapes and
options, none by the numbers in a tensor. So the second call of a kind is recorded (``recorder.py``): what it asks of
torch and of its ops is written as one function, straight from the arguments to the result, and later calls run that.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..arrays import call_with_tensors, has_arrays
from ..domains import Blocks, Edges, Jagged, Pages
from ..engines.common.bounded_cache import BoundedCache
from ..engines.common.torch_code import define
from ..plan import settings
from ..program.trace import Watched
from ..stored_vectors import Scaled
from . import dispatch
from .recorder import LAYER_READS, Name, Recorder, Step, names_in, not_replayable, seen_once
from .replay import CallViews, View, Views

# The key of a call: all that its checks and its kernels look at, and nothing else.
#
# Types, shapes, devices, choices and, where kernels run, strides and alignment; values are no part of it, so a new
# temperature is the same key. A key is read by a function that is generated for how the call is spelt and for the types
# of its values, so that no value is asked what it is: another type is another function. Whatever a key cannot say (a
# tensor subclass, a NumPy number) has none, and every check is run.

STATIC, WHOLE, NUMBER, CHOICE = "static", "int", "", "choice"  # how a value is declared; CHOICE: a layer's option
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

    def key(self, count: int, names: Mapping[str, Any], values: Sequence[Any], more: Any = "") -> tuple | None:
        """The key of a call that gives ``count`` values by position, if it is an ordinary one; ``more``: what else it
        depends on."""
        reader = self.readers.get((count, *names, *map(type, values))) or self._make_reader(count, names, values)
        if reader is None or not dispatch.is_untraced():
            return None
        if torch._C._is_any_autocast_enabled() or settings.layout.get() is not None:
            return None
        on_kernels, elsewhere, first = reader
        there = first is not None and (values[first].is_cuda or settings.interprets_kernels())
        launches = settings.launch_key() if there and self.launches else None
        try:
            if launches is not None:
                return on_kernels(launches, more, *values)
            return (on_kernels if there else elsewhere)(settings.now().engine, more, *values)
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
    parts, checks = ["form", "engine", "more"], []
    for k, (kind, declaration) in enumerate(zip(kinds, declared, strict=True)):
        name = f"v{k}"
        found = _key_parts(kind, declaration, tensors)
        if found is None:
            return None
        parts += [part.format(name) for part in found]
        if kind is int and declaration in (WHOLE, NUMBER):  # a larger one is checked in every call
            checks += [f"if not {-_LARGEST} < {name} < {_LARGEST}:", "    return None"]
    given = ["engine", "more", *(f"v{k}" for k in range(len(kinds)))]
    return define("key", given, [*checks, f"return ({', '.join(parts)})"], {"form": form})


def _is_tensor(kind: type, declaration: str) -> bool:
    return kind in dispatch.PLAIN and declaration != STATIC


def _key_parts(kind: type, declaration: str, tensors: Sequence[str]) -> Sequence[str] | None:
    """What is read of a value of this type, besides the type; None where that cannot be said cheaply."""
    if declaration == STATIC:
        return ("{0}",) if kind.__hash__ is not None else None
    if kind in dispatch.PLAIN:
        return tensors
    if declaration == CHOICE:
        return ("{0}.hex()",) if kind is float else ("{0}",) if kind in _CHOICES else None  # 0.0 is not -0.0
    return () if kind in (bool, int, type(None)) or (kind is float and declaration != WHOLE) else None


_MOST = 1024  # kinds of calls of a layer: packed or bucketed sequences have hundreds of lengths
_DOMAINS = frozenset({Blocks, Edges, Jagged, Pages})
_IN_PARTS = _DOMAINS | {Scaled}  # arguments that are several values
_CHANGED = object()  # a replay's answer where a body would read something else


class OpPlan(Protocol):
    """A plan of an op (``call.py``)."""

    @property
    def traced(self) -> Any: ...
    @property
    def sources(self) -> Sequence[tuple[int, Callable[[Any], Any] | None]]: ...
    def run_program(self, *inputs: Any) -> Sequence[Tensor]: ...
    def fix(
        self, inputs: Sequence[Any], given: Sequence[Any] = (), views: CallViews | None = None
    ) -> Callable[..., Sequence[Tensor]] | None: ...


class LayerRecorder(Recorder):
    """Records one call of a layer with these values: torch calls, and ops as a whole."""

    reads = LAYER_READS
    key_has_strides = False
    most = 32  # what takes more is no plain layer

    def __init__(self, values: Sequence[Any]):
        self.tensors: dict[Name, Tensor] = {}  # kept until the recording ends: launches are fixed on them
        self.views: dict[Name, tuple[View, Step]] = {}  # tensors that are views of the first argument of a step
        self.plans: dict[Step, OpPlan] = {}  # the steps that are ops
        self.watched: list[Watched] = []  # what bodies read besides their values
        super().__init__(values)

    def name(self, t: Tensor, name: Name) -> Name:
        self.tensors[name] = t
        return super().name(t, name)

    def add_step(
        self, run: Any, args: Sequence[Any], kwargs: Mapping[str, Any], found: Any, needed: bool = False
    ) -> Step:
        step = super().add_step(run, args, kwargs, found, needed)
        if isinstance(found, Tensor) and step.made and not kwargs:
            self._note_view(step, args, found)
        return step

    def run_plan(self, plan: OpPlan, values: Sequence[Any]) -> Any:
        """Run an op's plan: one step, whatever it does. What its body reads elsewhere is checked in each call."""
        if plan.traced.watched is not None:
            self.watched.append(plan.traced.watched)
        inputs = [values[at] if view is None else self._run_view(view, values[at]) for at, view in plan.sources]
        with self._paused():
            found = plan.run_program(*inputs)
        self.plans[self.add_step(plan.run_program, inputs, {}, tuple(found), needed=True)] = plan
        return plan.traced.pack(found)

    def run_step(self, run: Callable[..., Any], given: Sequence[Any], faster: Faster | None = None) -> Any:
        """Run a function of ours: one step likewise, unless it makes no tensor. ``faster``: see :func:`step`."""
        with self._paused():
            found = run(*given)
            again = None if faster is None else faster(*given)
        if isinstance(found, Tensor):
            self.add_step(again or run, given, {}, found)
        return found

    def _run_view(self, view: Callable[[Any], Any], value: Any) -> Any:
        """An argument as its op's input, with all batch dimensions."""
        with self._paused():
            found = view(value)
        if isinstance(found, Tensor) and self.find_name(found) is None:
            self._note_view(super().add_step(view, (value,), {}, found), (value,), found, reshapes=True)
        return found

    def _note_view(self, step: Step, args: Sequence[Any], found: Tensor, reshapes: bool = False) -> None:
        with self._paused():
            view = View.of(step.run, args, found, reshapes)
        if view is not None and step.made:
            self.views[step.made[0]] = view, step

    def replay(self, result: Any) -> Callable[..., Any] | None:
        """The call as a function of its values, which returns ``_CHANGED`` where a body would read something else; None
        where it cannot be replayed."""
        returned = names_in(self.name_tensors(result))
        if self.failed:
            return None
        for step, plan in self.plans.items():
            self._fix_launches(step, plan, returned)
        checks: list[str] = []
        for watched in self.watched:
            checks += [f"if not {self.writer.hold(watched.holds)}():", f"    return {self.writer.hold(_CHANGED)}"]
        return self.function(result, checks)

    def _fix_launches(self, step: Step, plan: OpPlan, returned: set[str]) -> None:
        """Run an op's recorded launches without a look-up, straight from what its inputs are views of to the views that
        are made of its results."""
        before = [self._look_through(value) for value in step.args]
        after = [self._follow(name, returned) for name in step.made]
        views = CallViews(
            tuple(chain for _, chain in before), tuple(tuple(view for view, _ in users) for users in after)
        )
        inputs, given = self._tensors(step.args), self._tensors([value for value, _ in before])
        fixed = plan.fix(inputs, given, views) if any(views.inputs) or any(views.outputs) else None
        if fixed is None:
            step.run = plan.fix(inputs) or step.run
            return
        step.run, step.args = fixed, [value for value, _ in before]
        for k, users in enumerate(after):
            for _, user in users:  # the step makes what this one did
                (step.made[k],), user.made = user.made, []

    def _tensors(self, values: Sequence[Any]) -> list[Any]:
        """Values with the tensors in the places of their names."""
        return [self.tensors[v] if type(v) is Name else v for v in values]

    def _look_through(self, value: Any) -> tuple[Any, Views]:
        """What a value is a view of, and the views in between."""
        found: list[View] = []
        while value in self.views if type(value) is Name else False:
            view, step = self.views[value]
            found.append(view)
            value = step.args[0]
        return value, tuple(found[::-1])

    def _follow(self, name: Name, returned: set[str]) -> list[tuple[View, Step]]:
        """The views, one after the other, through which alone a result of an op is used."""
        found: list[tuple[View, Step]] = []
        while name not in returned:
            users = [
                s for s in self.steps for used in tree_leaves((s.args, s.kwargs)) if type(used) is Name and used == name
            ]
            if len(users) != 1 or not users[0].made or users[0].made[0] not in self.views:
                break
            (name,) = users[0].made
            found.append(self.views[name])
        return found

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """What happens inside is not recorded."""
        self.paused, before = True, self.paused
        try:
            yield
        finally:
            self.paused = before


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


def _split_values(values: Sequence[Any]) -> tuple[tuple | None, tuple]:
    """The values of a call with the tensors and numbers of domains and stored vectors in the places of these, each
    tensor once; and what says how they were put together. None where the call must not be replayed, because the numbers
    of lists are looked at in every call, or vectors are made whole under autograd."""
    flat: list[Any] = []
    forms: list[Any] = []
    for at, value in enumerate(values):
        if type(value) is Scaled:
            if value.asks:  # its vectors are made whole under autograd
                return None, ()
            flat += (value.values, value.scale)
            forms += (at, value.wide, value.bits, value.block)
        elif type(value) in _DOMAINS:
            tensors = value.tensors()
            if settings.now().check or not (tensors[0].is_cuda or settings.interprets_kernels()):
                return None, ()
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


def _make_distinct(args: tuple, kwargs: Mapping[str, Any]) -> tuple[tuple, Mapping[str, Any]]:
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
        self.known: BoundedCache[tuple, Callable[..., Any]] = BoundedCache(_MOST)

    def __call__(self, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        if recording.get() is not None:
            return self.layer(*args, **kwargs)  # inside another layer that is being recorded, this one is a part of it
        flat: tuple | None
        flat = values = (*args, *kwargs.values()) if kwargs else args
        if _IN_PARTS.isdisjoint(map(type, values)):
            key = self.keys.key(len(args), kwargs, values)
        else:
            flat, forms = _split_values(values)
            key = None if flat is None else self.keys.key(len(flat), {}, flat, (len(args), *kwargs, forms))
        if key is None or flat is None:
            if has_arrays(values) and _DOMAINS.isdisjoint(map(type, values)):
                return self.call_with_arrays(args, kwargs)
            return self.unkeyed(*args, **kwargs)
        call = self.known.find(key)
        if call is None or call is seen_once:
            return self._record(key, args, kwargs, flat)
        if call is not_replayable:
            return self.layer(*args, **kwargs)
        found = call(*flat)
        return self._record(key, args, kwargs, flat) if found is _CHANGED else found

    def call_with_arrays(self, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """A call with arrays of other libraries: one with tensors, which is recorded as any other."""

        def call(*given: Any, **named: Any) -> Any:
            return self(given, named)

        return call_with_tensors(call, list(inspect.signature(self.layer).parameters), args, kwargs)

    def _record(self, key: tuple, args: tuple, kwargs: Mapping[str, Any], flat: tuple) -> Any:
        """Record the second call of a kind; one that raises leaves nothing behind. ``flat``: its values with those of
        domains and stored vectors in their places."""
        args, kwargs = tuple(map(_drop_master, args)), {n: _drop_master(v) for n, v in kwargs.items()}
        if self.known.get(key) is not seen_once:  # or what a body reads has changed, and may in every call
            result = self.layer(*args, **kwargs)
            self.known.keep(key, seen_once)
            return result
        if _IN_PARTS.isdisjoint(map(type, (*args, *kwargs.values()))):
            args, kwargs = _make_distinct(args, kwargs)
            flat = (*args, *kwargs.values())
        recorder = LayerRecorder(flat)
        token = recording.set(recorder)
        try:
            with recorder:
                result = self.layer(*args, **kwargs)
        finally:
            recording.reset(token)
        self.known.keep(key, recorder.replay(result) or not_replayable)
        return result


def _drop_master(value: Any) -> Any:
    """Stored vectors without what they were rounded from: it asks for no gradient here."""
    return value.without_master() if type(value) is Scaled else value

"""Replay of recorded torch calls, and the keys by which a call of any op or layer is recognised.

Between a layer's arguments and its ops stand checks, defaults and views, all of them decided by types, shapes and
options, none by the numbers in a tensor. So the second call of a kind is recorded (``recorder.py``): what it asks of
torch and of its ops is written as one function, straight from the arguments to the result, and later calls run that
(:class:`LayerReplay`). So is a fold on a CPU, or its gradient (:class:`FoldReplay`): the eager engine itself takes
several times as long as its torch calls on small tensors. What differs in every call is no kind.

Measured on one core of a Neoverse N1, in µs of CPU time by the engine and by replay: attention of 2 heads, 64 × 64
pairs, 16 features 1589 and 623, with its gradient 4645 and 2020; a logsumexp of the same size 1212 and 492; 4 of 64
neighbours 1699 and 912.
"""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arrays import call_with_tensors, has_arrays
from ..domains import Blocks, Edges, Jagged, Pages
from ..engines.common import matmul, skip_small_tiles
from ..engines.common.bounded_cache import BoundedCache
from ..engines.common.evaluate import Sizes
from ..engines.common.torch_code import define
from ..plan import settings
from ..stored_vectors import Scaled
from . import dispatch
from .recorder import CHANGED, LayerRecorder, Recorder, recording

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
        launches = dispatch.launch_key() if there and self.launches else None
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
        found = _list_key_parts(kind, declaration, tensors)
        if found is None:
            return None
        parts += [part.format(name) for part in found]
        if kind is int and declaration in (WHOLE, NUMBER):  # a larger one is checked in every call
            checks += [f"if not {-_LARGEST} < {name} < {_LARGEST}:", "    return None"]
    given = ["engine", "more", *(f"v{k}" for k in range(len(kinds)))]
    return define("key", given, [*checks, f"return ({', '.join(parts)})"], {"form": form})


def _is_tensor(kind: type, declaration: str) -> bool:
    return kind in dispatch.PLAIN and declaration != STATIC


def _list_key_parts(kind: type, declaration: str, tensors: Sequence[str]) -> Sequence[str] | None:
    """What is read of a value of this type, besides the type; None where that cannot be said cheaply."""
    if declaration == STATIC:
        return ("{0}",) if kind.__hash__ is not None else None
    if kind in dispatch.PLAIN:
        return tensors
    if declaration == CHOICE:
        return ("{0}.hex()",) if kind is float else ("{0}",) if kind in _CHOICES else None  # 0.0 is not -0.0
    return () if kind in (bool, int, type(None)) or (kind is float and declaration != WHOLE) else None


# The functions that replay calls are kept in a cache, by the keys of the calls. Two values stand for no function:


def seen_once(*values: Any) -> Any:
    """Stands for calls of which there was one: the next is recorded."""
    raise AssertionError("the call is recorded")


def not_replayable(*values: Any) -> Any:
    """Stands for calls that cannot be replayed."""
    raise AssertionError("the function itself is called")


# Layers

_MOST = 1024  # kinds of calls of a layer: packed or bucketed sequences have hundreds of lengths
_DOMAINS = frozenset({Blocks, Edges, Jagged, Pages})
_IN_PARTS = _DOMAINS | {Scaled}  # arguments that are several values


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
            if has_arrays(values):
                return self.call_with_arrays(args, kwargs)
            return self.unkeyed(*args, **kwargs)
        call = self.known.find(key)
        if call is None or call is seen_once:
            return self._record(key, args, kwargs, flat)
        if call is not_replayable:
            return self.layer(*args, **kwargs)
        found = call(*flat)
        return self._record(key, args, kwargs, flat) if found is CHANGED else found

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


# Folds on a CPU

_MOST_KINDS = 64  # of inputs of one fold
_MOST_PAIRS = 2**22  # of more, the host's time does not count
_is_recording: ContextVar[bool] = ContextVar("is_recording", default=False)
_cpp = settings.EnvironmentVariable("MONOIDREDUCE_CPP")


class FoldReplay:
    """``run``, a function of a list of tensors and numbers, or what was recorded of it on values of the same kind.

    ``engine`` names the engine of its folds. The engine ``auto`` also follows tuned plans."""

    def __init__(self, run: Callable[[Sequence[Any]], Sequence[Any]], engine: str):
        self.run, self.engine = run, engine
        self.known: BoundedCache[tuple, Callable[..., Sequence[Any]]] = BoundedCache(_MOST_KINDS)

    @classmethod
    def make(cls, run: Callable[[Sequence[Any]], Sequence[Any]], engine: str, sizes: Sizes) -> FoldReplay | None:
        """For a fold of these sizes by an engine, or its gradient; None where recordings would not pay."""
        pairs = math.prod(sizes.batch) * sizes.rows * sizes.cols
        if sizes.device.type != "cpu" or engine not in ("auto", "eager") or not 0 < pairs <= _MOST_PAIRS:
            return None
        return cls(run, engine)

    def __call__(self, values: Sequence[Any]) -> Sequence[Any]:
        chosen = dispatch.launch_key() if self.engine == "auto" else settings.now().launches
        if chosen is None or skip_small_tiles.counters.get() or matmul.dry_run_sizes.get() is not None:
            return self.run(values)
        kinds = [(v.dtype, v.shape, v.stride(), v.is_neg()) if isinstance(v, Tensor) else repr(v) for v in values]
        key = (chosen, dispatch.FOLDERS[self.engine], _cpp.read(), torch.get_num_threads(), *kinds)
        call = self.known.get(key)
        if call is None or call is seen_once:
            return self._record(key, values)
        if call is not not_replayable:
            try:
                return call(*values)
            except Exception:  # the engine says what is wrong, and tries with less memory if that ran out
                pass
        return self.run(values)

    def _record(self, key: tuple, values: Sequence[Any]) -> Sequence[Any]:
        if key not in self.known or _is_recording.get():  # then this is a part of what is recorded
            self.known.keep(key, seen_once)
            return self.run(values)
        given = [v.detach() if isinstance(v, Tensor) else v for v in values]  # one given twice has two names
        token = _is_recording.set(True)
        try:
            with Recorder(given) as recorder:
                found = self.run(given)
        finally:
            _is_recording.reset(token)
        self.known.keep(key, recorder.function(found) or not_replayable)
        return found

"""Torch calls that are recorded while a function runs, and replayed as one function.

Which torch calls a function makes is often decided by the types, shapes and options that it is given, and not by the
numbers in its tensors. The calls of one run are then written as one Python function of the same values, which later
runs call (``torch_replay.py``): the same bits, without the Python in between. Two things are recorded:

- **the Python of a layer** (:class:`LayerRecorder`): checks, defaults and views around its ops. A step is a torch call
  or a whole op. It is recorded under autograd, so the replay is differentiable.
- **a fold on a CPU, or its gradient** (:class:`Recorder`): the tiles of the eager engine. A step is a torch call, or a
  fold as compiled C++. It is recorded below autograd.

Only calls listed here may be recorded. Anything else (a number read from a tensor, a tensor that the values do not lead
to, gradients switched off) means that this kind of call cannot be replayed, and the function itself runs every time.
Launches of kernels, whose addresses change, are recorded by ``engines/triton/launch/replay.py``.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..engines.common.torch_code import FunctionWriter, define, tuple_text
from ..engines.eager.cpp.compiled_fold import CompiledFold
from ..program.primitives import PRIMITIVES
from ..program.trace import WatchedPlaces
from .replay import CallViews, View, Views


def _find_getters(names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names.split()}


def _find_methods(names: str) -> set[Any]:
    return {getattr(Tensor, name) for name in names.split()}


# Calls that make no tensor and whose answer is decided by the kind of a tensor: they are not recorded. A layer may also
# read what the keys of its ops hold, a fold what its own key holds.
_READS = frozenset(
    _find_getters("device dtype is_cuda is_meta is_nested is_quantized is_sparse layout ndim shape")
    | _find_methods("__len__ dim is_complex is_floating_point is_neg numel size stride")
)
_LAYER_READS, _FOLD_READS = _READS | {Tensor.data_ptr}, _READS | {Tensor.is_contiguous}
# Calls that make or change tensors in a form that is decided by the kind of their arguments. Functions, methods,
# operators and methods in place have one name here: ``torch.add``, ``Tensor.add``, ``__add__`` and ``add_``. These are
# the functions of the language, which their table names, and others.
_OTHERS = """
addcmul addmm all amax amin and any arange argmax argmin baddbmm bmm bool cat clamp clone contiguous copy cumsum detach
double empty empty_like expand expand_as fill find_best flatten flip float floor_divide floordiv full full_like gather
iadd imul index_add int invert isfinite isinf isnan isub log_sigmoid logsumexp long lshift masked_fill matmul mean mm
mod movedim new_empty new_full new_ones new_zeros ones ones_like or permute prod radd rdiv reshape rmul rpow rshift rsub
rtruediv scalar_tensor scatter scatter_add softmax sort special_erfcx special_expm1 special_ndtr squeeze stack sum
sum_to_size take_along_dim tan tensor to topk transpose truediv unbind unflatten unfold unsqueeze view where xor zero
zeros zeros_like
"""
_FUNCTIONS = [getattr(row.torch, "__name__", row.name).strip("_") for row in PRIMITIVES.values() if row.in_torch]
_RECORDED = frozenset([*_OTHERS.split(), *_FUNCTIONS])
_TRANSPOSE = Tensor.mT.__get__  # type: ignore[attr-defined]
_INDEXES = frozenset({Tensor.__getitem__, Tensor.__setitem__})
_MAY_BE_THE_SAME = frozenset({Tensor.__getitem__, Tensor.expand, Tensor.reshape, Tensor.to, Tensor.view})


def _is_recordable(func: Any, args: tuple) -> bool:
    """Whether the form of what a call makes is decided by the kind of its arguments."""
    if isinstance(func, CompiledFold):
        return True
    if func in _INDEXES:  # a mask chooses as many as it holds
        return not any(t.dtype in (torch.bool, torch.uint8) for t in tensors_in(args[1]))
    name = getattr(func, "__name__", "").strip("_")
    return func == _TRANSPOSE or (name in _RECORDED and (name != "where" or len(args) == 3))


def _writes(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call writes into a tensor that is given to it."""
    if isinstance(func, CompiledFold):
        return bool(func.totals)
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.startswith("__")
    return in_place or name in ("__setitem__", "__iadd__", "__imul__", "__isub__") or kwargs.get("out") is not None


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a nest of containers."""
    return [t for t in tree_leaves(value) if isinstance(t, Tensor)]


class Name(str):
    """The name of a tensor in the text of a replay, which stands for it in the arguments of a step."""


def names_in(value: Any) -> set[str]:
    return {leaf for leaf in tree_leaves(value) if type(leaf) is Name}


@dataclass(eq=False)
class Step:
    """One recorded call, with names in place of tensors, and the names of the tensors that it made. ``needed``: it runs
    whether these are used or not."""

    run: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    made: list[Name]
    returns_one: bool  # a tensor, not several in a tuple or a list
    needed: bool = False


class Recorder(TorchFunctionMode):
    """Records the torch calls inside its block, as a function of these values: tensors by their names, all else as it
    is. A tensor is not kept alive for its name."""

    reads: ClassVar[frozenset[Any]] = _FOLD_READS
    key_has_strides: ClassVar[bool] = True  # so that what is contiguous now is so in all calls of its kind
    most: ClassVar[int] = 512  # steps of a recording: of more, the host's time does not count

    def __init__(self, values: Sequence[Any]):
        super().__init__()
        self.writer = FunctionWriter()
        self.values = [Name(f"v{k}") for k in range(len(values))]
        self.names: dict[int, tuple[weakref.ref[Tensor], Name]] = {}  # by the ids of tensors
        self.steps: list[Step] = []
        self.paused, self.grad_mode = False, torch.is_grad_enabled()
        tensors = [(v, name) for v, name in zip(values, self.values, strict=True) if isinstance(v, Tensor)]
        for t, name in tensors:
            self.name(t, name)
        self.failed = len(self.names) < len(tensors)  # a tensor given twice: it is not known which is which

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not (self.paused or self.failed or func in self.reads):
            unsure = not self.key_has_strides and func is Tensor.contiguous
            self.failed = unsure or not _is_recordable(func, args)
            if not self.failed:
                self._record_call(func, args, kwargs or {}, found)
        return found

    def _record_call(self, func: Any, args: tuple, kwargs: Mapping[str, Any], found: Any) -> None:
        if func in _MAY_BE_THE_SAME or (func is Tensor.contiguous and self.key_has_strides):
            name = self.find_name(args[0])
            if name is not None and _is_same_view(found, args[0]):
                self.name(found, name)  # no call at all
                return
        writes = _writes(func, kwargs)
        if writes or self.find_name(found) is None:  # ``x.float()`` of a float tensor is x
            self.add_step(func, args, kwargs, found, writes)

    def add_step(
        self, run: Any, args: Sequence[Any], kwargs: Mapping[str, Any], found: Any, needed: bool = False
    ) -> Step:
        """Record that ``found`` was made by this call."""
        tensors = [] if found is None else [*found] if isinstance(found, (tuple, list)) else [found]
        self.failed = self.failed or torch.is_grad_enabled() != self.grad_mode or len(self.steps) >= self.most
        self.failed = self.failed or not all(isinstance(t, Tensor) for t in tensors)
        args, kwargs = self.name_tensors((tuple(args), dict(kwargs)))
        step = Step(run, args, kwargs, [], isinstance(found, Tensor), needed)
        if not self.failed:
            new = [t for t in tensors if self.find_name(t) is None]  # others were written into
            step.made = [self.name(t, Name(f"r{len(self.steps)}_{k}")) for k, t in enumerate(new)]
            self.failed = len(new) not in (0, len(tensors))
            self.steps.append(step)
        return step

    def name(self, t: Tensor, name: Name) -> Name:
        """Say what a tensor is called."""
        self.names[id(t)] = weakref.ref(t), name
        return name

    def find_name(self, t: Any) -> Name | None:
        """What a tensor is called; None where it is not known where it comes from."""
        known = self.names.get(id(t))
        return known[1] if known is not None and known[0]() is t else None

    def name_tensors(self, value: Any) -> Any:
        """A nest of containers with the names of tensors in their places. The recording fails where one has none."""

        def named(t: Tensor) -> Name | None:
            found = self.find_name(t)
            self.failed = self.failed or found is None
            return found

        return tree_map_only(Tensor, named, value)

    def function(self, results: Any, checks: Sequence[str] = ()) -> Callable[..., Any] | None:
        """What was recorded, as a function of the values that returns ``results`` (a nest of containers); None where it
        cannot be replayed. ``checks``: lines that come first."""
        returned = self.name_tensors(results)
        if self.failed:
            return None
        lines, later = [f"return {self._write_value(returned)}"], names_in(returned)
        for step in reversed(self.steps):
            if step.needed or not later.isdisjoint(step.made):
                read = names_in((step.args, step.kwargs))
                gone = {*step.made, *read} - later - {*self.values}  # a tensor is let go after its last use
                lines += [f"del {', '.join(sorted(gone))}"] if gone else []
                lines.append(self._step_text(step))
                later |= read
        return define("call", self.values, [*checks, *lines[::-1]], self.writer.scope)

    def _step_text(self, step: Step) -> str:
        given = [
            *map(self._write_value, step.args),
            *(f"{key}={self._write_value(value)}" for key, value in step.kwargs.items()),
        ]
        made = ", ".join(step.made) if step.returns_one else "".join(f"{name}, " for name in step.made)
        return f"{made}{' = ' if made else ''}{self.writer.hold(step.run, step.run)}({', '.join(given)})"

    def _write_value(self, value: Any) -> str:
        """A value in the text: a name, or put together of some, or fixed."""
        if type(value) is Name:
            return value
        if isinstance(value, dict):
            return f"{{{', '.join(f'{self.writer.hold(k)}: {self._write_value(v)}' for k, v in value.items())}}}"
        if isinstance(value, list):
            return f"[{', '.join(map(self._write_value, value))}]"
        if isinstance(value, tuple) and names_in(value):
            parts = tuple_text(map(self._write_value, value))
            return f"{self.writer.hold(type(value))}{parts}" if hasattr(value, "_fields") else parts
        return self.writer.hold(value)


def _is_same_view(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are the same numbers in the same form, at the same place."""
    same = x.dtype is y.dtype and x.shape == y.shape and x.stride() == y.stride()
    return same and x.data_ptr() == y.data_ptr()


# A layer's own Python

CHANGED = object()  # a replay's answer where a body would read something else


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

    reads = _LAYER_READS
    key_has_strides = False
    most = 32  # what takes more is no plain layer

    def __init__(self, values: Sequence[Any]):
        self.tensors: dict[Name, Tensor] = {}  # kept until the recording ends: launches are fixed on them
        self.views: dict[Name, tuple[View, Step]] = {}  # tensors that are views of the first argument of a step
        self.plans: dict[Step, OpPlan] = {}  # the steps that are ops
        self.watched: list[WatchedPlaces] = []  # what bodies read besides their values
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
        with self._pause():
            found = plan.run_program(*inputs)
        self.plans[self.add_step(plan.run_program, inputs, {}, tuple(found), needed=True)] = plan
        return plan.traced.pack(found)

    def run_step(self, run: Callable[..., Any], given: Sequence[Any], faster: Faster | None = None) -> Any:
        """Run a function of ours: one step likewise, unless it makes no tensor. ``faster``: see :func:`step`."""
        with self._pause():
            found = run(*given)
            again = None if faster is None else faster(*given)
        if isinstance(found, Tensor):
            self.add_step(again or run, given, {}, found)
        return found

    def _run_view(self, view: Callable[[Any], Any], value: Any) -> Any:
        """An argument as its op's input, with all batch dimensions."""
        with self._pause():
            found = view(value)
        if isinstance(found, Tensor) and self.find_name(found) is None:
            self._note_view(super().add_step(view, (value,), {}, found), (value,), found, reshapes=True)
        return found

    def _note_view(self, step: Step, args: Sequence[Any], found: Tensor, reshapes: bool = False) -> None:
        with self._pause():
            view = View.of(step.run, args, found, reshapes)
        if view is not None and step.made:
            self.views[step.made[0]] = view, step

    def replay(self, result: Any) -> Callable[..., Any] | None:
        """The call as a function of its values, which returns ``CHANGED`` where a body would read something else; None
        where it cannot be replayed."""
        returned = names_in(self.name_tensors(result))
        if self.failed:
            return None
        for step, plan in self.plans.items():
            self._fix_launches(step, plan, returned)
        checks: list[str] = []
        for watched in self.watched:
            checks += [f"if not {self.writer.hold(watched.holds)}():", f"    return {self.writer.hold(CHANGED)}"]
        return self.function(result, checks)

    def _fix_launches(self, step: Step, plan: OpPlan, returned: set[str]) -> None:
        """Run an op's recorded launches without a look-up, straight from what its inputs are views of to the views that
        are made of its results."""
        before = [self._look_through(value) for value in step.args]
        after = [self._follow(name, returned) for name in step.made]
        views = CallViews(
            tuple(chain for _, chain in before), tuple(tuple(view for view, _ in users) for users in after)
        )
        inputs, given = self._insert_tensors(step.args), self._insert_tensors([value for value, _ in before])
        fixed = plan.fix(inputs, given, views) if any(views.inputs) or any(views.outputs) else None
        if fixed is None:
            step.run = plan.fix(inputs) or step.run
            return
        step.run, step.args = fixed, [value for value, _ in before]
        for k, users in enumerate(after):
            for _, user in users:  # the step makes what this one did
                (step.made[k],), user.made = user.made, []

    def _insert_tensors(self, values: Sequence[Any]) -> list[Any]:
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

    @contextlib.contextmanager
    def _pause(self) -> Iterator[None]:
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

"""Torch calls that are recorded while a function runs, and replayed as one function.

Which torch calls a function makes is often decided by the types, shapes and options that it is given, and not by the
numbers in its tensors. The calls of one run are then written as one Python function of the same values, which later
runs call: the same bits, without the Python in between. Two things are recorded:

- **the Python of a layer** (``layer_replay.py``): checks, defaults and views around its ops. A step is a torch call or
  a whole op. It is recorded under autograd, so the replay is differentiable.
- **a fold on a CPU, or its gradient** (:class:`FoldReplay`): the tiles of the eager engine, whose own Python takes
  several times as long as its torch calls on small tensors. A step is a torch call, or a fold as
  compiled C++. It is recorded below autograd.

Either is recorded in the second call of a kind: what differs in every call is no kind. Only calls listed here may be
recorded. Anything else (a number read from a tensor, a tensor that the values do not lead to, gradients switched off)
means that this kind of call cannot be replayed, and the function itself runs every time. Launches of kernels, whose
addresses change, are recorded by ``engines/triton/launch/replay.py``.

Measured on one core of a Neoverse N1, in µs of CPU time by the engine and by replay: attention of 2 heads, 64 × 64
pairs, 16 features 1589 and 623, with its gradient 4645 and 2020; a logsumexp of the same size 1212 and 492; 4 of 64
neighbours 1699 and 912.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..engines.common import matmul, skip_small_tiles
from ..engines.common.bounded_cache import BoundedCache
from ..engines.common.evaluate import Sizes
from ..engines.common.torch_code import FunctionWriter, define, tuple_text
from ..engines.eager.cpp.compiled_fold import CompiledFold
from ..plan import settings
from ..program.primitives import PRIMITIVES
from .dispatch import FOLDERS


def _getters(names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names.split()}


def _methods(names: str) -> set[Any]:
    return {getattr(Tensor, name) for name in names.split()}


# Calls that make no tensor and whose answer is decided by the kind of a tensor: they are not recorded. A layer may also
# read what the keys of its ops hold, a fold what its own key holds.
_READS = frozenset(
    _getters("device dtype is_cuda is_meta is_nested is_quantized is_sparse layout ndim shape")
    | _methods("__len__ dim is_complex is_floating_point is_neg numel size stride")
)
LAYER_READS, _FOLD_READS = _READS | {Tensor.data_ptr}, _READS | {Tensor.is_contiguous}
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
_FUNCTIONS = [getattr(row.torch, "__name__", row.name) for row in PRIMITIVES.values() if row.in_torch]
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
        lines, later = [f"return {self._text(returned)}"], names_in(returned)
        for step in reversed(self.steps):
            if step.needed or not later.isdisjoint(step.made):
                read = names_in((step.args, step.kwargs))
                gone = {*step.made, *read} - later - {*self.values}  # a tensor is let go after its last use
                lines += [f"del {', '.join(sorted(gone))}"] if gone else []
                lines.append(self._step_text(step))
                later |= read
        return define("call", self.values, [*checks, *lines[::-1]], self.writer.scope)

    def _step_text(self, step: Step) -> str:
        given = [*map(self._text, step.args), *(f"{key}={self._text(value)}" for key, value in step.kwargs.items())]
        made = ", ".join(step.made) if step.returns_one else "".join(f"{name}, " for name in step.made)
        return f"{made}{' = ' if made else ''}{self.writer.hold(step.run, step.run)}({', '.join(given)})"

    def _text(self, value: Any) -> str:
        """A value in the text: a name, or put together of some, or fixed."""
        if type(value) is Name:
            return value
        if isinstance(value, dict):
            return f"{{{', '.join(f'{self.writer.hold(k)}: {self._text(v)}' for k, v in value.items())}}}"
        if isinstance(value, list):
            return f"[{', '.join(map(self._text, value))}]"
        if isinstance(value, tuple) and names_in(value):
            parts = tuple_text(map(self._text, value))
            return f"{self.writer.hold(type(value))}{parts}" if hasattr(value, "_fields") else parts
        return self.writer.hold(value)


def _is_same_view(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are the same numbers in the same form, at the same place."""
    same = x.dtype is y.dtype and x.shape == y.shape and x.stride() == y.stride()
    return same and x.data_ptr() == y.data_ptr()


# The functions that replay calls are kept in a cache, by the keys of the calls. Two values stand for no function:


def seen_once(*values: Any) -> Any:
    """Stands for calls of which there was one: the next is recorded."""
    raise AssertionError("the call is recorded")


def not_replayable(*values: Any) -> Any:
    """Stands for calls that cannot be replayed."""
    raise AssertionError("the function itself is called")


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
        chosen = settings.launch_key() if self.engine == "auto" else settings.now().launches
        if chosen is None or skip_small_tiles.counters.get() or matmul.dry_run_sizes.get() is not None:
            return self.run(values)
        kinds = [(v.dtype, v.shape, v.stride(), v.is_neg()) if isinstance(v, Tensor) else repr(v) for v in values]
        key = (chosen, FOLDERS[self.engine], _cpp.read(), torch.get_num_threads(), *kinds)
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

"""A fold on a CPU, recorded as the torch calls that it makes and replayed.

On small tensors the eager engine's own Python (checks, the choice of tiles, the loop over them) takes several times as
long as the torch calls at its end. Which calls these are is decided by types, shapes, strides, numbers and settings,
unless a fold looks at its data: labels that pick a column, conditions on numbers of rows. So the second call of a kind
is recorded under a ``TorchFunctionMode``: each call is one line of a function of the inputs, which later calls run.
Results are the same bits, and memory is held no longer than the engine holds it.

Measured on one core of a Neoverse N1, in µs of CPU time by the engine and by replay: attention of 2 heads, 64 × 64
pairs, 16 features 1589 and 623, with its gradient 4645 and 2020; a logsumexp of the same size 1212 and 492; 4 of 64
neighbours 1699 and 912.

Only calls listed here may be recorded. Anything else (a number read from a tensor, an address, a tensor that the
inputs do not lead to) means that the fold cannot be replayed, and the engine runs it every time.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..engines.common import matmul, skip_small_tiles
from ..engines.common.bounded_cache import BoundedCache
from ..engines.common.evaluate import Sizes
from ..engines.common.torch_code import FunctionWriter, define, tuple_text
from ..plan import settings
from . import call_context
from .registry import FOLDERS

_MOST_KINDS = 64  # of inputs of one fold
_MOST_CALLS = 512  # in a recording: of more, or of more pairs, the host's time does not count
_MOST_PAIRS = 2**22

# Calls whose answer is decided by the kind of a tensor
_READS = frozenset(
    {getattr(Tensor, name).__get__ for name in ("device", "dtype", "is_cuda", "is_meta", "layout", "ndim", "shape")}
    | {Tensor.__len__, Tensor.dim, Tensor.is_complex, Tensor.is_contiguous, Tensor.is_floating_point, Tensor.numel}
    | {Tensor.size, Tensor.stride}
)
# Calls that make or change tensors in a form that is decided by the kind of their arguments. Functions, methods,
# operators and methods in place have one name here: ``torch.add``, ``Tensor.add``, ``__add__`` and ``add_``.
_NAMES = """
abs add addcmul addmm all amax amin and any arange argmax argmin atan baddbmm bitwise_and bitwise_left_shift
bitwise_not bitwise_or bitwise_right_shift bitwise_xor bmm bool cat ceil clamp clone contiguous copy copysign cos cosh
cumsum detach div double empty empty_like eq erf erfc exp exp2 expand expand_as expm1 fill find_best flatten flip float
floor floor_divide floordiv fmod full full_like gather ge gelu gt iadd imul index_add int invert isfinite isinf isnan
isub le leaky_relu log log1p log2 log_sigmoid logaddexp logical_and logical_not logical_or logical_xor logsumexp long
lshift lt masked_fill matmul maximum mean minimum mm mod movedim mul nan_to_num ne neg new_empty new_full new_ones
new_zeros ones ones_like or permute pow prod radd rdiv reciprocal relu remainder reshape rmul round rpow rshift rsqrt
rsub rtruediv scalar_tensor scatter scatter_add sigmoid sign silu sin sinh softmax softplus sort special_erfcx
special_expm1 special_ndtr sqrt square squeeze stack sub sum sum_to_size take_along_dim tan tanh tensor to topk
transpose truediv trunc unbind unflatten unfold unsqueeze view where xlogy xor zero zeros zeros_like
"""
_MAKES = frozenset(_NAMES.split())
_TRANSPOSE = Tensor.mT.__get__  # type: ignore[attr-defined]
_INDEXES = frozenset({Tensor.__getitem__, Tensor.__setitem__})
_VIEWS = frozenset({Tensor.__getitem__, Tensor.contiguous, Tensor.expand, Tensor.reshape, Tensor.to, Tensor.view})


def _is_fixed(func: Any, args: tuple) -> bool:
    """Whether the form of what a call makes is decided by the kind of its arguments."""
    if func in _INDEXES:  # a mask chooses as many as it holds
        return not any(t.dtype in (torch.bool, torch.uint8) for t in tensors_in(args[1]))
    name = getattr(func, "__name__", "").strip("_")
    return func == _TRANSPOSE or (name in _MAKES and (name != "where" or len(args) == 3))


class TorchRecorder(TorchFunctionMode):
    """Writes what runs under it as a function of its values: tensors by their names, all else as it is."""

    def __init__(self, values: Sequence[Any]):
        super().__init__()
        self.writer, self.failed, self.count = FunctionWriter(), False, len(values)

    def name(self, t: Tensor) -> str | None:
        """The name of a tensor; None where it is not known where it comes from."""
        raise NotImplementedError

    def call_text(self, run: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        given = [*map(self.text, args), *(f"{key}={self.text(value)}" for key, value in kwargs.items())]
        return f"{self.writer.hold(run, run)}({', '.join(given)})"

    def text(self, value: Any) -> str:
        """A value in the text: known by name, or put together of such, or fixed."""
        if isinstance(value, Tensor):
            name = self.name(value)
            self.failed = self.failed or name is None
            return name or "None"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{self.writer.hold(k)}: {self.text(v)}' for k, v in value.items())}}}"
        if isinstance(value, list):
            return f"[{', '.join(map(self.text, value))}]"
        if isinstance(value, tuple) and tensors_in(value):
            parts = tuple_text(map(self.text, value))
            return f"{self.writer.hold(type(value))}{parts}" if hasattr(value, "_fields") else parts
        return self.writer.hold(value)

    def define(self, name: str, lines: list[str]) -> Callable[..., Any]:
        """The function of these lines, last first."""
        return define(name, [f"v{k}" for k in range(self.count)], lines[::-1], self.writer.scope)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a nest of containers."""
    return [t for t in tree_leaves(value) if isinstance(t, Tensor)]


class _Step:
    """One recorded call: its text, and the names that it makes and reads."""

    def __init__(self, text: str, made: list[str], read: set[str]):
        self.text, self.made, self.read = text, made, read


class CallRecorder(TorchRecorder):
    """Records the torch calls of one run on these values."""

    def __init__(self, values: Sequence[Any]):
        super().__init__(values)
        self.names: dict[int, tuple[weakref.ref[Tensor], str]] = {}  # by id: a tensor is not kept alive for its name
        self.steps: list[_Step] = []
        self.reads: set[str] = set()
        for k, v in enumerate(values):
            if isinstance(v, Tensor):
                self.names[id(v)] = weakref.ref(v), f"v{k}"

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not self.failed and func not in _READS:
            self.failed = not _is_fixed(func, args) or len(self.steps) >= _MOST_CALLS
            if not self.failed:
                self._write(func, args, kwargs or {}, found)
        return found

    def _write(self, func: Any, args: tuple, kwargs: Mapping[str, Any], found: Any) -> None:
        self.reads = set()
        text, made = self.call_text(func, args, kwargs), []
        if func in _VIEWS and _is_same_view(found, args[0]):
            self._new_name(found, self.text(args[0]))  # no call at all
            return
        if isinstance(found, Tensor):
            if self._find(found) is None:  # else it was changed in place
                made = [self._new_name(found, f"r{len(self.steps)}")]
                text = f"{made[0]} = {text}"
        elif isinstance(found, (tuple, list)) and all(isinstance(v, Tensor) for v in found):
            made = [self._new_name(v, f"r{len(self.steps)}_{k}") for k, v in enumerate(found)]
            text = f"{''.join(f'{name}, ' for name in made)} = {text}" if made else text
        elif found is not None:
            self.failed = True
        self.steps.append(_Step(text, made, self.reads))

    def function(self, results: Sequence[Any]) -> Callable[..., list[Any]] | None:
        """The run as a function of its values; None where it cannot be replayed."""
        self.reads = set()
        returned = f"return [{', '.join(map(self.text, results))}]"
        if self.failed:
            return None
        lines, later = [returned], self.reads
        for step in reversed(self.steps):  # a tensor is let go after its last use
            gone = sorted({n for n in (*step.made, *step.read) if n not in later and not n.startswith("v")})
            lines += [f"del {', '.join(gone)}"] if gone else []
            lines.append(step.text)
            later = later | step.read
        return self.define("calls", lines)

    def _new_name(self, found: Tensor, name: str) -> str:
        self.names[id(found)] = weakref.ref(found), name
        return name

    def _find(self, value: Tensor) -> str | None:
        known = self.names.get(id(value))
        return known[1] if known is not None and known[0]() is value else None

    def name(self, t: Tensor) -> str | None:
        found = self._find(t)
        self.reads.add(found or "None")
        return found


def _is_same_view(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are the same numbers in the same form, at the same place."""
    same = x.dtype is y.dtype and x.shape == y.shape and x.stride() == y.stride()
    return same and x.data_ptr() == y.data_ptr()


class TorchReplays:
    """``run``, a function of a list of tensors and numbers, with the recordings of its torch calls by their kinds.

    ``engine`` names the engine of its folds. The engine ``auto`` also follows tuned plans."""

    def __init__(self, run: Callable[[Sequence[Any]], Sequence[Any]], engine: str):
        self.run, self.engine = run, engine
        self.known: BoundedCache[tuple, Callable[..., Sequence[Any]]] = BoundedCache(_MOST_KINDS)
        self.seen: BoundedCache[tuple, bool] = BoundedCache(_MOST_KINDS)  # once: a number may change in every call

    def __call__(self, values: Sequence[Any]) -> Sequence[Any]:
        asked = call_context.launch_key() if self.engine == "auto" else settings.now().launches
        if asked is None or skip_small_tiles.counters.get() or matmul.dry_run_sizes.get() is not None:
            return self.run(values)
        kinds = [(v.dtype, v.shape, v.stride()) if isinstance(v, Tensor) else repr(v) for v in values]
        key = (asked, FOLDERS[self.engine], _cpp.read(), *kinds)
        calls = self.known.get(key)
        if calls is None:
            return self._record(key, values)
        try:
            return calls(*values)
        except Exception:  # the engine says what is wrong, and tries with less memory if that ran out
            pass
        return self.run(values)

    def _record(self, key: tuple, values: Sequence[Any]) -> Sequence[Any]:
        if key not in self.seen or _is_recording.get():  # then this is a part of what is recorded
            self.seen.keep(key, True)
            return self.run(values)
        given = [v.detach() if isinstance(v, Tensor) else v for v in values]  # one given twice has two names
        token = _is_recording.set(True)
        try:
            with CallRecorder(given) as recorder:
                found = self.run(given)
        finally:
            _is_recording.reset(token)
        self.known.keep(key, recorder.function(found) or (lambda *values: self.run(values)))
        return found


_is_recording: ContextVar[bool] = ContextVar("is_recording", default=False)
_cpp = settings.EnvironmentVariable("MONOIDREDUCE_CPP")


def replay_calls(run: Callable[[Sequence[Any]], Sequence[Any]], engine: str, sizes: Sizes) -> TorchReplays | None:
    """``run``, a fold or its gradient of these sizes by an engine, with recordings; None where they would not pay."""
    pairs = math.prod(sizes.batch) * sizes.rows * sizes.cols
    if sizes.device.type != "cpu" or engine not in ("auto", "eager") or not 0 < pairs <= _MOST_PAIRS:
        return None
    return TorchReplays(run, engine)

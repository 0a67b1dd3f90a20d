"""What ``run`` may be given to fold: an op, or a ready-made layer that is one fold per row; as a stream, anywhere.

A layer (``ops.knn``) checks its options and calls its op. Here it is run once, on empty arguments, with a stand-in for
the op that notes how it was called: so the layer's own checks and defaults hold, and the op can be streamed. A layer
that does something to the op's result (adds up rows, runs several ops) is refused.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...errors import ArgumentError
from ...op import Op, op
from ...stream import Stream


@dataclass(frozen=True)
class Called:
    """How a layer called its op: all that it gave, by the op's parameters."""

    op: Op
    given: Mapping[str, Any]


@dataclass(frozen=True)
class _StandIn:
    """Stands for an op inside a layer."""

    op: Op

    def __call__(self, *args: Any, **kwargs: Any) -> Called:
        return Called(self.op, self.op._bind(args, kwargs))


@dataclass(frozen=True)
class Names:
    """The arguments that are rows and columns, and those of them that may be left out."""

    rows: tuple[str, ...]
    cols: tuple[str, ...]
    optional: tuple[str, ...]


def find_names(fold: Any) -> Names:
    """The names of the rows and columns; of a layer, its first two arguments and every tensor that it may be given."""
    if isinstance(fold, Op):
        pairs = [n for n, p in fold.parameters.items() if p.axis == "pairs"]
        if pairs:
            raise ArgumentError(
                detail=f"{fold!r} takes {', '.join(pairs)} for every pair, which is as large as rows × columns",
                fix="Compute it in the op, from rows and columns",
            )
        sides = [tuple(n for n, p in fold.parameters.items() if p.axis == side) for side in ("rows", "cols")]
        return Names(sides[0], sides[1], tuple(n for n, p in fold.parameters.items() if p.optional))
    layer = _body_of(fold)
    known = list(inspect.signature(layer).parameters.values())
    required = [p.name for p in known if p.default is p.empty]
    tensors = [p.name for p in known if p.default is None and "Tensor" in str(p.annotation)]
    if len(required) < 2:
        raise _not_a_fold(fold)
    extra = tuple(n for n in tensors if n not in required[:2])
    return Names((required[0], *extra), (required[1], *required[2:], *extra), (*required[2:], *extra))


def _body_of(fold: Any) -> Any:
    """The function that a layer is."""
    body = inspect.unwrap(fold) if callable(fold) else fold
    if not isinstance(body, types.FunctionType):
        raise _not_a_fold(fold)
    return body


def call_layer(layer: Any, given: Mapping[str, Any]) -> Called:
    """How a layer calls its op on these arguments."""
    body = _body_of(layer)
    scope = {n: _StandIn(v) if isinstance(v, Op) else v for n, v in body.__globals__.items()}
    copied = types.FunctionType(body.__code__, scope, body.__name__, body.__defaults__, body.__closure__)
    copied.__kwdefaults__ = body.__kwdefaults__
    try:
        inspect.signature(body).bind(**given)
    except TypeError as error:
        raise ArgumentError(
            detail=f"{body.__name__}: {error}", fix=f"It is {body.__name__}{inspect.signature(body)}"
        ) from None
    try:
        found = copied(**given)
    except (AttributeError, TypeError) as error:
        if isinstance(error, ArgumentError) or "Called" not in str(error):
            raise
        found = None
    if not isinstance(found, Called):
        raise _not_a_fold(layer)
    return found


def make_stream(
    layer: Any, rows: Mapping[str, Tensor], cols: Mapping[str, Tensor], options: Mapping[str, Any]
) -> Stream:
    """The stream of an op or a layer over these rows; ``cols`` are empty and say the columns' kind."""
    if isinstance(layer, Op):
        return layer.stream(**rows, **options)
    called = call_layer(layer, {**rows, **cols, **options})
    sides = {id(t): (side, n) for side, named in (("rows", rows), ("cols", cols)) for n, t in named.items()}
    kept: dict[str, Any] = {}
    for name, value in called.given.items():
        axis = called.op.parameters[name].axis
        side, given = sides.pop(id(value), (None, ""))
        if value is None and called.op.parameters[name].optional:
            continue
        if side is None and axis in ("rows", "cols", "pairs"):
            raise _not_a_fold(layer)
        if side is not None and (side != axis or (side == "cols" and name != given)):
            raise (
                _not_a_fold(layer)
                if side == axis
                else ArgumentError(
                    detail=f"{given} was given as {side}, but {layer.__name__} has it for {axis}",
                    fix=f"Give it as {axis}" if axis in ("rows", "cols") else "Give it as a number",
                )
            )
        if side != "cols":
            kept[name] = value
    if sides:
        raise _not_a_fold(layer)
    return called.op.stream(**kept)


def _not_a_fold(fold: Any) -> ArgumentError:
    name = getattr(fold, "__name__", type(fold).__name__)
    return ArgumentError(
        detail=f"{name} is not one fold per row, so that its rows cannot be spread over workers",
        fix="Give an op (@mr.op) whose results are per row, or a layer such as ops.knn, ops.kmeans_assign, "
        "ops.kernel_sum or ops.kernel_logsumexp",
    )


@dataclass(frozen=True)
class Portable:
    """An op or layer that can be pickled wherever it was defined: an op travels as its function.

    An op is its function by name otherwise, which a worker cannot find where it was defined in a script.
    """

    function: Any
    is_op: bool

    @staticmethod
    def of(fold: Any) -> Portable:
        return Portable(fold.function, True) if isinstance(fold, Op) else Portable(fold, False)

    def stream(self, rows: Mapping[str, Tensor], cols: Mapping[str, Tensor], options: Mapping[str, Any]) -> Stream:
        """See :func:`make_stream`."""
        return make_stream(
            _ops.setdefault(self.function, op(self.function)) if self.is_op else self.function, rows, cols, options
        )


_ops: dict[Any, Op] = {}  # of this process, so that each is traced once

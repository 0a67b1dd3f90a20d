"""fold: ``⊙`` of many elements, lying along an axis of tensors or coming one after the other from a stream.

What users call: their tensors are brought into the shapes that ``combine`` sees, and back; the tree over an axis is
``fields.fold_axis``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from monoidreduce.algebra.fields import Function, List, Scalar, combined, describe, fold_axis, with_identity
from monoidreduce.algebra.laws import probe
from monoidreduce.algebra.monoid import Monoid
from monoidreduce.arrays import Border, is_array
from monoidreduce.errors import ArgumentError, DeviceError, ShapeError, shown

# From a user's tensors to the inner convention and back.
#
# A user gives a number per element in its plain shape and ``dim`` counts its axes; inside ``combine`` a Scalar carries
# a trailing axis of size 1. Here is also where 16-bit numbers become float32 (folds accumulate in it), booleans that
# are to be counted become integers, and every mistake in names, ranks and sizes is answered, before any work.
#
# Legend: ``*batch`` are the axes all fields share (the folded one among them); a Vector or List adds one axis behind
# them, a Matrix two.


def as_fields(monoid: type[Monoid], x: Any, dim: int | None, start: int = 0) -> dict[str, Any]:
    """The fields of ``x`` (an element of the monoid, a mapping, or one tensor or function), names checked."""
    if isinstance(x, Mapping):
        return monoid(**x).asdict()
    if isinstance(x, Monoid):
        if not isinstance(x, monoid):
            raise ArgumentError(
                detail=f"fold of {monoid.__name__} got an element of {type(x).__name__}",
                fix=f"Give elements of {monoid.__name__}, dicts of its fields, or tensors",
            )
        return x.asdict()
    if isinstance(x, (bool, int, float)):
        x = torch.tensor(x)
    if not isinstance(x, Tensor) and not (callable(x) and _of_functions(monoid)):
        raise ArgumentError(
            detail=f"fold of {monoid.__name__} got {type(x).__name__}",
            fix=f"Give elements of {monoid.__name__}, dicts of its fields, or tensors",
        )
    if isinstance(x, Tensor) and dim is not None:
        dim = normal_dim(dim, x.dim() - _axes_of_one_tensor(monoid))
    return monoid.embed(x, dim, start).asdict()


def lift(monoid: type[Monoid], values: Mapping[str, Any]) -> Monoid:
    """The element with every tensor in the inner convention, of one batch shape, in the type it is folded in."""
    if _of_functions(monoid):
        return monoid(**values)
    tensors = {name: _number(monoid, name, value) for name, value in values.items()}
    devices = {t.device for t in tensors.values() if t.dim() > 0}
    if len(devices) > 1:
        places = ", ".join(f"{name} on {t.device}" for name, t in tensors.items())
        raise DeviceError(detail=f"the fields of {monoid.__name__} are on different devices: {places}")
    batches = {name: _batch(monoid, name, t) for name, t in tensors.items()}
    try:
        batch = torch.broadcast_shapes(*batches.values())
    except RuntimeError:
        shapes = ", ".join(f"{name} {list(t.shape)}" for name, t in tensors.items())
        raise ShapeError(
            detail=f"the fields of {monoid.__name__} do not broadcast: {shapes}",
            fix="All fields share their leading axes; a Vector has its feature axis behind them",
        ) from None
    lifted = {}
    for name, t in tensors.items():
        inner = t.unsqueeze(-1) if monoid.fields()[name].marker is Scalar else t
        lifted[name] = inner.expand(*batch, *inner.shape[len(batches[name]) :])
    return monoid(**lifted)


def lower(x: Monoid, given: Mapping[str, Any]) -> Monoid:
    """Back from the inner convention; 16-bit fields of ``given`` get their type back."""
    monoid = type(x)
    if _of_functions(monoid):
        return x
    lowered = {}
    for name, t in x.asdict().items():
        plain = t.squeeze(-1) if monoid.fields()[name].marker is Scalar else t
        kind = given[name].dtype if isinstance(given[name], Tensor) else None
        lowered[name] = plain.to(kind) if kind in _SHORT else plain
    return monoid(**lowered)


def normal_dim(dim: int, rank: int) -> int:
    """``dim`` counted from the front; ShapeError if there is no such axis."""
    if isinstance(dim, bool) or not hasattr(dim, "__index__"):
        raise ArgumentError(detail=f"dim was given {shown(dim)}", fix="Give the number of one axis, such as -1")
    if not -rank <= dim < rank:
        raise ShapeError(
            detail=f"there is no axis {dim} to fold among {rank} axes",
            fix="dim counts the axes of a number per element; a Vector's feature axis does not count",
        )
    return dim % rank


_SHORT = (torch.float16, torch.bfloat16)


def _of_functions(monoid: type[Monoid]) -> bool:
    return any(field.marker is Function for field in monoid.fields().values())


def _axes_of_one_tensor(monoid: type[Monoid]) -> int:
    """How many trailing axes do not count when the monoid is given one tensor."""
    fields = monoid.fields()
    takes_as_is = len(fields) == 1 and not monoid.components
    return next(iter(fields.values())).marker.axes if takes_as_is else 0


def _number(monoid: type[Monoid], name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        if not isinstance(value, (bool, int, float)):
            raise ArgumentError(
                detail=f"field {name} of {monoid.__name__} is {type(value).__name__}", fix="Give a tensor or a number"
            )
        value = torch.tensor(value)
    if isinstance(monoid.fields()[name].identity, bool):
        return value if value.dtype == torch.bool else value != 0
    if value.dtype == torch.bool or (name in monoid.integers and not value.is_floating_point()):
        return value.to(torch.int64)
    return value.float() if value.dtype in _SHORT else value


def _batch(monoid: type[Monoid], name: str, t: Tensor) -> torch.Size:
    marker = monoid.fields()[name].marker
    if t.dim() < marker.axes:
        raise ShapeError(
            detail=f"field {name} of {monoid.__name__} is a {marker.__name__}, but its shape is {list(t.shape)}",
            fix=f"Give it {marker.axes} trailing axes of its own",
        )
    if marker.axes == 2 and t.shape[-1] != t.shape[-2]:
        raise ShapeError(
            detail=f"field {name} of {monoid.__name__} is a Matrix, but its shape is {list(t.shape)}",
            fix="Its last two axes must be equally long",
        )
    return t.shape[: t.dim() - marker.axes]


def fold(monoid: Any, xs: Any, dim: int | None = None, *, like: Any = None) -> Any:
    """``x₁ ⊙ x₂ ⊙ … ⊙ xₙ``, in order, as an element of the monoid; differentiable by autograd.

    ``xs`` is one of

    - tensors: an element of the monoid or a dict, whose fields hold all elements along one axis; or one tensor, for a
      monoid of one field or one that knows what a number means to it (``fold(ArgMax, x)``). A Scalar field has the
      plain shape ``[*batch]``, a Vector or List ``[*batch, d]``, a Matrix ``[*batch, d, d]``; the batch axes broadcast.
      ``dim`` (default -1) counts the batch axes only: for ``z`` of ``[M, N]`` and ``v`` of ``[M, N, d]``, ``dim=-1``
      folds N. An empty axis gives the identity.
    - any other iterable, of elements, dicts or tensors: folded as they come, holding O(log n) partial results.
      Without ``dim`` each is one element of the fold. With ``dim`` each is a chunk of elements along that axis, and
      the result is that of all chunks laid end to end. ``like``, an element (or chunk), gives the sizes of the
      identity for a stream that turns out empty.

    The fields of the result have the shape of one element. 16-bit numbers are folded in float32. Numpy arrays may stand
    for tensors, and the result's fields are then numpy arrays; so may arrays with DLPack, which give tensors.

    Plain torch: ``fold(Sum, x, dim).v`` is ``x.sum(dim)``; ``fold(LogWSum, {"z": z, "v": v}).v`` is ``softmax(z) @ v``.
    Raises ArgumentError, ShapeError or DeviceError, before any work; and MonoidLawError, with an example, for a monoid
    that plainly breaks a law (looked at once for each class; say with ``domain`` which states it has).

    >>> import torch
    >>> from monoidreduce.algebra.catalogue import LogWSum, Sum
    >>> fold(Sum, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), dim=0)
    Sum(v=tensor([4., 6.]))
    >>> fold(LogWSum, {"z": torch.zeros(2), "v": torch.tensor([[1.0, 5.0], [3.0, 7.0]])}).v
    tensor([2., 6.])
    >>> fold(Sum, (torch.tensor(float(i)) for i in range(5))).v
    tensor(10.)
    """
    if not (isinstance(monoid, type) and issubclass(monoid, Monoid) and monoid.fields()):
        raise ArgumentError(detail=f"fold needs a monoid class, got {monoid!r}", fix="Pass a subclass of Monoid")
    probe(monoid)
    border = Border()
    if isinstance(xs, (Monoid, Mapping, Tensor)) or is_array(xs):
        dim = -1 if dim is None else dim
        given = as_fields(monoid, _take(border, xs, monoid), dim)
        return border.give(lower(_fold_axis(lift(monoid, given), dim), given))
    if not isinstance(xs, Iterable):
        raise ArgumentError(
            detail=f"fold of {monoid.__name__} got {type(xs).__name__}",
            fix="Give tensors, or an iterable of elements",
        )
    like = None if like is None else _take(border, like, monoid)
    return border.give(_fold_stream(monoid, (_take(border, x, monoid) for x in xs), dim, like))


def fold_pairs(monoid: Any, fields: Mapping[str, Tensor], dim: int) -> Any:
    """:func:`fold` of tensors for a commutative monoid whose elements may come in any order: faster."""
    return lower(_fold_axis(lift(monoid, fields), dim, in_order=False), fields)


def _take(border: Border, x: Any, monoid: Any) -> Any:
    """An element, or tensors of many, with tensors in place of arrays."""
    if isinstance(x, Monoid):
        return type(x)(**{name: border.take(value, name) for name, value in x.asdict().items()})
    return border.take(x, f"what {monoid.__name__} folds")


class Partials:
    """A fold under way: ``push`` elements in order, ask for the ``result`` at any time.

    Keeps one partial result per set bit of the number of elements, each of twice as many elements as the next: the
    balanced tree again, grown from the left. Elements are in the inner convention.

    >>> from monoidreduce.algebra.catalogue import Sum
    >>> partials = Partials()
    >>> for i in range(11):
    ...     partials.push(Sum(v=i))
    >>> partials.result(), len(partials.waiting)
    (Sum(v=55), 3)
    """

    def __init__(self) -> None:
        self.waiting: list[tuple[int, Monoid]] = []  # (level, product of 2^level elements), levels falling

    def push(self, x: Monoid) -> None:
        level = 0
        while self.waiting and self.waiting[-1][0] == level:
            x = combined(self.waiting.pop()[1], x)
            level += 1
        self.waiting.append((level, x))

    def result(self) -> Monoid | None:
        total: Monoid | None = None
        for _, x in reversed(self.waiting):
            total = x if total is None else combined(x, total)
        return total


def _fold_axis(x: Monoid, dim: int, in_order: bool = True) -> Monoid:
    at = _axis(x, dim)
    return fold_axis(x, at, in_order) if _length(x, at) > 0 else _empty_axis(x, at)


def _axis(x: Monoid, dim: int) -> int:
    """The axis that ``dim`` means, counted from the front, in every field of a lifted element."""
    (name, first), *_ = x.asdict().items()
    if not isinstance(first, Tensor):
        raise ArgumentError(
            detail=f"{type(x).__name__} holds functions, which do not lie along an axis",
            fix="Give an iterable of its elements",
        )
    return normal_dim(dim, first.dim() - type(x).fields()[name].trailing)


def _length(x: Monoid, at: int) -> int:
    return int(next(iter(x.asdict().values())).shape[at])


def _empty_axis(x: Monoid, at: int) -> Monoid:
    monoid = type(x)
    shapes = {name: t.shape[:at] + t.shape[at + 1 :] for name, t in x.asdict().items()}
    identity = monoid.identity(monoid(**{name: t.new_empty(shapes[name]) for name, t in x.asdict().items()}))
    values = identity.asdict()
    for name, t in x.asdict().items():
        if t.requires_grad and monoid.fields()[name].marker is not List:
            values[name] = values[name] + t.sum(at)  # nothing is added, but a gradient can be asked for
    return monoid(**values)


def _fold_stream(monoid: type[Monoid], xs: Iterable[Any], dim: int | None, like: Any) -> Monoid:
    partials = Partials()
    given: Mapping[str, Any] | None = None
    start = 0
    for x in xs:
        values = as_fields(monoid, x, dim, start)
        given = given or values
        element = lift(monoid, values)
        partials.push(element if dim is None else _fold_axis(element, dim))
        start += 1 if dim is None else _length(element, _axis(element, dim))
    total = partials.result()
    if total is not None and given is not None:
        return lower(with_identity(total) if start == 1 else total, given)
    return _empty_stream(monoid, dim, like)


def _empty_stream(monoid: type[Monoid], dim: int | None, like: Any) -> Monoid:
    if like is not None:
        given = as_fields(monoid, like, dim)
        element = lift(monoid, given)
        return lower(monoid.identity(element if dim is None else _fold_axis(element, dim)), given)
    sized = [name for name, field in monoid.fields().items() if field.marker.axes and field.marker is not List]
    if sized:
        raise ArgumentError(
            detail=f"the stream is empty, and the identity of {monoid.__name__} ({describe(monoid.fields())}) "
            f"has no known size for {', '.join(sized)}",
            fix="Pass like=, an element of the right sizes",
        )
    identity = monoid.identity()
    return lower(identity, identity.asdict())


__all__ = ["as_fields", "fold", "lift", "lower", "normal_dim"]

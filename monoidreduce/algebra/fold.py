"""fold: ``⊙`` of many elements, lying along an axis of tensors or coming one after the other from a stream.

This is the door for users; the tree over an axis is in ``tree``, the change of shapes in ``shaping``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from monoidreduce.algebra.fields import List, describe
from monoidreduce.algebra.monoid import Monoid
from monoidreduce.algebra.probe import probe
from monoidreduce.algebra.shaping import as_fields, lift, lower, normal_dim
from monoidreduce.algebra.tree import combined, fold_axis, with_identity
from monoidreduce.arrays import Border, is_array
from monoidreduce.errors import ArgumentError


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


def _fold_axis(x: Monoid, dim: int) -> Monoid:
    at = _axis(x, dim)
    return fold_axis(x, at) if _length(x, at) > 0 else _empty_axis(x, at)


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


__all__ = ["fold"]

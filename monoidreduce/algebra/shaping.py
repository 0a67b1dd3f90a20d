"""From a user's tensors to the inner convention and back.

A user gives a number per element in its plain shape and ``dim`` counts its axes; inside ``combine`` a Scalar carries a
trailing axis of size 1. Here is also where 16-bit numbers become float32 (folds accumulate in it), booleans that are to
be counted become integers, and every mistake in names, ranks and sizes is answered, before any work.

Legend: ``*batch`` are the axes all fields share (the folded one among them); a Vector or List adds one axis behind
them, a Matrix two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from monoidreduce.algebra.fields import Function, Scalar
from monoidreduce.algebra.monoid import Monoid
from monoidreduce.errors import ArgumentError, DeviceError, ShapeError


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


__all__ = ["as_fields", "lift", "lower", "normal_dim"]

"""What the layers check that their declarations cannot say: labels, options, ranks; and rows flattened and put back.

Every mistake is raised here, before any work, with the name of the user's argument. Sizes, number types and devices
that must agree are left to ``@mr.op``, which knows them from the declarations."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from ..engine import agree
from ..errors import ArgumentError, DeviceError, DTypeError, LabelError, MonoidReduceError, ShapeError

Reduction = Literal["mean", "sum", "none"]
Layer = TypeVar("Layer", bound=Callable)
_REDUCTIONS = ("mean", "sum", "none")


# Options


def reduction(value: str) -> None:
    """A loss is averaged, added up or left per row."""
    if value not in _REDUCTIONS:
        raise ArgumentError(
            detail=f"reduction was given {value!r}", fix=f"Use one of {', '.join(map(repr, _REDUCTIONS))}"
        )


def whole(name: str, value: Any) -> None:
    """An integer that fits 64 bits, or a 0-dim tensor of integers (which is not looked at)."""
    if isinstance(value, Tensor) and value.dim() == 0 and not value.is_floating_point() and not value.is_complex():
        return
    if not isinstance(value, numbers.Integral) or not -(2**63) <= int(value) < 2**63:
        raise ArgumentError(detail=f"{name} was given {value!r}", fix="Give an integer that fits in 64 bits")


def positive(name: str, value: Any) -> None:
    """A plain number must be above zero; a tensor is not looked at."""
    if not isinstance(value, Tensor) and not (isinstance(value, numbers.Real) and float(value) > 0):
        raise ArgumentError(detail=f"{name} was given {value!r}", fix="Give a number above 0, or a 0-dim tensor of one")


# Tensors


def tensor(name: str, value: Any, shape: str, least: int, most: int | None = None) -> None:
    """A tensor with at least ``least`` and at most ``most`` dimensions; ``shape`` says which, for the message."""
    if not isinstance(value, Tensor):
        raise ArgumentError(
            detail=f"{name} was given {value!r} ({type(value).__name__})", fix=f"Give a tensor of shape {shape}"
        )
    if value.dim() < least or (most is not None and value.dim() > most):
        raise ShapeError(
            detail=f"{name} has shape {tuple(value.shape)}, but {shape} was expected", fix="Add or drop dimensions"
        )


def head(x: Any, weight: Any, bias: Any) -> None:
    """The arguments of a linear head, whose logits are ``x @ weight.T + bias``."""
    tensor("x", x, "[..., D]", 1)
    tensor("weight", weight, "[V, D]", 2, 2)
    alike(x=x, weight=weight)
    if x.shape[-1] != weight.shape[-1]:
        raise ShapeError(
            detail=f"x {tuple(x.shape)} and weight {tuple(weight.shape)} differ in their features",
            fix="Both have one feature axis, the last: x is [..., D] and weight [V, D], one vector per class",
        )
    if bias is not None:
        tensor("bias", bias, "[V]", 1, 1)
        alike(x=x, bias=bias)


def alike(**tensors: Tensor) -> None:
    """One number type and one device."""
    if len({t.dtype for t in tensors.values()}) > 1:
        mixed = ", ".join(f"{name} is {str(t.dtype)[6:]}" for name, t in tensors.items())
        raise DTypeError(detail=f"arguments mix number types: {mixed}")
    if len({t.device for t in tensors.values()}) > 1:
        mixed = ", ".join(f"{name} on {t.device}" for name, t in tensors.items())
        raise DeviceError(detail=f"arguments are on different devices: {mixed}")


def labels(x: Tensor, weight: Tensor, target: Any, ignore_index: int) -> Tensor:
    """Class indices, one per row of x, as int64 [M]; each is looked at where looking is free (see :func:`visible`)."""
    tensor("target", target, "[...]", 0)
    if target.is_floating_point() or target.is_complex() or target.dtype is torch.bool:
        raise DTypeError(
            detail=f"target is {str(target.dtype)[6:]}, but class indices are integers",
            fix="Give integers; a distribution over the classes goes to cross_entropy_given",
        )
    if target.shape != x.shape[:-1]:
        raise ShapeError(
            detail=f"target has shape {tuple(target.shape)}, but x {tuple(x.shape)} asks for {tuple(x.shape[:-1])}",
            fix="Give one label for each row of x",
        )
    flat = target.reshape(-1).long()
    if visible(flat):
        classes = agree.whole_cols(len(flat), len(weight))
        bad = ((flat < 0) | (flat >= classes)) & (flat != ignore_index)
        if bool(bad.any()):
            at = int(bad.to(torch.uint8).argmax())
            place = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), target.shape))
            fix = "" if classes else "weight has no rows, so there are no classes"
            raise LabelError(
                label=int(flat[at]), position=place[0] if len(place) == 1 else place, last=classes - 1, fix=fix
            )
    return flat


def visible(t: Tensor) -> bool:
    """Whether looking at values is free: a CPU has nothing to wait for, elsewhere it would be a synchronisation."""
    return t.device.type == "cpu"


def probabilities(x: Tensor, weight: Tensor, probs: Any) -> None:
    """A given distribution over the classes for each row of x, in the same number type and place."""
    tensor("probs", probs, "[..., V]", 1)
    if probs.shape != (*x.shape[:-1], len(weight)):
        raise ShapeError(
            detail=f"probs has shape {tuple(probs.shape)}, but x {tuple(x.shape)} and weight {tuple(weight.shape)} "
            f"ask for {(*x.shape[:-1], len(weight))}",
            fix="Give one number for each row of x and each row of weight",
        )
    alike(x=x, probs=probs)


# Rows


def flat(x: Any, *columns: Any) -> Any:
    """x [..., D] as [M, D] where the columns are shared by all rows, so that products are large; else x as it is."""
    shared = all(isinstance(c, Tensor) and c.dim() == 2 for c in columns)
    if not shared or not isinstance(x, Tensor) or x.dim() in (0, 2):
        return x
    return x.flatten(0, -2) if x.dim() > 2 else x.unsqueeze(0)


def unflat(y: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    """A result [M] or [M, N] of ``rows = flat(x)`` with the leading dimensions of x again."""
    return y if rows is x else y.reshape((*x.shape[:-1], *y.shape[1:]))


def reduced(loss: Tensor, how: Reduction) -> Tensor:
    """A loss per row, averaged, added up or as it is."""
    if how == "none":
        return loss
    return total(loss) / total(torch.ones_like(loss)) if how == "mean" else total(loss)


def total(x: Tensor) -> Tensor:
    """The sum of all numbers, over all ranks where rows are divided."""
    return agree.over_rows(x.sum())


def together(layer: Layer) -> Layer:
    """A layer whose checks fail on all ranks of a group when they fail on one."""

    @functools.wraps(layer)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return layer(*args, **kwargs)
        except MonoidReduceError as error:
            agree.withdraw(error)
            raise

    return cast(Layer, checked)

"""``mr.scaled``: vectors as they are stored, small numbers with their scales, given to an op in place of a tensor.

A layer that is called with some of these is traced once more, for the parameters that are stored: the body's vector is
the stored one times its scale, and engines widen the stored numbers tile by tile. Scales leave products (``q @ (s k)``
is ``s (q @ k)``), so that a scale costs one multiplication per pair, and a column's weight takes that of its vector.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .errors import ArgumentError, DeviceError, DTypeError, ShapeError, shown
from .program.declarations import STORED, Parameter

_NUMBER, _BATCH, _VECTOR = "number", "batch", "vector"  # what has a scale of its own: all, a batch element, a vector


_WIDE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
Form = tuple[str, torch.dtype]  # what has a scale of its own, and the type that the vectors stand for


@dataclass(frozen=True, eq=False)
class Scaled:
    """Vectors ``values[..., f] * scale``: what :func:`scaled` returns, and ops take in place of a tensor.

    >>> import torch, monoidreduce as mr
    >>> mr.scaled(torch.zeros(3, 4, dtype=torch.int8), 0.5)
    mr.scaled(int8[3, 4], 0.5)
    """

    values: Tensor
    scale: Tensor | float
    wide: torch.dtype = torch.float32  # the type that the vectors stand for

    @property
    def shape(self) -> torch.Size:
        """The shape of the vectors."""
        return self.values.shape

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.values.device

    @property
    def dtype(self) -> torch.dtype:
        """The type that they are stored in."""
        return self.values.dtype

    def dim(self) -> int:
        """How many dimensions the vectors have."""
        return self.values.dim()

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, at: Tensor | slice) -> Any:
        """Some of the vectors: a slice of them as they are stored; those at given indices as a plain tensor."""
        scale = self.scale
        if isinstance(scale, Tensor) and scale.dim() == self.values.dim() - 1 and len(scale) == len(self.values):
            scale = scale[at]
        found = replace(self, values=self.values[at], scale=scale)
        return found if isinstance(at, slice) else found.dequantize()

    def unsqueeze(self, dim: int) -> Scaled:
        """The same vectors with one more batch dimension, counted from the end as in torch."""
        if dim > -3:
            raise ShapeError(detail=f"dimension {dim} is no batch dimension of {self!r}", fix="Give -3 or less")
        scale = self.scale
        if isinstance(scale, Tensor) and scale.dim() >= -dim - 1:
            scale = scale.unsqueeze(dim + 1)
        return replace(self, values=self.values.unsqueeze(dim), scale=scale)

    def unflatten(self, dim: int, sizes: tuple[int, ...]) -> Scaled:
        """The same vectors with one batch dimension split, counted from the end as in torch."""
        if dim > -3:
            raise ShapeError(detail=f"dimension {dim} is no batch dimension of {self!r}", fix="Give -3 or less")
        scale = self.scale
        if isinstance(scale, Tensor) and scale.dim() >= -dim - 1:
            alone = scale.shape[dim + 1] == 1
            scale = scale.unflatten(dim + 1, (1,) * len(sizes) if alone else sizes)
        return replace(self, values=self.values.unflatten(dim, sizes), scale=scale)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Scaled:
        """The same vectors on another device."""
        move = lambda t: t.to(device, non_blocking=non_blocking) if isinstance(t, Tensor) else t
        return replace(self, values=move(self.values), scale=move(self.scale))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The vectors as a plain tensor, for comparison: as many times larger as ``dtype`` is.

        >>> import torch, monoidreduce as mr
        >>> mr.scaled(torch.tensor([[2, 4]], dtype=torch.int8), 0.5).dequantize()
        tensor([[1., 2.]])
        """
        scale = self.scale.unsqueeze(-1) if isinstance(self.scale, Tensor) and self.scale.dim() else self.scale
        return self.values.to(dtype) * (scale.to(dtype) if isinstance(scale, Tensor) else scale)

    def __repr__(self) -> str:
        return f"mr.scaled({shown(self.values)}, {shown(self.scale)})"

    @property
    def form(self) -> str:
        """What the scale belongs to: ``"number"``, ``"batch"`` or ``"vector"``."""
        if not isinstance(self.scale, Tensor) or not self.scale.dim():
            return _NUMBER
        return _BATCH if self.scale.shape[-1] == 1 and self.values.shape[-2] != 1 else _VECTOR


def scaled(values: Tensor, scale: Tensor | float, *, wide: torch.dtype | None = None) -> Scaled:
    """Vectors stored as small numbers with a scale, for any ``Row["f"]`` or ``Col["f"]`` of an op.

    ``values`` [..., N, f] are int8, float8_e4m3fn or float8_e5m2. ``scale``: one number (a float, or a tensor without
    dimensions), or a tensor [..., N] with one for each vector; of size 1 in its last dimension, [..., 1], one for each
    batch element (a head, say). The layer computes with ``values * scale``, which is never in memory as a whole: each
    tile is widened when it is read. Gradients flow to all other arguments, and to the scale. ``wide`` is the type that
    the vectors stand for, by default that of a tensor of scales, or float32: a layer whose vectors are all stored has
    results of this type.

    On GPUs with matrix units for 8 bits (NVIDIA's, from Ada on), products of vectors that are stored on both sides are
    taken as they are stored: of int8 exactly, of FP8 with sums of 14 bits or more, less than was rounded when they were
    stored. Attention of FP8 queries, keys and values also rounds its weights to FP8, where no column of the values has
    a scale of its own.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def attention(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["d"]):
    ...     return mr.softmax_mean(q @ k, v)
    >>> q, k, v = torch.randn(5, 8), torch.randn(7, 8), torch.randn(7, 3)
    >>> size = k.abs().amax(-1) / 127
    >>> stored = mr.scaled((k / size[:, None]).round().to(torch.int8), size)
    >>> torch.allclose(attention(q, stored, v), attention(q, stored.dequantize(), v), atol=1e-5)
    True
    """
    if not isinstance(values, Tensor) or values.dim() < 2:
        raise ArgumentError(detail=f"values was given {shown(values)}", fix="Give a tensor [..., N, f]")
    if values.dtype not in STORED:
        names = ", ".join(str(kind)[6:] for kind in STORED)
        raise DTypeError(
            detail=f"values is {shown(values)}", fix=f"Give one of {names}; wider numbers need no mr.scaled"
        )
    if isinstance(scale, Tensor):
        _check_scale(values, scale)
    elif not isinstance(scale, float | int) or isinstance(scale, bool):
        raise ArgumentError(detail=f"scale was given {shown(scale)}", fix="Give a number or a tensor of them")
    if wide is not None and wide not in _WIDE:
        raise DTypeError(detail=f"wide was given {wide}", fix="Give float64, float32, float16 or bfloat16")
    wide = wide or (scale.dtype if isinstance(scale, Tensor) else torch.float32)
    return Scaled(values, scale if isinstance(scale, Tensor) else float(scale), wide)


def _check_scale(values: Tensor, scale: Tensor) -> None:
    if not scale.is_floating_point() or scale.dtype in STORED:
        raise DTypeError(
            detail=f"scale is {shown(scale)}", fix="Give float32, or the type of the layer's other arguments"
        )
    if scale.device != values.device and scale.dim():
        raise DeviceError(detail=f"values are on {values.device}, but scale on {scale.device}")
    wanted = values.shape[:-1]
    fits = scale.dim() <= len(wanted) and all(
        n in (1, m) for n, m in zip(scale.shape[::-1], wanted[::-1], strict=False)
    )
    if not fits:
        raise ShapeError(
            detail=f"scale has shape {tuple(scale.shape)}, but values {tuple(values.shape)}",
            fix=f"Give one number, or {tuple(wanted)} of them: one for each vector",
        )


def scale_name(name: str) -> str:
    """The name of the hidden parameter that holds an argument's scale."""
    return f"{name}_scale_"


def split_arguments(given: Mapping[str, Any]) -> tuple[list[tuple[str, Form]], dict[str, Any]]:
    """The form of each argument that is scaled, and all arguments with the scales apart."""
    forms: list[tuple[str, Form]] = []
    apart: dict[str, Any] = {}
    for name, value in given.items():
        if not isinstance(value, Scaled):
            apart[name] = value
            continue
        forms.append((name, (value.form, value.wide)))
        apart[name] = value.values
        scale = value.scale
        if value.form == _BATCH:
            scale = scale.squeeze(-1)  # type: ignore[union-attr]
        elif value.form == _VECTOR:
            scale = scale.expand(*scale.shape[:-1], value.values.shape[-2])  # type: ignore[union-attr]
        apart[scale_name(name)] = scale
    return forms, apart


def make_body(
    function: Callable, parameters: Mapping[str, Parameter], forms: Mapping[str, Form]
) -> tuple[Callable, dict[str, Parameter]]:
    """The body of a layer for stored arguments, which multiplies each by its scale, and its parameters: the scales are
    further ones."""
    found: dict[str, Parameter] = {}
    for name, p in parameters.items():
        found[name] = p
        if name not in forms:
            continue
        if p.axis not in ("rows", "cols") or len(p.tail) != 2:
            raise ArgumentError(
                detail=f"{name} is declared {p}, but was given mr.scaled(...)",
                fix='Only vectors of rows and columns, Row["f"] and Col["f"], may be stored so',
            )
        form, wide = forms[name]
        axis = {_NUMBER: "number", _BATCH: "batch"}.get(form, p.axis)
        python = float if axis == "number" else None
        found[name] = replace(p, stored="vectors", wide=wide)
        found[scale_name(name)] = Parameter(scale_name(name), axis, None, False, ..., python, stored="scale")

    @functools.wraps(function)
    def body(**given: Any) -> Any:
        for name in forms:
            given[name] = given[name] * given.pop(scale_name(name))
        return function(**given)

    own = inspect.signature(function).parameters
    listed = [
        inspect.Parameter(
            n, inspect.Parameter.KEYWORD_ONLY, default=own[n].default if n in own else inspect.Parameter.empty
        )
        for n in found
    ]
    body.__signature__ = inspect.Signature(listed)  # type: ignore[attr-defined]
    del body.__wrapped__
    return body, found

"""``mr.scaled``: vectors as they are stored, small numbers with their scales, given to an op in place of a tensor.

A layer that is called with some of these is traced once more, for the parameters that are stored: the body's vector is
the stored one times its scale, and engines widen the stored numbers tile by tile. Scales leave products (``q @ (s k)``
is ``s (q @ k)``), so that a scale costs one multiplication per pair, and a column's weight takes that of its vector.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import arrays
from .engines.common.evaluate import unpack
from .errors import ArgumentError, DeviceError, DTypeError, ShapeError, shown
from .program.trace import STORED, Parameter

# What has a scale of its own: all vectors, a batch element, a vector, a block of a vector's features
_NUMBER, _BATCH, _VECTOR, _BLOCK = "number", "batch", "vector", "block"
WIDE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Form(NamedTuple):
    """What of a stored argument the program depends on."""

    scales: str  # what has a scale of its own
    wide: torch.dtype  # the type that the vectors stand for
    bits: int
    block: int  # features that share a scale; 0: all do


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
    bits: int = 8
    block: int = 0  # features that share a scale, where the scales have a dimension of blocks; else 0
    master: Tensor | None = None  # what was rounded: it is given the gradient of the vectors

    @property
    def shape(self) -> torch.Size:
        """The shape of the vectors."""
        *rest, width = self.values.shape
        return torch.Size((*rest, width * 8 // self.bits))

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
        scale, own = self.scale, self.values.dim() - 1 + bool(self.block)
        if isinstance(scale, Tensor) and scale.dim() == own and len(scale) == len(self.values):
            scale = scale[at]
        master = None if self.master is None else self.master[at]
        found = replace(self, values=self.values[at], scale=scale, master=master)
        return found if isinstance(at, slice) else found.pass_through(torch.float32)

    def unsqueeze(self, dim: int) -> Scaled:
        """The same vectors with one more batch dimension, counted from the end as in torch."""
        return self._reshape(dim, lambda t, at, sizes: t.unsqueeze(at))

    def unflatten(self, dim: int, sizes: tuple[int, ...]) -> Scaled:
        """The same vectors with one batch dimension split, counted from the end as in torch."""
        ones = (1,) * len(sizes)
        return self._reshape(dim, lambda t, at, alone: t.unflatten(at, ones if alone else sizes))

    def _reshape(self, dim: int, change: Callable[[Tensor, int, bool], Tensor]) -> Scaled:
        if dim > -3:
            raise ShapeError(detail=f"dimension {dim} is no batch dimension of {self!r}", fix="Give -3 or less")
        scale, at = self.scale, dim + (not self.block)
        if isinstance(scale, Tensor) and scale.dim() >= -at:
            scale = change(scale, at, scale.shape[at] == 1)
        master = None if self.master is None else change(self.master, dim, False)
        return replace(self, values=change(self.values, dim, False), scale=scale, master=master)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Scaled:
        """The same vectors on another device."""

        def move(value: Any) -> Any:
            return value.to(device, non_blocking=non_blocking) if isinstance(value, Tensor) else value

        return replace(self, values=move(self.values), scale=move(self.scale), master=move(self.master))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The vectors as a plain tensor, for comparison: as many times larger as ``dtype`` is.

        >>> import torch, monoidreduce as mr
        >>> mr.scaled(torch.tensor([[2, 4]], dtype=torch.int8), 0.5).dequantize()
        tensor([[1., 2.]])
        """
        if self.block:
            return unpack((self.bits, self.block), self.shape[-1], self.values, self.scale, dtype)  # type: ignore[arg-type]
        scale = self.scale.unsqueeze(-1) if isinstance(self.scale, Tensor) and self.scale.dim() else self.scale
        return unpack((self.bits, 0), self.shape[-1], self.values, None, dtype) * (
            scale.to(dtype) if isinstance(scale, Tensor) else scale
        )

    @property
    def asks(self) -> bool:
        """Whether the master is differentiated."""
        if self.master is None:
            return False
        moves = forward_ad._current_level >= 0 and forward_ad.unpack_dual(self.master).tangent is not None
        return moves or (torch.is_grad_enabled() and self.master.requires_grad)

    def without_master(self) -> Scaled:
        """The same vectors for a call that does not differentiate the master."""
        return self if self.master is None else replace(self, master=None)

    def pass_through(self, dtype: torch.dtype) -> Tensor:
        """The vectors as a plain tensor, whose gradient is also the master's (straight-through estimator)."""
        wide, master = self.dequantize(dtype), self.master
        if master is None:
            return wide
        if forward_ad._current_level >= 0 or torch.compiler.is_compiling():  # the same, which tracers know
            return wide + (master - master.detach()).to(dtype)
        return _StraightThrough.apply(wide, master)

    def __repr__(self) -> str:
        more = (f", block={self.block}" if self.block else "") + (f", bits={self.bits}" if self.bits != 8 else "")
        more += "" if self.master is None else f", master={shown(self.master)}"
        return f"mr.scaled({shown(self.values)}, {shown(self.scale)}{more})"

    @property
    def form(self) -> Form:
        """What of them the program depends on."""
        scales = _VECTOR
        if self.block:
            scales = _BLOCK
        elif not isinstance(self.scale, Tensor) or not self.scale.dim():
            scales = _NUMBER
        elif self.scale.shape[-1] == 1 and self.values.shape[-2] != 1:
            scales = _BATCH
        return Form(scales, self.wide, self.bits, self.block)


Vectors: TypeAlias = Tensor | Scaled  # of a layer's argument that may be stored


class _StraightThrough(torch.autograd.Function):
    """Rounded vectors, as if nothing had been rounded: their gradient is that of what they were rounded from."""

    generate_vmap_rule = True

    @staticmethod
    def forward(wide: Tensor, master: Tensor) -> Tensor:
        return wide.view_as(wide)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.dtype = inputs[1].dtype

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple[Tensor, Tensor]:
        return g[0], g[0].to(ctx.dtype)


def scaled(
    values: Tensor,
    scale: Tensor | float,
    *,
    block: int | None = None,
    bits: int = 8,
    wide: torch.dtype | None = None,
    master: Tensor | None = None,
) -> Scaled:
    """Vectors stored as small numbers with a scale, for any ``Row["f"]`` or ``Col["f"]`` of an op.

    ``values`` [..., N, f] are int8, float8_e4m3fn or float8_e5m2. ``scale``: one number (a float, or a tensor without
    dimensions), or a tensor [..., N] with one for each vector; of size 1 in its last dimension, [..., 1], one for each
    batch element (a head, say). The layer computes with ``values * scale``, which is never in memory as a whole: each
    tile is widened when it is read. Gradients flow to all other arguments, and to the scale. ``wide`` is the type that
    the vectors stand for, by default that of a tensor of scales, or float32: a layer whose vectors are all stored has
    results of this type.

    ``block``: scales of blocks. With [..., N, f / block] of them (rounded up), so many features of a vector share one;
    with [..., N / block] so many vectors do; with [..., N / block, f / block] so many of both. Scales of blocks of
    features have no gradients.

    ``bits=4``: two numbers in a byte. ``values`` [..., N, f / 2] are uint8; feature 2 i is the lower half of byte i and
    feature 2 i + 1 the upper half, each stored with an offset of 8: the numbers are ``(byte & 15) - 8`` and
    ``(byte >> 4) - 8``, from -8 to 7.

    ``master`` [..., N, f]: the vectors before they were rounded, where these are trained. Its values do not count: it
    is given the gradient of the vectors that the layer computed with (straight-through estimator), in its own type. A
    call that is differentiated by it makes these vectors whole, in the type of the layer's other arguments: as much
    memory as the master takes in that type. Calls without gradients read what is stored.

    On GPUs with matrix units for 8 bits (NVIDIA's, from Ada on), products of vectors that are stored in 8 bits on both
    sides, without blocks of features, are taken as they are stored: of int8 exactly, of FP8 with sums of 14 bits or
    more, less than was rounded when they were stored. Attention of FP8 queries, keys and values also rounds its weights
    to FP8, where no column of the values has a scale of its own.

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
    values = arrays.to_tensor(values, "values") if arrays.is_array(values) else values
    scale = arrays.to_tensor(scale, "scale") if arrays.is_array(scale) else scale
    if not isinstance(values, Tensor) or values.dim() < 2:
        raise ArgumentError(detail=f"values was given {shown(values)}", fix="Give a tensor [..., N, f]")
    if bits not in (4, 8):
        raise ArgumentError(detail=f"bits was given {shown(bits)}", fix="Give 8, or 4 for two numbers in a byte")
    kinds = STORED if bits == 8 else (torch.uint8,)
    if values.dtype not in kinds:
        names = ", ".join(str(kind)[6:] for kind in kinds)
        raise DTypeError(
            detail=f"values is {shown(values)}", fix=f"Give one of {names}; wider numbers need no mr.scaled"
        )
    if not isinstance(scale, (Tensor, float, int)) or isinstance(scale, bool):
        raise ArgumentError(detail=f"scale was given {shown(scale)}", fix="Give a number or a tensor of them")
    if block is not None and (not isinstance(block, int) or isinstance(block, bool) or block < 1):
        raise ArgumentError(detail=f"block was given {shown(block)}", fix="Give how many share a scale, 1 or more")
    if wide is not None and wide not in WIDE:
        raise DTypeError(detail=f"wide was given {wide}", fix="Give float64, float32, float16 or bfloat16")
    wide = wide or (scale.dtype if isinstance(scale, Tensor) else torch.float32)
    found = Scaled(values, scale if isinstance(scale, Tensor) else float(scale), wide, bits, master=master)
    if master is not None:
        _check_master(found, master)
    if block is not None:
        return _with_blocks(found, block)
    if isinstance(scale, Tensor):
        _check_scale(found, scale, found.shape[:-1], "one number, or {} of them: one for each vector")
    return found


def _check_master(found: Scaled, master: Tensor) -> None:
    if not isinstance(master, Tensor) or master.dtype not in WIDE:
        raise DTypeError(
            detail=f"master was given {shown(master)}", fix="Give a tensor of float64, float32, float16 or bfloat16"
        )
    if master.shape != found.shape:
        raise ShapeError(
            detail=f"master has shape {tuple(master.shape)}, but the vectors have {tuple(found.shape)}",
            fix="Give what the stored numbers were rounded from",
        )
    if master.device != found.device:
        raise DeviceError(detail=f"values are on {found.device}, but master on {master.device}")


def _with_blocks(found: Scaled, block: int) -> Scaled:
    """Scales of blocks of vectors become those of vectors; of blocks of features they stay what they are."""
    *batch, vectors, features = found.shape
    cols, parts, scale = -(-vectors // block), -(-features // block), found.scale
    by_features = isinstance(scale, Tensor) and scale.dim() == found.dim()
    if not isinstance(scale, Tensor) or not (by_features or scale.dim() == found.dim() - 1):
        raise ShapeError(
            detail=f"scale was given {shown(scale)} with block={block}, but values {tuple(found.values.shape)}",
            fix=f"Give scales {(*batch, vectors, parts)}, {(*batch, cols, parts)} or {(*batch, cols)}",
        )
    if by_features and scale.requires_grad:
        raise ArgumentError(
            detail="scale requires a gradient, which scales of blocks of features do not have",
            fix="Give scale.detach()",
        )
    whole = by_features and scale.shape[-2] == vectors
    wanted = (*batch, vectors if whole else cols, *((parts,) if by_features else ()))
    _check_scale(found, scale, wanted, "{} of them, or one for each block of vectors too", exact=1 + by_features)
    if not whole:
        scale = scale.repeat_interleave(block, -2 if by_features else -1)
        scale = scale[..., :vectors, :] if by_features else scale[..., :vectors]
    return replace(found, scale=scale, block=block if by_features else 0)


def _check_scale(found: Scaled, scale: Tensor, wanted: Sequence[int], fix: str, exact: int = 0) -> None:
    """``exact``: how many of the last dimensions may not be 1 in place of their size."""
    values = found.values
    if not scale.is_floating_point() or scale.dtype in STORED:
        raise DTypeError(
            detail=f"scale is {shown(scale)}", fix="Give float32, or the type of the layer's other arguments"
        )
    if scale.device != values.device and scale.dim():
        raise DeviceError(detail=f"values are on {values.device}, but scale on {scale.device}")
    sizes = list(zip(scale.shape[::-1], wanted[::-1], strict=False))
    fits = scale.dim() <= len(wanted) and all(n == m or (n == 1 and k >= exact) for k, (n, m) in enumerate(sizes))
    if not fits:
        raise ShapeError(
            detail=f"scale has shape {tuple(scale.shape)}, but values {tuple(values.shape)}",
            fix=f"Give {fix.format(tuple(wanted))}",
        )


def scale_name(name: str) -> str:
    """The name of the hidden parameter that holds an argument's scale."""
    return f"{name}_scale_"


def split_arguments(given: Mapping[str, Any]) -> tuple[list[tuple[str, Form]], dict[str, Any]]:
    """The form of each argument that is scaled, and all arguments with the scales apart. Those whose masters ask for a
    gradient are plain tensors."""
    forms: list[tuple[str, Form]] = []
    apart: dict[str, Any] = {}
    floats = [v.dtype for v in given.values() if isinstance(v, Tensor) and v.dtype in WIDE and v.dim()]
    for name, value in given.items():
        if not isinstance(value, Scaled):
            apart[name] = value
            continue
        if value.asks:
            apart[name] = value.pass_through(floats[0] if floats else value.wide)
            continue
        form = value.form
        forms.append((name, form))
        apart[name] = value.values
        scale: Any = value.scale
        if form.scales == _BATCH:
            scale = scale.squeeze(-1)
        elif form.scales == _VECTOR:
            scale = scale.expand(*scale.shape[:-1], value.values.shape[-2])
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
        form = forms[name]
        axis = {_NUMBER: "number", _BATCH: "batch"}.get(form.scales, p.axis)
        python, letter = float if axis == "number" else None, f"{name}_blocks_" if form.block else None
        scale = Parameter(scale_name(name), axis, letter, False, ..., python, stored="scale")
        packing = (form.bits, form.block) if form.block or form.bits != 8 else None
        found[name] = replace(
            p, stored="vectors", wide=form.wide, packing=packing, blocks=scale if form.block else None
        )
        found[scale.name] = scale

    @functools.wraps(function)
    def body(**given: Any) -> Any:
        for name, form in forms.items():
            scale = given.pop(scale_name(name))
            given[name] = given[name] if form.block else given[name] * scale
        return function(**given)

    own = inspect.signature(function).parameters
    listed = [
        inspect.Parameter(
            n, inspect.Parameter.KEYWORD_ONLY, default=own[n].default if n in own else inspect.Parameter.empty
        )
        for n in found
    ]
    body.__signature__ = inspect.Signature(listed)  # type: ignore[attr-defined]
    body.user_body = function  # type: ignore[attr-defined]
    del body.__wrapped__
    return body, found

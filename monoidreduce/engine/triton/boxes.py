"""Tensor descriptors: blocks of vectors that the hardware copies by itself (Hopper and newer).

A box is a block of consecutive vectors of one batch element; what lies outside the tensor reads as zero. The copy takes
one instruction and no registers, which pays where tiles are many. Which leaves have one depends on their strides: the
features lie side by side, rows and batch elements begin on 16 bytes. Dimensions that broadcast are left out.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...program.expr import Expr
from . import source
from .spec import WIDEST, Spec, padded

_DIMENSIONS = 5  # of a descriptor, at most


@functools.cache
def on(device: torch.device) -> bool:
    """Whether the device and this Triton have them."""
    if source.version() < (3, 4):
        return False
    if device.type != "cuda":
        return os.environ.get("TRITON_INTERPRET") == "1"
    if not torch.cuda.is_available() or torch.version.hip is not None:  # plans are also made for a device elsewhere
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def of(spec: Spec, leaves: tuple[Expr, ...], values: Mapping[Expr, Any], batch: int) -> tuple:
    """Per leaf of the fold: the batch dimensions of its box, None where it has none."""
    return tuple(_dimensions(e, spec, values[e], batch) if e in leaves else None for e in spec.fold.leaves)


def _dimensions(e: Expr, spec: Spec, v: Any, batch: int) -> tuple[int, ...] | None:
    if not (isinstance(v, Tensor) and v.element_size() == 2 and str(v.dtype)[6:] == spec.narrow):
        return None
    width, found = v.shape[-1], tuple(k for k in range(batch) if v.shape[k] > 1 and v.stride(k))
    strides = [v.stride(k) for k in (*found, batch)]
    whole = width == padded(width) <= WIDEST or (spec.deep and width > WIDEST)
    fits = whole and v.stride(-1) == 1 and len(found) + 2 <= _DIMENSIONS
    aligned = all(s > 0 and s * 2 % 16 == 0 for s in strides) and v.data_ptr() % 16 == 0
    return found if fits and aligned and v.numel() and not spec.room_of[e] else None


def fits(v: Tensor) -> bool:
    """Whether vectors ``[1, length, features]`` of any number of features can be copied."""
    aligned = v.stride(-2) > 0 and v.stride(-2) * v.element_size() % 16 == 0 and v.data_ptr() % 16 == 0
    return v.element_size() == 2 and v.stride(-1) == 1 and aligned and v.numel() > 0


def template(v: Tensor, dims: tuple[int, ...], block: tuple[int, int], staged: bool = False) -> Any:
    """The descriptor of a leaf ``[*batch, length, features]``, for blocks of some vectors and features.

    ``staged``: for kernels that name the layout of what is copied."""
    kept, shape = (*dims, v.ndim - 2, v.ndim - 1), [*(1 for _ in dims), *block]
    given = (v, [v.shape[k] for k in kept], [v.stride(k) for k in kept], shape)
    if staged:
        gl = importlib.import_module("triton.experimental.gluon.language")
        layout = gl.NVMMASharedLayout.get_default_for(shape, getattr(gl, str(v.dtype)[6:]))
        made = importlib.import_module("triton.experimental.gluon.nvidia.hopper").TensorDescriptor(*given, layout)
    else:
        made = importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor(*given)
    made.base = None  # a frozen launch holds nobody's tensor
    return made


def filled(made: Any, v: Tensor) -> Any:
    """A descriptor for another tensor of the same shape, strides and alignment."""
    found = object.__new__(type(made))
    found.__dict__ = {**made.__dict__, "base": v}
    return found

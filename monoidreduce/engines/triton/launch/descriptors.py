"""Tensor descriptors: blocks of vectors that the hardware copies by itself (Hopper and newer).

A descriptor (TMA) copies a block of consecutive vectors of one batch element; outside the tensor it reads zeros.
The copy takes one instruction and no registers, which pays where tiles are many. Which leaves have one depends on their
strides: features are contiguous, rows and batch elements begin on 16 bytes. Dimensions that broadcast are left out.
Numbers along the folded axis have descriptors too: otherwise many threads would load the same ones.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ....plan import settings
from ....program.expression import Expr, are_several
from ....program.lower import Fold
from ..codegen.kernel_spec import NARROW, TINY, WIDEST, Spec, gluon_type, padded
from . import jit_module
from .encoded_descriptors import replace_base as replace_base

_DIMENSIONS = 5  # of a descriptor, at most


@functools.cache
def are_supported(device: torch.device) -> bool:
    """True when the device and this version of Triton have tensor descriptors."""
    if jit_module.triton_version() < (3, 4):
        return False
    if device.type != "cuda":
        return settings.interprets_kernels()
    return jit_module.find_capability(device) >= (9, 0)


def find_copied_leaves(spec: Spec, vectors: tuple[Expr, ...], values: Mapping[Expr, Any], batch: int) -> tuple:
    """Per leaf of the fold: the batch dimensions of its descriptor, None where it has none."""
    numbers = [e for e in spec.fold.leaves if e.feature is None and spec.folds(e) and not spec.keeps(e)]
    vectors = tuple(e for e in vectors if not are_several(e))
    fits = {**dict.fromkeys(vectors, _fits), **(dict.fromkeys(numbers, _fits_number) if spec.narrow else {})}
    return tuple(_dimensions(e, spec, values[e], batch, fits[e]) if e in fits else None for e in spec.fold.leaves)


def keep_vectors(fold: Fold, found: tuple) -> tuple:
    """The same for vectors alone."""
    return tuple(b if e.feature is not None else None for e, b in zip(fold.leaves, found, strict=True))


def _dimensions(e: Expr, spec: Spec, v: Any, batch: int, fits: Callable[..., bool]) -> tuple[int, ...] | None:
    if not isinstance(v, Tensor) or not v.numel():
        return None
    found = tuple(k for k in range(batch) if v.shape[k] > 1 and v.stride(k))
    if e.feature is None and not found:
        return None  # descriptors of one dimension have not been seen to work on a device
    kept = (*found, *((batch,) if e.feature is not None else ()))  # those with a stride of their own
    aligned = all(v.stride(k) > 0 and v.stride(k) * v.element_size() % 16 == 0 for k in kept)
    aligned &= v.data_ptr() % 16 == 0
    return found if aligned and len(found) + 2 <= _DIMENSIONS and v.stride(-1) == 1 and fits(e, spec, v) else None


def _fits(e: Expr, spec: Spec, v: Tensor) -> bool:
    if spec.pieces:
        return v.element_size() == 2
    width = v.shape[-1]
    if spec.is_stored_softmax:  # for the warp-specialised kernel
        return NARROW < width <= WIDEST and padded(width) == width and not spec.room_of[e]
    whole = (width % 8 == 0 and TINY < width <= WIDEST) or (spec.deep and width > WIDEST)
    whole &= not (_is_softmax(spec) and width < padded(width) <= NARROW)
    plain = spec.deep or not spec.room_of[e]  # a K loop reads a padded copy like any other
    return whole and v.element_size() == 2 and str(v.dtype)[6:] == spec.narrow and plain


def _is_softmax(spec: Spec) -> bool:
    """Of a softmax, narrow vectors with zeros behind their features are loaded, not copied: attention of 48 features
    takes 0.82 of the time, of 40 features 0.57; its gradients by columns take up to 1.4 of it (H200)."""
    return any(r.attrs[0] == "soft" for r in spec.fold.reductions)


def _fits_number(e: Expr, spec: Spec, v: Tensor) -> bool:
    return v.element_size() == 4  # of 8 bytes they cost a kernel a third of its speed


def make_shift_descriptor(length: int, count: int, block: int, device: torch.device) -> Any:
    """The descriptor of float32 numbers ``[count, length]`` that are made for every launch."""
    like = torch.empty(1, dtype=torch.float32, device=device).expand(count, length)
    made = _descriptor(like, [count, length], [length, 1], [1, block])
    made.base = None
    return made


def make_buffer_descriptor(rows: int, width: int, block: int, device: torch.device) -> Any:
    """The descriptor of float32 numbers ``[rows, width]`` in a buffer that is made for every launch, for kernels that
    name the layout of their blocks."""
    gl = importlib.import_module("triton.experimental.gluon.language")
    layout = gl.NVMMASharedLayout.get_default_for([block, width], gl.float32)
    like = torch.empty(1, dtype=torch.float32, device=device).expand(rows, width)
    kind = importlib.import_module("triton.experimental.gluon.nvidia.hopper").TensorDescriptor
    made = kind(like, [rows, width], [width, 1], [block, width], layout)
    made.base = None
    return made


def _descriptor(v: Tensor, *form: list[int]) -> Any:
    return importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor(v, *form)


def can_copy_vectors(v: Tensor) -> bool:
    """Whether vectors ``[1, length, features]`` of any number of features can be copied."""
    aligned = v.stride(-2) > 0 and v.stride(-2) * v.element_size() % 16 == 0 and v.data_ptr() % 16 == 0
    return v.element_size() == 2 and v.stride(-1) == 1 and aligned and v.numel() > 0


def make_descriptor(v: Tensor, dims: tuple[int, ...], block: tuple[int, ...], staged: bool = False) -> Any:
    """The descriptor of a leaf ``[*batch, length(, features)]``, for blocks of some numbers, or vectors.

    ``staged``: for kernels that name the layout of what is copied."""
    kept, shape = (*dims, *range(v.ndim - len(block), v.ndim)), [*(1 for _ in dims), *block]
    given = ([v.shape[k] for k in kept], [v.stride(k) for k in kept], shape)
    if staged:
        gl = importlib.import_module("triton.experimental.gluon.language")
        layout = gl.NVMMASharedLayout.get_default_for(shape, getattr(gl, gluon_type(str(v.dtype)[6:])))
        made = importlib.import_module("triton.experimental.gluon.nvidia.hopper").TensorDescriptor(v, *given, layout)
    else:
        made = _descriptor(v, *given)
    made.base = None  # a prepared launch must not keep a tensor alive
    return made

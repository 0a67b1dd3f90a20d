"""Tensor descriptors (TMA, Hopper and newer): which leaves have one, how it is made, and its encoded form by address.

A descriptor copies a block of consecutive vectors of one batch element; outside the tensor it reads zeros. The copy
takes one instruction and no registers, which pays where tiles are many. Which leaves have one depends on their strides:
features are contiguous, rows and batch elements begin on 16 bytes. Dimensions that broadcast are left out. Numbers
along the folded axis have descriptors too: otherwise many threads would load the same ones.

Triton's launchers take descriptors apart in Python and have the driver encode them at every launch, which takes longer
than the launch itself. The result depends only on the kernel, the descriptor's shape and its address, so it is cached
by address: the allocator returns tensors of one shape to the same addresses.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ....program.expression import Expr, are_several
from ....program.lower import Fold
from ..codegen.kernel_spec import NARROW, TINY, WIDEST, Spec, gluon_type, pad_width

_MOST_DIMENSIONS = 5  # of a descriptor
_MOST_ADDRESSES = 1024  # of one argument
_ANY_ADDRESS = 1 << 30  # nothing is read there
Start = Callable[..., None]


# Which leaves have one


def find_copied_leaves(spec: Spec, vectors: tuple[Expr, ...], values: Mapping[Expr, Any], batch: int) -> tuple:
    """Per leaf of the fold: the batch dimensions of its descriptor, None where it has none."""
    numbers = [e for e in spec.fold.leaves if e.feature is None and spec.folds(e) and not spec.keeps(e)]
    vectors = tuple(e for e in vectors if not are_several(e))
    fits = {**dict.fromkeys(vectors, _fits), **(dict.fromkeys(numbers, _fits_number) if spec.narrow else {})}
    return tuple(_find_dimensions(e, spec, values[e], batch, fits[e]) if e in fits else None for e in spec.fold.leaves)


def keep_vectors(fold: Fold, found: tuple) -> tuple:
    """The same for vectors alone."""
    return tuple(b if e.feature is not None else None for e, b in zip(fold.leaves, found, strict=True))


def can_copy_vectors(v: Tensor) -> bool:
    """True for vectors ``[1, length, features]`` of any number of features that can be copied."""
    aligned = v.stride(-2) > 0 and v.stride(-2) * v.element_size() % 16 == 0 and v.data_ptr() % 16 == 0
    return v.element_size() == 2 and v.stride(-1) == 1 and aligned and v.numel() > 0


def _find_dimensions(e: Expr, spec: Spec, v: Any, batch: int, fits: Callable[..., bool]) -> tuple[int, ...] | None:
    if not isinstance(v, Tensor) or not v.numel():
        return None
    found = tuple(k for k in range(batch) if v.shape[k] > 1 and v.stride(k))
    if e.feature is None and not found:
        return None  # descriptors of one dimension have not been seen to work on a device
    kept = (*found, *((batch,) if e.feature is not None else ()))  # those with a stride of their own
    aligned = all(v.stride(k) > 0 and v.stride(k) * v.element_size() % 16 == 0 for k in kept)
    aligned &= v.data_ptr() % 16 == 0
    return found if aligned and len(found) + 2 <= _MOST_DIMENSIONS and v.stride(-1) == 1 and fits(e, spec, v) else None


def _fits(e: Expr, spec: Spec, v: Tensor) -> bool:
    if spec.pieces:
        return v.element_size() == 2
    width = v.shape[-1]
    if spec.is_stored_softmax:  # for the warp-specialised kernel
        return NARROW < width <= WIDEST and pad_width(width) == width and not spec.padded_width_of[e]
    whole = (width % 8 == 0 and TINY < width <= WIDEST) or (spec.k_loop and width > WIDEST)
    # Narrow vectors of a softmax that would be padded are loaded instead: attention of 48 features takes 0.82 of the
    # time, of 40 features 0.57; its gradients by columns take up to 1.4 of it (H200).
    whole &= not (any(r.attrs[0] == "soft" for r in spec.fold.reductions) and width < pad_width(width) <= NARROW)
    plain = spec.k_loop or not spec.padded_width_of[e]  # a K loop reads a padded copy like any other
    return whole and v.element_size() == 2 and str(v.dtype)[6:] == spec.narrow and plain


def _fits_number(e: Expr, spec: Spec, v: Tensor) -> bool:
    return v.element_size() == 4  # of 8 bytes they cost a kernel a third of its speed


# Templates: descriptors without a tensor, since a prepared launch must not keep one alive


def make_descriptor(v: Tensor, dims: tuple[int, ...], block: tuple[int, ...], with_layout: bool = False) -> Any:
    """The descriptor of a leaf ``[*batch, length(, features)]``, for blocks of some numbers, or vectors.

    ``with_layout``: for kernels that name the layout of what is copied (Gluon)."""
    kept, shape = (*dims, *range(v.ndim - len(block), v.ndim)), [*(1 for _ in dims), *block]
    return _describe(v, [v.shape[k] for k in kept], [v.stride(k) for k in kept], shape, with_layout)


def make_shift_descriptor(length: int, count: int, block: int, device: torch.device) -> Any:
    """The descriptor of float32 numbers ``[count, length]`` that are made for every launch."""
    like = torch.empty(1, dtype=torch.float32, device=device).expand(count, length)
    return _describe(like, [count, length], [length, 1], [1, block])


def make_buffer_descriptor(rows: int, width: int, block: int, device: torch.device) -> Any:
    """The descriptor of float32 numbers ``[rows, width]`` in a buffer that is made for every launch, with a layout."""
    like = torch.empty(1, dtype=torch.float32, device=device).expand(rows, width)
    return _describe(like, [rows, width], [width, 1], [block, width], with_layout=True)


def _describe(v: Tensor, shape: list[int], strides: list[int], block: list[int], with_layout: bool = False) -> Any:
    more = (_find_layout(tuple(block), v.dtype),) if with_layout else ()
    made = _find_kind(with_layout)(v, shape, strides, block, *more)
    made.base = None
    return made


@functools.cache
def _find_kind(with_layout: bool) -> Any:
    """Triton's class of tensor descriptors, with or without a layout."""
    name = "triton.experimental.gluon.nvidia.hopper" if with_layout else "triton.tools.tensor_descriptor"
    return importlib.import_module(name).TensorDescriptor


@functools.lru_cache(maxsize=1024)
def _find_layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    """The layout in which a block lies in shared memory."""
    gl = importlib.import_module("triton.experimental.gluon.language")
    return gl.NVMMASharedLayout.get_default_for([*block], getattr(gl, gluon_type(str(dtype)[6:])))


def is_descriptor(v: Any) -> bool:
    """True for a tensor descriptor."""
    return hasattr(v, "block_shape")


def replace_base(template: Any, v: Any) -> Any:
    """A descriptor for another tensor of the same shape, strides and alignment, or for none."""
    found = object.__new__(type(template))
    found.__dict__ = {**template.__dict__, "base": v}
    return found


class Address:
    """Stands for a tensor at an address: launchers ask a descriptor's tensor for nothing else."""

    __slots__ = ("at",)

    def __init__(self, at: int):
        self.at = at

    def data_ptr(self) -> int:
        """Where it begins."""
        return self.at


def make_descriptor_at(template: Any, address: int) -> Any:
    """The descriptor of what lies at an address."""
    return replace_base(template, Address(address))


# Encoded descriptors, cached by address


class EncodedByAddress(dict[int, tuple]):
    """By address: what is given to a compiled kernel's function in place of one of its descriptors."""

    def __init__(self, encode: Callable[[int], tuple]):
        super().__init__()
        self.encode = encode

    def __missing__(self, address: int) -> tuple:
        if len(self) >= _MOST_ADDRESSES:
            self.clear()
        found = self[address] = self.encode(address)
        return found


def bypass_encoding(
    launch: Any, before: Sequence[Any], arguments: Sequence[Any]
) -> tuple[Start, dict[int, EncodedByAddress]] | None:
    """Launch a kernel with descriptors that are encoded already: the C launch function and, by argument, a cache of
    encoded descriptors. None without descriptors, or if this Triton builds its launchers differently.

    ``launch`` takes ``before`` and the arguments; of these only the shapes of descriptors are read."""
    places = [k for k, v in enumerate(arguments) if is_descriptor(v)]
    found = _find_c_function(launch) if places else None
    if found is None:
        return None
    start, rebuild_launcher = found

    def encode(place: int, address: int) -> tuple:
        """The arguments that the launcher passes on for one descriptor, seen by a C function that records them."""
        seen: list[tuple] = []
        given = [
            _Marked.of(make_descriptor_at(v, address)) if k in places else object() for k, v in enumerate(arguments)
        ]
        rebuild_launcher(lambda *passed: seen.append(passed[len(before) :]))(*before, *given)
        (passed,) = seen
        begins = [*(_find_argument(passed, v) for v in given), len(passed)]
        return tuple(int(v) if isinstance(v, _Marked) else v for v in passed[begins[place] : begins[place + 1]])

    try:
        encode(places[0], _ANY_ADDRESS)
    except Exception:  # of another make
        return None
    return start, {k: EncodedByAddress(functools.partial(encode, k)) for k in places}


class _Marked(int):
    """An integer with an identity, to find a descriptor's fields among the arguments that a launcher passes on."""

    @classmethod
    def of(cls, descriptor: Any) -> Any:
        """A descriptor with marked lengths."""
        descriptor.shape = [cls(n) for n in descriptor.shape]
        return descriptor


def _find_argument(passed: Sequence[Any], given: Any) -> int:
    """Where an argument begins in what was passed on: a descriptor one place before its first length."""
    mark = given.shape[0] if is_descriptor(given) else given
    return next(k for k, v in enumerate(passed) if v is mark) - is_descriptor(given)


def _find_c_function(launch: Any) -> tuple[Start, Callable[[Start], Start]] | None:
    """The C function in a launcher's closure, and what makes the same launcher around another function."""
    cells = getattr(launch, "__closure__", None) or ()
    found = [k for k, cell in enumerate(cells) if isinstance(cell.cell_contents, types.BuiltinFunctionType)]
    if len(found) != 1:
        return None

    def rebuild(other: Start) -> Start:
        closure = tuple(types.CellType(other) if k == found[0] else cell for k, cell in enumerate(cells))
        return types.FunctionType(launch.__code__, launch.__globals__, closure=closure)

    return cells[found[0]].cell_contents, rebuild

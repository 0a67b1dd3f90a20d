"""From a call's tensors to the spec of its kernel: types, padding, conversions before the launch, device properties."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ....plan import budget, settings
from ....program.constructors import contractions
from ....program.expression import Expr, topological
from ....program.lower import Fold
from ...common import matmul
from ...common.evaluate import Sizes
from ..codegen import k_loop, kernel_spec, tile_ranges
from ..codegen.kernel_spec import TINY, WIDEST, Spec, pad_width, pair_vector_leaves, specialize
from ..codegen.reductions import move_factors_to_weight
from ..launch import hardware
from .vector_conversions import (
    MANY_FLOAT32,
    MANY_SIXTEEN,
    MANY_STORED,
    Cast,
    Conversions,
    replace_distances,
    split_fold,
)

_GUESSED = (torch.bfloat16,)  # types with the range for weights by a guessed maximum; float16 would lose small ones
MANY = 2**22  # pairs from which on a faster kernel is worth some host time
VERY_MANY = 2**28  # and from which on it is worth more
# Folded indices, by features, up to which a softmax of 16-bit vectors has a running maximum and loads its blocks: a
# guess takes one tile more, a ring buffer its start-up. H200, 128 x 16 heads of 128 rows: 48 us instead of 61 (64
# features), 92 instead of 98 (128); 64 x 16 heads of 256 rows: 66 instead of 74 (64), but 124 instead of 116 (128).
_SHORT = {64: 256, 128: 128}
# The same with a condition on indices; descriptors then copy the blocks. H200, causal, 64 and 128 features: 128 rows 51
# and 96 us (59 and 106 where blocks are loaded), 256 rows 60 and 115 (68 and 128), 512 rows 46 and 74 (49 and 77).
_SHORT_MASKED = {64: 512, 128: 512}
_SHORT_PAIRS = 2**22
_THRESHOLDS = (MANY, MANY_FLOAT32, MANY_SIXTEEN, _SHORT_PAIRS)
_FEW = {*_SHORT.values(), *_SHORT_MASKED.values()}
_WIDENED = 1024  # kept indices from which widening stored vectors first takes a small share of their products' time
like: contextvars.ContextVar[int] = contextvars.ContextVar("like", default=0)


def as_for(sizes: Sizes) -> contextlib.AbstractContextManager[int]:
    """Inside the block kernels are chosen as for so many pairs: the tuner tries on a few rows what will run on all."""
    return settings.hold(like, sizes.rows * sizes.cols)


def describe_fold(
    fold: Fold, over: str, values: Mapping[Expr, Any], batch: tuple[int, ...], sizes: Sizes
) -> tuple[Spec, Conversions]:
    """The spec of a fold on these leaves, and the conversions before the launch."""
    pairs, folded = like.get() or sizes.rows * sizes.cols, sizes.cols if over == "cols" else sizes.rows
    every = pairs * math.prod(batch)
    fold, norms = replace_distances(fold, values, sizes, pairs, math.prod(batch))
    rewritten = split_fold(fold, values, sizes, every)
    fold, splits = rewritten.fold, rewritten.splits
    split = {s.leaf for s in splits}
    values = {**values, **{e: torch.empty(0, device="cpu") for e in fold.leaves if e not in values}}
    used = [e for e in fold.leaves if e.feature is not None and e in _find_used_leaves(fold) and e not in fold.tables]
    vectors = {e: values[e] for e in used}
    narrow = narrow_type(vectors, sizes)
    widest = max([0, *(sizes.of(str(e.feature)) for e in vectors)])
    wide = widest > WIDEST and k_loop.takes_fold(fold, widest, narrow is not None)
    conditions = kernel_spec.whole_tile_conditions(fold)
    shortest = _SHORT_MASKED if conditions and not condition_leaves(fold) else _SHORT
    few = folded <= next((n for features, n in shortest.items() if widest <= features), 0)
    short = few and _is_softmax(fold) and every >= _SHORT_PAIRS
    many = narrow is not None and every >= MANY
    types, padded_widths, casts = [], [], list[Cast]()
    for e in fold.leaves:
        v = values[e]
        kind: torch.dtype | None = v.dtype if isinstance(v, Tensor) else None
        room = 0
        if e in split:
            types.append("float16" if rewritten.pieces == 2 else "bfloat16")
            padded_widths.append(pad_width(sizes.of(str(e.feature))))
            continue
        if kind is None and sizes.compute is torch.float64 and e.dtype == "float":
            kind = torch.float64  # a Python number would be float32 in a kernel
        elif kind is not None and sizes.compute is torch.float64 and kind.itemsize < 4:
            # Triton asks float64 products for steps as of the shortest type that they are computed from, and fails
            kind = torch.float32 if e.dtype == "float" and kind is not torch.uint8 else torch.int32
        elif e in fold.packed:
            pass  # widened where it is loaded
        elif e in _find_multiplied(fold) and e not in fold.tables and isinstance(v, Tensor) and v.shape[-1] > TINY:
            if narrow and (kind is torch.float32 or (wide and pays_widening(e, over, fold.leaves, sizes))):
                kind = narrow  # rounded once, not in every tile
            row = v.shape[-1] * (2 if narrow else v.element_size())
            if v.stride(-1) == 1 and (row % 16 or (many and _is_unaligned(v))) and (wide or v.shape[-1] <= WIDEST):
                room = -(-v.shape[-1] // 16) * 16  # rows aligned to 16 bytes load four times faster
        if kind is not None and (room or not isinstance(v, Tensor) or kind is not v.dtype):
            casts.append((e, kind, room))
        types.append(str(kind)[6:] if kind else "positive" if e.dtype == "float" and v > 0 else "number")
        padded_widths.append(0 if isinstance(v, Tensor) and room == v.shape[-1] else room)  # a copy that is not padded
    converted = {e for e, _, _ in casts} | split
    spec = Spec(
        fold=fold,
        over=over,
        types=tuple(types),
        padded_widths=tuple(padded_widths),
        letters=tuple(sorted(sizes.letters.items())),
        compute=str(sizes.compute)[6:],
        narrow=str(narrow)[6:] if narrow else None,
        rank=len(batch),
        bounds=bool(conditions),
        lanes=max([0, *(sizes.of(str(e.feature)) for e in _find_vectors(fold))]) <= TINY,
        guess=narrow in _GUESSED and not wide and not short,
        exact=sizes.compute is torch.float64 or matmul.float32_precision() == "ieee",
        unrounded=fold.exact,
        native=narrow is not None and hardware.has_tanh(sizes.device),
        eight_bit_mma=sizes.compute is torch.float32 and hardware.multiplies_eight_bits(sizes.device),
        small_products=hardware.has_small_products(),
        pieces=rewritten.pieces,
        close_pairs=rewritten.close_pairs,
        k_loop=wide,
        strides_of_eight=tuple(e in vectors and e not in converted and _is_in_eighths(vectors[e]) for e in fold.leaves),
        precomputed_shifts=pairs >= MANY,
    )
    return specialize(spec), Conversions(splits, tuple(casts), norms)


def list_thresholds(over: str, batch: tuple[int, ...], sizes: Sizes) -> tuple[bool, ...]:
    """All that :func:`describe_fold` asks of the lengths, without stored vectors: on which side of each threshold they
    are."""
    pairs, folded = like.get() or sizes.rows * sizes.cols, sizes.cols if over == "cols" else sizes.rows
    every = pairs * torch.Size(batch).numel()
    found = [pairs > 1, pairs >= MANY, pairs >= MANY_STORED, *[every >= n for n in _THRESHOLDS]]
    return (*found, *[folded <= n for n in _FEW])


def describe_leaf(e: Expr, v: Any) -> tuple | type:
    """All that :func:`describe_fold`, descriptors and batch dimensions ask of a leaf besides its length: its type and
    features, which dimensions and strides are 0 or 1, and how strides in bytes are aligned."""
    if not isinstance(v, Tensor):
        return type(v)
    item, shape = v.dtype.itemsize, v.shape
    strides = tuple([(n == 1, n == 0, s == 0, s == 1, s * item & 31) for n, s in zip(shape, v.stride(), strict=True)])
    return v.dtype, shape[-1] if e.feature is not None else 0, v.data_ptr() & 15, strides


def pays_widening(e: Expr, over: str, leaves: Iterable[Expr], sizes: Sizes) -> bool:
    """True when stored vectors of many features are widened before the launch: where they meet so many kept indices
    that products are what takes the time, and a copy may be held. Their kernels are then those of plain vectors, which
    have products by whole warp groups; ``leaves``: of the fold."""
    kept, length = (sizes.rows, sizes.cols) if over == "cols" else (sizes.cols, sizes.rows)
    if not (e.is_stored and (e.cols if over == "cols" else e.rows)) or e.packing is not None:
        return False
    if all(v.is_stored for v in leaves if v.feature is not None):  # products of 8 bits
        return False
    width = sizes.of(str(e.feature))
    if width <= WIDEST or kept < _WIDENED or math.prod(sizes.batch) > 1 or settings.requested_budget() is not None:
        return False
    return 2 * length * width <= budget.allowed_bytes(lambda: matmul.free_memory(sizes.device))


def describe_as_given(
    fold: Fold, over: str, values: Iterable[Any], sizes: Sizes, rank: int = 1, narrow: str | None = None, **more: Any
) -> Spec:
    """The spec of a kernel that reads its leaves as they are given, tensors or Python numbers, and skips no tiles."""
    types = tuple([v.dtype if isinstance(v, Tensor) else None for v in values])
    letters = tuple(sorted(sizes.letters.items()))
    return _make_spec(fold, over, types, letters, sizes.compute, narrow, rank, tuple(more.items()))


@functools.lru_cache(maxsize=4096)
def _make_spec(
    fold: Fold,
    over: str,
    types: tuple[torch.dtype | None, ...],
    letters: tuple[tuple[str, int], ...],
    compute: torch.dtype,
    narrow: str | None,
    rank: int,
    more: tuple[tuple[str, Any], ...],
) -> Spec:
    names = tuple("number" if dtype is None else str(dtype)[6:] for dtype in types)
    return Spec(fold, over, names, (0,) * len(types), letters, str(compute)[6:], narrow, rank, **dict(more))


def _is_unaligned(v: Tensor) -> bool:
    """True for vectors that do not begin at multiples of 16 bytes, as in slices of wider ones: no descriptor copies
    them. (A gradient of attention by such cotangents took five times as long on an H200, the copy a tenth of it.)"""
    return any(s * v.element_size() % 16 for s in v.stride()[:-1])


def narrow_type(vectors: Mapping[Expr, Tensor], sizes: Sizes) -> torch.dtype | None:
    """The 16-bit type of matrix products of these vectors, if there is one."""
    scales = {a for e in vectors if e.packing is not None for a in e.args}
    vectors = {e: v for e, v in vectors.items() if e not in scales}
    if vectors and all(e.is_stored for e in vectors) and sizes.compute is torch.float32:
        return torch.bfloat16  # which holds all numbers of 8 bits
    return next((v.dtype for v in vectors.values() if v.dtype in matmul.SIXTEEN), None)


def has_short_loops(spec: Spec) -> bool:
    """True when a fold is a softmax of so few folded indices that neither a guess nor a ring buffer pays."""
    guesses = any(spec.narrow == str(kind)[6:] for kind in _GUESSED)
    return guesses and not (spec.guess or spec.k_loop) and _is_softmax(spec.fold)


def _is_softmax(fold: Fold) -> bool:
    return any(r.attrs[0] == "soft" for r in fold.reductions)


def _is_in_eighths(v: Any) -> bool:
    """True when rows of 16-bit vectors begin at multiples of 16 bytes, but not all at multiples of 32."""
    if not isinstance(v, Tensor) or v.dtype not in matmul.SIXTEEN or v.stride(-1) != 1 or v.data_ptr() % 16:
        return False
    strides = v.stride()[:-1]
    return all(s % 8 == 0 for s in strides) and any(s % 16 for s in strides)


def busy_share(instances: int, many: int) -> float:
    """The share of multiprocessors that are busy on average, where each runs one instance at a time."""
    return instances / (-(-instances // many) * many)


@functools.lru_cache(maxsize=1024)
def condition_leaves(fold: Fold) -> tuple[Expr, ...]:
    """The leaves that a fold's conditions read."""
    return tuple(e for e in topological(kernel_spec.whole_tile_conditions(fold)) if e.op == "leaf")


def walks_are_short(spec: Spec) -> bool:
    """True when conditions on data are expected to leave few tiles of a loop, as packed documents do; long stretches
    (``mr.jagged``) do not."""
    return bool(spec.bounds and condition_leaves(spec.fold)) and tile_ranges.find_stretches(spec.fold) is None


@functools.lru_cache(maxsize=1024)
def _find_vectors(fold: Fold) -> tuple[Expr, ...]:
    """The vectors that a fold computes with."""
    return tuple(e for e in topological(fold.reductions) if e.feature is not None and e not in fold.tables)


@functools.lru_cache(maxsize=1024)
def _find_used_leaves(fold: Fold) -> frozenset[Expr]:
    return frozenset(e for e in topological([*fold.reductions, *fold.scales]) if e.op == "leaf")


@functools.lru_cache(maxsize=1024)
def _find_multiplied(fold: Fold) -> frozenset[Expr]:
    """The vector leaves that only ever enter matrix products."""
    walked: set[Expr] = set()
    multiplied: set[Expr] = set()
    for r in fold.reductions:
        walked |= set(pair_vector_leaves(r))
        for c in (move_factors_to_weight(c) for a in r.args for c in contractions(a, r.attrs[1])):
            roots = [x for x in (c.weight, c.vector, c.minus) if x is not None]
            if c.walk:
                walked |= {e for e in topological(roots, stop=lambda e: e.feature is None) if e.feature is not None}
            multiplied |= {x for x in (c.vector,) if x is not None and x.op == "leaf"}
            for e in topological([x for x in roots if x.feature is None or c.walk]):
                if e.op == "dot":
                    multiplied |= set(e.args)
                elif e.op in ("fsum", "sqdist", "famax", "famin"):
                    walked |= set(topological(e.args, stop=lambda x: x.feature is None))
            walked |= {x for x in (c.minus, c.vector) if x is not None and c.minus is not None}
    return frozenset(multiplied - walked)

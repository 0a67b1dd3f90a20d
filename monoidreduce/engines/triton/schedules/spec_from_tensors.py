"""From a call's tensors to the spec of its kernel: types, padding, conversions before the launch, device properties.

Before a launch a fold's vectors are made into what its kernel multiplies fastest:

**Pieces.** float32 vectors are split into 16-bit pieces, which the matrix units multiply. Without this, a kernel would
split both operands in every tile. A vector becomes several, one behind the other, each padded with zeros to a block's
width. A squared distance becomes a product and two norms.

- Thirds: three bfloat16 numbers add up to one float32. Six products of thirds are as exact as float32, and cost what
  three TF32 products cost. The weights of a sum of vectors are split in registers.
- Halves: two float16 numbers, where a fold uses its vectors for distances only. Three products are enough, half the
  cost. float16 has little range: every vector is scaled by a power of two, and what that loses (of numbers 2⁴⁰ times
  smaller than its largest) is less than the rounding of its norm.

Points are shifted so that their mean is 0: less cancels. Vectors with other uses than products and distances are not
split, nor are points with other uses than distances and gaps.

**Squared norms.** Distances of vectors of 16 or 8 bits become products, |s x|² + |t y|² - 2 s t ⟨x, y⟩. The norms are
computed once: a kernel then has the vectors for matrix products alone, as in any layer of inner products. Scales of
stored vectors stay outside of the product: so it is one of the vectors as they are stored, on the matrix units for 8
bits where both sides are. Digits cancel for close pairs by less than vectors were rounded when they were stored;
products of 16-bit numbers are exact.

**Turned values.** Values in 8-bit floats are copied with their features first, as Hopper's matrix units take them: the
folded axis is contiguous. The columns of each sixteen are in the order in which a thread of the warp-specialised
attention kernel holds their weights (``attention.py``, ``join_bytes``).
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....plan import budget, settings
from ....program import constructors
from ....program.constructors import apply, contractions
from ....program.expression import Expr, const, node, topological
from ....program.lower import Fold
from ...common import evaluate, matmul
from ...common.evaluate import Sizes
from ..codegen import kernel_spec, tile_ranges
from ..codegen.kernel_spec import (
    TINY,
    WIDEST,
    ClosePairs,
    Spec,
    pad_width,
    pair_vector_leaves,
    specialize,
    takes_k_loop,
)
from ..codegen.reductions import move_factors_to_weight
from ..launch import driver
from ..launch.driver import Kernels

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
MANY_FLOAT32 = 2**24  # pairs from which on splitting pays
MANY_STORED = 2**18  # pairs from which on norms of stored vectors are computed before the launch
MANY_SIXTEEN = 2**24  # and of 16-bit vectors, in all batch elements: a kernel of fewer computes them in its tiles
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
    wide = widest > WIDEST and takes_k_loop(fold, widest, narrow is not None)
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
        exact=sizes.compute is torch.float64 or evaluate.float32_precision() == "ieee",
        unrounded=fold.exact,
        native=narrow is not None and driver.has_tanh(sizes.device),
        eight_bit_mma=sizes.compute is torch.float32 and driver.multiplies_eight_bits(sizes.device),
        small_products=driver.has_small_products(),
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


_TEXT = """@triton.jit
def high_third(x):
    high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return tl.where(x == x, high, x)


@triton.jit
def points(x, centre, norms, at, rows, row, feature, WIDTH, LANES, CENTRED, NORMED):
    lane, there = tl.arange(0, LANES), at < rows
    v = tl.load(x + at[:, None] * row + lane[None, :] * feature, mask=there[:, None] & (lane < WIDTH)[None, :], other=0)
    if CENTRED:
        v -= tl.load(centre + lane, mask=lane < WIDTH, other=0)[None, :]
    if NORMED:
        tl.store(norms + at, tl.sum(v * v, 1), mask=there)
    if CENTRED:  # the norm says how far it is, and no product is infinite too
        v = tl.where(tl.abs(v) == float("inf"), 0.0, v)
    return v, lane[None, :], there[:, None]


@triton.jit
def thirds(
    out, norms, x, centre, rows, row, feature,
    WIDTH: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, CENTRED: tl.constexpr, NORMED: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    v, lane, there = points(x, centre, norms, at, rows, row, feature, WIDTH, LANES, CENTRED, NORMED)
    # thirds have the sign of their number and, where it is not 0, are not 0: infinity times each is the same infinity
    endless = tl.abs(v) == float("inf")
    least = tl.where(endless, tl.where(v > 0, 1.0, -1.0), v) * 2.0**-60
    first = high_third(v)
    rest = tl.where(endless, 0.0, v - first)
    second = high_third(rest)
    third = rest - second
    place = out + at[:, None] * (3 * LANES) + lane
    tl.store(place, first.to(out.dtype.element_ty), mask=there)
    second = high_third(tl.where(second == 0, least, second))
    tl.store(place + LANES, second.to(out.dtype.element_ty), mask=there)
    third = high_third(tl.where(third == 0, least, third))
    tl.store(place + 2 * LANES, third.to(out.dtype.element_ty), mask=there)


@triton.jit
def halves(
    out, norms, scales, x, centre, rows, row, feature,
    WIDTH: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, CENTRED: tl.constexpr, NORMED: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    v, lane, there = points(x, centre, norms, at, rows, row, feature, WIDTH, LANES, CENTRED, NORMED)
    # the power of two that takes the largest number below 2 ** 15, and its inverse
    most = tl.max(tl.abs(v), 1)
    power = tl.minimum(268 - (most.to(tl.int32, bitcast=True) >> 23), 253)
    v = v * (power << 23).to(tl.float32, bitcast=True)[:, None]
    tl.store(scales + at, ((254 - power) << 23).to(tl.float32, bitcast=True), mask=at < rows)
    first = v.to(tl.float16)
    place = out + at[:, None] * (2 * LANES) + lane
    tl.store(place, first, mask=there)
    tl.store(place + LANES, (v - first.to(tl.float32)).to(tl.float16), mask=there)


@triton.jit
def squared_norms(out, x, rows, row, feature, WIDTH: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr):
    at, lane = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, LANES)
    inside = (at < rows)[:, None] & (lane < WIDTH)[None, :]
    v = tl.load(x + at[:, None] * row + lane[None, :] * feature, mask=inside)
    v = tl.where(inside, v.to(tl.float32), 0.0)
    tl.store(out + at, tl.sum(v * v, 1), mask=at < rows)


@triton.jit
def turn(out, x, cols, inner, outer_step, step, col, feature, out_step, room, WIDTH: tl.constexpr, COLS: tl.constexpr):
    place = tl.program_id(0) * COLS + tl.arange(0, COLS)
    # of sixteen columns, 8 b + 2 t + e comes to stand at 4 t + 2 b + e
    at = (place // 16) * 16 + (place // 2 % 2) * 8 + (place % 16 // 4) * 2 + place % 2
    lane, batch = tl.arange(0, WIDTH), tl.program_id(1).to(tl.int64)
    x += batch // inner * outer_step + batch % inner * step
    block = x + at.to(tl.int64)[:, None] * col + lane[None, :] * feature
    block = tl.load(block, mask=(at < cols)[:, None], other=0)
    turned = out + batch * out_step + lane.to(tl.int64)[:, None] * room + place[None, :]
    tl.store(turned, tl.trans(block), mask=(place < room)[None, :])
"""
_kernels = Kernels("Vectors in pieces, their norms, and vectors with their features first.", _TEXT)


@dataclass(frozen=True)
class Split:
    """A vector leaf that is split before the launch."""

    leaf: Expr
    norm: Expr | None  # the new leaf of its squared norm
    scale: Expr | None  # the new leaf by which its halves are multiplied
    whole: Expr | None  # the new leaf of the vector itself, where close points are compared
    centre: Expr | None  # the leaf whose mean is subtracted


@dataclass(frozen=True)
class Rewritten:
    """A fold as its kernel computes it."""

    fold: Fold
    splits: tuple[Split, ...] = ()
    pieces: int = 0  # of every vector that is split
    close_pairs: ClosePairs = ()


def split_fold(fold: Fold, values: Mapping[Expr, Any], sizes: Sizes, pairs: int) -> Rewritten:
    """The fold with products in place of distances, and the vectors to split; unchanged where that does not pay, memory
    is bounded (thirds take 6 bytes for every 4) or vectors have other uses."""
    precision = evaluate.float32_precision()
    vectors = [e for e in fold.leaves if e.feature is not None and e not in fold.tables]
    wide = frozenset(e for e in vectors if sizes.of(str(e.feature)) > TINY)
    fits = all(sizes.of(str(e.feature)) <= WIDEST and values[e].dtype is torch.float32 for e in wide)
    fits = fits and sizes.compute is torch.float32 and precision in ("ieee", "tf32x3")
    pays = pairs >= MANY_FLOAT32 and settings.requested_budget() is None and driver.splits_float32(sizes.device)
    return (fits and pays and _split_fold(fold, wide, precision == "ieee")) or Rewritten(fold)


@functools.lru_cache(maxsize=1024)
def _split_fold(fold: Fold, wide: frozenset[Expr], exact: bool) -> Rewritten | None:
    used = [e for e in fold.leaves if e in wide and e in set(topological(fold.reductions))]
    products, distances, gaps, others = _find_uses(fold)
    if not used or others & wide:
        return None
    pairs = [p for p in distances if p[0] in wide]
    norms = {e: _make_leaf(e, "norm", None) for p in pairs for e in p}
    wholes = {e: _make_leaf(e, "whole", e.feature) for p in pairs for e in p} if exact else {}
    centres: dict[Expr, Expr] = {}
    if len(pairs) == 1 and not products & set(pairs[0]) and gaps <= {*pairs}:
        centres = dict.fromkeys(pairs[0], pairs[0][1])
    elif pairs:  # a product would lose infinities
        return None
    alone = not products & wide and not gaps
    scales = {e: _make_leaf(e, "scale", None) for p in pairs for e in p} if alone else {}
    changed = {constructors.sqdist(*p): _expand_square(p, norms, scales) for p in pairs}
    reductions = constructors.substitute(fold.reductions, changed)
    leaves = (*fold.leaves, *norms.values(), *scales.values(), *wholes.values())
    splits = tuple(Split(e, norms.get(e), scales.get(e), wholes.get(e), centres.get(e)) for e in used)
    near = tuple((changed[constructors.sqdist(*p)], (wholes[p[0]], wholes[p[1]])) for p in pairs) if exact else ()
    return Rewritten(replace(fold, leaves=leaves, reductions=reductions), splits, 2 if alone else 3, near)


def _make_leaf(e: Expr, what: str, feature: str | int | None) -> Expr:
    return node("leaf", (), (f"{e.attrs[0]}_{what}",), rows=e.rows, cols=e.cols, feature=feature, dtype="float")


def _expand_square(pair: tuple[Expr, Expr], norms: Mapping[Expr, Expr], scales: Mapping[Expr, Expr]) -> Expr:
    """|x|² + |y|² - 2⟨x, y⟩."""
    x, y = pair
    product, twice = constructors.dot(x, y), const(2.0)
    if scales:
        product, twice = apply("mul", product, scales[y]), apply("mul", twice, scales[x])
    square = apply("sub", apply("add", norms[x], norms[y]), apply("mul", product, twice))
    return apply("maximum", square, const(0.0))


def _find_uses(fold: Fold) -> tuple[set[Expr], set[tuple[Expr, Expr]], set[tuple[Expr, Expr]], set[Expr]]:
    """The uses of vector leaves: products, squared distances, gaps; and the leaves that anything else reads."""
    products: set[Expr] = set()
    distances: set[tuple[Expr, Expr]] = set()
    gaps: set[tuple[Expr, Expr]] = set()
    others = {e for r in fold.reductions for e in pair_vector_leaves(r)}
    for c in (move_factors_to_weight(c) for r in fold.reductions for a in r.args for c in contractions(a, r.attrs[1])):
        roots = [c.weight]
        if c.minus is not None and c.vector is not None:
            gaps.add((c.vector, c.minus) if c.vector.rows else (c.minus, c.vector))
        elif c.vector is not None and c.vector.op == "leaf":
            products.add(c.vector)
        elif c.vector is not None:
            roots.append(c.vector)
        for e in topological(roots, stop=_is_product):
            if _is_product(e):
                distances |= {(e.args[0], e.args[1])} if e.op == "sqdist" else set()
                products |= set(e.args) if e.op == "dot" else set()
            elif e.op == "leaf" and e.feature is not None:
                others.add(e)
    return products, distances, gaps, others


def _is_product(e: Expr) -> bool:
    return e.op in ("dot", "sqdist") and all(a.op == "leaf" for a in e.args)


def split_leaves(splits: Iterable[Split], values: Mapping[Expr, Any], batch: int) -> dict[Expr, Any]:
    """The leaves with vectors split and their norms; ``batch``: how many leading dimensions are batch."""
    found = dict(values)
    middles: dict[Expr, Tensor] = {}
    for s in splits:
        centre = None
        if s.centre is not None:
            if s.centre not in middles:
                own = _drop_broadcast(values[s.centre], batch)
                middles[s.centre] = torch.nan_to_num(own.mean(tuple(range(own.dim() - 1))), 0.0, 0.0, 0.0)
            centre = middles[s.centre]
        parts = _split_vectors(values[s.leaf], batch, centre, s.norm is not None, s.scale is not None)
        wanted = (s.leaf, s.norm, s.scale, s.whole)
        found |= {e: v for e, v in zip(wanted, (*parts, values[s.leaf]), strict=True) if e is not None}
    return found


def _drop_broadcast(v: Tensor, batch: int) -> Tensor:
    """A leaf with its broadcast batch dimensions reduced to 1."""
    return v[tuple(slice(1) if s == 0 else slice(None) for s in v.stride()[:batch])]


def _split_vectors(v: Tensor, batch: int, centre: Tensor | None, normed: bool, halved: bool) -> tuple[Tensor, ...]:
    """The pieces of vectors, their norms and their scales (the latter two only where asked for)."""
    own = _drop_broadcast(v, batch)
    width, lanes = v.shape[-1], pad_width(v.shape[-1])
    flat = own.reshape(-1, width)
    count, kind = (2, torch.float16) if halved else (3, torch.bfloat16)
    pieces = torch.empty(*own.shape[:-1], count * lanes, dtype=kind, device=v.device)
    norms, scales = (
        torch.empty(own.shape[:-1] if asked else (1,), dtype=torch.float32, device=v.device)
        for asked in (normed, halved)
    )
    constants = dict(WIDTH=width, LANES=lanes, ROWS=max(1, 2048 // lanes), CENTRED=centre is not None, NORMED=normed)
    given = (flat, norms if centre is None else centre, len(flat), *flat.stride())
    written = (pieces, norms, scales) if halved else (pieces, norms)
    if not v.is_meta:  # a dry run
        name, grid = "halves" if halved else "thirds", (-(-len(flat) // constants["ROWS"]),)
        _kernels(name, grid, (*written, *given), constants)
    numbers = (t.expand(v.shape[:-1]) if asked else t for t, asked in ((norms, normed), (scales, halved)))
    return pieces.expand(*v.shape[:-1], count * lanes), *numbers


# Squared norms of vectors of 16 or 8 bits


@dataclass(frozen=True)
class Norm:
    """The squared norms of a leaf's vectors, a new leaf that is computed before the launch."""

    vector: Expr
    norm: Expr


def replace_distances(
    fold: Fold, values: Mapping[Expr, Any], sizes: Sizes, pairs: int, batch: int = 1
) -> tuple[Fold, tuple[Norm, ...]]:
    """The fold with products in place of distances of stored or 16-bit vectors; ``pairs``: of each of ``batch``
    elements."""
    stored = pairs >= max(MANY_STORED, 2) and any(e.is_stored for e in fold.leaves)
    if sizes.compute is not torch.float32 or not (stored or (pairs > 1 and pairs * batch >= MANY_SIXTEEN)):
        return fold, ()
    plain = [e for e in fold.leaves if e not in fold.packed]
    small = {e for e in plain if e.is_stored or getattr(values[e], "dtype", None) in matmul.SIXTEEN}
    wide = {e for e in small if e.feature is not None and TINY < sizes.of(str(e.feature)) <= WIDEST}
    return _replace_distances(fold, frozenset(wide))


@functools.lru_cache(maxsize=1024)
def _replace_distances(fold: Fold, vectors: frozenset[Expr]) -> tuple[Fold, tuple[Norm, ...]]:
    changed, norms = {}, dict[Expr, Expr]()
    for e in topological(fold.reductions):
        sides = [constructors.split_scale(a) for a in e.args] if e.op == "sqdist" else []
        if not sides or not vectors.issuperset(v for _, v in sides):
            continue
        total = const(0.0)
        for scale, v in sides:
            name = f"{v.attrs[0]}_norm"
            norms[v] = node("leaf", (), (name,), rows=v.rows, cols=v.cols, feature=None, dtype="float")
            total = apply("add", total, apply("mul", norms[v], apply("square", scale)))
        twice = apply("mul", constructors.dot(*e.args), const(2.0))
        changed[e] = apply("maximum", apply("sub", total, twice), const(0.0))
    if not changed:
        return fold, ()
    reductions = constructors.substitute(fold.reductions, changed)
    leaves = (*fold.leaves, *norms.values())
    return replace(fold, leaves=leaves, reductions=reductions), tuple(Norm(v, n) for v, n in norms.items())


def compute_norms(norms: Iterable[Norm], values: Mapping[Expr, Any], batch: int) -> dict[Expr, Tensor]:
    """The new leaves; ``batch``: how many leading dimensions of leaves are batch."""
    found = {}
    for one in norms:
        v = values[one.vector]
        rows = NormRows.of(v, batch)
        out = torch.empty(rows.shape, dtype=torch.float32, device=v.device)
        if rows.count and not v.is_meta:  # a dry run
            rows.launch(out, rows.flat(v))
        found[one.norm] = out.expand(v.shape[:-1])
    return found


@dataclass(frozen=True)
class NormRows:
    """The vectors of a leaf, each once where a batch dimension is broadcast, one after the other: ``shape`` of their
    norms, ``own``: what of the batch dimensions is read, ``strides`` of rows and features; no ``strides``: a copy."""

    shape: tuple[int, ...]
    own: tuple[slice, ...]
    width: int
    strides: tuple[int, ...] | None

    @staticmethod
    def of(v: Tensor, batch: int) -> NormRows:
        own = tuple(slice(1) if s == 0 else slice(None) for s in v.stride()[:batch])
        kept = v[own]
        try:
            strides = kept.view(-1, v.shape[-1]).stride()
        except RuntimeError:
            strides = None
        return NormRows(tuple(kept.shape[:-1]), own, v.shape[-1], strides)

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def flat(self, v: Tensor) -> Tensor:
        return v[self.own].reshape(-1, self.width)

    def launch(self, out: Tensor, flat: Tensor) -> Callable[..., None] | None:
        """Compute the norms of ``flat`` rows; what does it again, if there is."""
        lanes = pad_width(self.width)
        constants = dict(WIDTH=self.width, LANES=lanes, ROWS=max(1, 4096 // lanes))
        grid = (-(-self.count // constants["ROWS"]),)
        return _kernels("squared_norms", grid, (out, flat, self.count, *flat.stride()), constants)


# Values with their features first


_COLS = 128  # columns of an instance


def transpose_leaves(transposed: Iterable[Expr], values: Mapping[Expr, Any], batch: int) -> dict[Expr, Tensor]:
    """The leaves [*batch, columns, features] as [*batch, features, columns]; features are a power of two, and columns
    padded with zeros to a multiple of 16."""
    found = {}
    for e in transposed:
        v = values[e]
        own = _drop_broadcast(v, batch)  # once
        flat = own.view(torch.int8)
        while flat.dim() != 4:  # two batch dimensions with strides of their own
            flat = flat[None] if flat.dim() < 4 else flat.flatten(0, 1)
        (outer, inner, cols, width), strides = flat.shape, flat.stride()
        room = -(-cols // 16) * 16
        out = torch.empty(*own.shape[:-2], width, room, dtype=v.dtype, device=v.device)
        if flat.numel() and not v.is_meta:  # a dry run
            given = (out.view(torch.int8), flat, cols, inner, *strides, width * room, room)
            _kernels("turn", (-(-room // _COLS), outer * inner), given, dict(WIDTH=width, COLS=_COLS))
        found[e] = out.expand(*v.shape[:batch], width, room)
    return found


# All of it

Cast = tuple[Expr, torch.dtype, int]  # a leaf to convert, and the features to pad it to


class Conversions(NamedTuple):
    """What is made of leaves before a launch; all empty where a kernel reads them as they are."""

    splits: tuple[Split, ...] = ()
    casts: tuple[Cast, ...] = ()
    norms: tuple[Norm, ...] = ()
    transposed: tuple[Expr, ...] = ()

    def convert(self, values: Mapping[Expr, Any], batch: tuple[int, ...], sizes: Sizes) -> dict[Expr, Any]:
        """The leaves as the kernel reads them; ``values``: tensors ``[*batch, length(, features)]``, or numbers."""
        rank = len(batch)
        found = split_leaves(self.splits, values, rank) | compute_norms(self.norms, values, rank)
        for e, dtype, room in self.casts:
            v = found[e]
            if not isinstance(v, Tensor):
                found[e] = torch.full((1,) * rank, v, dtype=dtype, device=sizes.device).expand(batch)
            elif room:
                own = [1 if s == 0 else n for n, s in zip(v.shape[:rank], v.stride(), strict=False)]
                kept = torch.zeros((*own, v.shape[-2], room), dtype=dtype, device=v.device)
                kept[..., : v.shape[-1]] = v[tuple(slice(n) for n in own)]  # a broadcast leaf is copied once
                found[e] = kept.expand(*batch, -1, -1)
            else:
                found[e] = v.to(dtype)
        return found | transpose_leaves(self.transposed, found, rank)

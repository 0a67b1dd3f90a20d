"""What is made of a fold's vectors before its launch: 16-bit pieces, squared norms, conversions, values turned round.

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
attention kernel holds their weights (``attention_template.py``, ``join_bytes``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....plan import settings
from ....program import constructors
from ....program.constructors import apply, contractions
from ....program.expression import Expr, const, node, topological
from ....program.lower import Fold
from ...common import matmul
from ...common.evaluate import Sizes
from ..codegen.kernel_spec import TINY, WIDEST, ClosePairs, pad_width, pair_vector_leaves
from ..codegen.reductions import move_factors_to_weight
from ..launch import hardware
from ..launch.jit_module import Kernels

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
MANY_FLOAT32 = 2**24  # pairs from which on splitting pays


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
    precision = matmul.float32_precision()
    vectors = [e for e in fold.leaves if e.feature is not None and e not in fold.tables]
    wide = frozenset(e for e in vectors if sizes.of(str(e.feature)) > TINY)
    fits = all(sizes.of(str(e.feature)) <= WIDEST and values[e].dtype is torch.float32 for e in wide)
    fits = fits and sizes.compute is torch.float32 and precision in ("ieee", "tf32x3")
    pays = pairs >= MANY_FLOAT32 and settings.requested_budget() is None and hardware.splits_float32(sizes.device)
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


MANY_STORED = 2**18  # pairs from which on norms of stored vectors are computed before the launch
MANY_SIXTEEN = 2**24  # and of 16-bit vectors, in all batch elements: a kernel of fewer computes them in its tiles


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

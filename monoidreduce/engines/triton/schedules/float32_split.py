"""float32 vectors split into 16-bit pieces, which the matrix units multiply.

Without this, a kernel would split both operands in every tile. Here vectors are split once, before the launch: a vector
becomes several, one behind the other, each padded with zeros to a block's width. A squared distance becomes a product
and two norms.

- Thirds: three bfloat16 numbers add up to one float32. Six products of thirds are as exact as float32, and cost what
  three TF32 products cost. The weights of a sum of vectors are split in registers.
- Halves: two float16 numbers, where a fold uses its vectors for distances only. Three products are enough, half the
  cost. float16 has little range: every vector is scaled by a power of two, and what that loses (of numbers 2⁴⁰ times
  smaller than its largest) is less than the rounding of its norm.

Points are shifted so that their mean is 0: less cancels. Vectors with other uses than products and distances are not
split, nor are points with other uses than distances and gaps.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ....plan import budget, settings
from ....program import constructors
from ....program.constructors import apply
from ....program.contract import contractions
from ....program.expression import Expr, const, node, topological
from ....program.lower import Fold
from ...common import matmul
from ...common.evaluate import Sizes
from ..codegen.accumulators import move_factors_to_weight
from ..codegen.kernel_spec import TINY, WIDEST, Near, padded, pair_vector_leaves
from ..launch.launch_cache import Kernels

_TEXT = '''"""Vectors in pieces, and their norms."""

import triton
import triton.language as tl


@triton.jit
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
'''
_kernels = Kernels(_TEXT)
MANY = 2**24  # pairs from which on splitting pays


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
    near: Near = ()


@functools.cache
def is_supported(device: torch.device) -> bool:
    """True on Hopper and newer, which multiply split weights without moving them between threads."""
    if device.type != "cuda":
        return settings.interprets_kernels()
    if not torch.cuda.is_available() or torch.version.hip is not None:  # a plan for a GPU elsewhere
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def rewrite_fold(fold: Fold, values: Mapping[Expr, Any], sizes: Sizes, pairs: int) -> Rewritten:
    """The fold with products in place of distances, and the vectors to split; unchanged where that does not pay, memory
    is bounded (thirds take 6 bytes for every 4) or vectors have other uses."""
    precision = matmul.float32_precision()
    vectors = [e for e in fold.leaves if e.feature is not None and e not in fold.tables]
    wide = frozenset(e for e in vectors if sizes.of(str(e.feature)) > TINY)
    fits = all(sizes.of(str(e.feature)) <= WIDEST and values[e].dtype is torch.float32 for e in wide)
    fits = fits and sizes.compute is torch.float32 and precision in ("ieee", "tf32x3")
    pays = pairs >= MANY and budget.requested() is None and is_supported(sizes.device)
    return (fits and pays and _rewrite(fold, wide, precision == "ieee")) or Rewritten(fold)


@functools.lru_cache(maxsize=1024)
def _rewrite(fold: Fold, wide: frozenset[Expr], exact: bool) -> Rewritten | None:
    used = [e for e in fold.leaves if e in wide and e in set(topological(fold.reductions))]
    products, distances, gaps, others = _find_uses(fold)
    if not used or others & wide:
        return None
    pairs = [p for p in distances if p[0] in wide]
    norms = {e: _leaf(e, "norm", None) for p in pairs for e in p}
    wholes = {e: _leaf(e, "whole", e.feature) for p in pairs for e in p} if exact else {}
    centres: dict[Expr, Expr] = {}
    if len(pairs) == 1 and not products & set(pairs[0]) and gaps <= {*pairs}:
        centres = dict.fromkeys(pairs[0], pairs[0][1])
    elif pairs:  # a product would lose infinities
        return None
    alone = not products & wide and not gaps
    scales = {e: _leaf(e, "scale", None) for p in pairs for e in p} if alone else {}
    changed = {constructors.sqdist(*p): _square(p, norms, scales) for p in pairs}
    reductions = constructors.substitute(fold.reductions, changed)
    leaves = (*fold.leaves, *norms.values(), *scales.values(), *wholes.values())
    splits = tuple(Split(e, norms.get(e), scales.get(e), wholes.get(e), centres.get(e)) for e in used)
    near = tuple((changed[constructors.sqdist(*p)], (wholes[p[0]], wholes[p[1]])) for p in pairs) if exact else ()
    return Rewritten(replace(fold, leaves=leaves, reductions=reductions), splits, 2 if alone else 3, near)


def _leaf(e: Expr, what: str, feature: str | int | None) -> Expr:
    return node("leaf", (), (f"{e.attrs[0]}_{what}",), rows=e.rows, cols=e.cols, feature=feature, dtype="float")


def _square(pair: tuple[Expr, Expr], norms: Mapping[Expr, Expr], scales: Mapping[Expr, Expr]) -> Expr:
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
        parts = _split(values[s.leaf], batch, centre, s.norm is not None, s.scale is not None)
        wanted = (s.leaf, s.norm, s.scale, s.whole)
        found |= {e: v for e, v in zip(wanted, (*parts, values[s.leaf]), strict=True) if e is not None}
    return found


def _drop_broadcast(v: Tensor, batch: int) -> Tensor:
    """A leaf with its broadcast batch dimensions reduced to 1."""
    return v[tuple(slice(1) if s == 0 else slice(None) for s in v.stride()[:batch])]


def _split(v: Tensor, batch: int, centre: Tensor | None, normed: bool, halved: bool) -> tuple[Tensor, ...]:
    """The pieces of vectors, their norms and their scales (the latter two only where asked for)."""
    own = _drop_broadcast(v, batch)
    width, lanes = v.shape[-1], padded(v.shape[-1])
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

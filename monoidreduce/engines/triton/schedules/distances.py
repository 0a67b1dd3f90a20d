"""Squared distances of vectors of 16 or 8 bits, as products: |s x|² + |t y|² - 2 s t ⟨x, y⟩.

The squared norms are computed once, before the launch: a kernel then has the vectors for matrix products alone, as in
any layer of inner products. Scales of stored vectors stay outside of the product: so it is one of the vectors as they
are stored, on the matrix units for 8 bits where both sides are. Digits cancel for close pairs by less than vectors were
rounded when they were stored; products of 16-bit numbers are exact.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ....program import constructors
from ....program.constructors import apply
from ....program.expression import Expr, const, node, topological
from ....program.lower import Fold
from ...common import matmul
from ...common.evaluate import Sizes
from ..codegen.kernel_spec import TINY, WIDEST, padded
from ..launch.jit_module import Kernels

MANY = 2**18  # pairs from which on norms of stored vectors are computed before the launch
MANY_SIXTEEN = 2**24  # and of 16-bit vectors, in all batch elements: a kernel of fewer computes them in its tiles
_TEXT = '''"""Squared norms of vectors."""

import triton
import triton.language as tl


@triton.jit
def squared_norms(out, x, rows, row, feature, WIDTH: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr):
    at, lane = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, LANES)
    inside = (at < rows)[:, None] & (lane < WIDTH)[None, :]
    v = tl.load(x + at[:, None] * row + lane[None, :] * feature, mask=inside)
    v = tl.where(inside, v.to(tl.float32), 0.0)
    tl.store(out + at, tl.sum(v * v, 1), mask=at < rows)
'''
_kernels = Kernels(_TEXT)


@dataclass(frozen=True)
class Norm:
    """The squared norms of a leaf's vectors, a new leaf that is computed before the launch."""

    vector: Expr
    norm: Expr


def rewrite_fold(
    fold: Fold, values: Mapping[Expr, Any], sizes: Sizes, pairs: int, batch: int = 1
) -> tuple[Fold, tuple[Norm, ...]]:
    """The fold with products in place of distances of stored or 16-bit vectors; ``pairs``: of each of ``batch``
    elements."""
    stored = pairs >= max(MANY, 2) and any(e.is_stored for e in fold.leaves)
    if sizes.compute is not torch.float32 or not (stored or (pairs > 1 and pairs * batch >= MANY_SIXTEEN)):
        return fold, ()
    sixteen = lambda v: isinstance(v, Tensor) and v.dtype in matmul.SIXTEEN
    small = {e for e in fold.leaves if e not in fold.packed and (e.is_stored or sixteen(values[e]))}
    wide = {e for e in small if e.feature is not None and TINY < sizes.of(str(e.feature)) <= WIDEST}
    return _rewrite(fold, frozenset(wide))


@functools.lru_cache(maxsize=1024)
def _rewrite(fold: Fold, vectors: frozenset[Expr]) -> tuple[Fold, tuple[Norm, ...]]:
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
        lanes = padded(self.width)
        constants = dict(WIDTH=self.width, LANES=lanes, ROWS=max(1, 4096 // lanes))
        grid = (-(-self.count // constants["ROWS"]),)
        return _kernels("squared_norms", grid, (out, flat, self.count, *flat.stride()), constants)

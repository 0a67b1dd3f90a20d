"""What is left to do to sums whose weights wait for a factor of their row: the factor, and one column of each row.

A row's own column (its label) stands out by orders of magnitude. Written among the weights it would be rounded with
them, and multiplied by a rounded factor: it is added here instead, in float32, where its sums are complete. Rows of one
label are added in their order by the first of them, so that nothing depends on which comes first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..launch.launch_cache import Kernels

_TEXT = '''"""Vectors times a number of their row, and the vectors of labels."""

import triton
import triton.language as tl


@triton.jit
def scale_rows(out, vectors, vectors_s, vectors_f, factors, WIDTH: tl.constexpr, LANES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(factors + row)
    for start in range(0, WIDTH, LANES):
        lane = start + tl.arange(0, LANES)
        own = tl.load(vectors + row * vectors_s + lane * vectors_f, mask=lane < WIDTH, other=0).to(tl.float32)
        tl.store(out + row * WIDTH + lane, own * factor, mask=lane < WIDTH)


@triton.jit
def clear_own(pairs, pairs_r, targets, first, last, rows, LANES: tl.constexpr):
    row = tl.program_id(0) * LANES + tl.arange(0, LANES)
    target = tl.load(targets + row, mask=row < rows, other=-1)
    inside = (target >= first) & (target < last)
    nothing = tl.zeros([LANES], tl.float32).to(pairs.dtype.element_ty)
    tl.store(pairs + row.to(tl.int64) * pairs_r + target - first, nothing, mask=inside)


@triton.jit
def complete_rows(
    out, factors, hits, targets, vectors, vectors_s, vectors_f,
    SCALED: tl.constexpr, HITS: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(factors + row) if SCALED else 1.0
    for start in range(0, WIDTH, LANES):
        lane = start + tl.arange(0, LANES)
        value = tl.load(out + row * WIDTH + lane, mask=lane < WIDTH, other=0).to(tl.float32) * factor
        if HITS:
            hit = tl.load(hits + row)
            if hit != 0.0:
                place = tl.load(targets + row) * vectors_s + lane * vectors_f
                value += hit * tl.load(vectors + place, mask=lane < WIDTH, other=0).to(tl.float32)
        tl.store(out + row * WIDTH + lane, value, mask=lane < WIDTH)


@triton.jit
def add_labels(
    out, hits, targets, vectors, vectors_s, vectors_f, rows,
    DISTINCT: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr,
    MANY: tl.constexpr,
):
    row = tl.program_id(0) // BLOCKS
    lane = tl.program_id(0) % BLOCKS * LANES + tl.arange(0, LANES)
    hit = tl.load(hits + row)
    target = tl.load(targets + row)
    before = 0
    after = 0
    if not DISTINCT:
        if hit != 0.0:
            for start in range(0, rows, 1024):
                other = start + tl.arange(0, 1024)
                same = tl.load(targets + other, mask=other < rows, other=-1) == target
                same = same & (tl.load(hits + other, mask=same, other=0.0) != 0.0)
                before += tl.sum((same & (other < row)).to(tl.int32))
                after += tl.sum((same & (other > row)).to(tl.int32))
    if (hit != 0.0) & (before == 0):
        place = out + target * WIDTH + lane
        value = tl.load(place, mask=lane < WIDTH, other=0).to(tl.float32)
        own = vectors + row.to(tl.int64) * vectors_s + lane * vectors_f
        value += hit * tl.load(own, mask=lane < WIDTH, other=0).to(tl.float32)
        if after > 0:
            for start in range(row + 1, rows, MANY):
                others = start + tl.arange(0, MANY)
                same = tl.load(targets + others, mask=others < rows, other=-1) == target
                if tl.max(tl.abs(tl.load(hits + others, mask=same, other=0.0))) > 0.0:
                    for some in range(start, min(start + MANY, rows), ROWS):
                        other = some + tl.arange(0, ROWS)
                        there = tl.load(hits + other, mask=other < rows, other=0.0)
                        there = tl.where(tl.load(targets + other, mask=other < rows, other=-1) == target, there, 0.0)
                        if tl.max(tl.abs(there)) > 0.0:
                            more = vectors + other.to(tl.int64)[:, None] * vectors_s + lane[None, :] * vectors_f
                            mask = (there != 0.0)[:, None] & (lane < WIDTH)[None, :]
                            value += tl.sum(tl.load(more, mask=mask, other=0).to(tl.float32) * there[:, None], 0)
        tl.store(place, value, mask=lane < WIDTH)
'''
_run = Kernels(_TEXT)


@dataclass(frozen=True)
class Rest:
    """What is known of rows late, one number each: factors, and what is added in the column ``targets``."""

    factors: Tensor | None
    hits: Tensor | None = None  # 0 where nothing is added
    targets: Tensor | None = None  # some column that exists, where there is something to add
    distinct: bool = False  # whether no two rows have the same
    ready: Tensor | None = None  # rows' vectors times their factors

    def scaled(self, vectors: Tensor, kind: torch.dtype, out: Tensor | None = None) -> Tensor:
        """A row's vectors times its factor."""
        if self.ready is not None:
            return self.ready
        out = torch.empty(vectors.shape, dtype=kind, device=vectors.device) if out is None else out
        constants = dict(WIDTH=vectors.shape[1], LANES=1024)
        _run("scale_rows", vectors.shape[:1], (out, vectors, *vectors.stride(), self.factors), constants)
        return out

    def complete(self, sums: Tensor, vectors: Tensor) -> Tensor:
        """Sums over columns, in place; ``vectors``: what was summed, of all columns."""
        factors, hits, targets = (sums if t is None else t for t in (self.factors, self.hits, self.targets))
        has = dict(SCALED=self.factors is not None, HITS=self.hits is not None)
        constants = dict(**has, WIDTH=sums.shape[1], LANES=1024)
        arguments = (sums, factors, hits, targets, vectors, *vectors.stride())
        _run("complete_rows", sums.shape[:1], arguments, constants)
        return sums

    def clear(self, pairs: Tensor, first: int) -> None:
        """Weights of some columns, from ``first`` on: none stays that is added here."""
        if self.targets is not None:
            arguments = (pairs, pairs.stride(0), self.targets, first, first + pairs.shape[1], pairs.shape[0])
            _run("clear_own", (-(-pairs.shape[0] // 128),), arguments, dict(LANES=128))

    def of(self, rows: slice) -> Rest:
        """The same of some rows."""
        factors, hits, targets = (None if t is None else t[rows] for t in (self.factors, self.hits, self.targets))
        return replace(self, factors=factors, hits=hits, targets=targets)

    def add(self, sums: Tensor, vectors: Tensor) -> None:
        """Sums over rows, in place, once the weights are in them; ``vectors``: of these rows, not scaled."""
        if self.hits is None or self.targets is None:
            return
        width, lanes = sums.shape[1], 2048  # every block of lanes looks for rows of the same label
        constants = dict(DISTINCT=self.distinct, WIDTH=width, LANES=lanes, BLOCKS=-(-width // lanes), ROWS=8, MANY=256)
        arguments = (sums, self.hits, self.targets, vectors, *vectors.stride(), vectors.shape[0])
        _run("add_labels", (vectors.shape[0] * constants["BLOCKS"],), arguments, constants)

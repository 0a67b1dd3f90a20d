"""A gradient with respect to rows and that of a band in one launch.

Both are sums of the same numbers per pair. The warp-specialised kernel of the first also leaves their sums along the
diagonals of every tile (``schedules/resident/diagonal_sums.py``), 128 numbers of 64 × 64 pairs; a small kernel adds
those of all tiles, in a fixed order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....plan import budget
from ....program.constructors import apply
from ....program.contract import contractions
from ....program.diagonals import is_along_diagonals
from ....program.expression import Expr, topological
from ....program.lower import Fold
from ...common.evaluate import Allocator, Sizes
from ..codegen.accumulators import move_factors_to_weight
from ..codegen.kernel_spec import Unsupported
from ..launch.launch_cache import Kernels
from ..schedules.gluon_parts import GROUP_ROWS
from ..schedules.resident.diagonal_sums import SUMS
from .diagonal_bands import DiagonalIndex, add_diagonals
from .fold_kernel import FoldLaunch, Layouts, Leaves

_MOST_BYTES = 2**28  # of the sums of all tiles: a sixteenth of what the pairs would take in 16 bits
_TEXT = '''"""Sums along diagonals, from those of all tiles."""

import triton
import triton.language as tl


@triton.jit
def sum_tiles(out, parts, strips, tiles, HALF: tl.constexpr):
    # of 64 diagonals, those that begin at tile (strip, tile) with tile - strip = block - (strips - 1)
    block = tl.program_id(0) % (strips + tiles)
    batch = tl.program_id(0) // (strips + tiles)
    lane = tl.arange(0, HALF)
    base = parts + tl.cast(batch, tl.int64) * strips * tiles * (2 * HALF)
    total = tl.zeros([HALF], tl.float32)
    first = tl.maximum(0, strips - 1 - block)
    for strip in range(first, tl.minimum(strips, strips + tiles - block)):
        tile = block - (strips - 1) + strip
        place = base + (tl.cast(strip, tl.int64) * tiles + tile) * (2 * HALF) + lane
        total += tl.load(place, mask=lane * 0 + tile < tiles, other=0.0)
        total += tl.load(place - HALF, mask=lane * 0 + tile > 0, other=0.0)
    tl.store(out + tl.cast(tl.program_id(0), tl.int64) * HALF + lane, total)
'''
_kernels = Kernels(_TEXT)


class DiagonalLaunch(FoldLaunch):
    """The kernel of one sum over columns that also leaves the sums of a histogram along diagonals.

    Raises Unsupported where there is none."""

    combines = True

    def __init__(
        self, fold: Fold, histogram: Expr, values: Leaves, batch: tuple[int, ...], sizes: Sizes, layouts: Layouts
    ):
        value, index, table = histogram.args
        self.histogram, self.table_size = histogram, sizes.of(str(table.feature))
        self.number = find_shared_number(fold, value)
        bytes_ = math.prod(batch) * sizes.rows * sizes.cols * 4 * SUMS // GROUP_ROWS**2
        if (
            self.number is None
            or not is_along_diagonals(index)
            or bytes_ > _MOST_BYTES
            or budget.requested() is not None
        ):
            raise Unsupported("a gradient of rows has no numbers in common with that of the table")
        self.places = DiagonalIndex(index, fold.leaves, sizes, self.table_size)
        super().__init__(fold, "cols", values, batch, sizes, layouts)

    @property
    def made(self) -> tuple[tuple[Expr, int], ...]:
        return *self.fold.outputs, (self.histogram, 0)

    def _describe(self, values: Leaves) -> None:
        super()._describe(values)
        self.spec = replace(self.spec, diagonals=self.number)

    def _write_kernel(self, copied: tuple) -> None:
        super()._write_kernel(copied)
        if "sum_antidiagonals" not in self.kernel.text:
            raise Unsupported("there is no warp-specialised kernel")

    def _lay_out_results(self) -> None:
        super()._lay_out_results()
        rows, cols = (-(-n // GROUP_ROWS) for n in (2 * GROUP_ROWS * self.tiles, self.lengths[1]))
        self.strips, self.folded_tiles = rows, cols
        self.outputs.append(((math.prod(self.batch), rows, cols, SUMS), torch.float32))
        self.rooms.append(Allocator(self.outputs[-1], self.sizes.device))

    def recipe(self) -> None:
        return None  # the sums of tiles are added afterwards

    def __call__(
        self, leaves: Sequence[Any], merged: Callable[[], Leaves], then: Callable[[list[Tensor]], None] | None = None
    ) -> list[Tensor]:
        assert then is None, "sums have no lists that are completed"
        outputs = [room() for room in self.rooms]
        if self.spec.bounds:  # tiles may be skipped
            outputs[-1].zero_()
        if not self.grid:
            outputs[-1] = outputs[-1].new_zeros(*self.sizes.batch, self.table_size)
            return outputs
        if not self.launched(outputs, leaves, merged):
            return self(leaves, merged)
        sums = sum_tiles(outputs.pop(), *self.lengths)
        found = add_diagonals(sums, self.places(leaves), self.table_size)
        return [*outputs, found.view(*self.sizes.batch, self.table_size)]


def sum_tiles(parts: Tensor, rows: int, cols: int) -> Tensor:
    """Sums over every diagonal, from ``i - j = 1 - cols`` on, of what tiles ``[batch, strips, tiles, 128]`` left.
    Number x of tile (s, t) is of ``i - j = 64 (s - t) + 63 - x``."""
    batch, strips, tiles, _ = parts.shape
    found = parts.new_empty(batch, (strips + tiles) * GROUP_ROWS)
    grid = (batch * (strips + tiles),)
    _kernels("sum_tiles", grid, (found, parts, strips, tiles), dict(HALF=GROUP_ROWS), dict(num_warps=2))
    last = strips * GROUP_ROWS
    return found[:, last - rows : last + cols - 1].flip(1)


def find_shared_number(fold: Fold, value: Expr) -> Expr | None:
    """What a histogram adds up, as the weight of a sum over columns times a number of the row; None where it is not."""
    if len(fold.reductions) != 1 or fold.reductions[0].attrs[:2] != ("sum", "cols"):
        return None
    found = [move_factors_to_weight(c) for c in contractions(fold.reductions[0].args[0], "cols")]
    if len(found) != 1:
        return None
    weight = found[0].weight
    rest = Counter(_factors(value))
    rest.subtract(Counter(_factors(weight)))
    if min(rest.values()) < 0:
        return None
    number = weight
    for e in rest.elements():
        if e.cols or any(n.op == "leaf" and n.feature is not None for n in topological([e])):
            return None
        number = apply("mul", number, e)
    return number


def _factors(e: Expr) -> list[Expr]:
    return [f for a in e.args for f in _factors(a)] if e.op == "mul" else [e]

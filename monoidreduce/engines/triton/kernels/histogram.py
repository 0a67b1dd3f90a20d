"""Launches of a table's gradient, and what makes one result of all program instances' parts, in a fixed order.

:class:`HistogramLaunch` runs a kernel of its own (``codegen/histogram.py``). :class:`DiagonalLaunch` has the gradient
with respect to rows and that of a band in one launch: both are sums of the same numbers per pair. The warp-specialised
kernel of the first also leaves their sums along the diagonals of every tile (``schedules/resident/diagonal_sums.py``),
128 numbers of 64 × 64 pairs; a small kernel adds those of all tiles, in a fixed order.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ....plan import settings
from ....program.constructors import apply, is_along_diagonals, split_index
from ....program.expression import Expr, topological
from ....program.lower import Fold
from ....reductions.histogram import add_at
from ...common.evaluate import Allocator, Sizes
from ..codegen.histogram import compile_histogram
from ..codegen.kernel_spec import Spec, Unsupported, pad_width
from ..codegen.reductions import find_plain_sum, list_factors
from ..launch import hardware
from ..launch.jit_module import Kernels
from ..schedules.gluon_parts import GROUP_ROWS
from ..schedules.kernel_plan import KernelPlan, Rendering, find_overriding_plan
from ..schedules.resident.diagonal_sums import SUMS
from .fold_kernel import FoldLaunch, Layouts, Leaves, Merged, Then
from .table_lookups import DiagonalIndex, add_diagonals, evaluate_places

MOST_ENTRIES = 1024  # that a program instance holds in registers, where it does not walk along diagonals
_LEAST_WIDTH = 8  # up to which they are visited in every tile: a map of blocks took 4.6 ms, by tiles alike 6.2 (H200)
_MOST_WIDTH = 1024  # entries between the least and the greatest of tiles that are alike, all of which are visited
_LONGEST = 16  # tiles, after which an index may repeat itself along a diagonal
_INSTANCES = 4  # of a multiprocessor, where batch elements that share a table can be divided


@dataclass(frozen=True)
class AlikeTiles:
    """Tiles that read the same entries at the same places, in classes."""

    period: int  # tiles along a diagonal after which the index repeats itself; 0: it does not
    sharing: int  # batch elements that share a table, and so the classes
    first: Tensor  # the least entry of each class
    width: int  # entries from the least to the greatest, of the class that has most


def find_alike_tiles(rows: Tensor, cols: Tensor, block: int, sharing: int) -> AlikeTiles | None:
    """The classes of tiles of ``block`` × ``block`` pairs that read the entries ``rows[i] + cols[j]``; None where no
    two tiles are alike, or where they read too many entries."""
    m, n = len(rows) // block, len(cols) // block
    period = next((p for p in range(1, min(_LONGEST + 1, max(m, n))) if _repeats(rows, cols, p * block)), 0)
    if not period and sharing == 1:
        return None
    low, high = ([t.view(-1, block) for t in (rows, cols)] for _ in range(2))
    (r_low, c_low), (r_high, c_high) = ([t.amin(1) for t in low], [t.amax(1) for t in high])
    if period:
        band = torch.arange((m + n - 1) * period, device="cpu")
        shift, turn = band // period - (m - 1), band % period
        begin = (-shift).clamp(min=0)
        begin = begin + (turn - begin % period) % period
    else:
        begin = torch.arange(m * n, device="cpu") // n
        shift = torch.arange(m * n, device="cpu") % n - begin
    empty = (begin >= m) | (begin + shift >= n)
    kept, folded = begin.clamp(max=m - 1), (begin + shift).clamp(0, n - 1)
    first = r_low[kept] + c_low[folded]
    width = int((r_high[kept] + c_high[folded] - first).masked_fill(empty, 0).max()) + 1
    return AlikeTiles(period, sharing, first, width) if _LEAST_WIDTH < width <= _MOST_WIDTH else None


def _repeats(rows: Tensor, cols: Tensor, step: int) -> bool:
    """True when the sum of both numbers is the same after ``step`` rows and as many columns."""
    more = [t[step:] - t[:-step] for t in (rows, cols) if len(t) > step]
    return len(more) == 2 and all((t == t[0]).all() for t in more) and bool(more[0][0] + more[1][0] == 0)


def default_plan(spec: Spec, asked: KernelPlan | None) -> KernelPlan:
    """The plan of a kernel that sums up entries of a table; ``asked``: what the user asks for, if anything."""
    if asked is not None:
        return replace(asked, splits=0, rendering=Rendering.LOADS)
    if spec.narrow is None:
        return KernelPlan(32, 32, 4, 1) if spec.compute == "float64" else KernelPlan(64, 64, 4, 1)
    # four operands are loaded anew for every tile, and fill an instance's shared memory: eight warps hide more of that
    # and spill nothing, where four spill at 128 features; 128 × 128 spills too (compiled, not measured)
    return KernelPlan(64, 64, 8, 2)


class HistogramLaunch(FoldLaunch):
    """The kernel of one histogram on tensors of given types, shapes, strides and alignment."""

    combines = True

    def __init__(self, fold: Fold, values: Leaves, batch: tuple[int, ...], sizes: Sizes, layouts: Layouts):
        _, self.index, self.table = fold.reductions[0].args
        self.table_size = sizes.of(str(self.table.feature))
        self.entries = 0 if is_along_diagonals(self.index) else min(MOST_ENTRIES, pad_width(self.table_size))
        self.places = DiagonalIndex(self.index, fold.leaves, sizes, self.table_size)
        self.read = [e for e in topological([self.index]) if e.op == "leaf"]
        self.numbers = self._numbers([values[e] for e in fold.leaves], fold)
        self.others: dict[tuple, HistogramLaunch] = {}  # by other numbers of the index
        self.entries_read: Tensor | None = None  # by classes of tiles that are alike
        super().__init__(fold, "cols", values, batch, sizes, layouts)

    def _numbers(self, leaves: Sequence[Any], fold: Fold) -> tuple:
        """The numbers that the index is made of, which say which tiles are alike."""
        if not self.entries:
            return ()
        found = (leaves[fold.leaves.index(e)] for e in self.read)
        return tuple(None if isinstance(v, Tensor) else v for v in found)

    def _choose_batch_and_plan(self, leaves: Leaves, plan: KernelPlan | None) -> None:
        self.spec = replace(self.spec, bounds=False, guess=False, precomputed_shifts=False)
        self.plan = plan or default_plan(self.spec, find_overriding_plan(self.over))
        if not self.entries or split_index(self.index) is not None:  # such tiles are square
            block = min(self.blocks)
            self.plan = replace(self.plan, block_kept=block, block_folded=block)
        self.count = math.prod(self.batch)
        self.alike = self._find_alike(leaves)
        if self.alike is not None:
            classes, self.beside = self.alike.first.numel(), 0
            rests = self.count // self.alike.sharing
            enough = -(-_INSTANCES * hardware.count_processors(self.sizes.device) // max(1, rests * classes))
            self.splits = max(1, min(self.alike.sharing, enough))
            self.tiles = classes * self.splits
            self.grid, self.spec = self.tiles * rests, replace(self.spec, split=True)
            return
        kept, folded = (-(-n // b) for n, b in zip(self.lengths, self.blocks, strict=True))
        self.tiles, self.splits, self.beside = kept if self.entries else max(0, kept + folded - 1), 1, 0
        shares = -(-self.table_size // self.entries) if self.entries else 1
        self.grid = self.tiles * shares * self.count if min(self.lengths) else 0

    def _find_alike(self, leaves: Leaves) -> AlikeTiles | None:
        """Which tiles read the same entries at the same places; None where it is no two, or not known."""
        numbers = {str(e.attrs[0]): leaves[e] for e in self.read}
        parts = split_index(self.index) if self.entries and min(self.lengths) and self.count else None
        if parts is None or any(isinstance(v, Tensor) for v in numbers.values()):
            return None
        block, sharing = self.blocks[0], self._count_sharing()
        tiles = [-(-n // block) for n in self.lengths]
        rows, cols = (
            evaluate_places(e, axis, n * block, numbers, self.sizes)
            for e, axis, n in zip(parts, ("row", "col"), tiles, strict=True)
        )
        return find_alike_tiles(rows, cols, block, sharing)

    def _count_sharing(self) -> int:
        """How many batch elements share a table, where they are the first dimensions and its gradient may be summed."""
        layout = self.layouts.get((self.fold.reductions[0], 0))
        steps = [] if layout is None or not layout.summed else list(zip(self.batch, layout.steps, strict=False))
        shared = list(itertools.takewhile(lambda n_s: n_s[1] == 0, steps))
        rest = steps[len(shared) :]
        return 1 if any(s == 0 < n - 1 for n, s in rest) else math.prod(n for n, _ in shared)

    def _whole(self, outputs: list[Tensor]) -> list[Tensor]:
        return outputs

    def _write_kernel(self, leaves: Leaves) -> None:
        alike = self.alike and (self.alike.period, self.alike.width)
        self.kernel = compile_histogram(self.spec, self.entries, alike)

    def _lay_out_results(self) -> None:
        tail = (self.table_size,) if self.entries else (self.blocks[0] + 2, self.blocks[1])
        tail = tail if self.alike is None else (self.alike.width,)
        self.outputs = [((self.grid // max(1, self.tiles), self.tiles, *tail), self.sizes.compute)]
        self.allocators = [Allocator(self.outputs[0], self.sizes.device)]
        self.strides, self.types, self.split_lengths = [None], [self.sizes.compute], []

    @property
    def is_repeatable(self) -> bool:
        return False

    def recipe(self) -> None:
        return None  # torch combines the parts

    def __call__(self, leaves: Sequence[Any], merged: Merged, then: Then = None) -> list[Tensor]:
        assert then is None, "sums have no lists that are completed"
        if not self.grid:
            shape = (*self.sizes.batch, self.table_size)
            return [torch.zeros(shape, dtype=self.sizes.compute, device=self.sizes.device)]
        if self.entries and (numbers := self._numbers(leaves, self.fold)) != self.numbers:
            if numbers not in self.others:
                other = HistogramLaunch(self.fold, merged(), self.batch, self.sizes, self.layouts)
                self.others = {**self.others, numbers: other}
            return self.others[numbers](leaves, merged)
        (parts,) = super().__call__(leaves, merged)
        if self.alike is not None:
            return [self._add_alike(self.alike, parts)]
        found = parts.sum(1) if self.entries else self._add_bands(parts, leaves)
        return [found.view(*self.sizes.batch, self.table_size)]

    def _add_alike(self, alike: AlikeTiles, parts: Tensor) -> Tensor:
        """The entries of the table from those of every class of tiles, summed over batch elements that share it."""
        sums = parts.view(parts.shape[0], -1, self.splits, alike.width).sum(2)
        if self.entries_read is None:  # copied to the device once
            self.entries_read = (alike.first.view(1, -1, 1) + torch.arange(alike.width, device="cpu")).to(sums.device)
        total = sums.new_zeros(parts.shape[0], self.table_size)
        add_at(total, sums, self.entries_read)
        layout = self.layouts.get((self.fold.reductions[0], 0))
        return total.view(*self.sizes.batch, -1) if alike.sharing == 1 or layout is None else total.view(layout.shape)

    def _add_bands(self, parts: Tensor, leaves: Sequence[Any]) -> Tensor:
        """The entries of the table from the sums along diagonals of every band."""
        block, (rows, cols) = self.blocks[0], self.lengths
        below, above = (
            parts[:, :, block].flip(1),
            parts[:, :, block + 1].flip(1),
        )  # the first band has the largest i - j
        found = parts.new_zeros(self.count, self.tiles + 1, block)
        found[:, 1:] += below  # i - j from the band's own multiple of the block on, and those just before it
        found[:, :-1] += above
        first = -(-cols // block) * block - (cols - 1)
        sums = found.view(self.count, -1)[:, first : first + rows + cols - 1]  # i - j from 1 - cols on
        return add_diagonals(sums, self.places(leaves), self.table_size)


_MOST_BYTES = 2**28  # of the sums of all tiles: a sixteenth of what the pairs would take in 16 bits
_TEXT = """@triton.jit
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
"""
_kernels = Kernels("Sums along diagonals, from those of all tiles.", _TEXT)


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
            or settings.requested_budget() is not None
        ):
            raise Unsupported("a gradient of rows has no numbers in common with that of the table")
        self.places = DiagonalIndex(index, fold.leaves, sizes, self.table_size)
        super().__init__(fold, "cols", values, batch, sizes, layouts)

    @property
    def returned_outputs(self) -> tuple[tuple[Expr, int], ...]:
        return *self.fold.outputs, (self.histogram, 0)

    def _describe(self, values: Leaves) -> None:
        super()._describe(values)
        self.spec = replace(self.spec, diagonals=self.number)

    def _write_kernel(self, leaves: Leaves) -> None:
        super()._write_kernel(leaves)
        if "sum_antidiagonals" not in self.kernel.text:
            raise Unsupported("there is no warp-specialised kernel")

    def _lay_out_results(self) -> None:
        super()._lay_out_results()
        rows, cols = (-(-n // GROUP_ROWS) for n in (2 * GROUP_ROWS * self.tiles, self.lengths[1]))
        self.outputs.append(((math.prod(self.batch), rows, cols, SUMS), torch.float32))
        self.allocators.append(Allocator(self.outputs[-1], self.sizes.device))

    def recipe(self) -> None:
        return None  # the sums of tiles are added afterwards

    def __call__(self, leaves: Sequence[Any], merged: Merged, then: Then = None) -> list[Tensor]:
        assert then is None, "sums have no lists that are completed"
        outputs = [allocate() for allocate in self.allocators]
        if self.spec.bounds:  # tiles may be skipped
            outputs[-1].zero_()
        if not self.grid:
            outputs[-1] = outputs[-1].new_zeros(*self.sizes.batch, self.table_size)
            return outputs
        if not self.launch_into(outputs, leaves, merged):
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
    if (found := find_plain_sum(fold.reductions[0])) is None:
        return None
    weight = found.weight
    rest = Counter(list_factors(value))
    rest.subtract(Counter(list_factors(weight)))
    if min(rest.values()) < 0:
        return None
    number = weight
    for e in rest.elements():
        if e.cols or any(n.op == "leaf" and n.feature is not None for n in topological([e])):
            return None
        number = apply("mul", number, e)
    return number

"""The launch of a histogram's kernel, and what makes one result of all program instances' parts, in a fixed order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....plan import settings
from ....program.diagonals import is_along_diagonals
from ....program.lower import Fold
from ....reductions import kind_of
from ...common.evaluate import Allocator, Sizes
from ..codegen.histogram import compile_histogram
from ..codegen.kernel_spec import padded
from ..schedules.kernel_plan import KernelPlan
from .diagonal_bands import DiagonalIndex, add_diagonals
from .fold_kernel import FoldLaunch, Leaves

_MOST_ENTRIES = 1024  # that a program instance holds in registers, where it does not walk along diagonals


class HistogramLaunch(FoldLaunch):
    """The kernel of one histogram on tensors of given types, shapes, strides and alignment."""

    combines = True

    def __init__(self, fold: Fold, values: Leaves, batch: tuple[int, ...], sizes: Sizes):
        _, self.index, table = fold.reductions[0].args
        self.table_size = sizes.of(str(table.feature))
        self.entries = 0 if is_along_diagonals(self.index) else min(_MOST_ENTRIES, padded(self.table_size))
        self.places = DiagonalIndex(self.index, fold.leaves, sizes, self.table_size)
        super().__init__(fold, "cols", values, batch, sizes)

    def _choose_batch_and_plan(self, leaves: Leaves, plan: KernelPlan | None) -> tuple:
        self.spec = replace(self.spec, bounds=False, guess=False, join=False)
        self.plan = plan or self._default_plan()
        if not self.entries:  # bands of diagonals are of square tiles
            block = min(self.blocks)
            self.plan = replace(self.plan, block_kept=block, block_folded=block)
        self.count = math.prod(self.batch)
        kept, folded = (-(-n // b) for n, b in zip(self.lengths, self.blocks, strict=True))
        self.tiles, self.parts, self.beside = kept if self.entries else max(0, kept + folded - 1), 1, 0
        shares = -(-self.table_size // self.entries) if self.entries else 1
        self.grid = self.tiles * shares * self.count if min(self.lengths) else 0
        return ()

    def _default_plan(self) -> KernelPlan:
        asked = (settings.current.get().tiles or {}).get(self.over)
        if asked is not None:
            return replace(asked, parts=0, boxes=0)
        if self.spec.narrow is None:
            return KernelPlan(32, 32, 4, 1) if self.spec.compute == "float64" else KernelPlan(64, 64, 4, 1)
        return KernelPlan(64, 64, 4, 2)  # 128 × 128 spills registers at 128 features; compiled, not measured

    def _write_kernel(self, copied: tuple) -> None:
        self.kernel = compile_histogram(self.spec, self.entries)

    def _lay_out_results(self) -> None:
        tail = (self.table_size,) if self.entries else (self.blocks[0] + 2, self.blocks[1])
        self.outputs = [((self.count, self.tiles, *tail), self.sizes.compute)]
        self.rooms = [Allocator(self.outputs[0], self.sizes.device)]
        self.strides, self.types, self.cuts = [None], [self.sizes.compute], []

    def recipe(self) -> None:
        return None  # torch combines the parts

    def __call__(self, leaves: Sequence[Any], merged: Callable[[], Leaves]) -> list[Tensor]:
        if not self.grid:
            shape = (*self.sizes.batch, self.table_size)
            return [torch.zeros(shape, dtype=self.sizes.compute, device=self.sizes.device)]
        (parts,) = super().__call__(leaves, merged)
        found = parts.sum(1) if self.entries else self._add_bands(parts, leaves)
        return [found.view(*self.sizes.batch, self.table_size)]

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


def list_histograms(fold: Fold) -> list[Fold]:
    """The histograms of a fold, each as a fold of its own."""
    found = [r for r in fold.reductions if kind_of(r).both_axes]
    return [replace(fold, reductions=(r,), scales=(), gradients=()) for r in found]

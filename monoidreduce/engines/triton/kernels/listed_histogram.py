"""The launch of a table's gradient over lists of blocks or pages: a histogram of the pairs that are listed.

The kernel (``codegen/histogram.py``) has a few program instances for each batch element, of which each sums up every
so many-th tile of rows; torch adds these parts, in a fixed order. Over edges there is a number for each entry instead
(``lists.py``), so that one row with very many edges is not one instance's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....program.expression import Expr
from ...common.evaluate import Form
from ..codegen.few_rows import FewRows
from ..codegen.histogram import compile_listed_histogram
from ..codegen.kernel_spec import pad_width
from ..codegen.kernel_text import Kernel
from ..launch import hardware
from ..schedules.kernel_plan import KernelPlan
from .fold_kernel import Leaves, Merged, Then
from .histogram import MOST_ENTRIES, default_plan
from .listed_launch import ListedLaunch

_INSTANCES = 4  # of a multiprocessor; more of them even out lists of unequal length, and are as many more parts


class ListedHistogram(ListedLaunch):
    """The kernel of one histogram over lists, on tensors like the given ones."""

    combines = True

    def _describe(self, values: Leaves) -> None:
        self.table_size = self.sizes.of(str(self.fold.reductions[0].args[2].feature))
        self.entries = min(MOST_ENTRIES, pad_width(self.table_size))
        super()._describe(values)
        self.spec, self.may_guess = replace(self.spec, guess=False), False

    def _pack_heads(self, values: Leaves) -> FewRows | None:
        return None  # there is a result for each batch element

    def _find_copied_vectors(self, plain: Any, leaves: Leaves) -> tuple:
        return ()

    def _plan_tiles(self, plain: Any, group: int, copies: bool) -> KernelPlan:
        plan = default_plan(self.spec, None)
        return replace(plan, block_kept=min(plan.block_kept, max(16, 1 << (group - 1).bit_length())))

    def _compile_plain(self) -> Kernel:
        return compile_listed_histogram(replace(self.spec, guess=False), self.entries)

    def _write_kernel(self, leaves: Leaves) -> None:
        self.spec = replace(self.spec, guess=False, precomputed_shifts=False)
        self.kernel = compile_listed_histogram(self.spec, self.entries)

    def _split_folded_axis(self) -> None:
        super()._split_folded_axis()
        shares = -(-self.table_size // self.entries)
        enough = -(-_INSTANCES * hardware.count_processors(self.sizes.device) // max(1, self.count * shares))
        self.tiles, self.splits = min(self.tiles, max(1, enough)), 1
        self.grid = self.tiles * shares * self.count

    def _output(self, r: Expr, k: int) -> Form:
        return (self.count, self.tiles, self.table_size), self.sizes.compute

    def recipe(self) -> None:
        return None  # torch adds the parts

    def __call__(self, leaves: Sequence[Any], merged: Merged, then: Then = None) -> list[Tensor]:
        shape = (*self.sizes.batch, self.table_size)
        if not self.grid or not math.prod(shape):
            return [torch.zeros(shape, dtype=self.sizes.compute, device=self.sizes.device)]
        (parts,) = super().__call__(leaves, merged)
        return [parts.sum(1).view(shape)]

"""The lists of one direction as kernels read them, and what their text and plans depend on."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ....domains import ColumnLists
from ...common.bounded_cache import is_capturing
from ...common.evaluate import Sizes, restore_domain


class ListForm(NamedTuple):
    """What kernels, and the choice of their plans, depend on in lists: all but their numbers."""

    kept_block: int
    folded_block: int
    batch: tuple[int, ...]
    logical: bool
    ends: bool
    entry: bool
    lists: int  # how many there are
    items: int  # of all, rounded up to a power of two
    kinds: tuple  # types and alignment

    @property
    def average(self) -> int:
        """Folded indices of a list."""
        return -(-self.items * self.folded_block // max(self.lists, 1))

    def windows(self, size: int) -> int:
        """Windows of so many entries that the lists of a batch element have, at most."""
        return -(-self.items // (max(math.prod(self.batch), 1) * size))


@dataclass(frozen=True, eq=False)
class Lists:
    """The lists of one direction, as kernels read them.

    Group g of list l folds the blocks ``items[offsets[l * G + g]:offsets[l * G + g + 1]]``, where ``kept_block`` kept
    indices make a group (0: all of them) and ``folded_block`` folded ones a block; ``batch``: the dimensions of l."""

    offsets: Tensor
    items: Tensor
    kept_block: int
    folded_block: int
    batch: tuple[int, ...] = ()
    logical: bool = False  # the folded index counts along the list
    ends: Tensor | None = None  # [lists · groups]: how many folded indices each has; the last block is cut there
    entry: Tensor | None = None  # [items]: the place of each item in the lists that numbers per entry belong to

    def tensors(self, entries: bool) -> tuple[Tensor, ...]:
        """The arguments of a kernel; ``entries``: whether it reads which entry each item is."""
        found = self.offsets, self.items, self.ends, self.entry if entries else None
        return tuple(t for t in found if t is not None)

    @property
    def form(self) -> ListForm:
        kinds = tuple((t.dtype, t.data_ptr() & 15) for t in self.tensors(True))
        some = self.batch, self.logical, self.ends is not None, self.entry is not None
        items = 1 << (len(self.items) - 1).bit_length()
        return ListForm(self.kept_block, self.folded_block, *some, len(self.offsets) - 1, items, kinds)

    def own(self, given: Sequence[Tensor]) -> Lists:
        """The same lists without the memory of these tensors: what is cached for a tensor must not keep it alive."""
        theirs = {t.untyped_storage()._cdata for t in given}
        mine = {n: getattr(self, n) for n in ("offsets", "items", "ends", "entry")}
        held = {n: t.clone() for n, t in mine.items() if t is not None and t.untyped_storage()._cdata in theirs}
        return replace(self, **held) if held else self


def read_lists(given: ColumnLists, kept: int) -> Lists:
    """A domain's lists for ``kept`` indices, as kernels read them."""
    block = given.row_block if given.row_block < kept else 0
    items = given.items if len(given.items) else given.items.new_zeros(1)  # so that there is something to point to
    return Lists(given.offsets.contiguous(), items.contiguous(), block, given.col_block, given.batch, entry=given.entry)


def make_lists(form: tuple, tensors: Sequence[Tensor], sizes: Sizes, over: str) -> Lists:
    """The lists of a domain with this form and these tensors, for reductions over ``over``."""
    domain = restore_domain(form, tensors)
    if form[0] == "pages":  # the table as it is: sequence s has the pages from s * most on
        most = domain.tensors()[0].shape[-1]
        table, lengths = (t.contiguous() for t in domain.tensors())
        offsets = (_multiples.__wrapped__ if is_capturing(table) else _multiples)(most, len(lengths) + 1, table.device)
        return Lists(offsets, table.view(-1), 0, form[1], tuple(tensors[1].shape), True, lengths)
    found = domain.listing(sizes.rows, sizes.cols) if over == "cols" else domain.transposed(sizes.rows, sizes.cols)
    return read_lists(found, sizes.rows if over == "cols" else sizes.cols)


@functools.lru_cache(maxsize=64)
def _multiples(step: int, count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device) * step

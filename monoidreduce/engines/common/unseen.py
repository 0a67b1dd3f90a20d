"""Pairs that were not folded, added to results that they change: those that no list names, or in other sequences.

Whatever says that a pair does not exist, a condition or a list, it is the identity of its reduction. Of the k smallest
numbers it is an infinity, and stands before NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...program.lower import Fold
from ...reductions import kind_of
from .combine import split
from .evaluate import Sizes, restore_domain


def add_unseen(fold: Fold, results: list[Any], count: Callable[[str], tuple[Any, int]]) -> list[Any]:
    """Results of the pairs that were folded as those of whole axes. ``count(over)``: of pairs of each kept index (a
    number, or a tensor of them), and of the axis that is folded."""
    found: list[Any] = []
    for r, own in split(fold, results):
        over = r.attrs[1]
        one_way = over in ("rows", "cols")
        found += kind_of(r).add_unseen(r.attrs[2], own, functools.partial(count, over)) if one_way else own
    return found


def add_unlisted(fold: Fold, results: list[Any], tensors: Sequence[Tensor], sizes: Sizes) -> list[Any]:
    """The same of the pairs that a domain lists; ``tensors``: its own."""
    assert fold.domain is not None
    lists = functools.partial(_count_listed, fold.domain.attrs[0], tensors, sizes.rows, sizes.cols)
    return add_unseen(fold, results, lambda over: (lists(over), sizes.here(over)))


def _count_listed(form: tuple, tensors: Sequence[Tensor], rows: int, cols: int, over: str) -> int | Tensor:
    """How many pairs each kept index folds: a number, or ``[*batch, kept]``."""
    if form[0] == "pages":
        return tensors[1].unsqueeze(-1) if over == "cols" else rows
    domain, (kept, folded) = restore_domain(form, tensors), (rows, cols) if over == "cols" else (cols, rows)
    lists = domain.listing(rows, cols) if over == "cols" else domain.transposed(rows, cols)
    count = lists.offsets.diff().long() * lists.col_block
    if cut := -folded % lists.col_block:  # the last block is shorter
        last = torch.where(lists.items == folded // lists.col_block, cut, 0)
        count -= count.new_zeros(lists.groups + 1).index_add_(0, lists.owners().long(), last.to(count.dtype))[:-1]
    return count.view(*lists.batch, -1).repeat_interleave(lists.row_block, -1)[..., :kept]

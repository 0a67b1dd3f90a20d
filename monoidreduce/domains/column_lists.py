"""The form in which engines read a domain: for each group of rows, the column blocks that it folds.

Compressed rows (CSR) of column blocks. Everything is made on the lists' device, in a fixed order, without a host sync
and in memory proportional to the lists.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ColumnLists:
    """Group g folds the column blocks ``items[offsets[g]:offsets[g + 1]]``, in that order.

    ``row_block`` rows make a group and ``col_block`` columns a block; the last of each may be cut by the size of the
    axis. The groups of all elements of the domain's ``batch`` follow each other; items count within their element.
    ``items`` may be longer than ``offsets[-1]``: the rest of it holds zeros and belongs to no group, so that its size
    is known without reading the lists. ``entry``: where each item stands in the list that this one was made of; None
    where that is the same place.

    >>> import torch, monoidreduce as mr
    >>> lists = mr.edges(torch.tensor([0, 2, 3]), torch.tensor([4, 1, 4])).listing(2, 5)
    >>> lists.transposed(5).items.tolist()
    [0, 0, 1]
    """

    offsets: Tensor  # [groups + 1]
    items: Tensor  # [capacity]
    row_block: int
    col_block: int
    batch: tuple[int, ...] = ()
    entry: Tensor | None = None

    @property
    def groups(self) -> int:
        """How many groups there are in all elements of the batch."""
        return self.offsets.shape[0] - 1

    def owners(self) -> Tensor:
        """The group of each item; ``groups`` for what is beyond the last list."""
        if self.items.device.type == "cpu":  # where lengths may be read
            found = torch.repeat_interleave(self.offsets.diff())
            rest = found.new_full((self.items.shape[0] - found.shape[0],), self.groups)
            found = torch.cat([found, rest]) if len(rest) else found
            return found.to(torch.int32) if _fits(self.groups) else found
        at = torch.arange(self.items.shape[0], device=self.items.device, dtype=self.offsets.dtype)
        return torch.searchsorted(self.offsets[1:].contiguous(), at, right=True, out_int32=_fits(self.groups))

    def transposed(self, blocks: int) -> ColumnLists:
        """For each of the ``blocks`` column blocks of an element, the groups that fold it, in increasing order.

        ``entry`` says where each stands in this list: which number of an edge, or which page of a sequence, it is.
        """
        elements = torch.Size(self.batch).numel()
        each = self.groups // max(elements, 1)
        owner = self.owners()
        total = elements * blocks
        key = (owner // max(each, 1) * blocks if self.batch else 0) + self.items
        key = torch.where(owner < self.groups, key, total)
        key, entry = key.to(torch.int32 if _fits(total) else torch.int64).sort(stable=True)
        bounds = torch.arange(total + 1, device=key.device, dtype=key.dtype)
        offsets = torch.searchsorted(key, bounds, out_int32=_fits(key.shape[0]))
        items = owner.index_select(0, entry)
        items = torch.where(items < self.groups, items % max(each, 1) if self.batch else items, 0)
        entry = entry.to(torch.int32) if _fits(key.shape[0]) else entry
        return ColumnLists(offsets, items, self.col_block, self.row_block, self.batch, entry)

    def first_of_equal(self, blocks: int) -> Tensor:
        """Which items are the first of their list's equal ones; ``blocks``: of an element."""
        return self.copies(blocks) > 0

    def copies(self, blocks: int) -> Tensor:
        """How often each item is in its list, at the first of equal ones; 0 at the others. ``blocks``: of an element.

        >>> import torch, monoidreduce as mr
        >>> mr.edges(torch.tensor([0, 2, 5]), torch.tensor([1, 1, 1, 0, 1])).listing(2, 2).copies(2).tolist()
        [2, 0, 2, 1, 0]
        """
        key, order = (self.owners().long() * blocks + self.items).sort(stable=True)
        place = torch.arange(len(key), device=key.device)
        count = torch.searchsorted(key, key, right=True) - place
        count[1:].masked_fill_(key[1:] == key[:-1], 0)
        return torch.empty_like(count).scatter_(0, order, count)

    def multiplicity(self, rows: int, cols: int) -> Tensor:
        """How often each pair is folded, dense: [*batch, rows, cols]."""
        blocks = -(-cols // self.col_block)
        owner = self.owners().long()
        found = torch.zeros(self.groups, blocks, dtype=torch.int64, device=self.items.device)
        inside = owner < self.groups
        if found.numel():
            at = torch.where(inside, owner, 0) * blocks + torch.where(inside, self.items, 0)
            found.view(-1).scatter_add_(0, at, inside.long())
        found = found.view(*self.batch, -(-rows // self.row_block), blocks)
        spread = found.repeat_interleave(self.row_block, -2).repeat_interleave(self.col_block, -1)
        return spread[..., :rows, :cols]


def pack(index: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """The first ``count[g]`` entries of each row of ``index`` [G, most] behind each other: offsets [G + 1] and items
    [G · most], of which the rest is 0. Every place is written once, so the result does not depend on an order."""
    groups, most = index.shape
    offsets = count.new_zeros(groups + 1, dtype=torch.int32 if _fits(groups * most) else torch.int64)
    offsets[1:] = count.cumsum(0)
    place = torch.arange(most, device=index.device)
    kept = place < count.unsqueeze(1)
    # What is not kept goes to one place beyond the end, which is cut off.
    at = torch.where(kept, offsets[:-1].unsqueeze(1) + place, groups * most)
    items = torch.zeros(groups * most + 1, dtype=index.dtype, device=index.device)
    items = items.scatter(0, at.reshape(-1), torch.where(kept, index, 0).reshape(-1))  # in place, nothing is mapped
    return offsets, items[:-1]


def _fits(count: int) -> bool:
    return count < 2**31 - 1

"""Block-sparse folds: each block of rows folds a list of column blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError, ColumnListError, ShapeError, shown
from . import base
from .base import ColumnLists, pack


@dataclass(frozen=True, eq=False, repr=False)
class Blocks(base.Domain):
    """Row block b folds the column blocks ``index[..., b, :count[..., b]]``.

    ``index`` [..., row blocks, most] holds numbers of column blocks, ``count`` [..., row blocks] how many of them are
    used (all of them if left out); what stands beyond ``count`` is not read. ``rows`` and ``cols`` are the sizes of a
    block; the last block of either axis may be smaller. Leading dimensions broadcast against those of the call:
    [heads, row blocks, most] is a list per head, [row blocks, most] one for all. A block that is listed twice is
    folded twice; the order does not matter.

    Raises :class:`ArgumentError`, :class:`DTypeError`, :class:`ShapeError` or :class:`DeviceError` for tensors that
    are no such lists, and :class:`ColumnListError` for numbers out of range (see ``mr.use(check=True)``).

    >>> import torch, monoidreduce as mr
    >>> q, k, v = torch.randn(6, 4), torch.randn(6, 4), torch.randn(6, 4)
    >>> mr.blocks(torch.tensor([[0, 1], [2, 0], [1, 0]]), torch.tensor([2, 1, 0]), rows=2, cols=2)
    mr.blocks(3 row blocks of 2, at most 2 column blocks of 2 each)
    """

    kind = "blocks"
    index: Tensor
    count: Tensor | None = None
    rows: int = 128
    cols: int = 128

    def __post_init__(self) -> None:
        base.check_whole_number("rows", self.rows)
        base.check_whole_number("cols", self.cols)
        self.take_arrays("index", "count")
        base.check_integers("index", self.index, "[..., row blocks, most]", 2)
        if self.count is not None:
            base.check_integers("count", self.count, "[..., row blocks]", 1)
            base.check_one_device(index=self.index, count=self.count)
            if self.count.shape != self.index.shape[:-1]:
                raise ShapeError(
                    detail=f"count has shape {tuple(self.count.shape)}, but index {tuple(self.index.shape)}",
                    fix=f"Give one count for each list: {tuple(self.index.shape[:-1])}",
                )

    @classmethod
    def from_mask(cls, keep: Tensor, rows: int = 128, cols: int = 128) -> Blocks:
        """The blocks where a boolean ``keep`` [..., row blocks, column blocks] is True.

        >>> import torch, monoidreduce as mr
        >>> mr.blocks.from_mask(torch.eye(3, dtype=torch.bool), rows=2, cols=2).mask(6, 6).sum()
        tensor(12)
        """
        keep = base.take_array("keep", keep)
        if not isinstance(keep, Tensor) or keep.dtype is not torch.bool or keep.dim() < 2:
            raise ArgumentError(
                detail=f"keep was given {shown(keep)}", fix="Give a boolean tensor [..., row blocks, column blocks]"
            )
        order = torch.argsort(keep.to(torch.int8), dim=-1, descending=True, stable=True)
        return cls(order.to(torch.int32), keep.sum(-1, dtype=torch.int32), rows, cols)

    @classmethod
    def from_block_mask(cls, mask: Any, *, partial: bool = False) -> Blocks:
        """The blocks of a FlexAttention ``BlockMask``: those that it computes, partial and full.

        A BlockMask is two things: which blocks are computed at all, and in its *partial* blocks a function of indices
        that hides some pairs (``mask.mask_mod``). The lists say the first. The second is a condition that your body
        says, as it would without lists: ``torch.where(mr.col_index <= mr.row_index, s, -torch.inf)`` for a causal mask,
        or the ``causal``, ``window`` and ``documents`` of ``ops.attention``. It holds in all of a *full* block, so
        saying it for every block is right. ``partial=True`` states that the body does; without it, a mask with partial
        blocks is an :class:`ArgumentError`. A mask whose blocks are all full needs nothing more.

        >>> import torch, monoidreduce as mr
        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> flex = create_block_mask(lambda b, h, i, j: j <= i, None, None, 256, 256, device="cpu")
        >>> mr.blocks.from_block_mask(flex, partial=True).mask(256, 256)[0, 0, :, ::128].sum(0)
        tensor([256, 128])
        """
        counted, chosen = getattr(mask, "kv_num_blocks", None), getattr(mask, "kv_indices", None)
        size = getattr(mask, "BLOCK_SIZE", None)
        if not isinstance(counted, Tensor) or not isinstance(chosen, Tensor) or size is None:
            raise ArgumentError(
                detail=f"mask was given {shown(mask)}",
                fix="Give a torch.nn.attention.flex_attention.BlockMask; mr.blocks.from_mask takes booleans",
            )
        if not partial and not _is_unmasked(mask) and (not base.is_plain(counted) or bool(counted.any())):
            raise ArgumentError(
                detail="the BlockMask has partial blocks, inside which its mask_mod hides pairs, and lists do not",
                fix="Say that condition in the body with torch.where(..., s, -torch.inf), or with causal=, window= or "
                "documents= of ops.attention, and give partial=True",
            )
        count = counted
        if getattr(mask, "full_kv_indices", None) is not None:  # the full blocks behind the partial ones
            count = counted + mask.full_kv_num_blocks
            place = torch.arange(chosen.shape[-1], device=chosen.device)
            after = (place - counted.unsqueeze(-1)).clamp(min=0)
            full = mask.full_kv_indices.gather(-1, after.expand(mask.full_kv_indices.shape).long())
            chosen = torch.where(place < counted.unsqueeze(-1), chosen, full)
        return cls(chosen, count, int(size[0]), int(size[1]))

    def tensors(self) -> tuple[Tensor, ...]:
        """``index``, and ``count`` if there is one."""
        return (self.index,) if self.count is None else (self.index, self.count)

    @property
    def form(self) -> tuple:
        return (self.kind, self.rows, self.cols, self.index.dim() - 2, self.count is not None)

    @classmethod
    def _restore(cls, form: tuple, tensors: tuple[Tensor, ...]) -> Blocks:
        index, *count = tensors
        return base.build(cls, index=index, count=count[0] if count else None, rows=form[1], cols=form[2])

    @property
    def batch(self) -> tuple[int, ...]:
        return tuple(self.index.shape[:-2])

    def _check_sizes(self, rows: int, cols: int) -> None:
        wanted = -(-rows // self.rows)
        if self.index.shape[-2] != wanted:
            raise ShapeError(
                detail=f"index has lists for {self.index.shape[-2]} row blocks, but {rows} rows in blocks of "
                f"{self.rows} are {wanted}",
                fix="Give one list for each block of rows, or another size of blocks; mr.blocks.from_mask takes one "
                "truth value for each block of pairs, not for each pair",
            )

    def _check_values(self, rows: int, cols: int) -> None:
        used = None
        if self.count is not None:
            most = self.index.shape[-1]
            low, high = map(int, torch.aminmax(self.count)) if self.count.numel() else (0, 0)
            if low < 0 or high > most:
                raise ColumnListError(
                    detail=f"count holds {low if low < 0 else high}, but index has room for {most}",
                    fix=f"Give counts from 0 to {most}",
                )
            used = torch.arange(most, device=self.index.device) < self.count.unsqueeze(-1)
        fix = ", or leave entries at the end of a list out with count="
        base.check_range("index", self.index, -(-cols // self.cols) - 1, f"column blocks of {self.cols}", used, fix)

    def _make_listing(self, rows: int, cols: int) -> ColumnLists:
        index = self.index.flatten(0, -2)
        if self.count is not None:
            offsets, items = pack(index, self.count.reshape(-1))
        else:
            groups, most = index.shape
            offsets = torch.arange(groups + 1, dtype=index.dtype, device=index.device) * most
            items = index.reshape(-1)
        return ColumnLists(offsets, items, self.rows, self.cols, self.batch)

    def _sizes(self) -> str:
        lead = f", per {list(self.batch)}" if self.batch else ""
        return (
            f"{self.index.shape[-2]} row blocks of {self.rows}, at most {self.index.shape[-1]} column blocks of "
            f"{self.cols} each{lead}"
        )


def _is_unmasked(mask: Any) -> bool:
    """Whether the condition of a BlockMask is the one that FlexAttention gives a mask without any."""
    return getattr(getattr(mask, "mask_mod", None), "__name__", "") == "noop_mask"

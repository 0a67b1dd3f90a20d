"""The arena of a loop over panels: all scratch memory, whether it is allocated or borrowed from gradients.

A panel lies in buffers of its own, or in bytes of a *host*: the column gradient, which is written a few columns at a
time, or one allocation for all blocks of rows. Row gradients are added up in float32 and rounded to 16 bits at the very
end: until then their own memory, and that of later rows, holds float32 totals of half as many rows
(:class:`BorrowedTotals`). What is placed where is planned in ``plan/panel_layout.py`` and ``memory_plan.py``.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....plan.panel_layout import InPlaceLayout, PanelLayout, RowBlock
from ....program.expression import Expr
from ...common.evaluate import Sizes
from ...panel import ALIGN

_ALIGNED_COLS = 16  # columns of a panel that has fewer than ``ALIGN``: descriptors need 16 bytes
_ALIGNED_BYTES = 16  # where totals may begin
_PADDED_ROWS = 8  # scalars of tiles are aligned
_FIRST_ROWS = 8  # rows that are rounded by way of other memory

PanelBuffers = dict[Any, Tensor]  # by inner product, or by (number, type) of an extra buffer of weights


def row_pitch(cols: int) -> int:
    """Elements from one row of a panel to the next. Few columns are not rounded up beyond what a budget allows."""
    step = ALIGN if cols >= ALIGN else _ALIGNED_COLS
    return -(-cols // step) * step


def pad_rows(rows: int) -> int:
    """The length of a tile's scalars of all rows."""
    return -(-rows // _PADDED_ROWS) * _PADDED_ROWS


def tile_sum_bytes(rows: int, tiles: int) -> int:
    """Bytes of the maxima (bfloat16) and sums (float32) of all rows in so many tiles."""
    return (torch.bfloat16.itemsize + torch.float32.itemsize) * pad_rows(rows) * tiles


def is_aligned(width: int, compute: torch.dtype) -> bool:
    """Whether totals of so many features all begin at aligned addresses, if the first does."""
    return width * compute.itemsize % _ALIGNED_BYTES == 0


class Arena:
    """The scratch memory of one loop.

    ``panel``: the buffers of the panel that is worked on, ``own`` if they are not in borrowed memory."""

    def __init__(self, buffers: dict[Any, torch.dtype], layout: PanelLayout, sizes: Sizes, narrow: torch.dtype | None):
        """``buffers``: those of a panel, and their types; ``narrow``: the type of 16-bit gradients."""
        self.buffers, self.sizes, self.narrow = buffers, sizes, narrow
        self.own: PanelBuffers = {}
        if not layout.blocks:
            shape = layout.rows, row_pitch(layout.cols)
            self.own = {key: torch.empty(shape, dtype=t, device=sizes.device) for key, t in buffers.items()}
        self.panel = self.own
        self.host: Tensor | None = None
        self.scalars: dict[Expr, Tensor] = {}

    def fork(self) -> Arena:
        """The same memory; what is allocated from the copy is the copy's alone."""
        other = copy.copy(self)
        other.scalars = dict(self.scalars)
        return other

    def get_scalars(self, name: Expr) -> Tensor:
        """Where kernels write a scalar of every row: allocated once, not once a panel."""
        if name not in self.scalars:
            dtype = self.sizes.compute if name.dtype == "float" else torch.int64
            self.scalars[name] = torch.empty(self.sizes.rows, dtype=dtype, device=self.sizes.device)
        return self.scalars[name]

    # Panels

    def borrow(self, gradient: Tensor) -> None:
        """Use the memory of a gradient that is not written yet as the host."""
        self.host = gradient.view(-1).view(torch.uint8)

    def allocate_host(self, count: int) -> None:
        """Allocate a host of so many bytes."""
        self.host = torch.empty(count, dtype=torch.uint8, device=self.sizes.device)

    def move_panel(self, at: int | None, rows: int, cols: int) -> None:
        """Place the panel at a byte offset of the host, or in its own buffers where that is None."""
        self.panel = self.own if at is None else self.place_panel(at, rows, cols)

    def place_panel(self, at: int, rows: int, cols: int) -> PanelBuffers:
        """A panel's buffers at a byte offset of the host."""
        found = {}
        for key, dtype in self.buffers.items():
            found[key] = self.view_host(at, (rows, row_pitch(cols)), dtype)
            at += found[key].nbytes
        return found

    def panel_bytes(self, rows: int, cols: int) -> int:
        """Bytes of a panel's buffers."""
        return sum(rows * row_pitch(cols) * dtype.itemsize for dtype in self.buffers.values())

    @property
    def spare(self) -> Tensor | None:
        """The memory of panels, flat and of the gradients' type, when they are done with."""
        return next((b.view(-1) for b in (self.own or self.panel).values() if b.dtype == self.narrow), None)

    # Other memory of the host

    def view_host(self, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor at a byte offset of the host."""
        assert self.host is not None
        size = torch.Size(shape).numel() * dtype.itemsize
        return self.host[at : at + size].view(dtype).view(shape)

    def place_tile_sums(self, tiles: int) -> tuple[Tensor, Tensor]:
        """The maxima and the sums of exponentials of all rows in all tiles, at the beginning of the host."""
        shape = tiles, pad_rows(self.sizes.rows)
        sums = self.view_host(0, shape, torch.float32)
        return self.view_host(sums.nbytes, shape, torch.bfloat16), sums

    def borrow_row_totals(self, gradients: dict[Any, Tensor], layout: InPlaceLayout) -> dict[Any, BorrowedTotals]:
        """Float32 totals of all rows in their gradients' memory, the rest where the layout says."""
        found, at = {}, layout.totals
        for key, gradient in gradients.items():
            assert self.host is not None
            place = None if at is None else self.host[at:]
            found[key] = BorrowedTotals.allocate(gradient, len(gradient), layout.lent, self.sizes.compute, place)
            rest = (len(gradient) - layout.lent) * gradient.shape[1] * self.sizes.compute.itemsize
            at = None if at is None else at + rest
        return found

    def borrow_block_totals(
        self, gradients: dict[Any, Tensor], strips: dict[Any, int], block: RowBlock, lent: int
    ) -> tuple[dict[Any, BorrowedTotals], dict[Any, Tensor]]:
        """Float32 totals of a block's rows: of ``lent`` of them in the gradients of these and later rows, of the others
        behind the panel. Where the block has strips, also those of a strip's columns (``strips``: their features),
        behind the rows' totals."""
        assert self.host is not None
        place = self.host[self.panel_bytes(block.rows, block.cols) :]
        rows, columns = {}, {}
        count, compute = block.last - block.first, self.sizes.compute
        for key, gradient in gradients.items():
            own, width = gradient[block.first :], gradient.shape[1]
            rows[key] = BorrowedTotals.allocate(own, count, lent, compute, place, block.first)
            place = place[(count - lent) * width * compute.itemsize :]
            for other, wide in strips.items() if block.strips else ():
                free = own.view(-1).view(compute)[count * width :]
                columns[other] = free[: block.cols * wide].view(block.cols, wide)
        return rows, columns


def count_lendable(gradient: Tensor, count: int, compute: torch.dtype) -> int:
    """Of how many rows, ``count`` at most, a gradient's memory holds the totals."""
    fits = gradient.shape[0] * gradient.itemsize // compute.itemsize
    begins = gradient.storage_offset() * gradient.itemsize
    return min(count, fits) if begins % _ALIGNED_BYTES == 0 and is_aligned(gradient.shape[1], compute) else 0


@dataclass(frozen=True)
class BorrowedTotals:
    """Float32 totals of some rows, as many as fit in the memory of their own 16-bit gradient.

    ``gradient``: from the first of these rows on, whose number is ``first``; ``pieces``: slices of the rows, and their
    totals; ``inside``: the totals of so many rows lie in the gradient."""

    gradient: Tensor
    pieces: tuple[tuple[slice, Tensor], ...]
    first: int
    inside: int

    @staticmethod
    def allocate(
        gradient: Tensor, count: int, lent: int, compute: torch.dtype, place: Tensor | None = None, first: int = 0
    ) -> BorrowedTotals:
        """Zeros for ``count`` rows, ``lent`` of them in the gradient's memory, the others in ``place`` (bytes), or in a
        new allocation."""
        width, pieces = gradient.shape[1], []
        if lent:
            inside = gradient.view(-1)[: lent * width * compute.itemsize // gradient.itemsize]
            pieces.append((slice(0, lent), inside.view(compute).view(lent, width).zero_()))
        if lent < count:
            size = (count - lent) * width * compute.itemsize
            rest = torch.empty(size, dtype=torch.uint8, device=gradient.device) if place is None else place[:size]
            pieces.append((slice(lent, count), rest.view(compute).view(count - lent, width).zero_()))
        return BorrowedTotals(gradient, tuple(pieces), first, lent)

    def select(self, rows: slice) -> list[tuple[slice, Tensor]]:
        """The totals of some rows in pieces, each with its slice of these rows."""
        begin, end = rows.start - self.first, rows.stop - self.first
        inside = [(max(own.start, begin), min(own.stop, end), own.start, totals) for own, totals in self.pieces]
        return [(slice(a - begin, b - begin), totals[a - at : b - at]) for a, b, at, totals in inside if a < b]

    def round_into_gradient(self, spare: Tensor | None = None) -> None:
        """Write the gradient from its totals. Those that lie in its memory go by way of ``spare``, memory of its type,
        where that holds them; else from the first row on, each written where totals were read already."""
        for rows, totals in self.pieces:
            if rows.start >= self.inside:
                self.gradient[rows] = totals
            elif spare is not None and spare.numel() >= totals.numel():
                self.gradient[rows] = spare[: totals.numel()].view(totals.shape).copy_(totals)
            else:
                self._round_in_place(totals)

    def _round_in_place(self, totals: Tensor) -> None:
        at = min(_FIRST_ROWS, len(totals))
        self.gradient[:at] = totals[:at].to(self.gradient.dtype)
        while at < len(totals):
            end = min(2 * at, len(totals))
            self.gradient[at:end] = totals[at:end]
            at = end

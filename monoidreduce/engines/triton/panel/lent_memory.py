"""Totals of rows in the memory of their own gradients.

Row gradients are added up in float32 and rounded to 16 bits at the very end: until then their own memory, and that of
rows whose turn comes later, holds totals of half as many rows. Only what is left over needs a place of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_FIRST = 8  # rows that are rounded by way of other memory
_ALIGNED = 16  # bytes: where totals may begin


def aligned(width: int, compute: torch.dtype) -> bool:
    """Whether totals of so many features all begin where they may, if the first does."""
    return width * compute.itemsize % _ALIGNED == 0


def lendable(own: Tensor, count: int, compute: torch.dtype) -> int:
    """Of how many rows, ``count`` at most, a gradient's memory holds the totals."""
    fits = own.shape[0] * own.itemsize // compute.itemsize
    begins = own.storage_offset() * own.itemsize
    return min(count, fits) if begins % _ALIGNED == 0 and aligned(own.shape[1], compute) else 0


@dataclass(frozen=True)
class Lent:
    """Totals of some rows of a gradient, in pieces; ``own``: the gradient, from the first of these rows on, which is
    that of number ``first``; ``inside``: of how many rows they lie there."""

    own: Tensor
    pieces: tuple[tuple[slice, Tensor], ...]
    first: int
    inside: int

    @staticmethod
    def zeros(
        own: Tensor, count: int, lent: int, compute: torch.dtype, place: Tensor | None = None, first: int = 0
    ) -> Lent:
        """``count`` rows, ``lent`` of them where the gradient is, the others in ``place`` (bytes), or in one apart."""
        width, pieces = own.shape[1], []
        if lent:
            inside = own.view(-1)[: lent * width * compute.itemsize // own.itemsize]
            pieces.append((slice(0, lent), inside.view(compute).view(lent, width).zero_()))
        if lent < count:
            size = (count - lent) * width * compute.itemsize
            rest = torch.empty(size, dtype=torch.uint8, device=own.device) if place is None else place[:size]
            pieces.append((slice(lent, count), rest.view(compute).view(count - lent, width).zero_()))
        return Lent(own, tuple(pieces), first, lent)

    def of(self, rows: slice) -> list[tuple[slice, Tensor]]:
        """The totals of some rows in pieces, counted from the first of them."""
        begin, end = rows.start - self.first, rows.stop - self.first
        inside = [(max(part.start, begin), min(part.stop, end), part.start, totals) for part, totals in self.pieces]
        return [(slice(a - begin, b - begin), totals[a - at : b - at]) for a, b, at, totals in inside if a < b]

    def close(self, spare: Tensor | None = None) -> None:
        """The gradients from their totals. ``spare``: memory of their type, by way of which those go that lie in their
        own, where it holds them; else from the first on, each written where totals were read already."""
        for part, totals in self.pieces:
            if part.start >= self.inside:
                self.own[part] = totals
            elif spare is not None and spare.numel() >= totals.numel():
                self.own[part] = spare[: totals.numel()].view(totals.shape).copy_(totals)
            else:
                self._close_in_place(totals)

    def _close_in_place(self, totals: Tensor) -> None:
        at = min(_FIRST, len(totals))
        self.own[:at] = totals[:at].to(self.own.dtype)
        while at < len(totals):
            end = min(2 * at, len(totals))
            self.own[at:end] = totals[at:end]
            at = end

"""Blocks of pairs that a fold computes, out of a grid of blocks: what an engine that walks over tiles leaves out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .bounded_cache import BoundedCache


@dataclass(frozen=True, eq=False)
class ChosenBlocks:
    """``table`` [*batch, row blocks, column blocks] is 1 where a block of ``rows`` × ``cols`` pairs is folded, else 0;
    ``share`` of all are. ``calls``: what an engine has prepared for these blocks, and forgets with them."""

    table: Tensor
    rows: int
    cols: int
    share: float
    calls: BoundedCache[tuple, Any] = field(default_factory=lambda: BoundedCache(16))

    def choose_tile(self, most: tuple[int, int], swapped: bool) -> tuple[int, int]:
        """Kept and folded indices of tiles that lie in one block: divisors of its sizes, ``most`` at most."""
        kept, folded = (_largest_divisor(s, n) for s, n in zip(self._sizes(swapped), most, strict=True))
        return kept, folded

    def spread(self, table: Tensor, lengths: tuple[int, int], tile: tuple[int, int], swapped: bool) -> Tensor:
        """A table of this kind for the tiles of the kept and the folded axis."""
        table = table.mT if swapped else table
        for dim, length, n, size in zip((-2, -1), lengths, tile, self._sizes(swapped), strict=True):
            table = table.repeat_interleave(size // n, dim).narrow(dim, 0, -(-length // n))
        return table.contiguous()

    def _sizes(self, swapped: bool) -> tuple[int, int]:
        return (self.cols, self.rows) if swapped else (self.rows, self.cols)


def _largest_divisor(size: int, most: int) -> int:
    return next(n for n in range(min(size, most), 0, -1) if size % n == 0)

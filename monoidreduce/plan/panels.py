"""How many rows (and columns) of pairs are held at once by the panel schedule.

A panel's products are the vendor's: they want it large, since every panel reads all columns once more and, in a
gradient, adds to all column gradients once more (benchmarks/gpu_wide.py). Its size is what the budget leaves.
"""

from __future__ import annotations

from dataclasses import dataclass

ROUND = 128  # rows of a panel are a multiple of this where there are more
NARROW = 256  # features up to here are cheaper to multiply again than pairs are to keep
# a 16-bit total after n additions has sqrt((n + 1) / 2) times the error of one rounding: 2.1 times after eight
ADDS = 8
SMALLEST = 16  # rows and columns of the least panel that is cut both ways
FEW = 128  # fewer rows than this make poor products: pairs are then better recomputed than kept


@dataclass(frozen=True)
class Panels:
    """Rows and columns of one panel; ``wide``: whether 16-bit column totals are kept in float32 meanwhile."""

    rows: int
    cols: int
    wide: bool = False

    def count(self, rows: int) -> int:
        """How many panels of rows there are."""
        return -(-rows // self.rows)


def by_rows(rows: int, cols: int, pair: int, room: int, wide: bool = False) -> Panels | None:
    """Panels of whole rows: as many as ``room`` bytes hold at ``pair`` bytes a pair, all about equally large."""
    most = room // max(1, cols * pair)
    return Panels(_even(rows, most), cols, wide) if most > 0 else None


def by_columns(rows: int, cols: int, pair: int, room: int) -> Panels | None:
    """Panels of all rows and some columns where at least :data:`FEW` fit, else of a part of both."""
    most = max(0, room) // max(1, pair)
    if most < min(rows, SMALLEST) * min(cols, SMALLEST):
        return None
    if most // max(1, rows) >= min(FEW, cols):
        return Panels(rows, _even(cols, most // max(1, rows)))
    side = _even(cols, max(1, int(most**0.5)))
    return Panels(_even(rows, max(1, most // side)), side)


def _even(length: int, most: int) -> int:
    """The size of equal parts of ``length``, none above ``most``; rounded where that keeps their number."""
    if length <= most:
        return max(1, length)
    count = -(-length // most)
    even = -(-length // count)
    rounded = -(-even // ROUND) * ROUND
    return rounded if rounded <= most else max(1, most // ROUND * ROUND) if most >= ROUND else even

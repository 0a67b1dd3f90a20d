"""How many rows (and columns) of pairs are held at once by the panel schedule.

A panel's products are the vendor's: they want it large, since every panel reads all columns once more and, in a
gradient, adds to all column gradients once more (benchmarks/gpu_wide.py). Its size is what the budget leaves.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import budget

ROUND = 128  # rows of a panel are a multiple of this where there are more
NARROW = 256  # features up to here are cheaper to multiply again than pairs are to keep
# a 16-bit total after n additions has sqrt((n + 1) / 2) times the error of one rounding: 2.1 times after eight
ADDS = 8
FEW = 128  # fewer rows than this make poor products: pairs are then better recomputed than kept


@dataclass(frozen=True)
class Panels:
    """Rows and columns of one panel."""

    rows: int
    cols: int


def by_rows(rows: int, cols: int, pair: int, room: int) -> Panels:
    """Panels of whole rows: as many as ``room`` bytes hold at ``pair`` bytes a pair, all about equally large."""
    least = max(1, cols * pair)
    budget.require(least, "one row of pairs")
    return Panels(_even(rows, max(1, room // least)), cols)


def by_columns(rows: int, cols: int, pair: int, room: int) -> Panels:
    """Panels of whole columns where at least :data:`FEW` fit, else of both a part of the rows and of the columns."""
    budget.require(pair * min(cols, 16), "sixteen pairs")
    most = max(1, room // max(1, pair))
    if most // max(1, rows) >= min(FEW, cols):
        return Panels(rows, _even(cols, most // max(1, rows)))
    side = max(1, int(most**0.5))
    c = _even(cols, side)
    return Panels(_even(rows, max(1, most // max(1, c))), c)


def _even(length: int, most: int) -> int:
    """The size of equal parts of ``length``, none above ``most``; rounded where that keeps their number."""
    if length <= most:
        return max(1, length)
    count = -(-length // most)
    even = -(-length // count)
    rounded = -(-even // ROUND) * ROUND
    return rounded if rounded <= most else max(1, most // ROUND * ROUND) if most >= ROUND else even

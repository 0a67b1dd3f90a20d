"""How many rows (and columns) of pairs are held at once by the panel schedule.

A panel's products are the vendor's: they want it large, since every panel reads all columns once more and, in a
gradient, adds to all column gradients once more (benchmarks/gpu_wide.py). Its size is what the budget leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .in_place_layout import Tail

ROUND = 128  # rows of a panel are a multiple of this where there are more
NARROW = 256  # features up to here are cheaper to multiply again than pairs are to keep
# a 16-bit total after n additions has sqrt((n + 1) / 2) times the error of one rounding: 2.1 times after eight
ADDS = 8
# rather: where a row's own column outweighs the rest, eight add up to 2.3 times torch's error, six to 2
BLOCKS = 4
SMALLEST = 16  # rows and columns of the least panel that is cut both ways
MOST = 16384  # columns of a panel of all rows: every panel reads and writes the float32 totals of all rows once
FEW = 128  # fewer rows than this make poor products: pairs are then better recomputed than kept
# the same where every panel reads and writes float32 totals of all columns: on an H200 a loss of 32768 × 32768 pairs
# and 512 features took 1.72 of its products in panels of 768 rows, 1.33 of 1408, and 1.55 recomputed
LONG = 1024
TILE = 128, 256  # rows and columns, at most, of a tile of a generated product: a processor does one at a time


@dataclass(frozen=True)
class Block:
    """Some rows that are walked with all columns before the next (``row_blocks.py``), and the size of their panels."""

    first: int
    last: int
    rows: int
    cols: int

    @property
    def strips(self) -> bool:
        """Whether it is several panels high."""
        return self.rows < self.last - self.first


@dataclass(frozen=True)
class Panels:
    """Rows and columns of one panel, and how they follow each other.

    ``wide``: whether 16-bit column totals are kept in float32 meanwhile. ``outer``: whose parts are walked one after
    the other, each with all parts of the other axis.
    """

    rows: int
    cols: int
    wide: bool = False
    outer: str = "cols"
    tail: Tail | None = None  # in turns, with most of what is held in the column gradients' own memory
    blocks: tuple[Block, ...] = ()  # of rows, whose panels may differ: these are the highest and the narrowest of them

    def count(self, rows: int) -> int:
        """How many panels of rows there are."""
        return -(-rows // self.rows)

    def pays(self, rows: int) -> bool:
        """Whether panels of whole rows are long enough to keep their pairs rather than to recompute them."""
        return self.rows >= min(LONG if self.wide else FEW, rows)


def by_rows(rows: int, cols: int, pair: int, room: int, wide: bool = False, each: int = 0) -> Panels | None:
    """Panels of whole rows: as many as ``room`` bytes hold at ``pair`` bytes a pair and ``each`` a row, all about
    equally large."""
    most = room // max(1, cols * pair + each)
    return Panels(even(rows, most), cols, wide) if most > 0 else None


def cut(outer: int, inner: int, pair: int, room: int, each: int) -> tuple[int, int] | None:
    """Parts of two axes, the outer one's walked one after the other: all of the inner one where that leaves enough.

    ``each``: bytes, per index of an outer part, of what is added up over several inner ones.
    """
    whole = room // max(1, inner * pair)
    if whole >= min(FEW, outer):
        return even(outer, whole), inner
    side = max(SMALLEST, int((max(0, room) / 2 / pair) ** 0.5))
    side = min(outer, side, max(SMALLEST, room // 2 // each) if each else side)
    other = (room - side * each) // (side * pair)
    return (even(outer, side), even(inner, other)) if other >= min(SMALLEST, inner) else None


def filling(rows: int, processors: int, tile: int = TILE[1]) -> Callable[[int], int]:
    """Of panels of ``rows`` rows: how many of at most so many columns to take, that none of the processors idle in the
    last round of tiles, ``tile`` columns wide; a quarter of them may be left for that."""
    high = -(-rows // TILE[0])

    def fill(most: int) -> int:
        wide = most // tile
        if wide < 4 or processors < 2:
            return most
        some = range(wide, wide * 3 // 4, -1)
        busy = {n: n / -(-high * n // processors) for n in some}
        return tile * next(n for n in some if busy[n] >= 0.97 * max(busy.values()))

    return fill


def even(length: int, most: int) -> int:
    """The size of equal parts of ``length``, none above ``most``; rounded where that keeps their number."""
    if length <= most:
        return max(1, length)
    count = -(-length // most)
    even = -(-length // count)
    rounded = -(-even // ROUND) * ROUND
    return rounded if rounded <= most else max(1, most // ROUND * ROUND) if most >= ROUND else even

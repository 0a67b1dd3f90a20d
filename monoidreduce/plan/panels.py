"""How many rows (and columns) of pairs are held at once by the panel schedule.

A panel's products are the vendor's: they want it large, since every panel reads all columns once more and, in a
gradient, adds to all column gradients once more (benchmarks/gpu_wide.py). Its size is what the budget leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from .tail import Tail

ROUND = 128  # rows of a panel are a multiple of this where there are more
NARROW = 256  # features up to here are cheaper to multiply again than pairs are to keep
# a 16-bit total after n additions has sqrt((n + 1) / 2) times the error of one rounding: 2.1 times after eight
ADDS = 8
# rather: where a row's own column outweighs the rest, eight add up to 2.3 times torch's error, six to 2
BLOCKS = 4
SMALLEST = 16  # rows and columns of the least panel that is cut both ways
MOST = 16384  # columns of a panel of all rows: every panel reads and writes the float32 totals of all rows once
FEW = 128  # fewer rows than this make poor products: pairs are then better recomputed than kept
TILE = 128, 256  # rows and columns, at most, of a tile of a generated product: a processor does one at a time

_AROUND = 4  # rounds: what it takes to begin and to end a panel's three products


class Filling(Protocol):
    """Of at most so many columns how many a panel takes."""

    def __call__(self, most: int, length: int = 0) -> int: ...


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

    def count(self, rows: int) -> int:
        """How many panels of rows there are."""
        return -(-rows // self.rows)


def by_rows(rows: int, cols: int, pair: int, room: int, wide: bool = False, each: int = 0) -> Panels | None:
    """Panels of whole rows: as many as ``room`` bytes hold at ``pair`` bytes a pair and ``each`` a row, all about
    equally large."""
    most = room // max(1, cols * pair + each)
    return Panels(_even(rows, most), cols, wide) if most > 0 else None


def cut(outer: int, inner: int, pair: int, room: int, each: int) -> tuple[int, int] | None:
    """Parts of two axes, the outer one's walked one after the other: all of the inner one where that leaves enough.

    ``each``: bytes, per index of an outer part, of what is added up over several inner ones.
    """
    whole = room // max(1, inner * pair)
    if whole >= min(FEW, outer):
        return _even(outer, whole), inner
    side = max(SMALLEST, int((max(0, room) / 2 / pair) ** 0.5))
    side = min(outer, side, max(SMALLEST, room // 2 // each) if each else side)
    other = (room - side * each) // (side * pair)
    return (_even(outer, side), _even(inner, other)) if other >= min(SMALLEST, inner) else None


def filling(rows: int, processors: int, tile: int = TILE[1]) -> Filling:
    """Of panels of ``rows`` rows: how many of at most so many columns to take, that none of the processors idle in the
    last round of tiles, ``tile`` columns wide; a quarter of them may be left for that. Where all panels but the last
    have as many columns, ``length`` in all: that together they take few rounds, and are few."""
    high = -(-rows // TILE[0])

    def rounds(wide: int) -> int:
        return -(-high * wide // processors)

    def fill(most: int, length: int = 0) -> int:
        wide = most // tile
        if wide < 4 or processors < 2:
            return most
        some = range(wide, wide * 3 // 4, -1)
        if length:
            return tile * min(some, key=lambda n: together(-(-length // tile), n))
        busy = {n: n / rounds(n) for n in some}
        return tile * next(n for n in some if busy[n] >= 0.97 * max(busy.values()))

    def together(tiles: int, wide: int) -> int:
        whole, rest = divmod(tiles, wide)
        return whole * (_AROUND + rounds(wide)) + (_AROUND + rounds(rest) if rest else 0)

    return fill


def blocks(
    rows: int,
    cols: int,
    pair: int,
    room: int,
    each: int,
    filling: Callable[[int], Filling],
    lends: bool = True,
    most: int = BLOCKS,
) -> Panels | None:
    """Few blocks of rows one after the other, each with all columns, some at a time.

    Column totals are added to once a block, which 16 bits bear. A block's row totals, ``each`` bytes a row, lie apart
    or, where row gradients lend their memory, in those of its rows and of the rows after it, twice as long as they: of
    a last block of half the length a half lies apart, and a quarter of the one before. Of up to ``most`` blocks the
    number whose panels are longest along their shorter side, products of both are then large; of more as few as fit.
    ``filling``: for panels of so many rows, how many of at most so many columns to take."""
    shorter = 2 if lends else 1
    for counts in (range(2, most + 1), *((n,) for n in range(most + 1, ADDS + 1))):
        found: list[Panels] = []
        for count in counts:
            own = min(rows, -(-rows * shorter // (((count - 1) * shorter + 1) * ROUND)) * ROUND)
            last = max(0, rows - (count - 1) * own)
            apart = (-(-max(last, own - last) // 2) if lends else own) * each
            part = (room - apart) // max(1, own * pair)
            if apart <= room * 2 // 3 and part >= min(ROUND, cols):
                found.append(Panels(own, cols if part >= cols else filling(own)(_even(cols, part), cols), outer="rows"))
        if found:
            return max(found, key=lambda p: min(p.rows, p.cols))
    return None


def _even(length: int, most: int) -> int:
    """The size of equal parts of ``length``, none above ``most``; rounded where that keeps their number."""
    if length <= most:
        return max(1, length)
    count = -(-length // most)
    even = -(-length // count)
    rounded = -(-even // ROUND) * ROUND
    return rounded if rounded <= most else max(1, most // ROUND * ROUND) if most >= ROUND else even

"""Gradients in blocks of rows one after the other, where neither whole rows nor panels of all rows fit.

A block meets all columns, some at a time. Column gradients of 16 bits are added to once a block, which they bear a few
times. A block's row gradients are added up in float32; where row gradients lend their memory, these totals lie in those
of the block's own rows and of the rows after it, which are not written yet; or apart, where they do not hold all of
them: in two pieces their sums would be two products, too small for all processors. Where that leaves room, a block is
several panels high: a strip of columns is walked down all of its rows before the next one, and its column gradients
are added up in float32 too, in the same memory. So panels are nearly square while blocks are few.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from . import panel_layout
from .panel_layout import Block, Panels, even

# What a panel costs beside its pairs, as rows and columns that it would have more: its products begin and end, and it
# reads and writes totals of all its rows and columns. (On an H200 a loss of 65536 × 65536 pairs and 768 features took
# 1.46 of its products in panels of 5632 × 5632, 1.39 of 11264 × 5632; more in docs/wide.md.)
MORE = 512
_TRIES = 64  # heights of panels that are tried, about
_LOOKED = 8  # of these, the ones of which fewer columns are tried
# Rows and columns of a tile of the vendor's sums, as it chose them for 512 and 768 features.
_TILES = (256, 128), (192, 192), (128, 192), (128, 160), (128, 128)


@dataclass(frozen=True)
class Held:
    """Bytes of a pair, of the float32 totals of a row and of a column, and those that a row's gradient lends; numbers
    of a row's and of a column's gradient."""

    pair: int
    row: int
    col: int
    lent: int
    widths: tuple[int, int]


@dataclass(frozen=True)
class Machine:
    """Processors, and the rows and columns of a tile of the product that fills a panel."""

    processors: int
    tile: tuple[int, int]


def blocks(rows: int, cols: int, held: Held, machine: Machine, room: int, most: int, strips: bool) -> Panels | None:
    """The blocks that cost least, of those that are ``most`` or fewer, else of those that are as few as fit in ``room``
    bytes. ``strips``: whether a block may be several panels high."""
    found = [_blocks(high, rows, cols, held, room, strips) for high in _heights(rows, room, held)]
    found = [plan for plan in found if 1 < len(plan) <= panel_layout.ADDS and any(b.cols < cols for b in plan)]
    if not found:
        return None
    fewest = max(most, min(map(len, found)))
    cost = _Cost(cols, held.widths, machine)
    tried = sorted((plan for plan in found if len(plan) <= fewest), key=cost)[:_LOOKED]
    best = min(map(cost.filled, tried), key=cost)
    return Panels(max(b.rows for b in best), min(b.cols for b in best), outer="rows", blocks=best)


def _heights(rows: int, room: int, held: Held) -> list[int]:
    """Rows of a panel to try: so many that it is square, half of them to twice, and equal parts of all."""
    side = max(1, int((max(0, room) / held.pair) ** 0.5))
    step = max(1, side // (_TRIES * panel_layout.ROUND)) * panel_layout.ROUND
    square = range(-(-side // (2 * step)) * step, 2 * side + 1, step)
    equal = [-(-rows // (n * panel_layout.ROUND)) * panel_layout.ROUND for n in range(2, panel_layout.ADDS + 1)]
    return sorted({min(rows, high) for high in (*square, *equal)})


def apart(block: Block, rows: int, held: Held) -> int:
    """Bytes of a block's totals, where the gradients of its rows and of those after it do not hold all of them."""
    totals = (block.last - block.first) * held.row + (block.cols * held.col if block.strips else 0)
    return 0 if totals <= (rows - block.first) * held.lent else totals


def _blocks(high: int, rows: int, cols: int, held: Held, room: int, strips: bool) -> list[Block]:
    """Blocks of panels ``high`` rows high, as wide as they may be; none where ``room`` bytes do not hold one. A block
    ends where gradients hold no more totals, if that leaves half of a panel's rows."""
    found: list[Block] = []
    while not found or found[-1].last < rows:
        first = found[-1].last if found else 0
        wide = min(cols, room // (high * held.pair))  # where nothing lies apart
        lent = (rows - first) * held.lent
        count = max(1, (lent - wide * held.col) // (high * held.row)) if strips and held.row else 1
        last = min(rows, first + count * high)
        some = lent // held.row // panel_layout.ROUND * panel_layout.ROUND if held.row else 0
        if max(1, high // 2) <= some < last - first:
            last = first + some
        block = Block(first, last, min(high, last - first), wide)
        wide = (room - apart(block, rows, held)) // (block.rows * held.pair)
        if wide < min(panel_layout.ROUND, cols):
            return []
        found.append(replace(block, cols=even(cols, wide)))
    return found


class _Cost:
    """What blocks cost: the pairs of their panels, and what these cost beside them, as often as the three products of a
    panel leave processors idle."""

    def __init__(self, cols: int, widths: tuple[int, int], machine: Machine):
        self.cols, self.widths, self.machine = cols, widths, machine
        self.known: dict[tuple[int, int], float] = {}

    def __call__(self, plan: Sequence[Block]) -> float:
        return sum(map(self._block, plan))

    def filled(self, plan: Sequence[Block]) -> tuple[Block, ...]:
        """The same blocks, of panels that have fewer columns, down to three quarters, where that costs less."""
        found = []
        for b in plan:
            least = b.cols * 3 // 4 // panel_layout.ROUND * panel_layout.ROUND
            fewer = (
                range(b.cols // panel_layout.ROUND * panel_layout.ROUND, least, -panel_layout.ROUND)
                if b.cols < self.cols
                else ()
            )
            found.append(min((replace(b, cols=wide) for wide in (b.cols, *fewer)), key=self._block))
        return tuple(found)

    def _block(self, b: Block) -> float:
        whole, rest = divmod(b.last - b.first, b.rows)
        return whole * self._line(b.rows, b.cols) + (self._line(rest, b.cols) if rest else 0)

    def _line(self, high: int, wide: int) -> float:
        """Panels of all columns, so many at a time."""
        if (high, wide) not in self.known:
            whole, rest = divmod(self.cols, wide)
            self.known[high, wide] = whole * self._panel(high, wide) + (self._panel(high, rest) if rest else 0)
        return self.known[high, wide]

    def _panel(self, high: int, wide: int) -> float:
        products = (high, wide, (self.machine.tile,)), (high, self.widths[0], _TILES), (wide, self.widths[1], _TILES)
        times = sum(1 / busy(*product, self.machine.processors) for product in products if product[1])
        return (high + MORE) * (wide + MORE) * times


@functools.lru_cache(maxsize=4096)
def busy(rows: int, cols: int, tiles: tuple[tuple[int, int], ...], processors: int) -> float:
    """The share of the processors that a product of so many rows and columns keeps busy, in the tiles that serve it
    best: all of them do one tile at a time."""

    def rounds(high: int, wide: int) -> int:
        return -(-(-(-rows // high) * -(-cols // wide)) // processors)

    return rows * cols / (processors * min(rounds(*tile) * tile[0] * tile[1] for tile in tiles))

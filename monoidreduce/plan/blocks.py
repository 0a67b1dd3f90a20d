"""Gradients in blocks of rows one after the other, where neither whole rows nor panels of all rows fit.

A block meets all columns, some at a time. Column gradients of 16 bits are added to once a block, which they bear a few
times. A block's row gradients are added up in float32; where row gradients lend their memory, these totals lie in those
of the block's own rows and of the rows after it, which are not written yet. Where that leaves room, a block is several
panels high: a strip of columns is walked down all of its rows before the next one, and its column gradients are added
up in float32 too, in the same memory. So panels are nearly square while blocks are few.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import panels
from .panels import Block, Filling, Panels, even

# What a panel costs beside its pairs, as rows and columns that it would have more: its products begin and end, and it
# reads and writes totals of all its rows and columns. (On an H200 a loss of 65536 × 65536 pairs and 768 features took
# 1.51 of its products in panels of 8832 × 3072, 1.44 of 5632 × 5632, 1.37 of 11264 × 5632: benchmarks/gpu_wide.py.)
MORE = 512
_TRIES = 64  # panels on top of each other, at most


@dataclass(frozen=True)
class Bytes:
    """What is held of a pair, of the float32 totals of a row and of a column, and what a row's gradient lends."""

    pair: int
    row: int
    col: int
    lent: int


def blocks(
    rows: int, cols: int, each: Bytes, room: int, filling: Callable[[int], Filling], most: int, strips: bool
) -> Panels | None:
    """The blocks that cost least, of those that are ``most`` or fewer, else of those that are as few as fit.

    ``filling``: for panels of so many rows, how many of at most so many columns to take; ``strips``: whether a block
    may be several panels high."""
    heights = sorted({min(rows, -(-rows // (n * panels.ROUND)) * panels.ROUND) for n in range(1, _TRIES + 1)})
    found = [plan for high in heights if (plan := _blocks(high, rows, cols, each, room, strips))]
    found = [plan for plan in found if 1 < len(plan) <= panels.ADDS]
    if not found:
        return None
    fewest = max(most, min(map(len, found)))
    plan = min((plan for plan in found if len(plan) <= fewest), key=_cost(cols))
    full = tuple(_filled(b, cols, filling) for b in plan)
    return Panels(max(b.rows for b in full), min(b.cols for b in full), outer="rows", blocks=full)


def apart(block: Block, rows: int, each: Bytes) -> int:
    """Bytes of a block's totals for which the gradients of its rows and of those after it have no room."""
    strip = block.cols * each.col if block.strips else 0
    return max(0, (block.last - block.first) * each.row + strip - (rows - block.first) * each.lent)


def _blocks(high: int, rows: int, cols: int, each: Bytes, room: int, strips: bool) -> list[Block] | None:
    """Blocks of panels ``high`` rows high; None where ``room`` bytes do not hold one."""
    found: list[Block] = []
    while not found or found[-1].last < rows:
        first = found[-1].last if found else 0
        wide = min(cols, room // (high * each.pair))  # where nothing lies apart
        lent = (rows - first) * each.lent - wide * each.col if strips else 0
        count = max(1, lent // (high * each.row)) if each.row else 1
        last = min(rows, first + count * high)
        block = Block(first, last, min(high, last - first), wide)
        wide = (room - apart(block, rows, each)) // (block.rows * each.pair)
        if wide < min(panels.ROUND, cols):
            return None
        found.append(Block(first, last, block.rows, even(cols, wide)))
    return found


def _cost(cols: int) -> Callable[[Sequence[Block]], float]:
    def cost(plan: Sequence[Block]) -> float:
        return sum((b.last - b.first) * (1 + MORE / b.rows) * cols * (1 + MORE / b.cols) for b in plan)

    return cost


def _filled(block: Block, cols: int, filling: Callable[[int], Filling]) -> Block:
    wide = cols if block.cols >= cols else filling(block.rows)(block.cols, cols)
    return Block(block.first, block.last, block.rows, wide)

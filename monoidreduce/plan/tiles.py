"""How large a tile of pairs is.

The eager engine's time is matrix products plus a few passes of arithmetic over the tile: the products want a tile of
at least 512 × 512, the passes want it to stay in the cache. Measured with ``benchmarks/cpu.py`` on two cores (1 MB of
L2 each).
"""

from __future__ import annotations

from dataclasses import dataclass

ROWS, COLS = 1024, 1024  # the tile when both axes are long
ELEMENTS = ROWS * COLS


@dataclass(frozen=True)
class Tiles:
    """Batch elements, rows and columns of one tile."""

    batch: int
    rows: int
    cols: int


def choose(batch: int, rows: int, cols: int, width: int = 1, elements: int = ELEMENTS) -> Tiles:
    """The tile for a fold of ``batch`` problems of ``rows`` × ``cols`` pairs, each pair holding ``width`` numbers."""
    elements = max(1, elements // max(1, width))
    r = min(max(1, rows), max(1, min(ROWS, elements)))
    c = min(max(1, cols), max(1, elements // r))
    r = min(max(1, rows), max(r, elements // c))  # few columns: take more rows
    b = min(max(1, batch), max(1, elements // (r * c)))
    return Tiles(b, r, c)

"""How large a tile of pairs is.

The eager engine's time is matrix products, a few passes of arithmetic over the tile, and about 0.1 ms of Python per
tile. The products and Python want it large, the passes want it in the cache. Measured with attention, forward and
backward, on two cores each (``benchmarks/cpu.py``): a Neoverse N1 (1 MB of L2) and 16-bit work on a Xeon like 1024 ×
1024 best, float32 on that Xeon (2 MB of L2) 512 × 1024. """

from __future__ import annotations

import platform
from dataclasses import dataclass

ROWS, COLS = (512, 1024) if platform.machine().lower() in ("x86_64", "amd64") else (1024, 1024)
ELEMENTS = ROWS * COLS


@dataclass(frozen=True)
class Tiles:
    """Batch elements, rows and columns of one tile."""

    batch: int
    rows: int
    cols: int


def choose(batch: int, rows: int, cols: int, width: int = 1) -> Tiles:
    """The tile for a fold of ``batch`` problems of ``rows`` × ``cols`` pairs, each pair holding ``width`` numbers."""
    elements = max(1, ELEMENTS // max(1, width))
    r = min(max(1, rows), max(1, min(ROWS, elements)))
    c = min(max(1, cols), max(1, elements // r))
    r = min(max(1, rows), max(r, elements // c))  # few columns: take more rows
    b = min(max(1, batch), max(1, elements // (r * c)))
    return Tiles(b, r, c)

"""The size of a tile of pairs in torch.

The eager engine's time is matrix products, a few passes of arithmetic over the tile, and about 0.1 ms of Python per
tile. The products and Python want it large, the passes want it in the cache, and skipping wants it small. Measured with
attention, forward and backward, on two cores each of a Neoverse N1 (1 MB of L2) and of a Xeon with AMX (2 MB of L2):
1024 × 1024 is within a few per cent of the best shape on both, in float32 and bfloat16; 512 × 512 costs 20 to 40 %.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import BudgetError
from . import budget, settings

ROWS, COLS = 1024, 1024  # the tile when both axes are long
ELEMENTS = ROWS * COLS
HELD = 6 * 8  # bytes per pair, at most, of a tile's buffers and torch's temporaries: six numbers of 64 bits
LEAST = 16 * 16 * HELD  # a smaller budget is refused: the tiles would be too slow


@dataclass(frozen=True)
class Tiles:
    """Batch elements, rows and columns of one tile."""

    batch: int
    rows: int
    cols: int


def choose(
    batch: int, rows: int, cols: int, width: int = 1, room: int | None = None, copied: tuple[int, int] = (0, 0)
) -> Tiles:
    """The tile for ``batch`` folds of ``rows`` × ``cols`` pairs, each pair holding ``width`` numbers.

    ``copied``: bytes of a row's and of a column's vectors that are copied for a tile, as they are multiplied in another
    type than they are stored in. ``room``: bytes that tiles may take; by default the budget. Raises BudgetError if that
    is too little.
    """
    asked = settings.now()
    elements, room = ELEMENTS // max(1, width) // asked.shrink, room or asked.budget
    if room is not None:
        if room < LEAST:
            raise BudgetError(given=budget.format_floor(room), least=budget.format_ceil(LEAST))
        elements = min(elements, max(LEAST, room // asked.shrink) // HELD)
    elements = max(1, elements)
    r = min(max(1, rows), max(1, min(ROWS, elements)))
    c = min(max(1, cols), max(1, elements // r))
    r = min(max(1, rows), max(r, elements // c))  # few columns: take more rows
    if room is not None:  # a quarter for the copies of either side
        r, c = (min(n, max(16, room // 4 // held)) if held else n for n, held in zip((r, c), copied, strict=True))
    b = min(max(1, batch), max(1, elements // (r * c)))
    return Tiles(b, r, c)

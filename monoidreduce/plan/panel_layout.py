"""Panel layouts: which rows and columns of the pairs the panel schedule holds at once, and where they lie in memory.

A panel is filled by a vendor GEMM, which wants it large: every panel reads all columns once more and, in a gradient,
adds to all column gradients once more (benchmarks/gpu_wide.py). Its size is what the memory budget leaves. In the order
in which the planner prefers them, a layout is one of

- panels of whole rows (:func:`plan_whole_rows`);
- panels of all rows and some columns, kept in gradients that are not written yet (:func:`plan_in_place`);
- blocks of rows, one after the other, each in panels of some columns (:func:`plan_row_blocks`);
- panels cut along both axes (:func:`cut_both_axes`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from . import budget

NARROW = 256  # features: up to here pairs are cheaper to compute again than to keep
# The same on a CPU: with gradients, a head of 512 × 8192 takes 0.88 of the time of recomputing it at 256, 1.08 at 192.
HOST_NARROW = 224
MULTIPLE = 128  # rows of a panel are a multiple of this where there are more
# A 16-bit total after n additions has sqrt((n + 1) / 2) times the error of one rounding: 2.1 times after eight.
MAX_ROUNDINGS = 8
# Preferred number of row blocks: where the label column outweighs the rest, eight roundings add up to 2.3 times torch's
# error, six to 2.
PREFERRED_BLOCKS = 4
MIN_SIDE = 16  # rows and columns of the smallest panel that is cut along both axes
MAX_COLS = 16384  # of a panel of all rows: every panel reads and writes the float32 totals of all rows once
MIN_ROWS = 128  # fewer rows than this make slow GEMMs: pairs are then better computed again than kept
# The same where every panel reads and writes float32 totals of all columns: on an H200 a loss of 32768 × 32768 pairs
# and 512 features took 1.72 times its GEMMs in panels of 768 rows, 1.33 of 1408, and 1.55 when computed again.
MIN_ROWS_FLOAT32 = 1024
TILE = 128, 256  # rows and columns, at most, of an output tile of a generated GEMM: an SM computes one at a time
# What a panel costs beside its pairs, as rows and columns that it would have more: its GEMMs start and end, and it
# reads and writes totals of all its rows and columns. (On an H200 a loss of 65536 × 65536 pairs and 768 features took
# 1.46 times its GEMMs in panels of 5632 × 5632, 1.39 of 11264 × 5632; more in docs/internals/panel-kernels.md.)
OVERHEAD = 512


def narrow_features(device: torch.device) -> int:
    """Features up to which a loss on a device computes its pairs again in the backward."""
    return min(HOST_NARROW, NARROW) if device.type == "cpu" else NARROW


@dataclass(frozen=True)
class RowBlock:
    """Rows ``first`` to ``last``, multiplied with all columns before the next block, in panels of ``rows`` ×
    ``cols``."""

    first: int
    last: int
    rows: int
    cols: int

    @property
    def strips(self) -> bool:
        """True when the block is several panels high: a strip of columns then visits all of them before the next."""
        return self.rows < self.last - self.first


@dataclass(frozen=True)
class ColumnPanel:
    """A panel of all rows and the columns ``first`` to ``last``.

    ``over``: the axes that it is folded over; ``at``: its byte offset in the column gradient (None: in a buffer of its
    own)."""

    first: int
    last: int
    over: frozenset[str]
    at: int | None


@dataclass(frozen=True)
class InPlaceLayout:
    """Column panels in the memory of the column gradient (:func:`plan_in_place`).

    ``own``: columns of the separate panel buffer. ``lent``: float32 totals of so many rows lie in the row gradients;
    those of the others in the column gradient from the byte ``totals`` on (None: in a buffer of their own).
    ``stored``: panels that come before ``panels``, whose weights stay where they are from the fold over columns until
    they are summed, and ``vectors``: where the rows' scaled vectors lie meanwhile."""

    panels: tuple[ColumnPanel, ...]
    own: int
    lent: int
    totals: int | None
    stored: tuple[ColumnPanel, ...] = ()
    vectors: int = 0


@dataclass(frozen=True)
class PanelLayout:
    """Rows and columns of one panel, and the order of panels.

    ``float32_totals``: 16-bit column totals are kept in float32 until all panels are done. ``outer``: the axis of the
    outer loop over panels. With ``blocks``, ``rows`` and ``cols`` are the highest and the narrowest of their panels."""

    rows: int
    cols: int
    float32_totals: bool = False
    outer: str = "cols"
    in_place: InPlaceLayout | None = None
    blocks: tuple[RowBlock, ...] = ()

    def count(self, rows: int) -> int:
        """The number of panels down all rows."""
        return -(-rows // self.rows)

    def is_worthwhile(self, rows: int) -> bool:
        """True when panels of whole rows are high enough that keeping pairs beats computing them again."""
        return self.rows >= min(MIN_ROWS_FLOAT32 if self.float32_totals else MIN_ROWS, rows)


def choose_in_budget(
    choose: Callable[[int], PanelLayout | None], free: Callable[[], int], least: int
) -> tuple[int, PanelLayout | None]:
    """Bytes that panels may take, and their layout in them. Without a budget they are :data:`budget.PANELS` at most,
    and ``least`` where that is more and panels of whole rows need it."""
    free = functools.cache(free)
    usual, wider = (budget.allowed_bytes(free, n, budget.PANELS) for n in (0, least))
    found = choose(usual)
    if usual == wider or (found is not None and found.in_place is None and not found.blocks):
        return usual, found
    return wider, choose(wider)


# Whole rows, and both axes --------------------------------------------------------------------------------------


def plan_whole_rows(
    rows: int, cols: int, pair_bytes: int, limit: int, float32_totals: bool = False, row_bytes: int = 0
) -> PanelLayout | None:
    """Panels of whole rows, about equally high: as many rows as ``limit`` bytes hold, at ``pair_bytes`` a pair and
    ``row_bytes`` a row. None where not one row fits."""
    most = limit // max(1, cols * pair_bytes + row_bytes)
    return PanelLayout(split_evenly(rows, most), cols, float32_totals) if most > 0 else None


def cut_both_axes(outer: int, inner: int, pair_bytes: int, limit: int, total_bytes: int) -> tuple[int, int] | None:
    """The outer and inner length of panels; all of the inner axis where that leaves the outer one long enough.

    ``total_bytes``: per index of the outer axis, what is added up over several inner panels."""
    whole = limit // max(1, inner * pair_bytes)
    if whole >= min(MIN_ROWS, outer):
        return split_evenly(outer, whole), inner
    side = max(MIN_SIDE, int((max(0, limit) / 2 / pair_bytes) ** 0.5))
    side = min(outer, side, max(MIN_SIDE, limit // 2 // total_bytes) if total_bytes else side)
    other = (limit - side * total_bytes) // (side * pair_bytes)
    return (split_evenly(outer, side), split_evenly(inner, other)) if other >= min(MIN_SIDE, inner) else None


def split_evenly(length: int, most: int) -> int:
    """The size of equal parts of ``length``, none above ``most``; a multiple of ``MULTIPLE`` where that keeps their
    number."""
    if length <= most:
        return max(1, length)
    count = -(-length // most)
    even = -(-length // count)
    rounded = -(-even // MULTIPLE) * MULTIPLE
    return rounded if rounded <= most else max(1, most // MULTIPLE * MULTIPLE) if most >= MULTIPLE else even


def fill_waves(rows: int, processors: int, tile: int = TILE[1]) -> Callable[[int], int]:
    """A function from the most columns that a panel of ``rows`` rows may have to those that it had better have, so that
    no SM idles in the last wave of tiles, each ``tile`` columns wide. It gives up a quarter of the columns at most."""
    high = -(-rows // TILE[0])

    def fill(most: int) -> int:
        wide = most // tile
        if wide < 4 or processors < 2:
            return most
        some = range(wide, wide * 3 // 4, -1)
        busy = {n: n / -(-high * n // processors) for n in some}
        return tile * next(n for n in some if busy[n] >= 0.97 * max(busy.values()))

    return fill


# Blocks of rows -------------------------------------------------------------------------------------------------
#
# For gradients where neither whole rows nor panels of all rows fit. A block meets all columns, some at a time. Column
# gradients of 16 bits are added to once a block, so blocks must be few. A block's row gradients are added up in
# float32: in the memory of the gradients of its own and later rows, which are not written yet, or in a buffer of their
# own where those do not hold all of them (in two pieces each sum would be two GEMMs, too small for all SMs). Where that
# leaves memory a block is several panels high, and the column gradients of a strip are added up in float32 too, in the
# same memory. So panels are nearly square while blocks are few.

_HEIGHTS = 64  # heights of panels that are tried, about
_REFINED = 8  # of these, the ones of which fewer columns are tried
# Rows and columns of the vendor's output tiles, as it chose them for 512 and 768 features.
_VENDOR_TILES = (256, 128), (192, 192), (128, 192), (128, 160), (128, 128)


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of a pair, of the float32 totals of a row and of a column, and those that a row's gradient lends;
    ``widths``: features of a row's and of a column's gradient."""

    pair: int
    row: int
    col: int
    lent: int
    widths: tuple[int, int]


@dataclass(frozen=True)
class Machine:
    """The number of SMs, and rows and columns of an output tile of the GEMM that fills a panel."""

    processors: int
    tile: tuple[int, int]


def plan_row_blocks(
    rows: int, cols: int, held: BlockBytes, machine: Machine, limit: int, most: int, strips: bool
) -> PanelLayout | None:
    """The blocks of least cost, of those that are ``most`` or fewer, else of those that are as few as fit in ``limit``
    bytes. ``strips``: whether a block may be several panels high."""
    found = [_stack_blocks(high, rows, cols, held, limit, strips) for high in _list_heights(rows, limit, held)]
    found = [plan for plan in found if 1 < len(plan) <= MAX_ROUNDINGS and any(b.cols < cols for b in plan)]
    if not found:
        return None
    fewest = max(most, min(map(len, found)))
    cost = _BlockCost(cols, held.widths, machine)
    tried = sorted((plan for plan in found if len(plan) <= fewest), key=cost)[:_REFINED]
    best = min(map(cost.narrow, tried), key=cost)
    return PanelLayout(max(b.rows for b in best), min(b.cols for b in best), outer="rows", blocks=best)


def separate_total_bytes(block: RowBlock, rows: int, held: BlockBytes) -> int:
    """Bytes of a block's totals where they need a buffer of their own: the gradients of its rows and of those after it
    do not hold all of them."""
    totals = (block.last - block.first) * held.row + (block.cols * held.col if block.strips else 0)
    return 0 if totals <= (rows - block.first) * held.lent else totals


def _list_heights(rows: int, limit: int, held: BlockBytes) -> list[int]:
    """Rows of a panel to try: half to twice those of a square one, and equal parts of all rows."""
    side = max(1, int((max(0, limit) / held.pair) ** 0.5))
    step = max(1, side // (_HEIGHTS * MULTIPLE)) * MULTIPLE
    square = range(-(-side // (2 * step)) * step, 2 * side + 1, step)
    equal = [-(-rows // (n * MULTIPLE)) * MULTIPLE for n in range(2, MAX_ROUNDINGS + 1)]
    return sorted({min(rows, high) for high in (*square, *equal)})


def _stack_blocks(high: int, rows: int, cols: int, held: BlockBytes, limit: int, strips: bool) -> list[RowBlock]:
    """Blocks of panels ``high`` rows high, as wide as they may be; none where ``limit`` bytes do not hold one. A block
    ends where gradients hold no more totals, if that leaves half of a panel's rows."""
    found: list[RowBlock] = []
    while not found or found[-1].last < rows:
        first = found[-1].last if found else 0
        wide = min(cols, limit // (high * held.pair))  # where no totals need a buffer of their own
        lent = (rows - first) * held.lent
        count = max(1, (lent - wide * held.col) // (high * held.row)) if strips and held.row else 1
        last = min(rows, first + count * high)
        some = lent // held.row // MULTIPLE * MULTIPLE if held.row else 0
        if max(1, high // 2) <= some < last - first:
            last = first + some
        block = RowBlock(first, last, min(high, last - first), wide)
        wide = (limit - separate_total_bytes(block, rows, held)) // (block.rows * held.pair)
        if wide < min(MULTIPLE, cols):
            return []
        found.append(replace(block, cols=split_evenly(cols, wide)))
    return found


class _BlockCost:
    """The cost of blocks: (rows + OVERHEAD) × (columns + OVERHEAD) of every panel, divided by the share of SMs that its
    three GEMMs keep busy."""

    def __init__(self, cols: int, widths: tuple[int, int], machine: Machine):
        self.cols, self.widths, self.machine = cols, widths, machine
        self.known: dict[tuple[int, int], float] = {}

    def __call__(self, plan: Sequence[RowBlock]) -> float:
        return sum(map(self._of_block, plan))

    def narrow(self, plan: Sequence[RowBlock]) -> tuple[RowBlock, ...]:
        """The same blocks, of panels with fewer columns, down to three quarters, where that costs less."""
        found = []
        for b in plan:
            least = b.cols * 3 // 4 // MULTIPLE * MULTIPLE
            fewer = range(b.cols // MULTIPLE * MULTIPLE, least, -MULTIPLE) if b.cols < self.cols else ()
            found.append(min((replace(b, cols=wide) for wide in (b.cols, *fewer)), key=self._of_block))
        return tuple(found)

    def _of_block(self, b: RowBlock) -> float:
        whole, rest = divmod(b.last - b.first, b.rows)
        return whole * self._across(b.rows, b.cols) + (self._across(rest, b.cols) if rest else 0)

    def _across(self, high: int, wide: int) -> float:
        """Panels of all columns, so many at a time."""
        if (high, wide) not in self.known:
            whole, rest = divmod(self.cols, wide)
            self.known[high, wide] = whole * self._of_panel(high, wide) + (self._of_panel(high, rest) if rest else 0)
        return self.known[high, wide]

    def _of_panel(self, high: int, wide: int) -> float:
        fill, own = (high, wide, (self.machine.tile,)), self.widths
        gemms = (fill, (high, own[0], _VENDOR_TILES), (wide, own[1], _VENDOR_TILES))
        times = sum(1 / busy_share(*gemm, self.machine.processors) for gemm in gemms if gemm[1])
        return (high + OVERHEAD) * (wide + OVERHEAD) * times


@functools.lru_cache(maxsize=4096)
def busy_share(rows: int, cols: int, tiles: tuple[tuple[int, int], ...], processors: int) -> float:
    """The share of the SMs that a GEMM of so many rows and columns keeps busy, in the best of the output tiles: all SMs
    compute one tile at a time."""

    def waves(high: int, wide: int) -> int:
        return -(-(-(-rows // high) * -(-cols // wide)) // processors)

    return rows * cols / (processors * min(waves(*tile) * tile[0] * tile[1] for tile in tiles))


# In the memory of gradients -------------------------------------------------------------------------------------
#
# The column gradient of a vocabulary is the largest tensor that a backward returns, and is written a few columns at a
# time: until then its memory holds a panel. Row gradients are added up in float32 and rounded at the very end, so their
# own memory holds the totals of the first half of the rows. Those of the other half get a buffer where the budget
# allows, else lie at the end of the column gradient: the columns whose place they take are computed twice, first for
# the rows alone, and last, when the row gradients are done, for themselves.
#
# Where the gradient is taken in the forward, that memory is free before anything is written: the weights of the first
# columns are stored there during the fold over columns, and summed when rows are known, without a second GEMM.

COL_MULTIPLE, _HALF_MULTIPLE = 128, 64  # columns of a panel are a multiple of one of these where there are more
MIN_COLS = 16  # of the smallest panel
_ALIGN = 256  # bytes: where panels and totals may begin
_MAX_STORED = 64  # panels of stored weights, fewer than that
_MIN_STORED = 16  # at least one column in so many is stored: the others are folded a little slower for it
ROWS, COLS = frozenset({"cols"}), frozenset({"rows"})  # axes folded over: for row, for column gradients


class RowTotals(NamedTuple):
    """Rows: how many there are, of how many the row gradients' memory holds the totals, and bytes of a row's totals."""

    number: int
    lent: int
    each: int


class StorageNeeds(NamedTuple):
    """What stored weights need beside them: bytes of all tiles' sums, which lie first, during the fold; bytes of the
    rows' vectors, which lie last, while stored weights are summed; and the columns of a tile."""

    sums: int
    vectors: int
    tile: int


def plan_in_place(
    cols: int,
    gradient_bytes: int,
    column_bytes: int,
    rows: RowTotals,
    limit: int,
    most: int,
    fill: Callable[[int], int],
    stored: StorageNeeds | None = None,
) -> InPlaceLayout | None:
    """Column panels in the memory of the column gradient; None where that is too small to be of use.

    ``gradient_bytes``: of one column's gradient; ``column_bytes``: that a panel holds of one column; ``limit``: bytes
    for a panel buffer of its own, at least one of a few columns, and for row totals; ``most``: columns of a panel;
    ``fill``: of at most so many columns, how many a panel had better have; ``stored``: given when weights of the first
    columns are to be stored."""
    rest = (rows.number - rows.lent) * rows.each
    separate = rest <= limit * 3 // 4
    own = min((limit - rest if separate else limit) // max(1, column_bytes), cols, most)
    own = own // COL_MULTIPLE * COL_MULTIPLE or own // _HALF_MULTIPLE * _HALF_MULTIPLE or own // MIN_COLS * MIN_COLS
    begin = cols * gradient_bytes if separate else (cols * gradient_bytes - rest) // _ALIGN * _ALIGN
    first = begin // gradient_bytes  # the columns from here on are computed twice
    if not own or first < cols // 2:
        return None

    def fit(begin: int, end: int, each: int) -> int:
        return fill(min(most, max(0, end - begin - _ALIGN) // each // COL_MULTIPLE * COL_MULTIPLE))

    kept: tuple[ColumnPanel, ...] = ()
    vectors = 0
    if stored is not None:
        vectors = max(0, begin - stored.vectors) // _ALIGN * _ALIGN
        kept = _place_stored(first, vectors, gradient_bytes, column_bytes, most, fill, stored)
        if not kept or kept[-1].last < cols // _MIN_STORED:
            return None
    done = kept[-1].last if kept else 0
    step = fit(done * gradient_bytes, begin, column_bytes)
    step, place = (step, -(-done * gradient_bytes // _ALIGN) * _ALIGN) if step > own else (own, None)
    again = [ColumnPanel(at, min(cols, at + step), ROWS, place) for at in range(first, cols, step)]
    both = _place_written(done, first, begin, gradient_bytes, column_bytes, own, fit, ROWS | COLS)
    late = _place_written(first, cols, cols * gradient_bytes, gradient_bytes, column_bytes, own, fit, COLS)
    return InPlaceLayout((*again, *both, *late), own, rows.lent, None if separate else begin, kept, vectors)


def _place_stored(
    last: int,
    end: int,
    gradient_bytes: int,
    column_bytes: int,
    most: int,
    fill: Callable[[int], int],
    stored: StorageNeeds,
) -> tuple[ColumnPanel, ...]:
    """Panels of the first columns, one behind the other up to the byte ``end``: gradients are written from the
    beginning on, and must not reach a panel that is still to be summed."""
    found, whole = (0, 0), math.lcm(stored.tile, COL_MULTIPLE)
    for count in range(1, _MAX_STORED):
        # bytes a column before the first panel, and before the last where panels are narrower than gradients
        begins = gradient_bytes + count * column_bytes, count * gradient_bytes + column_bytes
        free = end - _ALIGN
        step = min(most, last // count, free // max(begins), (free - stored.sums) // (count * column_bytes))
        step = max(0, fill(step)) // whole * whole
        found = max(found, (count, step), key=lambda plan: plan[0] * (plan[1] - OVERHEAD))
    count, step = found
    first = (end - count * step * column_bytes) // _ALIGN * _ALIGN
    places = [(n * step, first + n * step * column_bytes) for n in range(count)]
    return tuple(ColumnPanel(at, at + step, ROWS | COLS, place) for at, place in places)


def _place_written(
    at: int,
    last: int,
    end: int,
    gradient_bytes: int,
    column_bytes: int,
    own: int,
    fit: Callable[[int, int, int], int],
    over: frozenset[str],
) -> list[ColumnPanel]:
    """Panels whose columns' gradients are written, each at the end of what is free behind its own gradients.

    ``fit``: columns of a panel between two byte offsets, at so many bytes a column."""
    found = []
    while at < last:
        step = min(fit(at * gradient_bytes, end, gradient_bytes + column_bytes), last - at)
        aligned = -(-step // COL_MULTIPLE) * COL_MULTIPLE
        place = (end - aligned * column_bytes) // _ALIGN * _ALIGN if step > own else None
        step = step if step > own else min(own, last - at)
        found.append(ColumnPanel(at, at + step, over, place))
        at += step
    return found

"""The k best of each row: of a panel, of a product of matrices, of all pairs of a fold, of lists of columns.

**A list that fits in registers.** The k largest of a row lie in the k of its strips (of 64 columns) that have the
largest maxima. A row is read once, for these maxima; then one program instance looks closely at the maxima and at the
chosen strips, in registers: it finds the k-th largest bit by bit, by counting, and sorts k numbers by counting too.

**A larger list, of all columns**: pairs are written to a panel, and the best are selected from its rows. Panels hold
some rows and as many columns as memory allows, all if it can be; where columns come in several panels, the lists of
each are combined. Every pair is computed once, written once and read once.

**A larger list, over lists of columns**: the best, then the best behind these, and so on. A launch keeps as many as fit
in registers, of the pairs behind the last one that the launches before it found: of lower numbers, of equal ones at
later places, and copies of itself that a list still has. All launches are of one kernel, which computes a pair to the
same bits in each of them. Besides the results nothing is held, however long lists are, and nothing waits for the host.
Pairs are computed in every launch, so that many best are found sooner by gathering pieces of lists and selecting from
panels of these.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....errors import BudgetError
from ....plan import budget, settings
from ....program.constructors import ONE, find_listed
from ....program.expression import Expr, node, reduce_node
from ....program.lower import Fold
from ....reductions import kind_of, outputs_of
from ....reductions.best import worst
from ....reductions.topk import EMPTY, MOST_IN_REGISTERS
from ...common import combine, matmul
from ...common.evaluate import Sizes
from ...common.subproblem import add_unlisted, run_block
from ..codegen.kernel_spec import pad_width, power_of_two
from ..launch import driver, replay
from ..launch.driver import Kernels

_STRIP = 64  # columns of a row whose maximum stands for them
_MANY = 32  # strips at a time
_LONG = 4  # rows of fewer strips than so many times k are looked at whole
_HELD = 8192  # numbers that a program instance looks at closely
_ALIGNED = 8  # numbers by which rows of a panel begin, at least 16 bytes: products of unaligned rows are slow
_TEXT = """@triton.jit
def strip_maxima(out, x, stride, strips, STRIP: tl.constexpr, MANY: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * MANY + tl.arange(0, MANY)
    place = row * stride + at[:, None] * STRIP + tl.arange(0, STRIP)[None, :]
    v = tl.load(x + place, mask=(at < strips)[:, None], other=0)
    if v.dtype != tl.float64:
        v = v.to(tl.float32)
    tl.store(out + row * strips + at, tl.reduce(v, 1, highest), mask=at < strips)


@triton.jit
def ordered(x, BITS: tl.constexpr):
    # integers in the order of the numbers, NaN above all; without the lowest bits, which are alike
    x = x.to(tl.float32)
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(x != x, 2143289344, bits)
    return (bits ^ ((bits >> 31) & 2147483647)) >> BITS


@triton.jit
def number(key, BITS: tl.constexpr):
    key = (key << BITS) | tl.where(key < 0, (1 << BITS) - 1, 0)
    return (key ^ ((key >> 31) & 2147483647)).to(tl.float32, bitcast=True)


@triton.jit
def taken(key, inside, k, BITS: tl.constexpr):
    # which are among the k largest, the first of equals, and how many of these come before each
    key = tl.where(inside, key, -1 << (31 - BITS))
    least = tl.where(tl.sum((key >= 0).to(tl.int32), 0) >= k, 0, -1 << (31 - BITS))  # the k-th, bit by bit from above
    for b in range(31 - BITS):
        more = least | (1 << (30 - BITS - b))
        least = tl.where(tl.sum((key >= more).to(tl.int32), 0) >= k, more, least)
    above, equal = inside & (key > least), inside & (key == least)
    room = k - tl.sum(above.to(tl.int32), 0)
    mine = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))
    return mine, tl.cumsum(mine.to(tl.int32), 0) - 1


@triton.jit
def best_listed(
    values, places, spare, x, maxima, stride, strips, k, whole, width,
    STRIP: tl.constexpr, STRIPS: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr, BITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    strip = tl.arange(0, STRIPS)
    key = ordered(tl.load(maxima + row * strips + strip, mask=strip < strips, other=0.0), BITS)
    mine, place = taken(key, strip < strips, k, BITS)
    spare += row * 2 * SLOTS  # of the row: what is chosen, written and read again by other threads
    tl.store(spare + place, strip, mask=mine)
    tl.debug_barrier()
    at = tl.arange(0, WIDTH)
    held = at < k * STRIP
    strip = tl.load(spare + at // STRIP, mask=held, other=0)
    at = tl.where(held, strip * STRIP + at % STRIP, at - k * STRIP + whole)
    inside = tl.arange(0, WIDTH) < width
    key = ordered(tl.load(x + row * stride + at, mask=inside, other=0.0), BITS)
    mine, place = taken(key, inside, k, BITS)
    tl.debug_barrier()
    tl.store(spare + place, key, mask=mine)
    tl.store(spare + SLOTS + place, at, mask=mine)
    tl.debug_barrier()
    slot = tl.arange(0, SLOTS)
    other = tl.arange(0, SLOTS)
    key = tl.load(spare + slot, mask=slot < k, other=-2147483648)
    at = tl.load(spare + SLOTS + slot, mask=slot < k, other=0)
    theirs = tl.load(spare + other, mask=other < k, other=-2147483648)
    before = (theirs[None, :] > key[:, None]) | ((theirs[None, :] == key[:, None]) & (other[None, :] < slot[:, None]))
    rank = tl.sum((before & (other < k)[None, :]).to(tl.int32), 1)
    v = number(key, BITS)
    tl.store(values + row * k + rank, v, mask=slot < k)
    tl.store(places + row * k + rank, tl.where(v == float("-inf"), -1, at).to(tl.int64), mask=slot < k)
"""
_kernels = Kernels("The best of a matrix's rows: strips by their maxima, and the best of those strips.", _TEXT)


def sort_list(r: Expr, values: Tensor, places: Tensor) -> list[Tensor]:
    """A list as users get it: best first, and no place where there was nothing."""
    merged = kind_of(r).merge(r.attrs[2], [values.unsqueeze(0), places.unsqueeze(0)])
    values, places = (t.squeeze(0) for t in kind_of(r).close(r.attrs[2], merged))
    return [values, places.masked_fill(values == worst(values.dtype, r.attrs[2][1]), -1)]


def select_best(panel: Tensor, k: int, largest: bool, compute: torch.dtype) -> list[Tensor]:
    """The k best of each row of a matrix, the first of equals, and their places: -1 where there is nothing.

    Few smallest are not found by strips: a strip's minimum would be NaN where anything in it is.
    """
    rows, strips = panel.shape[0], panel.shape[1] // _STRIP
    whole, kind = strips * _STRIP, torch.promote_types(panel.dtype, torch.float32)
    width = k * _STRIP + panel.shape[1] - whole
    short = not rows or strips < _LONG * k
    if k > MOST_IN_REGISTERS or short or not largest or kind is not torch.float32 or max(width, strips) > _HELD:
        return select_large(panel, k, largest, compute)
    maxima = torch.empty(rows, strips, dtype=kind, device=panel.device)
    grid = (rows, -(-strips // _MANY))
    _kernels("strip_maxima", grid, (maxima, panel, panel.stride(0), strips), dict(STRIP=_STRIP, MANY=_MANY))
    slots = pad_width(k)
    values, places = (torch.empty(rows, k, dtype=t, device=panel.device) for t in (compute, torch.int64))
    spare = torch.empty(rows, 2 * slots, dtype=torch.int32, device=panel.device)
    given = (values, places, spare, panel, maxima, panel.stride(0), strips, k, whole, width)
    alike = 16 if panel.dtype is torch.bfloat16 else 0
    constants = dict(STRIP=_STRIP, STRIPS=pad_width(strips), WIDTH=pad_width(width), SLOTS=slots, BITS=alike)
    _kernels("best_listed", (rows,), given, constants, dict(num_warps=8))
    return [values, places]


def select_best_of_panel(panel: Tensor, r: Expr, compute: torch.dtype) -> list[Tensor]:
    """The best of each row of a panel, as the eager engine keeps them."""
    k, largest = r.attrs[2]
    return select_best(panel, min(k, panel.shape[1]), largest, compute)


def find_product(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> tuple[Tensor, Tensor] | None:
    """Rows and columns, where a fold is the k best products of each row with all columns and nothing else."""
    places = _find_product_leaves(fold, sizes)
    if places is None:
        return None
    x, y = (leaves[k] for k in places)
    return (x, y) if x.dtype == y.dtype and x.dtype.is_floating_point else None


def prepare_best_products(
    fold: Fold, leaves: Sequence[Any], sizes: Sizes
) -> Callable[[Sequence[Any]], list[Tensor]] | None:
    """What finds them for leaves like these, if a fold is that: for calls whose host would take longer than they."""
    places = _find_product_leaves(fold, sizes)
    if places is None or find_product(fold, leaves, sizes) is None:
        return None
    return _BestProducts(fold, places, sizes)


class _BestProducts:
    """The k best products for leaves of one kind: the first call is recorded, later ones are replayed, in as many
    panels as there was memory for then.

    ``replays``: by whether rows and columns are the same tensor; None: it cannot be recorded."""

    def __init__(self, fold: Fold, places: tuple[int, int], sizes: Sizes):
        self.fold, self.places, self.sizes = fold, places, sizes
        self.replays: dict[bool, Any] = {}

    def __call__(self, leaves: Sequence[Any]) -> list[Tensor]:
        x, y = (leaves[k] for k in self.places)
        same = x.data_ptr() == y.data_ptr()
        made = self.replays.get(same, self)
        if made is self:
            return self._record(x, y, same)
        found = None if made is None else made.run(x, y)
        return select_best_products(self.fold, x, y, self.sizes) if found is None else list(found)

    def _record(self, x: Tensor, y: Tensor, same: bool) -> list[Tensor]:
        run = functools.partial(select_best_products, self.fold, sizes=self.sizes)
        if not driver.can_relaunch(self.sizes.device):
            return run(x, y)
        found, self.replays[same], _ = replay.record(run, (x, y), self.sizes.device)
        return found


def _find_product_leaves(fold: Fold, sizes: Sizes) -> tuple[int, int] | None:
    (r, *others), product = fold.reductions, fold.reductions[0].args[0]
    if others or r.attrs[:2] != ("topk", "cols") or product.op != "dot" or sizes.batch or not sizes.rows:
        return None
    if any(e.op != "leaf" or e.is_pair for e in product.args) or fold.scaled[0][1] is not ONE:
        return None
    x, y = product.args if product.args[0].rows else product.args[::-1]
    return fold.leaves.index(x), fold.leaves.index(y)


def select_best_products(fold: Fold, x: Tensor, y: Tensor, sizes: Sizes) -> list[Tensor]:
    """The k best products of each row with all columns, some rows at a time.

    What a panel does, without its book-keeping, which takes longer than the work where rows are few.
    """
    r = fold.reductions[0]
    kind = torch.bfloat16 if x.dtype is torch.bfloat16 else sizes.compute
    held = sizes.compute if fold.raised else kind  # as the caller will hold them, where nothing is computed of them
    pitch = -(-sizes.cols // _ALIGNED) * _ALIGNED
    row = pitch * kind.itemsize
    room = budget.allowed_bytes(lambda: matmul.free_memory(sizes.device), row)
    if room < row:
        raise BudgetError(given=budget.format_floor(room), least=budget.format_ceil(row))
    step = min(sizes.rows, room // row)
    panel = torch.empty(step, pitch, dtype=kind, device=sizes.device)[:, : sizes.cols]
    if step == sizes.rows:
        matmul.multiply_into_panel(panel, x, y)
        return select_best_of_panel(panel, r, held)
    parts = []
    for at in range(0, sizes.rows, step):
        some = x[at : at + step]
        matmul.multiply_into_panel(panel[: len(some)], some, y)
        parts.append(select_best_of_panel(panel[: len(some)], r, held))
    return [torch.cat(t) for t in zip(*parts, strict=True)]


# Lists that do not fit in registers

Run = Callable[[Fold, list[Any], Sizes], list[Tensor]]
_LEAST_COLUMNS = 4  # of a panel, times k, if memory is short
_LEAST_PANELS = 4  # where all pairs would take more than
_PANEL_BYTES = 2**26  # bytes: no call holds all pairs of a large problem at once


@functools.lru_cache(maxsize=1024)
def split_large(fold: Fold) -> tuple[Fold | None, tuple[Fold, ...]]:
    """What other kernels compute of a fold, and each of its reductions that is selected from panels, as a fold."""
    large = [r for r in fold.reductions if is_large(r)]
    rest = [(r, s) for r, s in fold.scaled if r not in large]
    kept = replace(fold, reductions=tuple(r for r, _ in rest), scales=tuple(s for _, s in rest)) if rest else None
    return kept, tuple(replace(fold, reductions=(r,), scales=()) for r in large)


def is_large(r: Expr) -> bool:
    """True for a top-k whose list does not fit in registers."""
    return r.attrs[0] == "topk" and r.attrs[2][0] > MOST_IN_REGISTERS


@functools.lru_cache(maxsize=1024)
def write_pairs(fold: Fold) -> Fold:
    """The fold that writes the pairs which the only reduction of ``fold`` selects from."""
    (r,) = fold.reductions
    _, over, params = r.attrs
    return replace(fold, reductions=(reduce_node("panel", over, params, r.args),))


def run_large(
    fold: Fold, leaves: list[Any], sizes: Sizes, launch: Run, select: Callable[..., list[Tensor]] | None = None
) -> list[Tensor]:
    """Run a fold with such reductions. ``launch``: runs a fold by its own kernels; ``select``: a fold of one such
    reduction, on the same arguments, where not by panels."""
    rest, large = split_large(fold)
    found = dict(zip(rest.outputs, launch(rest, leaves, sizes), strict=True)) if rest is not None else {}
    for one in large:
        found |= dict(zip(one.outputs, (select or _select)(one, leaves, sizes, launch), strict=True))
    return [found[o] for o in fold.outputs]


def _select(fold: Fold, leaves: list[Any], sizes: Sizes, launch: Run) -> list[Tensor]:
    (r,) = fold.reductions
    over = r.attrs[1]
    kept, folded = (sizes.rows, sizes.cols) if over == "cols" else (sizes.cols, sizes.rows)
    select_block = functools.partial(_select_once, launch=launch)
    panel_kept, panel_folded = _choose_panel_shape(r, sizes, kept, folded)
    if panel_kept >= kept and panel_folded >= folded:
        return select_block(fold, leaves, sizes)
    parts = []
    for first in range(0, kept, panel_kept):
        own, states = slice(first, min(first + panel_kept, kept)), []
        for start in range(0, folded, panel_folded):
            other = slice(start, min(start + panel_folded, folded))
            rows, cols = (own, other) if over == "cols" else (other, own)
            states += run_block(fold, leaves, sizes, rows, cols, select_block)
        parts.append(combine.close_state(r, combine.merge_states(r, states)))
    return [torch.cat(ts, len(sizes.batch)) for ts in zip(*parts, strict=True)]


def _select_once(fold: Fold, leaves: list[Any], sizes: Sizes, launch: Run) -> list[Tensor]:
    """The best of all rows and columns at once; where there are fewer than k, the last slots are empty."""
    (r,) = fold.reductions
    _, over, (k, largest) = r.attrs
    (panel,) = launch(write_pairs(fold), leaves, sizes)
    found_count = min(k, sizes.here(over))
    found = select_large(panel.flatten(0, -2), found_count, largest, sizes.compute)
    values, places = (t.view(*panel.shape[:-1], found_count) for t in found)
    if found_count < k:
        rest = (*panel.shape[:-1], k - found_count)
        values = torch.cat([values, values.new_full(rest, worst(values.dtype, largest))], -1)
        places = torch.cat([places, places.new_full(rest, -1)], -1)
    return [values, places]


def _choose_panel_shape(r: Expr, sizes: Sizes, kept: int, folded: int) -> tuple[int, int]:
    """How many kept and folded indices a panel has; raises BudgetError where no panel fits."""
    k, batch = r.attrs[2][0], max(1, math.prod(sizes.batch))

    def bytes_of(length: int) -> int:
        return batch * _count_row_bytes(r, sizes, length)

    least = bytes_of(min(folded, _LEAST_COLUMNS * k))
    room = budget.allowed_bytes(lambda: matmul.free_memory(sizes.device), least)
    if room < least:
        raise BudgetError(given=budget.format_floor(room), least=budget.format_ceil(least), bytes=least)
    if bytes_of(folded) <= room:
        row = max(1, bytes_of(folded))
        most = kept if settings.requested_budget() is not None else max(-(-kept // _LEAST_PANELS), _PANEL_BYTES // row)
        return max(1, min(kept, room // row, most)), max(folded, 1)
    length = max(min(folded, _LEAST_COLUMNS * k), folded * room // bytes_of(folded))
    while bytes_of(length) > room:  # strips of short rows take more for each number
        length = max(min(folded, _LEAST_COLUMNS * k), length * 7 // 8)
    return 1, length


def _count_row_bytes(r: Expr, sizes: Sizes, length: int) -> int:
    """Bytes that a row of a panel takes, and what is selected of it."""
    item = sizes.compute.itemsize if outputs_of(r)[0][1] == "float" else 8
    return length * item + extra_bytes(length, r.attrs[2][0], item)


def estimate_large_bytes(fold: Fold, sizes: Sizes) -> int:
    """Bytes alive at once while the only reduction of ``fold`` is selected, its results included."""
    (r,) = fold.reductions
    kept, folded = (sizes.rows, sizes.cols) if r.attrs[1] == "cols" else (sizes.cols, sizes.rows)
    panel_kept, panel_folded = _choose_panel_shape(r, sizes, kept, folded)
    item = sizes.compute.itemsize if outputs_of(r)[0][1] == "float" else 8
    results = math.prod(sizes.batch) * kept * r.attrs[2][0] * (item + 8)
    panels = math.prod(sizes.batch) * panel_kept * _count_row_bytes(r, sizes, panel_folded)
    return panels + results * (1 if panel_kept >= kept and panel_folded >= folded else 2)


def list_panel_folds(fold: Fold) -> Sequence[Fold]:
    """The folds whose kernels run ``fold``."""
    rest, large = split_large(fold)
    return [*([] if rest is None else [rest]), *map(write_pairs, large)]


def selects_from_panels(fold: Fold) -> bool:
    """True where a fold of all pairs has a top-k whose list does not fit in registers, and kernels for all else."""
    if not any(map(is_large, fold.reductions)) or find_listed(fold.reductions) is not None:
        return False
    return all(not kind_of(r).no_kernel(r) for f in list_panel_folds(fold) for r in f.reductions)


# The k best of each row of a matrix (:func:`select_large`).
#
# The k best of a row, the first of equals, lie in those k of its strips of columns that have the best maxima. One pass
# over the matrix finds the maxima. One program instance a row then finds the k-th of them, a threshold that about k
# numbers of the row pass, and collects those, in the order of their columns, from the k strips alone. Where too many
# pass (a sorted row, say), the threshold is first raised to the k-th number itself, bit by bit, by counting. Of what
# was collected, exactly k are chosen in registers and sorted by torch. No atomics, and no step waits for the host.
#
# Numbers are compared as integers that are ordered like them, the best largest: NaN is above all numbers, as in torch.


_LARGE_HELD = {4: 16384, 8: 8192}  # strips, and twice the numbers, that a program instance holds, by the bytes of a key
_SHARE_OF_HELD = 4  # k may be this share of them
_LANES = 2048  # numbers at a time, elsewhere
_WARPS = 16
_LARGE_TEXT = """

@triton.jit
def ranked(x, LARGEST: tl.constexpr, BITS: tl.constexpr):
    # integers in the order of the numbers, the best largest; without the lowest bits, which are alike
    if x.dtype == tl.int64:
        key = x
    elif x.dtype == tl.float64:
        key = ordered64(x)
    else:
        key = ordered32(x.to(tl.float32)) >> BITS
    if LARGEST:
        return key
    else:
        return ~key


@triton.jit
def chosen_of(key, inside, k, TOP: tl.constexpr):
    # which are among the k largest, the first of equals; how many of these come before each; and the k-th, by counting
    lowest: tl.constexpr = -(1 << TOP)
    key = tl.where(inside, key, lowest)
    least = tl.min(key, 0) * 0 + lowest
    more, bit = least * 0, least * 0 + (1 << (TOP - 1))
    for _ in range(TOP + 1):  # bit by bit from above
        least = tl.where(tl.sum((key >= more).to(tl.int32), 0) >= k, more, least)
        more = least + bit
        bit = bit >> 1
    above, equal = inside & (key > least), inside & (key == least)
    room = k - tl.sum(above.to(tl.int32), 0)
    mine = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))
    return mine, tl.cumsum(mine.to(tl.int32), 0) - 1, least


@triton.jit
def strip_maxima(
    out, x, stride, cols, strips,
    LARGEST: tl.constexpr, TOP: tl.constexpr, BITS: tl.constexpr, STRIP: tl.constexpr, MANY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * MANY + tl.arange(0, MANY)
    col = at[:, None] * STRIP + tl.arange(0, STRIP)[None, :]
    key = ranked(tl.load(x + row * stride + col, mask=col < cols, other=0), LARGEST, BITS)
    lowest: tl.constexpr = -(1 << TOP)
    tl.store(out + row * strips + at, tl.max(tl.where(col < cols, key, lowest), 1), mask=at < strips)


@triton.jit
def choose_strips(out, least, maxima, strips, k, TOP: tl.constexpr, STRIPS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, STRIPS)
    key = tl.load(maxima + row * strips + at, mask=at < strips, other=0)
    mine, place, threshold = chosen_of(key, at < strips, k, TOP)
    tl.store(out + row * k + place, at, mask=mine)
    tl.store(least + row, threshold)


@triton.jit
def read_strips(
    x, chosen, first, cols, k, LARGEST: tl.constexpr, BITS: tl.constexpr, STRIP: tl.constexpr, LANES: tl.constexpr
):
    at = first + tl.arange(0, LANES)
    col = tl.load(chosen + at // STRIP, mask=at < k * STRIP, other=0) * STRIP + at % STRIP
    inside = (at < k * STRIP) & (col < cols)
    return ranked(tl.load(x + col, mask=inside, other=0), LARGEST, BITS), col, inside


@triton.jit
def count_above(
    x, chosen, threshold, cols, k, LARGEST: tl.constexpr, BITS: tl.constexpr, STRIP: tl.constexpr, LANES: tl.constexpr
):
    found = tl.full([], 0, tl.int32)
    for first in range(0, k * STRIP, LANES):
        key, _, inside = read_strips(x, chosen, first, cols, k, LARGEST, BITS, STRIP, LANES)
        found += tl.sum((inside & (key > threshold)).to(tl.int32), 0)
    return found


@triton.jit
def collect(
    keys, places, counts, x, chosen, least, stride, cols, k,
    LARGEST: tl.constexpr, TOP: tl.constexpr, BITS: tl.constexpr, STRIP: tl.constexpr, LANES: tl.constexpr,
    ROOM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    chosen += row * k
    threshold = tl.load(least + row)
    above = count_above(x, chosen, threshold, cols, k, LARGEST, BITS, STRIP, LANES)
    if above > ROOM:  # the k-th number, bit by bit: at least k numbers are above what is one below it
        lowest: tl.constexpr = -(1 << TOP)
        low = threshold * 0 + lowest
        more, bit = low * 0, low * 0 + (1 << (TOP - 1))
        for _ in range(TOP + 1):
            enough = count_above(x, chosen, more - 1, cols, k, LARGEST, BITS, STRIP, LANES) >= k
            low = tl.where(enough, more, low)
            more = low + bit
            bit = bit >> 1
        threshold = low
        above = count_above(x, chosen, threshold, cols, k, LARGEST, BITS, STRIP, LANES)
    keys += row * ROOM
    places += row * ROOM
    done = tl.full([], 0, tl.int32)
    same = tl.full([], 0, tl.int32)
    for first in range(0, k * STRIP, LANES):
        key, col, inside = read_strips(x, chosen, first, cols, k, LARGEST, BITS, STRIP, LANES)
        equal = (inside & (key == threshold)).to(tl.int32)
        mine = (inside & (key > threshold)) | ((equal > 0) & (same + tl.cumsum(equal, 0) <= k - above))
        place = done + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(keys + place, key, mask=mine)
        tl.store(places + place, col, mask=mine)
        done += tl.sum(mine.to(tl.int32), 0)
        same += tl.sum(equal, 0)
    tl.store(counts + row, done)


@triton.jit
def choose(
    keys, places, x, at, counts, stride, cols, k,
    LARGEST: tl.constexpr, TOP: tl.constexpr, BITS: tl.constexpr, COLLECTED: tl.constexpr, WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    if COLLECTED:
        inside = lane < tl.load(counts + row)
        key = tl.load(x + row * stride + lane, mask=inside, other=0)
        col = tl.load(at + row * stride + lane, mask=inside, other=0)
    else:
        inside = lane < cols
        key = ranked(tl.load(x + row * stride + lane, mask=inside, other=0), LARGEST, BITS)
        col = lane
    mine, place, _ = chosen_of(key, inside, k, TOP)
    tl.store(keys + row * k + place, key, mask=mine)
    tl.store(places + row * k + place, col, mask=mine)


@triton.jit
def write_sorted(
    values, indices, keys, places, order, k, size, LARGEST: tl.constexpr, BITS: tl.constexpr, LANES: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    key = tl.load(keys + i, mask=i < size, other=0)
    at = i // k * k + tl.load(order + i, mask=i < size, other=0)
    place = tl.load(places + at, mask=i < size, other=0).to(tl.int64)
    if not LARGEST:
        key = ~key
    if values.dtype.element_ty == tl.int64:
        value = key
    elif key.dtype == tl.int64:
        value = unordered64(key)
    else:
        value = unordered32((key << BITS) | tl.where(key < 0, (1 << BITS) - 1, 0))
    if values.dtype.element_ty != tl.int64:
        place = tl.where(value == (float("-inf") if LARGEST else float("inf")), -1, place)
    else:
        place = tl.where(value == (-9223372036854775808 if LARGEST else 9223372036854775807), -1, place)
    tl.store(values + i, value.to(values.dtype.element_ty), mask=i < size)
    tl.store(indices + i, place, mask=i < size)
"""
_large_kernels = Kernels("The k best of the rows of a matrix.", _LARGE_TEXT)


def select_large(matrix: Tensor, k: int, largest: bool, compute: torch.dtype) -> list[Tensor]:
    """The k best numbers ``[rows, k]`` of each row of a matrix, best first and the first of equals first, in
    ``compute`` (int64 for integers), and their columns, -1 where there is nothing better than an infinity (or, of
    integers, than an end of int64)."""
    rows, cols = matrix.shape
    whole = not matrix.dtype.is_floating_point
    item = 8 if whole or matrix.dtype is torch.float64 else 4
    held, kind = _LARGE_HELD[item], torch.int64 if item == 8 else torch.int32
    values = torch.empty(rows, k, dtype=torch.int64 if whole else compute, device=matrix.device)
    indices = torch.empty(rows, k, dtype=torch.int64, device=matrix.device)
    if not rows or not k:
        return [values, indices]
    if k > held // _SHARE_OF_HELD:
        found, at = matrix.sort(dim=1, descending=largest, stable=True)
        at = at.masked_fill(found == worst(found.dtype, largest), -1)
        return [values.copy_(found[:, :k]), indices.copy_(at[:, :k])]
    equal_bits = 16 if matrix.dtype is torch.bfloat16 else 0
    constants = dict(LARGEST=largest, TOP=item * 8 - 1 - equal_bits, BITS=equal_bits)
    keys, places = (torch.empty(rows, k, dtype=t, device=matrix.device) for t in (kind, torch.int32))
    if cols <= held // 2:
        given: tuple = (keys, places, matrix, matrix, matrix, matrix.stride(0), cols, k)
        width = dict(COLLECTED=False, WIDTH=power_of_two(cols))
    else:
        collected, at, counts = _collect(matrix, k, held, kind, constants)
        given = (keys, places, collected, at, counts, collected.shape[1], cols, k)
        width = dict(COLLECTED=True, WIDTH=collected.shape[1])
    _large_kernels("choose", (rows,), given, constants | width, dict(num_warps=_WARPS))
    keys, order = keys.sort(dim=1, descending=True, stable=True)
    given = (values, indices, keys, places, order, k, keys.numel())
    last = dict(LARGEST=largest, BITS=equal_bits, LANES=_LANES)
    _large_kernels("write_sorted", (-(-keys.numel() // _LANES),), given, last)
    return [values, indices]


def extra_bytes(cols: int, k: int, item: int) -> int:
    """Bytes that :func:`select_large` holds of each row beside its results, numbers being of ``item`` bytes."""
    key = 8 if item == 8 else 4
    held = _LARGE_HELD[key]
    if k > held // _SHARE_OF_HELD:
        return cols * (item + 8)
    strips = (
        0 if cols <= held // 2 else key * -(-cols // _choose_strip(cols, held)) + 4 * k + (key + 4) * _count_room(k)
    )
    return strips + k * (2 * key + 12)


def _collect(matrix: Tensor, k: int, held: int, kind: torch.dtype, constants: dict[str, int]) -> tuple[Tensor, ...]:
    """Keys ``[rows, room]`` of at least k numbers of each row, the k best among them, in the order of their columns;
    their columns; and how many they are."""
    (rows, cols), device = matrix.shape, matrix.device
    strip, room = _choose_strip(cols, held), _count_room(k)
    strips = -(-cols // strip)
    empty = functools.partial(torch.empty, device=device)
    maxima, least = empty(rows, strips, dtype=kind), empty(rows, dtype=kind)
    chosen = empty(rows, k, dtype=torch.int32)
    many = max(1, _LANES // strip)
    grid = (rows, -(-strips // many))
    given: tuple = (maxima, matrix, matrix.stride(0), cols, strips)
    _large_kernels("strip_maxima", grid, given, constants | dict(STRIP=strip, MANY=many))
    given, width = (chosen, least, maxima, strips, k), dict(TOP=constants["TOP"], STRIPS=power_of_two(strips))
    _large_kernels("choose_strips", (rows,), given, width, dict(num_warps=_WARPS))
    keys, places = empty(rows, room, dtype=kind), empty(rows, room, dtype=torch.int32)
    counts = empty(rows, dtype=torch.int32)
    given = (keys, places, counts, matrix, chosen, least, matrix.stride(0), cols, k)
    _large_kernels("collect", (rows,), given, constants | dict(STRIP=strip, LANES=_LANES, ROOM=room))
    return keys, places, counts


def _choose_strip(cols: int, held: int) -> int:
    """Columns of a strip: as few as leave no more strips than a program instance holds."""
    return power_of_two(-(-cols // held))


def _count_room(k: int) -> int:
    """Numbers of a row that may be collected: random ones are little more than k."""
    return 2 * power_of_two(k)


_NOWHERE = 2**31 - 1  # behind every place of an int32
_SHARED, _MOST_ROUNDS, _MOST_LONE_ROUNDS = 16, 2, 8  # rows of one list, and launches for these and for lists of one row


def select_listed(
    fold: Fold, leaves: Sequence[Any], sizes: Sizes, launch: Run, gather: Run | None = None
) -> list[Tensor]:
    """The results of a fold of one top-k over lists. ``launch``: runs a fold over lists by its own kernels; ``gather``:
    by gathering pieces of lists, whose pairs are then selected from panels."""
    (r,) = fold.reductions
    _, over, (k, largest) = r.attrs
    if gather is not None and _is_gathered(fold):
        return gather(fold, [*leaves], sizes)
    kind, own = kind_of(r), functools.partial(torch.full, device=sizes.device)
    shape = (*sizes.batch, sizes.rows if over == "cols" else sizes.cols)
    dtype = sizes.compute if outputs_of(r)[0][1] == "float" else torch.int64
    first = worst(dtype, not largest) if dtype is torch.int64 else math.nan if largest else -math.inf
    value, place = own(shape, first, dtype=dtype), own(shape, -1, dtype=torch.int64)  # before all pairs
    copies = taken = torch.zeros_like(place)
    parts = []
    for _ in range(0, k, MOST_IN_REGISTERS):
        found = launch(_find_next(fold), [*leaves, value, place, copies, taken], sizes)
        values, places = (t.squeeze(0) for t in kind.merge(r.attrs[2], [t.unsqueeze(0) for t in found]))
        parts.append([values, places])
        end, last = values[..., -1], places[..., -1]
        again = (last == place) & _are_equal(end, value)
        same = (places == last.unsqueeze(-1)) & _are_equal(values, end.unsqueeze(-1))
        copies = same.sum(-1) + torch.where(again, copies, 0)
        taken = taken + (places == -1).sum(-1)
        value, place = end, torch.where(last == EMPTY, _NOWHERE, last)
    results = [torch.cat(ts, -1)[..., :k] for ts in zip(*parts, strict=True)]
    values, places = kind.close(r.attrs[2], results)
    assert fold.domain is not None
    given = [leaves[fold.leaves.index(a)] for a in fold.domain.args]
    return add_unlisted(fold, [values, places.masked_fill(values == worst(dtype, largest), -1)], given, sizes)


def _is_gathered(fold: Fold) -> bool:
    """True where gathering costs less than so many launches: a block of lists is gathered once for many rows. (A graph
    that is captured cannot wait for the host, which cuts lists into pieces.)"""
    (r,) = fold.reductions
    _, over, (k, _) = r.attrs
    assert fold.domain is not None
    form = fold.domain.attrs[0]
    if form[0] == "pages" or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return False
    shared = form[0] == "blocks" and form[1 if over == "cols" else 2] >= _SHARED
    return -(-k // MOST_IN_REGISTERS) > (_MOST_ROUNDS if shared else _MOST_LONE_ROUNDS)


@functools.lru_cache(maxsize=1024)
def _find_next(fold: Fold) -> Fold:
    """The fold that finds the best behind some of the only reduction of ``fold``."""
    (r,) = fold.reductions
    _, over, (_, largest) = r.attrs
    names = {"last_value": r.args[0].dtype, "last_place": "int", "last_copies": "int", "last_taken": "int"}
    last = tuple(
        node("leaf", (), (n,), rows=over == "cols", cols=over == "rows", feature=None, dtype=dtype)
        for n, dtype in names.items()
    )
    one = reduce_node("next_best", over, (MOST_IN_REGISTERS, largest), (*r.args, *last))
    return replace(fold, leaves=(*fold.leaves, *last), reductions=(one,))


def _are_equal(one: Tensor, other: Tensor) -> Tensor:
    return (one == other) | ((one != one) & (other != other))

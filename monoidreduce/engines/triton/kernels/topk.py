"""The k best of each row of a matrix: of a panel, and of a product of matrices that is written by panels.

The k largest of a row lie in the k of its strips (of 64 columns) that have the largest maxima. A row is read once, for
these maxima; then one program instance looks closely at the maxima and at the chosen strips, in registers: it finds the
k-th largest bit by bit, by counting, and sorts k numbers by counting too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ....errors import BudgetError
from ....plan import budget
from ....program.constructors import ONE
from ....program.expression import Expr
from ....program.lower import Fold
from ....reductions import kind_of
from ....reductions.best import worst
from ....reductions.topk import MOST_IN_REGISTERS
from ...common import matmul
from ...common.evaluate import Sizes
from ..codegen.kernel_spec import pad_width
from ..launch import driver, replay
from ..launch.driver import Kernels
from . import large_topk

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
        return large_topk.select(panel, k, largest, compute)
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

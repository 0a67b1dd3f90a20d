"""The arena of a loop over panels: all scratch memory, whether it is allocated or borrowed from gradients.

A panel lies in buffers of its own, or in bytes of a *host*: the column gradient, which is written a few columns at a
time, or one allocation for all blocks of rows. Row gradients are added up in float32 and rounded to 16 bits at the very
end: until then their own memory, and that of later rows, holds float32 totals of half as many rows
(:class:`BorrowedTotals`). What is placed where is planned in ``plan/panel_layout.py`` and by :class:`MemoryPlan`.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....plan import budget, panel_layout, settings
from ....plan.panel_layout import InPlaceLayout, PanelLayout, RowBlock
from ....program.expression import Expr
from ...common import matmul, skip_small_tiles
from ...common.evaluate import Sizes
from ...panel import ALIGN, PanelLoop, list_feeds
from ..codegen.kernel_spec import WIDEST
from ..launch import driver
from . import epilogue
from .epilogue import EpilogueGemm
from .row_kernel import group_stages, split_stage

_ALIGNED_COLS = 16  # columns of a panel that has fewer than ``ALIGN``: descriptors need 16 bytes
_ALIGNED_BYTES = 16  # where totals may begin
_PADDED_ROWS = 8  # scalars of tiles are aligned
_FIRST_ROWS = 8  # rows that are rounded by way of other memory

PanelBuffers = dict[Any, Tensor]  # by inner product, or by (number, type) of an extra buffer of weights


def row_pitch(cols: int) -> int:
    """Elements from one row of a panel to the next. Few columns are not rounded up beyond what a budget allows."""
    step = ALIGN if cols >= ALIGN else _ALIGNED_COLS
    return -(-cols // step) * step


def pad_rows(rows: int) -> int:
    """The length of a tile's scalars of all rows."""
    return -(-rows // _PADDED_ROWS) * _PADDED_ROWS


def tile_sum_bytes(rows: int, tiles: int) -> int:
    """Bytes of the maxima (bfloat16) and sums (float32) of all rows in so many tiles."""
    return (torch.bfloat16.itemsize + torch.float32.itemsize) * pad_rows(rows) * tiles


def is_aligned(width: int, compute: torch.dtype) -> bool:
    """True when totals of so many features all begin at aligned addresses, if the first does."""
    return width * compute.itemsize % _ALIGNED_BYTES == 0


class Arena:
    """The scratch memory of one loop.

    ``panel``: the buffers of the panel that is worked on, ``own`` if they are not in borrowed memory."""

    def __init__(self, buffers: dict[Any, torch.dtype], layout: PanelLayout, sizes: Sizes, narrow: torch.dtype | None):
        """``buffers``: those of a panel, and their types; ``narrow``: the type of 16-bit gradients."""
        self.buffers, self.sizes, self.narrow = buffers, sizes, narrow
        self.own: PanelBuffers = {}
        if not layout.blocks:
            shape = layout.rows, row_pitch(layout.cols)
            self.own = {key: torch.empty(shape, dtype=t, device=sizes.device) for key, t in buffers.items()}
        self.panel = self.own
        self.host: Tensor | None = None
        self.scalars: dict[Expr, Tensor] = {}

    def fork(self) -> Arena:
        """The same memory; what is allocated from the copy is the copy's alone."""
        other = copy.copy(self)
        other.scalars = dict(self.scalars)
        return other

    def get_scalars(self, name: Expr) -> Tensor:
        """Where kernels write a scalar of every row: allocated once, not once a panel."""
        if name not in self.scalars:
            dtype = self.sizes.compute if name.dtype == "float" else torch.int64
            self.scalars[name] = torch.empty(self.sizes.rows, dtype=dtype, device=self.sizes.device)
        return self.scalars[name]

    # Panels

    def borrow(self, gradient: Tensor) -> None:
        """Use the memory of a gradient that is not written yet as the host."""
        self.host = gradient.view(-1).view(torch.uint8)

    def allocate_host(self, count: int) -> None:
        """Allocate a host of so many bytes."""
        self.host = torch.empty(count, dtype=torch.uint8, device=self.sizes.device)

    def move_panel(self, at: int | None, rows: int, cols: int) -> None:
        """Place the panel at a byte offset of the host, or in its own buffers where that is None."""
        self.panel = self.own if at is None else self.place_panel(at, rows, cols)

    def place_panel(self, at: int, rows: int, cols: int) -> PanelBuffers:
        """A panel's buffers at a byte offset of the host."""
        found = {}
        for key, dtype in self.buffers.items():
            found[key] = self.view_host(at, (rows, row_pitch(cols)), dtype)
            at += found[key].nbytes
        return found

    def panel_bytes(self, rows: int, cols: int) -> int:
        """Bytes of a panel's buffers."""
        return sum(rows * row_pitch(cols) * dtype.itemsize for dtype in self.buffers.values())

    @property
    def spare(self) -> Tensor | None:
        """The memory of panels, flat and of the gradients' type, when they are done with."""
        return next((b.view(-1) for b in (self.own or self.panel).values() if b.dtype == self.narrow), None)

    # Other memory of the host

    def view_host(self, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor at a byte offset of the host."""
        assert self.host is not None
        size = torch.Size(shape).numel() * dtype.itemsize
        return self.host[at : at + size].view(dtype).view(shape)

    def place_tile_sums(self, tiles: int) -> tuple[Tensor, Tensor]:
        """The maxima and the sums of exponentials of all rows in all tiles, at the beginning of the host."""
        shape = tiles, pad_rows(self.sizes.rows)
        sums = self.view_host(0, shape, torch.float32)
        return self.view_host(sums.nbytes, shape, torch.bfloat16), sums

    def borrow_row_totals(self, gradients: dict[Any, Tensor], layout: InPlaceLayout) -> dict[Any, BorrowedTotals]:
        """Float32 totals of all rows in their gradients' memory, the rest where the layout says."""
        found, at = {}, layout.totals
        for key, gradient in gradients.items():
            assert self.host is not None
            place = None if at is None else self.host[at:]
            found[key] = BorrowedTotals.allocate(gradient, len(gradient), layout.lent, self.sizes.compute, place)
            rest = (len(gradient) - layout.lent) * gradient.shape[1] * self.sizes.compute.itemsize
            at = None if at is None else at + rest
        return found

    def borrow_block_totals(
        self, gradients: dict[Any, Tensor], strips: dict[Any, int], block: RowBlock, lent: int
    ) -> tuple[dict[Any, BorrowedTotals], dict[Any, Tensor]]:
        """Float32 totals of a block's rows: of ``lent`` of them in the gradients of these and later rows, of the others
        behind the panel. Where the block has strips, also those of a strip's columns (``strips``: their features),
        behind the rows' totals."""
        assert self.host is not None
        place = self.host[self.panel_bytes(block.rows, block.cols) :]
        rows, columns = {}, {}
        count, compute = block.last - block.first, self.sizes.compute
        for key, gradient in gradients.items():
            own, width = gradient[block.first :], gradient.shape[1]
            rows[key] = BorrowedTotals.allocate(own, count, lent, compute, place, block.first)
            place = place[(count - lent) * width * compute.itemsize :]
            for other, wide in strips.items() if block.strips else ():
                free = own.view(-1).view(compute)[count * width :]
                columns[other] = free[: block.cols * wide].view(block.cols, wide)
        return rows, columns


def count_lendable(gradient: Tensor, count: int, compute: torch.dtype) -> int:
    """Of how many rows, ``count`` at most, a gradient's memory holds the totals."""
    fits = gradient.shape[0] * gradient.itemsize // compute.itemsize
    begins = gradient.storage_offset() * gradient.itemsize
    return min(count, fits) if begins % _ALIGNED_BYTES == 0 and is_aligned(gradient.shape[1], compute) else 0


@dataclass(frozen=True)
class BorrowedTotals:
    """Float32 totals of some rows, as many as fit in the memory of their own 16-bit gradient.

    ``gradient``: from the first of these rows on, whose number is ``first``; ``pieces``: slices of the rows, and their
    totals; ``inside``: the totals of so many rows lie in the gradient."""

    gradient: Tensor
    pieces: tuple[tuple[slice, Tensor], ...]
    first: int
    inside: int

    @staticmethod
    def allocate(
        gradient: Tensor, count: int, lent: int, compute: torch.dtype, place: Tensor | None = None, first: int = 0
    ) -> BorrowedTotals:
        """Zeros for ``count`` rows, ``lent`` of them in the gradient's memory, the others in ``place`` (bytes), or in a
        new allocation."""
        width, pieces = gradient.shape[1], []
        if lent:
            inside = gradient.view(-1)[: lent * width * compute.itemsize // gradient.itemsize]
            pieces.append((slice(0, lent), inside.view(compute).view(lent, width).zero_()))
        if lent < count:
            size = (count - lent) * width * compute.itemsize
            rest = torch.empty(size, dtype=torch.uint8, device=gradient.device) if place is None else place[:size]
            pieces.append((slice(lent, count), rest.view(compute).view(count - lent, width).zero_()))
        return BorrowedTotals(gradient, tuple(pieces), first, lent)

    def select(self, rows: slice) -> list[tuple[slice, Tensor]]:
        """The totals of some rows in pieces, each with its slice of these rows."""
        begin, end = rows.start - self.first, rows.stop - self.first
        inside = [(max(own.start, begin), min(own.stop, end), own.start, totals) for own, totals in self.pieces]
        return [(slice(a - begin, b - begin), totals[a - at : b - at]) for a, b, at, totals in inside if a < b]

    def round_into_gradient(self, spare: Tensor | None = None) -> None:
        """Write the gradient from its totals. Those that lie in its memory go by way of ``spare``, memory of its type,
        where that holds them; else from the first row on, each written where totals were read already."""
        for rows, totals in self.pieces:
            if rows.start >= self.inside:
                self.gradient[rows] = totals
            elif spare is not None and spare.numel() >= totals.numel():
                self.gradient[rows] = spare[: totals.numel()].view(totals.shape).copy_(totals)
            else:
                self._round_in_place(totals)

    def _round_in_place(self, totals: Tensor) -> None:
        at = min(_FIRST_ROWS, len(totals))
        self.gradient[:at] = totals[:at].to(self.gradient.dtype)
        while at < len(totals):
            end = min(2 * at, len(totals))
            self.gradient[at:end] = totals[at:end]
            at = end


# What a loop over panels on a GPU needs in memory, and which panel layout fits in a budget.
#
# Only sizes and types are looked at: ``arena.py`` allocates what is planned here, ``kernel_step.py`` runs it.

_ROW_BYTES = 32  # of the scalars of a row of a panel
_SCALAR_SHARE = 32  # one part in so many of the budget, at most, is left to the scalars of all rows

# Where a weight is written: its type, and the inner product that it overwrites, or the number of an extra buffer, or
# None where it is an inner product itself and is multiplied where it lies.
WeightPlace = tuple[torch.dtype, Expr | int | None]


@functools.lru_cache(maxsize=1024)
def _place_weights(
    loop: PanelLoop, at: int, pair_dtype: torch.dtype, weight_dtype: torch.dtype, compute: torch.dtype
) -> list[WeightPlace]:
    """Where each weight of a stage is written. ``pair_dtype``: of a panel's inner products; ``weight_dtype``: in which
    weights are multiplied; a scalar per pair that is sorted keeps its digits."""
    stage, split = loop.stages[at], split_stage(loop.stages[at])
    product = dict(stage.products)
    multiplied = {c.weight for one in split.sums for c in one.products}
    dtypes = [weight_dtype if w in multiplied else pair_dtype if w in product else compute for w in split.weights]
    plain = [w in product and dtype == pair_dtype for w, dtype in zip(split.weights, dtypes, strict=True)]
    kept = {product[w] for w, is_plain in zip(split.weights, plain, strict=True) if is_plain}
    free = [f for f in loop.list_last_uses(at) if f not in kept]
    found: list[WeightPlace] = []
    extra = 0
    for dtype, is_plain in zip(dtypes, plain, strict=True):
        if is_plain:
            found.append((dtype, None))
        elif free and dtype == pair_dtype:
            found.append((dtype, free.pop(0)))
        else:
            found.append((dtype, extra))
            extra += 1
    return found


class MemoryPlan:
    """The memory of one loop: types of panels and sums, GEMMs with an epilogue that write weights, layouts that fit.

    ``gemm_dtype``: the 16-bit type in which vectors are multiplied, None: their own. ``narrow_dtype``: bfloat16 where
    panels and gradients may be stored in it (float16 logits may overflow, and what is computed from a row alone may
    leave its range). ``weight_dtype``: of weights and gradients; ``pair_dtype``: of a panel's inner products."""

    def __init__(self, loop: PanelLoop, sizes: Sizes, dtypes: set[torch.dtype]):
        self.loop, self.sizes = loop, sizes
        self.splits = [split_stage(s) for s in loop.stages]
        self.groups = group_stages(loop)
        sixteen = dtypes & set(matmul.SIXTEEN)
        self.gemm_dtype = sixteen.pop() if len(sixteen) == 1 else None
        self.narrow_dtype = torch.bfloat16 if self.gemm_dtype is torch.bfloat16 else None
        self.weight_dtype = self.narrow_dtype or sizes.compute
        self._epilogues: dict[bool, EpilogueGemm | None] = {}
        self._set_pair_dtype(self.weight_dtype)
        if loop.exact and not self.has_epilogue():  # vendor GEMMs round to the type of their panel
            self._epilogues = {False: None, True: None}
            self._set_pair_dtype(sizes.compute)

    def _set_pair_dtype(self, dtype: torch.dtype) -> None:
        self.pair_dtype, stages = dtype, range(len(self.loop.stages))
        given = dtype, self.weight_dtype, self.sizes.compute
        self.weight_places = [_place_weights(self.loop, at, *given) for at in stages]

    # GEMMs with an epilogue

    def has_epilogue(self) -> bool:
        """True when weights are written by a GEMM's epilogue, whatever the layout."""
        return all(self.epilogue(shifted) is not None for shifted in (False, True))

    def epilogue(self, shifted: bool) -> EpilogueGemm | None:
        """The whole loop as one GEMM whose epilogue writes weights in place of its inner products.

        Not where small tiles are skipped: weights of a guessed maximum lack a factor of their row."""
        if shifted not in self._epilogues:
            alone = len(self.groups) == 1 and self.narrow_dtype and driver.has_fast_epilogues(self.sizes.device)
            alone = alone and skip_small_tiles.active() is None
            found = epilogue.fuse_epilogue(self.loop, self.groups[0], shifted) if alone else None
            self._epilogues[shifted] = found if found and self._is_suitable(found) else None
        return self._epilogues[shifted]

    def _is_suitable(self, gemm: EpilogueGemm) -> bool:
        """True when it has features enough, its weights overwrite its inner products, and each sum is one GEMM."""
        last = self.groups[0][-1]
        wide = self.sizes.of(str(gemm.product.args[0].feature)) > WIDEST
        overwrites = self.weight_places[last] == [(self.narrow_dtype, gemm.product)]
        return wide and overwrites and all(len(one.products) == 1 for one in self.splits[last].sums)

    def epilogue_without_labels(self) -> EpilogueGemm | None:
        """The same with the label column left out of the weights, where totals lie in row gradients: its term is added
        to those, and to column gradients after all panels, so that 16 bits round it once."""
        if not self.lends_gradients():
            return None
        if self._is_sum():
            found = self.epilogue(True) and epilogue.fuse_epilogue(self.loop, self.groups[0], True, True)
        else:
            found = self.epilogue_of_last_stage(True)
        vectors = [dict(list_feeds(self.loop.stages[-1]))[v] for v in self._vectors("rows")]
        return found if all(v.op in ("input", "leaf") for v in vectors) else None  # these are in memory anyway

    def epilogue_of_last_stage(self, without_labels: bool = False) -> EpilogueGemm | None:
        """The last stage by itself, for rows whose scalars are known: of logits that are not rounded, as those are from
        which the stages before it guess."""
        last = self.groups[0][-1]
        return epilogue.fuse_epilogue(self.loop, range(last, last + 1), True, without_labels, stored=True)

    def epilogue_with_storage(self) -> EpilogueGemm | None:
        """The whole loop as GEMMs of some columns at a time, whose weights are stored until rows are known
        (``accumulators.py``)."""
        gemm = self.epilogue(False)
        if gemm is None or gemm.epilogue.factored is None or not self.lends_gradients():
            return None
        if any(e.is_pair for e, _ in gemm.feeds):
            return None
        if len(self.widths("rows")) != 1 or len(self.widths("cols")) > 1 or self.epilogue_of_last_stage() is None:
            return None
        has_labels = gemm.epilogue.factored.label_weight is not None
        found = epilogue.fuse_epilogue(self.loop, self.groups[0], True, stored=True)
        return found if has_labels == (self.epilogue_without_labels() is not None) else None

    # Layouts

    def choose_layout(self, limit: int) -> PanelLayout | None:
        """The layout in ``limit`` bytes: whole rows where column totals stay accurate and panels are high enough, else,
        of a plain sum, the one with the largest panels. None where none fits.

        Column totals of 16 bits are rounded once a panel: beyond a few panels they are kept in float32."""
        rows, cols, pair, totals = self.sizes.rows, self.sizes.cols, self._pair_bytes(), self._totals_bytes("rows")
        each = self._row_bytes()
        whole = panel_layout.plan_whole_rows(rows, cols, pair, limit, row_bytes=each)
        too_many = whole is not None and whole.count(rows) > panel_layout.MAX_ROUNDINGS
        if totals and (whole is None or not self.narrow_dtype or too_many):
            # a gradient of 16 bits, half as large, is allocated only when the panel is freed
            left = limit - totals // 2 if totals <= limit else 0
            whole = panel_layout.plan_whole_rows(rows, cols, pair, left, float32_totals=True, row_bytes=each)
        if whole is not None and whole.is_worthwhile(rows):
            return whole
        if not self._is_sum():
            gemm = self.epilogue_with_storage()
            stored = self._plan_in_place(limit, gemm) if gemm else None
            return PanelLayout(rows, stored.own, in_place=stored) if stored else whole
        in_place, blocks = self._plan_in_place(limit), self._plan_row_blocks(limit)
        if in_place and (not blocks or cols // len(in_place.panels) * rows >= blocks.rows * blocks.cols):
            return PanelLayout(rows, in_place.own, in_place=in_place)  # its panels are larger, on average
        if not self.total_bytes("rows"):
            found = panel_layout.cut_both_axes(rows, cols, pair, limit, self.total_bytes("cols"))
            return PanelLayout(*found, outer="rows") if found else whole
        left = limit - self._totals_bytes("cols")
        found = panel_layout.cut_both_axes(cols, rows, pair, left, self.total_bytes("rows"))
        if blocks and (found is None or found[0] * found[1] < blocks.rows * blocks.cols):
            return blocks
        return PanelLayout(*found[::-1]) if found else whole

    def choose_default_layout(self) -> PanelLayout | None:
        """The layout that would be chosen now, without an explicit budget."""
        if self._small_layout is not None and settings.requested_budget() is None and settings.shrink_factor() == 1:
            return self._small_layout
        free = functools.partial(matmul.free_memory, self.sizes.device)
        return panel_layout.choose_in_budget(self.choose_layout, free, self.least_bytes())[1]

    @functools.cached_property
    def _small_layout(self) -> PanelLayout | None:
        """The layout of a small problem, which is the same in the least memory that is ever used and in any more: how
        much is free, which takes the host a tenth of a millisecond to ask, does not matter."""
        least, most = (self.choose_layout(n) for n in (max(budget.LEAST, self.least_bytes()), 2**60))
        return least if least == most else None

    def least_bytes(self) -> int:
        """Bytes in which some layout fits."""
        rows, cols, pair = self.sizes.rows, self.sizes.cols, self._pair_bytes()
        in_float32 = rows > panel_layout.MAX_ROUNDINGS or not self.narrow_dtype
        row = cols * pair + self._row_bytes() + (self._totals_bytes("rows") if in_float32 else 0)
        if not self._is_sum():
            return row
        each = max(self.total_bytes("rows"), self.total_bytes("cols"))  # directions can run one after the other
        return min(row, panel_layout.MIN_SIDE * (each + pair * panel_layout.MIN_SIDE))

    def _plan_row_blocks(self, limit: int) -> PanelLayout | None:
        """Blocks of rows, where column gradients of 16 bits are added to."""
        if not self.narrow_dtype or not self.total_bytes("rows"):
            return None
        rows, cols = self.sizes.rows, self.sizes.cols
        most = panel_layout.MAX_ROUNDINGS if self.epilogue_without_labels() else panel_layout.PREFERRED_BLOCKS
        strips = len(self.widths("rows")) == 1 == len(self.widths("cols"))
        limit -= min(rows * _ROW_BYTES, limit // _SCALAR_SHARE)
        processors = driver.count_processors(self.sizes.device)
        machine = panel_layout.Machine(processors, (panel_layout.TILE[0], self._tile_cols()))
        row, widths = self.total_bytes("cols"), (sum(self.widths("cols")), sum(self.widths("rows")))
        lent = row * self.weight_dtype.itemsize // self.sizes.compute.itemsize if self.lends_gradients() else 0
        held = panel_layout.BlockBytes(self._pair_bytes(), row, self.total_bytes("rows"), lent, widths)
        return panel_layout.plan_row_blocks(rows, cols, held, machine, limit, most, strips)

    def _plan_in_place(self, limit: int, stored: EpilogueGemm | None = None) -> InPlaceLayout | None:
        """Panels in the memory of 16-bit column gradients. ``stored``: the GEMM whose weights are stored there."""
        if not self.narrow_dtype or not self.total_bytes("rows"):
            return None
        rows, cols = self.sizes.rows, self.sizes.cols
        gradient, column = max(self.widths("rows")) * self.narrow_dtype.itemsize, rows * self._pair_bytes()
        half = rows * self.narrow_dtype.itemsize // self.sizes.compute.itemsize
        half = half // panel_layout.MULTIPLE * panel_layout.MULTIPLE
        lent = half if skip_small_tiles.active() is None else 0  # small tiles are searched for in whole panels
        totals, needs = panel_layout.RowTotals(rows, lent, self.total_bytes("cols")), None
        if stored is not None:
            tile = stored.plan_kernel("write_guessed", self.sizes).block_folded
            needs = panel_layout.StorageNeeds(tile_sum_bytes(rows, -(-cols // tile)), rows * gradient, tile)
        processors = driver.count_processors(self.sizes.device)
        fill = panel_layout.fill_waves(rows, processors, self._tile_cols())
        return panel_layout.plan_in_place(cols, gradient, column, totals, limit, panel_layout.MAX_COLS, fill, needs)

    def lends_gradients(self) -> bool:
        """True when row gradients lend their memory to float32 totals: not where small tiles are skipped, which are
        searched for in whole panels, nor where totals would not be aligned."""
        aligned = all(is_aligned(w, self.sizes.compute) for w in self.widths("cols"))
        return skip_small_tiles.active() is None and aligned

    def _tile_cols(self) -> int:
        """Columns of an output tile of the GEMM that fills a panel of some columns."""
        gemm = self.epilogue(True) or self.epilogue(False)
        return gemm.plan_kernel("write_weights", self.sizes).block_folded if gemm else panel_layout.TILE[1]

    # Bytes

    def _pair_bytes(self) -> int:
        """Bytes held of one pair."""
        extra = [sum(dtype.itemsize for dtype, at in places if isinstance(at, int)) for places in self.weight_places]
        return max(1, len(self.loop.products) * self.pair_dtype.itemsize + max([0, *extra]))

    def _row_bytes(self) -> int:
        """Bytes held of a row besides its pairs: the sums of its tiles, and then its vectors times a factor."""
        gemm = self.epilogue(False)
        if gemm is None or not gemm.guesses:
            return 0
        vectors = max([0, *self.widths("rows")]) * self.weight_dtype.itemsize
        return _ROW_BYTES + max(gemm.row_bytes(self.sizes), vectors)

    def _totals_bytes(self, over: str) -> int:
        """Bytes of the float32 totals of 16-bit gradients of one direction; none where gradients are float32."""
        length = self.sizes.cols if over == "rows" else self.sizes.rows
        return self.total_bytes(over) * length if self.gemm_dtype else 0

    def total_bytes(self, over: str) -> int:
        """Bytes of the totals of one row or column, of sums folded over the other axis ``over``."""
        return sum(self.widths(over)) * self.sizes.compute.itemsize

    def widths(self, over: str) -> list[int]:
        """Features of each sum of vectors that is folded over an axis."""
        return [self.sizes.of(str(v.feature)) for v in self._vectors(over)]

    def _vectors(self, over: str) -> list[Expr]:
        sums = [one for split in self.splits for one in split.sums if one.over == over]
        return [v for v in (one.products[0].vector for one in sums) if v is not None]

    def _is_sum(self) -> bool:
        """True when panels of a row can be added up: one stage, of sums and label gathers."""
        kinds = {r.attrs[0] for s in self.loop.stages for r in s.fold.reductions}
        return len(self.loop.stages) == 1 and kinds <= {"sum", "pick"}

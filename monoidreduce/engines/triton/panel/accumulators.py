"""What the panels of a loop add up to: sums of vectors by GEMMs, in the type and the place that keep them exact, and
scalars by the combine of their reduction.

Panels' weights are contracted with vectors by ping-pong kernels where these are faster than the vendor's GEMM. The
vendor's GEMM is as fast in its K loop, and then waits for what it adds to and until results are written: where few
indices are folded, that is a tenth of the time. Here one consumer writes while the other multiplies
(``schedules/pingpong.py``). What is added to is added in float32 and rounded once; the vendor's GEMM
rounds before it adds, and again.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ....plan.panel_layout import InPlaceLayout, PanelLayout, RowBlock
from ....program.expression import Expr
from ....program.lower import Fold
from ...common import combine, evaluate, matmul, skip_small_tiles
from ...common.bounded_cache import BoundedCache
from ...common.evaluate import Sizes
from ...common.skip_small_tiles import TILE
from ...panel import Panel, list_feeds
from ..codegen.kernel_spec import pad_width
from ..kernels import fold_kernel
from ..launch import descriptors, driver
from ..launch.driver import Kernels, LaunchCache, Relaunch
from ..schedules.gluon_parts import GROUP_ROWS
from ..schedules.kernel_plan import KernelPlan
from ..schedules.pingpong import CONTRACTION, write_contraction
from .arena import Arena, BorrowedTotals, MemoryPlan, count_lendable, pad_rows
from .epilogue import EpilogueGemm
from .row_factor import RowCorrections
from .row_kernel import FIRST, VectorSum, fuse_stages

PLAN = KernelPlan(GROUP_ROWS, CONTRACTION.depth, 4, 1)
# On an H200, time ÷ the vendor's in turns with it (and each by itself), 256000 × 2304 sums that are added to: over 512
# indices 0.76 (0.80), 1024 0.84 (0.87), 2048 0.92 (0.95), 4096 0.95 (1.01); 128256 × 4096 over 2048 0.91 (0.91), over
# 4096 0.94 (1.11). A loss of 4096 features in 1100 MB took 0.98 of its products where it took 1.02 with the vendor's
# sums over 4096, in turns with them; in blocks of calls of one kind both took 1.01, or 1.02 and 1.03.
SHORTEST, LONGEST = 512, 4096
ROUNDS = 7.5  # tiles of a processor, at least: 32768 × 768 sums have 7.8
NARROWEST = 768  # features: over 2048 0.97 (1.02), over 1024 0.91 (0.94); 512 1.04 (1.08) and 0.97 (1.01)
PADDED = 1.05  # features of tiles to those that there are, at most


def contract_into(out: Tensor, weights: Tensor, vectors: Tensor, add: bool) -> None:
    """out[l, d] (+)= weights[l, n] @ vectors[n, d], accumulated in float32 and rounded once to the type of ``out``: by
    the kernel of this file where it is faster, else by the vendor's product."""
    if not contract_by_pingpong(out, weights, vectors, add):
        matmul.contract_into(out, weights, vectors, add)


def contract_by_pingpong(out: Tensor, weights: Tensor, vectors: Tensor, add: bool) -> bool:
    """out[l, d] (+)= weights[l, n] @ vectors[n, d], accumulated in float32 and rounded once; False where the vendor's
    product is as fast, or there is no such kernel."""
    if weights.dtype not in matmul.SIXTEEN:
        return False
    key = (add, out.device, *map(fold_kernel.describe_tensor, (out, weights, vectors)))
    ready = _PREPARED.find(key, _MISSING)
    if ready is _MISSING:
        gains = _fits(out, weights, vectors) and is_faster(*out.shape, folded=len(vectors), device=out.device)
        ready = _PREPARED.keep(key, PreparedContraction(out, weights, vectors, add) if gains else None)
    if ready is not None:
        ready(out, weights, vectors)
    return ready is not None


def is_faster(kept: int, features: int, *, folded: int, device: torch.device) -> bool:
    """True when the ping-pong kernel is faster than the vendor's product for sums so many, so wide and so long."""
    tiles, turns = -(-kept // CONTRACTION.tile), -(-features // CONTRACTION.width)
    many = tiles * turns >= ROUNDS * driver.count_processors(device)
    return (
        SHORTEST <= folded <= LONGEST
        and many
        and features >= NARROWEST
        and turns * CONTRACTION.width <= PADDED * features
    )


def _fits(out: Tensor, weights: Tensor, vectors: Tensor) -> bool:
    """True on Hopper, for tensors of one 16-bit type that tensor descriptors can copy."""
    kinds = {t.dtype for t in (out, weights, vectors)}
    panel = weights if weights.stride(1) == 1 else weights.mT
    return (
        len(kinds) == 1
        and kinds <= set(matmul.SIXTEEN)
        and driver.runs_warp_specialized(out.device)
        and all(map(descriptors.can_copy_vectors, (out, panel, vectors)))
    )


class PreparedContraction:
    """A sum on tensors of given types, shapes, strides and alignment."""

    def __init__(self, out: Tensor, weights: Tensor, vectors: Tensor, add: bool):
        self.over = "cols" if weights.stride(1) == 1 else "rows"
        run, depth = GROUP_ROWS, CONTRACTION.depth
        self.kernel = write_contraction(str(out.dtype)[6:], self.over, add)
        tiles, turns = -(-out.shape[0] // CONTRACTION.tile), -(-out.shape[1] // CONTRACTION.width)
        self.numbers = (-(-weights.shape[1] // depth), tiles, turns)
        self.grid = min(driver.count_processors(out.device), tiles * turns)
        panel, block = (weights, (run, depth)) if self.over == "cols" else (weights.mT, (depth, run))
        forms = ((panel, block), (vectors, (depth, CONTRACTION.width)), (out, (run, CONTRACTION.piece)))
        self.descriptors = [descriptors.make_descriptor(t, (), block, with_layout=True) for t, block in forms]
        self.launch_cache = LaunchCache()

    def __call__(self, out: Tensor, weights: Tensor, vectors: Tensor) -> None:
        given = (weights if self.over == "cols" else weights.mT, vectors, out)
        arguments = [*map(descriptors.replace_base, self.descriptors, given), *self.numbers]
        self.launch_cache((), functools.partial(self._first, arguments, out.device), arguments)

    def _first(self, arguments: list[Any], device: torch.device) -> Relaunch | None:
        return fold_kernel.execute(
            fold_kernel.KernelCall(self.kernel, PLAN, self.grid, tuple(arguments), False, "ieee", False, device)
        )


_PREPARED: BoundedCache[tuple, PreparedContraction | None] = BoundedCache(1024)
_MISSING: Any = object()


# GEMMs of a panel's weights that skip small tiles (``engines/common/skip_small_tiles.py``).
#
# One kernel finds the largest weight of every tile, one lists the tiles that are not small beside the largest of all,
# along each axis, and the GEMM iterates over a list. There is no host sync: lists and counts stay on the device, and
# the order of a sum is that of its tiles.

_TEXT = """@triton.jit
def tile_maxima(maxima, weights, stride, rows, cols, across, TILE: tl.constexpr):
    # the largest |weight| of a tile, NaN where one is
    tile = tl.program_id(0)
    row = (tile // across) * TILE + tl.arange(0, TILE)
    col = (tile % across) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    x = tl.load(weights + row.to(tl.int64)[:, None] * stride + col[None, :], mask=inside, other=0)
    if x.dtype != tl.float64:
        x = x.to(tl.float32)
    tl.store(maxima + tile, tl.reduce(tl.reduce(tl.abs(x), 1, highest), 0, highest))


@triton.jit
def list_kept(lists, counts, maxima, least, stride, step, length, LANES: tl.constexpr):
    # of one row or column of tiles, the places of those that are not below, in their order; NaN is not
    line = tl.program_id(0)
    below = tl.load(least)
    found = 0
    for start in range(0, length, LANES):
        at = start + tl.arange(0, LANES)
        x = tl.load(maxima + line * stride + at * step, mask=at < length, other=0)
        kept = ((at < length) & ~(x < below)).to(tl.int32)
        place = found + tl.cumsum(kept, 0) - kept
        tl.store(lists + line * (length + 1) + place, at, mask=kept != 0)
        found += tl.sum(kept, 0)
    tl.store(counts + line, found)


@triton.jit
def contract(
    out, out_s, weights, weight_k, weight_f, vectors, vector_f, lists, counts, kept_size, folded_size, width, longest,
    blocks, TILE: tl.constexpr, DEPTH: tl.constexpr, WIDE: tl.constexpr, ADD: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr, SUM: tl.constexpr,
):
    # out[kept, width] (+)= Σ weights[kept, folded] vectors[folded, width] over the tiles that are kept
    line = tl.program_id(0) // blocks
    kept = line * TILE + tl.arange(0, TILE)
    lane = (tl.program_id(0) % blocks) * WIDE + tl.arange(0, WIDE)
    depth = tl.arange(0, DEPTH)
    places = lists + line * longest
    turns = tl.load(counts + line) * (TILE // DEPTH)
    weight_at = weights + kept.to(tl.int64)[:, None] * weight_k
    vector_at = vectors + lane[None, :]
    total = tl.zeros([TILE, WIDE], SUM)
    tile = tl.load(places)
    for turn in range(0, turns):
        folded = tile * TILE + (turn % (TILE // DEPTH)) * DEPTH + depth
        tile = tl.load(places + (turn + 1) // (TILE // DEPTH))  # of the next turn: copies begin ahead of products
        weight_place = weight_at + folded.to(tl.int64)[None, :] * weight_f
        vector_place = vector_at + folded.to(tl.int64)[:, None] * vector_f
        if WHOLE:
            w = tl.load(weight_place)
            v = tl.load(vector_place)
        else:
            inside = folded < folded_size
            w = tl.load(weight_place, mask=(kept < kept_size)[:, None] & inside[None, :], other=0)
            v = tl.load(vector_place, mask=inside[:, None] & (lane < width)[None, :], other=0)
        total = tl.dot(w, v, acc=total, input_precision=PRECISION, out_dtype=SUM)
    at = out + kept.to(tl.int64)[:, None] * out_s + lane[None, :]
    inside = (kept < kept_size)[:, None] & (lane < width)[None, :]
    if ADD:
        if turns > 0:
            tl.store(at, total + tl.load(at, mask=inside, other=0).to(SUM), mask=inside)
    else:
        tl.store(at, total, mask=inside)
"""
_kernels = Kernels("Products of a matrix of weights without its small tiles.", _TEXT)
# features of an output tile, features at a time, warps and stages, by bytes of a number; not measured beyond 16 bits
_PLANS = {2: (256, 64, 8, 3), 4: (64, 32, 8, 2), 8: (32, 16, 4, 1)}


@dataclass(frozen=True)
class KeptTiles:
    """The tiles of a matrix of weights that are not skipped: per line of tiles along each axis, which and how many."""

    asked: skip_small_tiles.skip_below
    lists: dict[str, Tensor]  # by the axis that is folded
    counts: dict[str, Tensor]


class PanelContraction:
    """The GEMMs of one panel. A matrix of weights is searched for small tiles once, whichever axes it is folded
    over."""

    def __init__(self) -> None:
        self.kept: dict[tuple, KeptTiles | None] = {}

    def __call__(self, out: Tensor, weights: Tensor, vectors: Tensor, over: str, add: bool) -> None:
        """out (+)= weights @ vectors over columns, weightsᵀ @ vectors over rows."""
        key = weights.data_ptr(), weights.dtype, weights.stride()
        if key not in self.kept:
            self.kept[key] = _list_kept_tiles(weights)
        kept = self.kept[key]
        if kept is None:
            contract_into(out, weights if over == "cols" else weights.mT, vectors, add)
        else:
            _contract_kept_tiles(out, weights, vectors, over, add, kept)


def _list_kept_tiles(weights: Tensor) -> KeptTiles | None:
    """The tiles of a matrix of weights that are not small; None where none is to be skipped."""
    skipped = skip_small_tiles.active()
    if skipped is None or not weights.numel() or weights.stride(1) != 1:
        return None
    down, across = (-(-n // TILE) for n in weights.shape)
    device = weights.device
    maxima = torch.empty(down, across, dtype=torch.promote_types(weights.dtype, torch.float32), device=device)
    whole = functools.partial(torch.empty, dtype=torch.int32, device=device)
    lists = {"cols": whole(down, across + 1), "rows": whole(across, down + 1)}  # each with room for one more
    counts = {"cols": whole(down), "rows": whole(across)}
    given = (maxima, weights, weights.stride(0), *weights.shape, across)
    _kernels("tile_maxima", (down * across,), given, dict(TILE=TILE), dict(num_warps=8))
    largest = maxima.amax()
    least = torch.where(torch.isfinite(largest), largest * skipped.bound, 0.0)
    for over, length, step in (("cols", across, (across, 1)), ("rows", down, (1, across))):
        into = (lists[over], counts[over], maxima, least, *step, length)
        _kernels("list_kept", (len(lists[over]),), into, dict(LANES=min(1024, pad_width(length))))
    return KeptTiles(skipped, lists, counts)


def _contract_kept_tiles(out: Tensor, weights: Tensor, vectors: Tensor, over: str, add: bool, kept: KeptTiles) -> None:
    weights = weights if over == "cols" else weights.mT
    vectors = vectors if vectors.stride(1) == 1 else vectors.contiguous()
    wide, depth, warps, stages = _PLANS[weights.element_size()]
    blocks, longest = -(-out.shape[1] // wide), kept.lists[over].shape[1]
    whole = not (weights.shape[0] % TILE or weights.shape[1] % TILE or out.shape[1] % wide)
    kept.asked.count(kept.counts[over], len(kept.lists["rows"]) * len(kept.lists["cols"]))
    tl = driver.load_module(_kernels.text).tl
    given = (out, out.stride(0), weights, *weights.stride(), vectors, vectors.stride(0))
    given += (kept.lists[over], kept.counts[over], *weights.shape, out.shape[1], longest, blocks)
    constants = dict(TILE=TILE, DEPTH=depth, WIDE=wide, ADD=add, WHOLE=whole, PRECISION=evaluate.float32_precision())
    constants["SUM"] = tl.float64 if weights.dtype is torch.float64 else tl.float32
    options = dict(num_warps=warps, num_stages=stages)
    _kernels("contract", (len(kept.lists[over]) * blocks,), given, constants, options)


Key = tuple[int, int]  # of a sum: its stage, and its place among the stage's reductions


@dataclass(frozen=True)
class PanelWeights:
    """The weights of one panel: a matrix for each, what their sums still need, and the GEMM that sums them."""

    matrices: dict[Expr, Tensor]
    corrections: RowCorrections | None = None
    contract: Callable[..., None] = field(default_factory=PanelContraction)


class Accumulators:
    """The totals of a loop, by direction. A direction is named by the axis that is folded over."""

    def __init__(self, plan: MemoryPlan, layout: PanelLayout, arena: Arena):
        self.plan, self.layout, self.arena, self.sizes = plan, layout, arena, plan.sizes
        self.feeds = [dict(list_feeds(stage)) for stage in plan.loop.stages]
        self.totals: dict[Key, Tensor] = {}  # of vectors: the gradients, whole
        self.complete: dict[Key, Tensor] = {}  # of vectors of all rows, each complete with its panel
        self.borrowed: dict[Key, BorrowedTotals] = {}  # of rows, in float32, in the memory of their own gradients
        self.partial: dict[Key, Tensor] = {}  # of some columns, in float32, before they are rounded
        self.block: RowBlock | None = None  # that is worked on
        self.labelled_rows: slice | None = None  # those of ``label_terms``
        self.label_terms: RowCorrections | None = None
        self.columns: dict[Key, Tensor] = {}  # the vectors that rows' totals are sums of, of all columns
        self.waiting: dict[Key, list[tuple[RowCorrections, Tensor]]] = {}  # label terms to add after all panels
        self.states: list[dict[int, Any]] = [{} for _ in plan.loop.stages]  # of scalars, by place

    def fork(self, arena: Arena) -> Accumulators:
        """A copy in another arena: what is allocated or waits in it is the copy's alone."""
        other = copy.copy(self)
        other.arena, other.waiting = arena, {}
        other.totals, other.complete, other.partial = dict(self.totals), dict(self.complete), dict(self.partial)
        return other

    # Gradients allocated before anything is summed

    def _allocate_gradients(self, over: str) -> dict[Key, Tensor]:
        at = self.plan.groups[0][-1]
        length = self.sizes.cols if over == "rows" else self.sizes.rows
        keys = [(at, one.place) for one in self.plan.splits[at].sums if one.over == over]
        for key, width in zip(keys, self.plan.widths(over), strict=True):
            self.totals[key] = torch.empty(length, width, dtype=self.plan.weight_dtype, device=self.sizes.device)
        return {key: self.totals[key] for key in keys}

    def begin_in_place(self, layout: InPlaceLayout) -> None:
        """Allocate gradients; the largest column gradient lends its memory to panels, row gradients to their totals."""
        columns, rows = self._allocate_gradients("rows"), self._allocate_gradients("cols")
        self.arena.borrow(max(columns.values(), key=lambda gradient: gradient.shape[1]))
        self.borrowed = self.arena.borrow_row_totals(rows, layout)

    def begin_blocks(self, blocks: Sequence[RowBlock]) -> None:
        """Allocate gradients, and memory for the panel of any block and the totals that gradients do not hold."""
        self.column_gradients, self.row_gradients = self._allocate_gradients("rows"), self._allocate_gradients("cols")
        row = self.plan.total_bytes("cols")
        totals = [(b.last - b.first - self._count_lent_rows(b)) * row for b in blocks]
        panels = [self.arena.panel_bytes(b.rows, b.cols) for b in blocks]
        self.arena.allocate_host(max(map(sum, zip(panels, totals, strict=True))))

    def begin_block(self, block: RowBlock) -> None:
        """Place a block's panel and the totals of its rows."""
        self.block = block
        self.arena.move_panel(0, block.rows, block.cols)
        strips = {key: gradient.shape[1] for key, gradient in self.column_gradients.items()}
        found = self.arena.borrow_block_totals(self.row_gradients, strips, block, self._count_lent_rows(block))
        self.borrowed, self.partial = found

    def _count_lent_rows(self, block: RowBlock) -> int:
        """Of how many rows of a block the totals lie in gradients, its own and those of later rows: of all or none."""
        count = block.last - block.first
        free = (self.sizes.rows - block.first) * self.plan.weight_dtype.itemsize // self.sizes.compute.itemsize
        return count if self.plan.lends_gradients() and count <= free else 0

    # Sums of vectors

    def add_vector_sum(self, at: int, one: VectorSum, weights: PanelWeights, panel: Panel) -> Tensor | None:
        """Add Σ weight × vector of a panel to a sum of the stage ``at``; returned where its panel completes it."""
        key, over, (rows, cols) = (at, one.place), one.over, (panel.rows, panel.cols)
        feeds = [self.feeds[at][c.vector] for c in one.products if c.vector is not None]
        vectors = [panel.feed(f) for f in feeds]
        kept, folded = (rows, cols) if over == "cols" else (cols, rows)
        completes = over == "cols" and self.layout.cols == self.sizes.cols
        width = vectors[0].shape[-1]
        if completes:
            outs: Sequence[tuple[slice, Tensor]] = [(slice(None), self._complete_sum(key, rows, width))]
        else:
            outs = self._find_totals(key, over, kept, width)
        corrections = weights.corrections
        for k, (c, vector) in enumerate(zip(one.products, vectors, strict=True)):
            weight = weights.matrices[c.weight]
            if corrections and over == "rows":
                vector = corrections.scale_vectors(vector, weight.dtype)
            else:
                vector = vector.to(weight.dtype)
            begun = not completes and (folded.start > self._rounding_span(over)[0] or key in self.borrowed)
            for piece, out in outs:
                weights.contract(out, weight[piece], vector, over, add=k > 0 or begun)
        if corrections and over == "rows":
            self._add_labels(key, corrections, out, vectors[0], given=feeds[0].op == "input")
        if completes:
            return corrections.complete_row_sums(out, vectors[0]) if corrections else out
        first, last = self._rounding_span(over)
        if key in self.partial and folded.stop == last:
            whole, own = self.totals[key][kept], self.partial[key][: kept.stop - kept.start]
            whole.add_(own) if first else whole.copy_(own)
        return None

    def _rounding_span(self, over: str) -> tuple[int, int]:
        """The folded indices over which totals are added up before they are rounded."""
        if over == "rows" and self.block and self.block.strips:
            return self.block.first, self.block.last
        return 0, self.sizes.cols if over == "cols" else self.sizes.rows

    def _complete_sum(self, key: Key, rows: slice, width: int) -> Tensor:
        """Where sums go that are complete with their panel: to those of all rows, unless a later stage reads them."""
        empty = functools.partial(torch.empty, dtype=self.plan.weight_dtype, device=self.sizes.device)
        if key[0] < len(self.plan.loop.stages) - 1:
            return empty(rows.stop - rows.start, width)
        if key not in self.complete:
            self.complete[key] = empty(self.sizes.rows, width)
        return self.complete[key][rows]

    def _find_totals(self, key: Key, over: str, kept: slice, width: int) -> Sequence[tuple[slice, Tensor]]:
        """What to add to, in pieces: the whole total, or float32 totals of some rows or columns where 16 bits would be
        rounded too often.

        The outer loop over panels completes each slice of its axis before the next; the whole total may then be of 16
        bits. So may column totals over few enough panels of whole rows."""
        if key in self.borrowed:
            return self.borrowed[key].select(kept)
        count = kept.stop - kept.start
        if self.block:
            return [(slice(None), self.partial[key][:count] if key in self.partial else self.totals[key][kept])]
        layout, sizes = self.layout, self.sizes
        lengths, steps = (sizes.cols, sizes.rows), (layout.cols, layout.rows)
        (length, other), (own, step) = (lengths, steps) if over == "rows" else (lengths[::-1], steps[::-1])
        is_outer = layout.outer != over and own < length
        narrow = None if layout.float32_totals or not (is_outer or over == "rows") else self.plan.narrow_dtype
        empty = functools.partial(torch.empty, device=sizes.device)
        if key not in self.totals:
            self.totals[key] = empty(length, width, dtype=narrow or sizes.compute)
        if not (narrow and is_outer and step < other):
            return [(slice(None), self.totals[key][kept])]
        if over == "cols":
            gradient = self.totals[key][kept.start :]
            lent = count_lendable(gradient, count, sizes.compute) if self.plan.lends_gradients() else 0
            self.borrowed[key] = BorrowedTotals.allocate(gradient, count, lent, sizes.compute, first=kept.start)
            return self.borrowed[key].pieces
        if key not in self.partial:
            self.partial[key] = empty(own, width, dtype=sizes.compute)
        return [(slice(None), self.partial[key][:count])]

    def close_borrowed(self) -> None:
        """Write the gradients of rows from their totals, and add their label terms. The panel is done with."""
        for key, borrowed in self.borrowed.items():
            for rows, totals in borrowed.pieces:
                if self.label_terms:
                    self.label_terms.select_rows(rows).complete_row_sums(totals, self.columns[key])
            borrowed.round_into_gradient(self.arena.spare)
        self.borrowed = {}

    def scale_borrowed(self, factors: RowCorrections) -> None:
        """Multiply the totals of rows by their factors: what is added from now on has these in it."""
        for borrowed in self.borrowed.values():
            for rows, totals in borrowed.pieces:
                factors.select_rows(rows).complete_row_sums(totals, totals)

    # Label columns

    def keep_label_terms(self, terms: RowCorrections, panel: Panel) -> None:
        """Keep the label terms of some rows and all columns: for the end of their totals, and of all panels."""
        self.labelled_rows, self.label_terms = panel.rows, terms
        at = self.plan.groups[0][-1]
        for one in self.plan.splits[at].sums:
            vector = one.products[0].vector
            assert vector is not None
            vectors = panel.feed(self.feeds[at][vector])
            if one.over == "cols":
                self.columns[at, one.place] = vectors
            else:
                self.waiting.setdefault((at, one.place), []).append((terms, vectors))

    def _add_labels(self, key: Key, terms: RowCorrections, out: Tensor, vectors: Tensor, given: bool) -> None:
        """Add the label terms of a panel's rows: after all panels, so that 16 bits round them once, where the vectors
        are inputs, which stay in memory anyway."""
        if given:
            self.waiting.setdefault(key, []).append((terms, vectors))
        else:
            terms.add_label_terms(out, vectors)

    def add_waiting_labels(self, at: int) -> None:
        """Add the label terms of a stage that waited for all panels."""
        for key in [key for key in self.waiting if key[0] == at]:
            for terms, vectors in self.waiting.pop(key):
                terms.add_label_terms(self.totals[key], vectors)

    # Scalars

    def combine_scalars(self, at: int, place: int, r: Expr, own: list[Tensor], panel: Panel) -> None:
        """Combine a panel's results of one reduction with those of the panels before: over rows by the reduction's
        combine, over columns as sums."""
        states, rows, cols = self.states[at], panel.rows, panel.cols
        if r.attrs[1] == "cols":
            if place not in states:
                length = (self.sizes.rows, *own[0].shape[1:])
                states[place] = [torch.zeros(length, dtype=own[0].dtype, device=own[0].device)]
            states[place][0][rows] += own[0]
            return
        new = combine.open_state(r, [t.unsqueeze(0) for t in own], [rows.stop - rows.start], [rows.start])
        if self.layout.cols < self.sizes.cols:  # sums: one total for all columns
            if place not in states:
                states[place] = [t.new_zeros(1, self.sizes.cols, *t.shape[2:]) for t in new]
            states[place][0][:, cols] += new[0]
            return
        states[place] = combine.merge_states(r, [states[place], new] if place in states else [new])

    def finish_stage(self, at: int) -> list[list[Tensor] | None]:
        """The results of a stage that only all panels complete, None for the others."""
        split = self.plan.splits[at]
        self.add_waiting_labels(at)
        results: dict[int, list[Tensor]] = {place: [t] for (stage, place), t in self.totals.items() if stage == at}
        for over, reductions in split.folds.items():
            for place, r in zip(split.places[over], reductions, strict=True):
                state = self.states[at].get(place)
                if state is not None:
                    results[place] = state if over == "cols" else combine.close_state(r, state)
        return [results.get(place) for place in range(len(self.plan.loop.stages[at].fold.reductions))]


# Weights stored in the memory of the column gradient until all of their rows are known.
#
# Where a gradient is taken in the forward and whole rows do not fit, rows are folded some columns at a time by GEMMs
# that measure weights from a guessed maximum (``epilogue.py``). The weights of the first columns are stored where the
# column gradient will be written (:func:`monoidreduce.plan.panel_layout.plan_in_place`), of the others only their sums.
# When rows are known, stored weights are summed; the others are computed again. So there are between three and four
# GEMMs, however little memory there is.

Feed = Callable[[EpilogueGemm, Panel], dict[Expr, Any]]


class StoredWeights:
    """The stored panels of one loop. Call ``fold_columns`` once for all rows and columns, then ``take_weights`` for
    every stored panel, then ``close``.

    ``labels``: the GEMM that weighs label columns, where there are any; ``feed``: what a GEMM's leaves are fed."""

    def __init__(
        self,
        accumulators: Accumulators,
        layout: InPlaceLayout,
        gemm: EpilogueGemm,
        labels: EpilogueGemm | None,
        feed: Feed,
    ):
        self.accumulators, self.layout, self.gemm, self.labels, self.feed = accumulators, layout, gemm, labels, feed
        self.plan, self.arena, self.sizes = accumulators.plan, accumulators.arena, accumulators.sizes
        self.corrections: RowCorrections | None = None  # once rows are known
        self.panels = [self._place(one.at or 0, one.last - one.first) for one in layout.stored]

    def _place(self, at: int, cols: int) -> Tensor:
        return self.arena.place_panel(at, self.sizes.rows, cols)[self.gemm.product][:, :cols]

    def fold_columns(self, panel: Panel, here: Sizes) -> PanelWeights:
        """Fold all columns of all rows: results are handed over, the weights of some columns stored."""
        gemm, group = self.gemm, self.plan.groups[0]
        stages = fuse_stages(self.plan.loop, group, True)
        results = [self.arena.get_scalars(n) for names in stages.names for n in names]
        values = self.feed(gemm, panel)
        key = ("stored", here.cols, here.device, *here.letters.values())
        launch = functools.partial(self._launch_fold, values, results, here)
        if key not in gemm.compiled and driver.compile_ahead(here.device, launch):
            gemm.compiled.add(key)
        factors = launch()
        places = [(stage, place) for stage in group for place in self.plan.splits[stage].places["cols"]]
        fold = Fold((), tuple(r for own in stages.folds for r in own))
        for (stage, place), (_, values_of) in zip(places, combine.split(fold, results), strict=True):
            panel.keep_results(stage, place, values_of, values_of)
        if self.labels:
            terms = self.labels.weigh_labels(self.feed(self.labels, panel), here)
            self.accumulators.keep_label_terms(terms, panel)
            for one, stored in zip(self.layout.stored, self.panels, strict=True):
                terms.clear_label_weights(stored, one.first)
        self.corrections = self._scale_vectors(RowCorrections(factors), panel)
        return PanelWeights({})

    def _launch_fold(self, values: dict[Expr, Any], results: list[Tensor], here: Sizes) -> Tensor:
        """Write the folds' results, and weights where they are stored; returns the factors of rows."""
        gemm, rows, factored = self.gemm, here.rows, self.gemm.epilogue.factored
        tiles = -(-here.cols // gemm.plan_kernel("write_guessed", here).block_folded)
        empty, padded_rows = functools.partial(torch.empty, device=here.device), pad_rows(rows)
        guesses, label_logits, factors = empty(3, padded_rows, dtype=torch.float32)[:, :rows]
        marks = empty(rows, dtype=torch.int32)
        maxima, sums = self.arena.place_tile_sums(tiles)
        whole = gemm.prepare((guesses,), values, here)
        whole.launch("guess_maxima", [guesses], values)
        spans = [(one.first, one.last) for one in self.layout.stored]
        rest = (spans[-1][1], here.cols)
        done, written = 0, []
        for (first, last), panel in zip([*spans, rest], [*self.panels, self.panels[0]], strict=True):
            own = _select_columns(values, first, last)
            prepared = gemm.prepare((panel,), own, replace(self.sizes, rows=rows, cols=last - first))
            is_stored = (first, last) != rest
            outputs = [prepared.describe_output(panel), guesses, maxima[done:], sums[done:], padded_rows]
            prepared.launch("write_guessed" if is_stored else "sum_guessed", outputs, own)
            written += [(prepared, panel, own)] if is_stored else []
            done += prepared.tiles
        if done < tiles:
            maxima[done:].fill_(-torch.inf)
            sums[done:].zero_()
        if factored is not None and factored.label is not None:
            whole.launch("multiply_labels", [label_logits], values)
        # label columns are weighed elsewhere: no panel, no label weights
        ends = [label_logits, guesses, 0, factors, guesses, guesses, marks]
        whole.launch("finish_rows", [*results, guesses, maxima, sums, padded_rows, *ends], values, tiles)
        known = {name: t.unsqueeze(0) for name, t in zip(gemm.epilogue.names, results, strict=True)}
        for prepared, panel, own in written:
            prepared.launch("recompute_rows", [panel, panel.stride(0), marks], own | known)
        return factors

    def _scale_vectors(self, corrections: RowCorrections, panel: Panel) -> RowCorrections:
        """The same with the rows' vectors times their factors, which lie behind the weights."""
        at, dtype = self.plan.groups[0][-1], self.plan.narrow_dtype
        (one,) = [s for s in self.plan.splits[at].sums if s.over == "rows"]
        assert one.products[0].vector is not None and dtype is not None
        vectors = panel.feed(self.accumulators.feeds[at][one.products[0].vector])
        place = self.arena.view_host(self.layout.vectors, vectors.shape, dtype)
        return replace(corrections, scaled=corrections.scale_vectors(vectors, dtype, place))

    def take_weights(self, panel: Panel, here: Sizes) -> PanelWeights:
        """The stored weights of some columns."""
        at = [one.first for one in self.layout.stored].index(panel.cols.start)
        weight = self.plan.splits[self.plan.groups[0][-1]].weights[0]
        return PanelWeights({weight: self.panels[at]}, self.corrections)

    def close(self) -> None:
        """Multiply row totals by the factors of their rows: what is added from now on has these in it."""
        assert self.corrections is not None
        self.accumulators.scale_borrowed(RowCorrections(self.corrections.factors))


def _select_columns(values: dict[Expr, Any], first: int, last: int) -> dict[Expr, Any]:
    """What is fed of some columns."""
    found = {e: v[:, first:last] if isinstance(v, Tensor) and e.cols else v for e, v in values.items()}
    return found | {FIRST["col"]: first}

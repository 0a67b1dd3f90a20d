"""Contractions of a panel's weights with vectors, by ping-pong kernels where these are faster than the vendor's GEMM.

The vendor's GEMM is as fast in its K loop, and then waits for what it adds to and until results are written: where few
indices are folded, that is a tenth of the time. Here one consumer writes while the other multiplies
(``schedules/pingpong/contraction_kernel.py``). What is added to is added in float32 and rounded once; the vendor's GEMM
rounds before it adds, and again.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...common import matmul, skip_small_tiles
from ...common.bounded_cache import BoundedCache
from ...common.skip_small_tiles import TILE
from ..codegen.kernel_spec import pad_width
from ..kernels import fold_kernel
from ..launch import descriptors, hardware, jit_module
from ..launch.jit_module import Kernels, LaunchCache, Relaunch
from ..schedules.gluon_parts import GROUP_ROWS
from ..schedules.kernel_plan import KernelPlan
from ..schedules.pingpong import contraction_kernel
from ..schedules.pingpong.contraction_kernel import SCHEDULE

PLAN = KernelPlan(GROUP_ROWS, SCHEDULE.depth, 4, 1)
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
    tiles, turns = -(-kept // SCHEDULE.tile), -(-features // SCHEDULE.width)
    many = tiles * turns >= ROUNDS * hardware.count_processors(device)
    return (
        SHORTEST <= folded <= LONGEST and many and features >= NARROWEST and turns * SCHEDULE.width <= PADDED * features
    )


def _fits(out: Tensor, weights: Tensor, vectors: Tensor) -> bool:
    """True on Hopper, for tensors of one 16-bit type that tensor descriptors can copy."""
    kinds = {t.dtype for t in (out, weights, vectors)}
    panel = weights if weights.stride(1) == 1 else weights.mT
    return (
        len(kinds) == 1
        and kinds <= set(matmul.SIXTEEN)
        and hardware.runs_warp_specialized(out.device)
        and all(map(descriptors.can_copy_vectors, (out, panel, vectors)))
    )


class PreparedContraction:
    """A sum on tensors of given types, shapes, strides and alignment."""

    def __init__(self, out: Tensor, weights: Tensor, vectors: Tensor, add: bool):
        self.over = "cols" if weights.stride(1) == 1 else "rows"
        run, depth = GROUP_ROWS, SCHEDULE.depth
        self.kernel = contraction_kernel.write_kernel(str(out.dtype)[6:], self.over, add)
        tiles, turns = -(-out.shape[0] // SCHEDULE.tile), -(-out.shape[1] // SCHEDULE.width)
        self.numbers = (-(-weights.shape[1] // depth), tiles, turns)
        self.grid = min(hardware.count_processors(out.device), tiles * turns)
        panel, block = (weights, (run, depth)) if self.over == "cols" else (weights.mT, (depth, run))
        forms = ((panel, block), (vectors, (depth, SCHEDULE.width)), (out, (run, SCHEDULE.piece)))
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
    tl = jit_module.load_module(_kernels.text).tl
    given = (out, out.stride(0), weights, *weights.stride(), vectors, vectors.stride(0))
    given += (kept.lists[over], kept.counts[over], *weights.shape, out.shape[1], longest, blocks)
    constants = dict(TILE=TILE, DEPTH=depth, WIDE=wide, ADD=add, WHOLE=whole, PRECISION=matmul.float32_precision())
    constants["SUM"] = tl.float64 if weights.dtype is torch.float64 else tl.float32
    options = dict(num_warps=warps, num_stages=stages)
    _kernels("contract", (len(kept.lists[over]) * blocks,), given, constants, options)

"""Near points on a GPU: one program instance for each query walks the blocks whose boxes are near enough.

A block is a node of a tree of boxes (``engines/common/point_tree.py``) with at most ``_POINTS`` points. A query first
looks at the block whose box is nearest, then at every other block that is no farther than the k-th point found so far,
nearest first within a group of boxes. Which blocks these are is decided on the device: nothing is read by the host. A
distance (not negative) and a place are compared as one integer, so that of equal distances the first column is found
and NaN comes last, as in every fold.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...common.point_tree import PointTree, choose_depth
from ..codegen.kernel_spec import pad_width
from ..launch.driver import Kernels

MOST = 512  # neighbours: their list is kept in registers
_POINTS, _BOXES = 128, 512  # points of a block; boxes looked at together
_EMPTY, _INFINITE = (0x7FFFFFFF << 32) | 0x7FFFFFFF, 0x7F800000  # a slot without a point; the bits of infinity
_TEXT = '''EMPTY = tl.constexpr((0x7FFFFFFF << 32) | 0x7FFFFFFF)  # behind everything, NaN too
FARTHEST = tl.constexpr((0x7F800000 << 32) | 0x7FFFFFFF)  # infinitely far, and behind every column


@triton.jit
def look_at(best, worst, start, stop, queries, sorted, order, row, total, own, D: tl.constexpr, POINTS: tl.constexpr):
    """Take those of the points from start to stop that are nearer than the worst of the list into it."""
    for first in range(start, stop, POINTS):
        at = first + tl.arange(0, POINTS)
        near = tl.zeros([POINTS], tl.float32)
        for f in tl.static_range(D):
            gap = tl.load(queries + row * D + f) - tl.load(sorted + f * total + at, mask=at < stop, other=0.0)
            near = gap * gap + near
        place = tl.load(order + at, mask=at < stop, other=0)
        bits = tl.where(near == near, near, float("nan")).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        key = (bits.to(tl.int64) << 32) | place
        key = tl.where(at < stop, tl.where(place != own, key, FARTHEST), EMPTY)
        least = tl.min(key, 0)
        while least < worst:
            slot = tl.arange(0, best.shape[0])
            best = tl.where(slot == tl.argmax(best, 0), least, best)
            worst = tl.max(best, 0)
            key = tl.where(key == least, EMPTY, key)
            least = tl.min(key, 0)
    return best, worst


@triton.jit
def box_gaps(queries, boxes, row, block, blocks, D: tl.constexpr):
    """Squared distances from a query to the boxes of some blocks."""
    near = tl.zeros([block.shape[0]], tl.float32)
    for f in tl.static_range(D):
        x = tl.load(queries + row * D + f)
        below = tl.load(boxes + block.to(tl.int64) * 2 * D + f, mask=block < blocks, other=0.0) - x
        above = x - tl.load(boxes + block.to(tl.int64) * 2 * D + D + f, mask=block < blocks, other=0.0)
        gap = tl.maximum(tl.maximum(below, above), 0.0)
        near = gap * gap + near
    near = tl.where(near == near, near, 0.0)  # a query that is NaN looks at everything
    return tl.where(block < blocks, near, float("inf"))


@triton.jit(do_not_specialize=["total", "count", "level", "blocks", "k", "first_own"])
def nearest(
    found, queries, sorted, order, boxes, total, count, level, blocks, k, first_own,
    D: tl.constexpr, SLOTS: tl.constexpr, POINTS: tl.constexpr, BOXES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    own = first_own + row
    total = total.to(tl.int64)
    wide = count.to(tl.int64)
    slot = tl.arange(0, SLOTS)
    lane = tl.arange(0, BOXES)
    best = tl.where(slot < k, tl.full([SLOTS], EMPTY, tl.int64), -1)  # slots beyond k are never the worst
    worst = tl.max(best, 0)
    best, worst = look_at(best, worst, wide, total, queries, sorted, order, row, total, own, D, POINTS)
    closest = row * 0
    least = tl.min(tl.full([BOXES], float("inf"), tl.float32), 0)
    for start in range(0, blocks, BOXES):
        gap = box_gaps(queries, boxes, row, start + lane, blocks, D)
        here = tl.min(gap, 0)
        closest = tl.where(here < least, start + tl.argmin(gap, 0), closest)
        least = tl.minimum(here, least)
    if blocks > 0:
        best, worst = look_at(
            best, worst, (closest * wide) >> level, ((closest + 1) * wide) >> level,
            queries, sorted, order, row, total, own, D, POINTS,
        )
    for start in range(0, blocks, BOXES):
        gap = box_gaps(queries, boxes, row, start + lane, blocks, D)
        bits = (gap * 0.99999).to(tl.int32, bitcast=True)  # what rounding may have added is taken off
        left = (start + lane < blocks) & (start + lane != closest)
        left = left & (bits <= (worst >> 32))
        while tl.max(left.to(tl.int32), 0) > 0:
            chosen = tl.argmin(tl.where(left, bits, 0x7FFFFFFF), 0)
            node = (start + chosen).to(tl.int64)
            best, worst = look_at(
                best, worst, (node * wide) >> level, ((node + 1) * wide) >> level,
                queries, sorted, order, row, total, own, D, POINTS,
            )
            left = left & (lane != chosen)
            left = left & (bits <= (worst >> 32))
    tl.store(found + row * k + slot, best, mask=slot < k)
'''
_kernels = Kernels("The points nearest to each query, block by block.", _TEXT)


def has_kernel(tree: PointTree, k: int) -> bool:
    """True when the kernel searches this tree: float32, and a list that fits registers."""
    return tree.sorted.dtype is torch.float32 and k <= MOST and tree.count < 2**31 - 1


def search(tree: PointTree, queries: Tensor, k: int, excluded: int | None = None) -> tuple[Tensor, Tensor]:
    """Squared distances and places [M, k] of the k points nearest to each query [M, D], nearest first, the first of
    equals first. ``excluded``: query i is not to find the point ``excluded + i``. Infinite distances have place -1."""
    found = torch.empty(len(queries), k, dtype=torch.int64, device=queries.device)
    if len(queries):
        level = choose_depth(tree.finite, _POINTS)
        boxes = tree.boxes[2**level : 2 ** (level + 1)]
        own = -(2**31) if excluded is None else excluded
        blocks = 2**level if tree.finite else 0
        given = (found, queries.contiguous(), tree.sorted, tree.order, boxes)
        sizes = (tree.count, tree.finite, level, blocks, k, own)
        constants = dict(D=tree.features, SLOTS=max(2, pad_width(k)), POINTS=_POINTS, BOXES=_BOXES)
        _kernels("nearest", (len(queries),), (*given, *sizes), constants, dict(num_warps=4))
    found = found.sort(-1).values
    values = torch.where(found < _EMPTY, found >> 32, _INFINITE).to(torch.int32).view(torch.float32)
    return values, torch.where(values.isposinf(), -1, found & 0x7FFFFFFF)

"""A tree of bounding boxes over points, as plain tensors: what a search for near points can skip whole blocks by.

The points are split in halves again and again, each time across the widest side of their box, until a leaf holds at
most ``LEAF``. The tree is perfectly balanced, so nothing but the boxes has to be stored: node ``i`` of level ``l`` (the
root is level 0) holds the places ``i * n >> l`` to ``(i + 1) * n >> l`` of the sorted points, and its box is row
``2**l + i`` of ``boxes``. Points with an infinite or NaN coordinate belong to no box; they stand last, beyond ``n``,
and every search looks at them. Engines build and search such trees, each in its own way; torch only, used by all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

LEAF = 32  # points of a leaf, at most


@dataclass(frozen=True)
class PointTree:
    """Points sorted into the leaves of a tree of boxes.

    ``sorted`` [D, N]: the points in the tree's order, one coordinate after the other. ``order`` [N]: where each of them
    stood (int64). ``boxes`` [2**(depth + 1), 2 * D]: least coordinates, then greatest. ``finite``: how many points the
    boxes hold; the others stand behind them.
    """

    sorted: Tensor
    order: Tensor
    boxes: Tensor
    finite: int

    @property
    def depth(self) -> int:
        return len(self.boxes).bit_length() - 2

    @property
    def features(self) -> int:
        return self.sorted.shape[0]

    @property
    def count(self) -> int:
        return self.sorted.shape[1]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.sorted, self.order, self.boxes))

    def to(self, device: torch.device | str) -> PointTree:
        return replace(self, **{n: getattr(self, n).to(device) for n in ("sorted", "order", "boxes")})


def depth_for(count: int, leaf: int = LEAF) -> int:
    """Levels below the root at which no node holds more than ``leaf`` points."""
    depth = 0
    while -(-count >> depth) > leaf:
        depth += 1
    return depth


def split_finite(points: Tensor) -> tuple[Tensor, int]:
    """Places of all points [N, D], those whose coordinates are all finite first, and how many these are."""
    finite = points.isfinite().all(-1)
    count = int(finite.sum())
    if count == len(points):
        return torch.arange(len(points), device=points.device), count
    return finite.logical_not().to(torch.uint8).argsort(stable=True), count


def build_in_torch(points: Tensor) -> PointTree:
    """The tree of points [N, D], level by level, with sorts of all points: for GPUs, where sorts are fast."""
    order, count = split_finite(points)
    depth = depth_for(count)
    boxes = points.new_zeros(2 ** (depth + 1), 2 * points.shape[1])
    near, rest = order[:count], order[count:]
    if count:
        starts = (torch.arange(2**depth + 1, device=points.device) * count) >> depth
        lanes = starts[:-1, None] + torch.arange(LEAF, device=points.device)
        lanes = torch.minimum(lanes, starts[1:, None] - 1)  # the last point of a leaf stands for those it lacks
        leaf = torch.searchsorted(starts, torch.arange(count, device=points.device), right=True) - 1
    for level in range(depth + 1 if count else 0):
        own = points[near]
        leaves = own[lanes].unflatten(0, (2**level, -1))
        low, high = leaves.amin((1, 2)), leaves.amax((1, 2))
        boxes[2**level : 2 ** (level + 1)] = torch.cat([low, high], -1)
        if level < depth:
            node = leaf >> (depth - level)
            widest = (high - low).argmax(-1)[node]
            key = own.gather(-1, widest.unsqueeze(-1)).squeeze(-1).argsort(stable=True)
            near = near[key[node[key].argsort(stable=True)]]
    order = torch.cat([near, rest])
    return PointTree(points[order].mT.contiguous(), order, boxes, count)

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


def choose_depth(count: int, leaf: int = LEAF) -> int:
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
    """The tree of points [N, D] with a sort for each feature that is halved: for GPUs, where sorts are fast.

    All halvings of a feature come together: points are sorted by it into slabs, and each slab by the next feature. A
    level of the tree goes to the feature that is widest after those that it has had."""
    order, count = split_finite(points)
    depth, device = choose_depth(count), points.device
    boxes = points.new_zeros(2 ** (depth + 1), 2 * points.shape[1])
    near, rest = order[:count], order[count:]
    place, level = torch.arange(count, device=device), 0
    for feature, halvings in _share_levels(points[near], depth):
        slabs = (torch.arange(1, 2**level, device=device) * count) >> level
        slab = torch.searchsorted(slabs, place, right=True, out_int32=True)
        key = points[near, feature].argsort()
        near = near[key[slab[key].argsort(stable=True)]]
        level += halvings
    order = torch.cat([near, rest])
    held = points[order]
    if count:
        starts = (torch.arange(2**depth + 1, device=device) * count) >> depth
        lanes = starts[:-1, None] + torch.arange(LEAF, device=device)
        lanes = torch.minimum(lanes, starts[1:, None] - 1)  # the last point of a leaf stands for those it lacks
        low, high = held[lanes].aminmax(dim=1)
        for level in range(depth, -1, -1):
            low, high = low.view(2**level, -1, low.shape[1]).amin(1), high.view(2**level, -1, high.shape[1]).amax(1)
            boxes[2**level : 2 ** (level + 1)] = torch.cat([low, high], -1)
    return PointTree(held.mT.contiguous(), order, boxes, count)


def _share_levels(points: Tensor, depth: int) -> list[tuple[int, int]]:
    """Features and how many levels of the tree halve each, the widest first. Widths are those of a sample, without its
    extremes."""
    if not depth:
        return []
    sample = points[:: max(1, len(points) // 1024)].sort(0).values
    tenth = len(sample) // 10
    widths = (sample[-1 - tenth] - sample[tenth]).tolist()
    levels = [0] * len(widths)
    for _ in range(depth):
        levels[max(range(len(widths)), key=lambda f: widths[f] / 2 ** levels[f])] += 1
    return [(f, levels[f]) for f in sorted(range(len(widths)), key=lambda f: -widths[f]) if levels[f]]

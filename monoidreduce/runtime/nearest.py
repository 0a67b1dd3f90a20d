"""Trees of points that are kept between calls: built and searched by the engine of their device.

The search is also a registered torch operator, ``torch.ops.monoidreduce.nearest``, so that compilers see one call. It
has no gradient of its own: ``ops/point_index.py`` makes one of the places that it finds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..engines import triton
from ..engines.common import point_tree
from ..engines.common.point_tree import PointTree
from ..engines.eager.cpp import point_search
from ..plan import settings
from .torch_operator import register_operator

MOST_FEATURES = point_search.MOST_FEATURES
_SAMPLED, _WANTED = 32, 10  # queries, and neighbours of each, by which the worth of a tree is measured


def build(points: Tensor) -> PointTree | None:
    """A tree of points [N, D]; None where this machine cannot search it."""
    if points.dtype not in (torch.float32, torch.float64) or not 0 < points.shape[1] <= MOST_FEATURES:
        return None
    if points.device.type == "cpu":
        return point_search.build(points)
    if settings.launches_kernels_on(points.device) and points.dtype is torch.float32:
        return point_tree.build_in_torch(points)
    return None


def measure_share(tree: PointTree) -> float:
    """Which share of all points a search compares a query with, as found with some of the points themselves."""
    if not tree.finite:
        return 1.0
    step = max(1, tree.finite // _SAMPLED)
    queries, wanted = tree.sorted[:, : tree.finite : step].mT[:_SAMPLED].contiguous(), min(_WANTED, tree.count)
    if queries.device.type == "cpu":
        share = point_search.measure_share(tree, queries, wanted)
        return 1.0 if share is None else share
    edge = triton.point_search.search(tree, queries, wanted)[0][:, -1:, None]
    low, high = tree.boxes[2**tree.depth :].chunk(2, -1)
    gaps = torch.maximum(low - queries.unsqueeze(1), queries.unsqueeze(1) - high).clamp_(min=0).square().sum(-1)
    return float((gaps <= edge.squeeze(-1)).float().mean())


def search(tree: PointTree, queries: Tensor, k: int, excluded: int | None = None) -> tuple[Tensor, Tensor] | None:
    """Squared distances and places [M, k] of the points nearest to the queries [M, D]; None where the engine of the
    device does not search so many."""
    if queries.device.type != "cpu" and not triton.point_search.has_kernel(tree, k):
        return None
    if torch.compiler.is_compiling():
        given = (queries, tree.sorted, tree.order, tree.boxes, tree.finite, k, excluded)
        values, places = torch.ops.monoidreduce.nearest(*given)
        return values, places
    if queries.device.type == "cpu":
        return point_search.search(tree, queries, k, excluded)
    return triton.point_search.search(tree, queries, k, excluded)


def _run(
    queries: Tensor, ordered: Tensor, order: Tensor, boxes: Tensor, finite: int, k: int, excluded: int | None
) -> tuple[Tensor, Tensor]:
    found = search(PointTree(ordered, order, boxes, finite), queries, k, excluded)
    assert found is not None  # a tree was built, so it can be searched
    return found


def _make_fake(
    queries: Tensor, ordered: Tensor, order: Tensor, boxes: Tensor, finite: int, k: int, excluded: int | None
):
    shape = (queries.shape[0], k)
    return queries.new_empty(shape), queries.new_empty(shape, dtype=torch.int64)


_SCHEMA = "nearest(Tensor queries, Tensor sorted, Tensor order, Tensor boxes, int finite, SymInt k, int? excluded)"
register_operator(f"{_SCHEMA} -> (Tensor, Tensor)", _run, _make_fake)

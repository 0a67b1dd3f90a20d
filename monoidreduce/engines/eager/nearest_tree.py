"""Nearest-neighbour folds on a CPU by boxes, for points that are searched in one call.

For ``mr.topk(mr.sqdist(x, y), k, largest=False)``, also without pairs of equal index, of points with few features. Few
queries are boxed: one pass over the points looks up which queries a point may be near to (``cpp/ball_search.py``). For
more, the points are: a tree of boxes is built, which costs about as much as a hundred such passes, and a query in it
takes a few microseconds (``cpp/point_search.py``). A tree that is kept between calls is ``ops.knn.prepare``. Values
that are made of a distance in any other way are left to ``branch_and_bound``.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...plan import settings
from ...program.constructors import ONE
from ...program.expression import Expr
from ...program.lower import Fold
from ..common import matmul, skip_small_tiles
from ..common.evaluate import Sizes
from .cpp import WORTH, applies, ball_search, point_search

MIN_POINTS = 8192  # below, all pairs take about as long as the call itself
MIN_BATCHED = 65536  # the same for batches of few queries: each batch element is a search of its own
MANY_POINTS = 2**20  # from which all pairs of a single query take 10 ms in torch, and compiling a search pays
MOST_FEATURES = 4  # of more, too few boxes can be skipped to pay for them in one call
# Measured with 10 neighbours on one core of an ARM Neoverse N1, and of a Xeon: a tree takes 300 ns for each point, a
# pass over the points 3 ns for each and 10 ns for each pair that it compares.
MOST_BOXED, POINTS_PER_QUERY = 1024, 256  # queries up to which a pass is faster than a tree
_PAIRS_PER_POINT, _WORTH = 30, 8  # pairs that are as fast as a tree; the share of all pairs that is as fast as all


def run(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> list[Tensor] | None:
    """Run a fold by boxes; None if that does not apply or would be slower."""
    if not fits(fold, leaves, sizes):
        return None
    (r,) = fold.reductions
    _, excludes, (near, far) = _match(r)  # type: ignore[misc]
    values = dict(zip(fold.leaves, leaves, strict=True))
    queries, points = values[near], values[far]
    if r.attrs[1] == "rows":
        queries, points = points, queries
    batch, k = torch.Size(sizes.batch), r.attrs[2][0]
    queries = queries.detach().to(sizes.compute).expand(*batch, *queries.shape[-2:])
    points = points.detach().to(sizes.compute).expand(*batch, *points.shape[-2:])
    found = []
    for at in itertools.product(*map(range, batch)):
        part = _search(points[at], queries[at], k, 0 if excludes else None)
        if part is None:
            return None
        found.append(part)
    skip_small_tiles.count_tile(True, len(found), queries.shape[-2], points.shape[-2])
    return [torch.stack(t).view(*batch, *t[0].shape) for t in zip(*found, strict=True)]


def _search(points: Tensor, queries: Tensor, k: int, excluded: int | None) -> tuple[Tensor, Tensor] | None:
    count, rows = len(points), len(queries)
    if rows <= max(MOST_BOXED, count // POINTS_PER_QUERY):
        most = min(_PAIRS_PER_POINT * count, count * rows // _WORTH)
        found = ball_search.search(points, queries, k, excluded, most)
        if found is not None or rows < MOST_BOXED:
            return found
    tree = point_search.build(points)
    return None if tree is None else point_search.search(tree, queries, k, excluded)


def fits(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> bool:
    """Whether boxes are to run this fold. Does not read the points."""
    if len(fold.reductions) != 1 or sizes.device.type != "cpu" or sizes.shard is not None:
        return False
    ((r, scale),) = fold.scaled
    found = _match(r)
    if found is None or scale is not ONE:
        return False
    kept, folded = (sizes.rows, sizes.cols) if r.attrs[1] == "cols" else (sizes.cols, sizes.rows)
    least = MIN_BATCHED if kept <= MOST_BOXED and torch.Size(sizes.batch).numel() > 1 else MIN_POINTS
    if not kept or folded < least or not 0 < sizes.of(found[0]) <= MOST_FEATURES:
        return False
    if (
        settings.requested_budget() is not None
        or settings.shrink_factor() > 1
        or matmul.dry_run_sizes.get() is not None
    ):
        return False
    if skip_small_tiles.active() is not None or not torch.Size(sizes.batch).numel():
        return False
    worth = WORTH if folded < MANY_POINTS else 0
    return applies(fold, leaves, sizes, worth) and point_search.is_available(sizes.of(found[0]), sizes.compute)


def estimate_bytes(fold: Fold, sizes: Sizes) -> int:
    """Memory beside the results, for one batch element: a contiguous copy of the points, and the lists of the cells or
    the tree and the points while they are sorted."""
    (r,) = fold.reductions
    kept, folded = (sizes.rows, sizes.cols) if r.attrs[1] == "cols" else (sizes.cols, sizes.rows)
    features = sizes.of(_match(r)[0])  # type: ignore[index]
    width = features * sizes.compute.itemsize
    if kept < MOST_BOXED:
        listed = kept * 80 * 3**features  # two or three cells across each ball, and a table of four times as many
        return folded * width + listed + kept * 16 * r.attrs[2][0] * torch.get_num_threads()
    tree = folded * (width + 8) + folded // 4 * width  # the points, their places, and boxes of 16 points or more
    return tree + folded * (2 * width + 16)


@functools.lru_cache(maxsize=1024)
def _match(r: Expr) -> tuple[str, bool, tuple[Expr, Expr]] | None:
    """The features, whether pairs of equal index are left out, and both leaves, of a fold that a tree can run."""
    if r.attrs[0] != "topk" or r.attrs[2][1]:
        return None
    value, excludes = r.args[0], False
    if value.op == "where":
        own, far, value = value.args
        excludes = own.op == "eq" and {a.op for a in own.args} == {"row_index", "col_index"}
        if not excludes or far.op != "const" or far.const != math.inf:
            return None
    if value.op != "sqdist" or any(a.op != "leaf" or a.is_pair for a in value.args):
        return None
    near, far = sorted(value.args, key=lambda a: a.cols)
    return (str(near.feature), excludes, (near, far)) if near.rows and far.cols else None

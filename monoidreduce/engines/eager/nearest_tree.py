"""Nearest-neighbour folds on a CPU by a tree of boxes, built for the one call.

For ``mr.topk(mr.sqdist(x, y), k, largest=False)``, also without pairs of equal index, of points with few features. A
tree costs about as much as 1,500 queries by all pairs, and a query in it a few microseconds; with fewer queries all
pairs are faster. (A tree that is kept between calls is ``ops.knn.prepare``.) Values that are made of a distance in any
other way are left to ``branch_and_bound``.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...plan import budget
from ...program.constructors import ONE
from ...program.expression import Expr
from ...program.lower import Fold
from ..common import matmul, skip_small_tiles
from ..common.evaluate import Sizes
from .cpp import applies, point_search

MIN_QUERIES = 2048  # where a tree of 10^5 to 2 * 10^6 points pays, building it included (one core of a Xeon)
MIN_POINTS = 8192
MOST_FEATURES = 4  # of more, too few boxes can be skipped to pay for the tree in one call


def run(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> list[Tensor] | None:
    """Run a fold by building a tree and searching it; None if that does not apply or would be slower."""
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
        tree = point_search.build(points[at])
        part = None if tree is None else point_search.search(tree, queries[at], k, 0 if excludes else None)
        if part is None:
            return None
        found.append(part)
    skip_small_tiles.count_tile(True, len(found), queries.shape[-2], points.shape[-2])
    return [torch.stack(t).view(*batch, *t[0].shape) for t in zip(*found, strict=True)]


def fits(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> bool:
    """Whether a tree runs this fold. Does not read the points."""
    if len(fold.reductions) != 1 or sizes.device.type != "cpu" or sizes.shard is not None:
        return False
    ((r, scale),) = fold.scaled
    found = _match(r)
    if found is None or scale is not ONE:
        return False
    kept, folded = (sizes.rows, sizes.cols) if r.attrs[1] == "cols" else (sizes.cols, sizes.rows)
    if kept < MIN_QUERIES or folded < MIN_POINTS or not 0 < sizes.of(found[0]) <= MOST_FEATURES:
        return False
    if budget.requested() is not None or budget.shrink_factor() > 1 or matmul.dry_run_sizes.get() is not None:
        return False
    if skip_small_tiles.active() is not None or not torch.Size(sizes.batch).numel():
        return False
    return applies(fold, leaves, sizes) and point_search.is_available(sizes.of(found[0]), sizes.compute)


def estimate_bytes(fold: Fold, sizes: Sizes) -> int:
    """Memory beside the results: the tree and the points while they are sorted, for one batch element."""
    (r,) = fold.reductions
    points = sizes.cols if r.attrs[1] == "cols" else sizes.rows
    width = sizes.of(_match(r)[0]) * sizes.compute.itemsize  # type: ignore[index]
    tree = points * (width + 8) + points // 4 * width  # the points, their places, and boxes of 16 points or more
    return tree + points * (2 * width + 16)  # a contiguous copy, and points with their places


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

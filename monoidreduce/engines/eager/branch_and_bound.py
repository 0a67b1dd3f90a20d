"""Nearest-neighbour folds on a CPU: near blocks of points are visited first, and those that are too far skipped.

**Branch and bound.** ``mr.topk(mr.sqdist(x, y), k, largest=False)`` needs only the columns near each row. Rows and
columns are sorted into blocks of points that lie together. A block of rows is folded with the columns whose bounding
boxes are nearest, and from then on only with those that may hold a better pair than the worst kept so far. Interval
arithmetic on the program bounds the value of a pair at a given distance, so this works for any value that a distance
bounds. Results are those of all pairs, including the order of ties. Used on CPUs for points of few features; with many,
all points are about equally far from each other and no box can be skipped.

**Boxes** (:func:`search_boxes`), in C++, of points that are searched in one call: for the same reduction, also without
pairs of equal index, of points with few features. Few queries are boxed: one pass over the points looks up which
queries a point may be near to. For more, the points are: a tree of boxes is built, which costs about as much as a
hundred such passes, and a query in it takes a few microseconds (``cpp/point_search.py``). A tree that is kept between
calls is ``ops.knn.prepare``. Values that are made of a distance in any other way are left to
branch and bound.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...plan import schedule as plan
from ...plan import settings
from ...program.constructors import ONE, interval
from ...program.expression import Expr, size, topological
from ...program.intervals import INF
from ...program.lower import Fold
from ...reductions import kind_of
from ..common import matmul, skip_small_tiles
from ..common.evaluate import Sizes
from .cpp import WORTH, applies, point_search
from .tile_code import FEW_FEATURES, Buffers, TileRun, match_label_scatter
from .tile_walk import BatchChunk, compile_fold, split_range

# measured with 10 neighbours of 10,000 to 100,000 points in 3 dimensions (benchmarks/cpu.py): half or twice is alike
KEPT_BLOCK, FOLDED_BLOCK = 256, 32  # points of a block
FIRST_POINTS, GROWTH = 512, 8  # points folded first (at least), and the growth factor of later rounds
HEAP_RATIO = 64  # candidates per result from which torch.topk uses a heap, in half the time
MIN_POINTS = 8192  # rows and columns from which this is faster; at half, all pairs take as long

ROUNDING = 1e-5  # relative; an upper bound of the rounding error of a pair
KEEPS_RELATIVE_ERROR = (
    "sqdist",
    "neg",
    "mul",
    "div",
    "sqrt",
    "where",
)  # operations that keep a relative error relative
# squared distances at which bounds are evaluated; the last is NaN, for pairs beyond all of them
DISTANCES = torch.tensor([*(2 ** (n / 8) for n in range(-800, 801)), math.nan], dtype=torch.float64, device="cpu")


def run(fold: Fold, leaves: list[Any], sizes: Sizes, tiles: plan.Tiles | None) -> list[Tensor] | None:
    """Run a fold by branch and bound; None if that does not apply or would be slower."""
    bounds = find_distance_bounds(fold, leaves, sizes)
    return None if bounds is None else run_by_distance(fold, leaves, sizes, tiles, bounds, NearestSearch)


def find_distance_bounds(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> list[Tensor] | None:
    """A bound by distance for each reduction; None if one has none. Does not read the points."""
    if not _is_faster(fold, sizes):
        return None
    numbers = _scalar_values(fold, leaves, sizes)
    found = [
        _bound_by_distance(r, tuple((e, v) for e, v in numbers.items() if e in _nodes_under(r)))
        for r in fold.reductions
    ]
    bounds = [ladder for ladder in found if ladder is not None]
    return bounds if len(bounds) == len(found) else None


def _scalar_values(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> dict[Expr, Any]:
    given = {e: v for e, v in zip(fold.leaves, leaves, strict=True) if not isinstance(v, Tensor)}
    return given | {size(axis): sizes.of(axis) for axis in ("rows", "cols", *sizes.letters)}


def run_by_distance(
    fold: Fold,
    leaves: list[Any],
    sizes: Sizes,
    tiles: plan.Tiles | None,
    bounds: list[Tensor],
    near: type[NearestSearch],
) -> list[Tensor]:
    """Run a fold, reduction by reduction, batch element by batch element."""
    batch, numbers = torch.Size(sizes.batch), _scalar_values(fold, leaves, sizes)
    tensors = {e: v for e, v in zip(fold.leaves, leaves, strict=True) if isinstance(v, Tensor)}
    views = {e: v.expand(*batch, *v.shape[len(batch) :]) for e, v in tensors.items()}
    found: list[Tensor] = []
    for r, ladder in zip(fold.reductions, bounds, strict=True):
        parts = []
        for at in itertools.product(*map(range, batch)):
            given = {**{e: v[at].unsqueeze(0) for e, v in views.items()}, **numbers}
            parts.append(near(r, fold, given, sizes, tiles, ladder).run())
        found += [torch.cat(part).view(*batch, *part[0].shape[1:]) for part in zip(*parts, strict=True)]
    return found


def _is_faster(fold: Fold, sizes: Sizes) -> bool:
    if sizes.device.type != "cpu" or min(sizes.rows, sizes.cols) < MIN_POINTS or not torch.Size(sizes.batch).numel():
        return False
    if settings.requested_budget() is not None or settings.shrink_factor() > 1:  # the order of points is memory too
        return False
    return all(d is not None and sizes.of(str(d.args[0].feature)) <= FEW_FEATURES for d in _find_distances(fold))


@functools.lru_cache(maxsize=1024)
def _find_distances(fold: Fold) -> tuple[Expr | None, ...]:
    return tuple(_find_distance(r) if s is ONE else None for r, s in fold.scaled)


def _find_distance(r: Expr) -> Expr | None:
    """The one squared distance between leaves that all pairs of a reduction are made of, if there is one.

    Numbers made of it by anything that might cancel are left alone: there rounding, not distance, decides."""
    if not kind_of(r).selected(r.attrs[2]) or r.args[0].dtype != "float":
        return None
    under = topological(r.args[:1])
    found = [e for e in under if e.op == "sqdist"]
    if len(found) != 1 or any(a.op != "leaf" or a.is_pair for a in found[0].args):
        return None
    made = {found[0]}
    for e in under:
        if match_label_scatter(e) is not None or (e.op == "leaf" and e.is_pair):  # these read consecutive columns
            return None
        if e.dtype == "float" and not made.isdisjoint(e.args):
            made.add(e)
            if e.op not in KEEPS_RELATIVE_ERROR:
                return None
    return found[0]


@functools.lru_cache(maxsize=256)
def _nodes_under(r: Expr) -> frozenset[Expr]:
    return frozenset(topological(r.args))


@functools.lru_cache(maxsize=256)
def _bound_by_distance(r: Expr, numbers: tuple[tuple[Expr, float], ...]) -> Tensor | None:
    """A lower bound of the value (negated where the largest are sought) of pairs at least as far apart as each of
    ``DISTANCES``; None if distance does not bound it."""
    distance, largest = _find_distance(r), r.attrs[2][-1]
    assert distance is not None
    known = {e: (float(v), float(v)) for e, v in numbers}
    ends = [interval(r.args[0], {**known, distance: (s, INF)}) for s in DISTANCES[:-1].tolist()]
    best = torch.tensor([-high if largest else low for low, high in ends], dtype=torch.float64, device="cpu")
    best = best.nan_to_num(nan=-INF, posinf=INF, neginf=-INF).flip(0).cummin(0).values.flip(0)
    return best if best[-1] > best[0] else None


class NearestSearch(BatchChunk):
    """The search for one reduction of one batch element."""

    def __init__(
        self, r: Expr, fold: Fold, leaves: dict[Expr, Any], sizes: Sizes, tiles: plan.Tiles | None, ladder: Tensor
    ):
        tiles = tiles or plan.choose_tiles(1, sizes.rows, sizes.cols)
        elements = max(tiles.rows * tiles.cols, KEPT_BLOCK * FOLDED_BLOCK)
        numbers = {e: v for e, v in leaves.items() if not isinstance(v, Tensor)}
        code = compile_fold(Fold(fold.leaves, (r,)), frozenset(numbers))
        buffers = Buffers(elements, sizes.compute, sizes.device, numbers)
        super().__init__(code, leaves, sizes, replace(tiles, batch=1), 1, buffers)
        self.ladder, self.over, self.largest = ladder, r.attrs[1], r.attrs[2][-1]
        distance = _find_distance(r)
        assert distance is not None
        points = [
            leaves[a][0].to(sizes.compute) for a in sorted(distance.args, key=lambda a: a.rows == (self.over == "rows"))
        ]
        self.points, folded = points
        self.kept, self.folded = sort_into_blocks(self.points, KEPT_BLOCK), sort_into_blocks(folded, FOLDED_BLOCK)
        self.low, self.high = _bounding_boxes(folded, self.folded)
        self.most = elements // (KEPT_BLOCK * FOLDED_BLOCK)  # blocks of a tile

    def run(self) -> list[Tensor]:
        self.fold_tiles()
        (accumulator,) = self.accumulators
        assert accumulator is not None
        found = []
        for value in accumulator.finish():
            found.append(torch.empty_like(value))
            found[-1][:, self.kept] = value
        return found

    def fold_tiles(self) -> None:
        (accumulator,) = self.accumulators
        assert accumulator is not None
        wanted = accumulator.kind.selected(accumulator.params)
        for at in split_range(len(self.kept), KEPT_BLOCK):
            block = self.kept[at]
            values = self.load_axis(block, self.over == "cols")
            points = self.points[block].mT.unsqueeze(-1)
            low, high = points.amin(1), points.amax(1)
            gaps = _box_distances(low, high, self.low, self.high)
            left = torch.ones_like(gaps, dtype=torch.bool)
            room = min(self.most, len(gaps), -(-max(FIRST_POINTS, HEAP_RATIO * wanted) // FOLDED_BLOCK))
            centres = (self.low + self.high - low - high).square_().sum(0).nan_to_num_(nan=0.0)
            chosen, met = centres.topk(room, largest=False).indices, 0
            while len(chosen):
                left[chosen] = False
                met += self._fold_blocks(at, block, values, chosen)
                room = min(self.most, room * GROWTH)
                chosen = self._next(points, gaps, left, self._reach(accumulator.edge(at)[0]), room)
            skip_small_tiles.count_tile(False, 1, len(block), len(self.folded) - met)

    def _next(self, points: Tensor, gaps: Tensor, left: Tensor, reach: Tensor, room: int) -> Tensor:
        """The nearest remaining blocks that may improve any of these points; the others are removed from ``left``."""
        while True:
            chosen = (left & ~(gaps >= reach.amax())).nonzero().squeeze(1)
            if len(chosen) > room:
                chosen = chosen[gaps[chosen].topk(room, largest=False).indices]
            low, high = self.low[:, None, chosen], self.high[:, None, chosen]
            near = ~(_box_distances(points, points, low, high) >= reach.unsqueeze(-1))
            left[chosen] = False
            reached = chosen[near.any(0)]
            if len(reached) or not len(chosen):
                return reached

    def _reach(self, edge: Tensor) -> Tensor:
        """The squared distance from which on no pair can improve on ``edge``; NaN if any pair may."""
        edge = (-edge if self.largest else edge).double()
        edge = (edge + edge.abs() * ROUNDING).nan_to_num(nan=INF, posinf=INF, neginf=-INF)
        return (DISTANCES[torch.searchsorted(self.ladder, edge, right=True)] * (1 + ROUNDING)).to(self.sizes.compute)

    def _fold_blocks(self, at: slice, block: Tensor, values: dict[Expr, Any], chosen: Tensor) -> int:
        """Fold a kept block with some folded blocks; returns how many folded points those hold."""
        count = len(self.folded)
        places = (chosen.unsqueeze(-1) * FOLDED_BLOCK + torch.arange(FOLDED_BLOCK, device=chosen.device)).flatten()
        others = self.folded[places[places < count]].sort().values
        self.fold_pairs(at, block, values, others)
        return len(others)

    def fold_pairs(self, at: slice, block: Tensor, values: dict[Expr, Any], others: Tensor) -> None:
        """Fold all pairs of a kept block and some folded points."""
        by_rows = self.over == "cols"
        shape = (1, len(block), len(others)) if by_rows else (1, len(others), len(block))
        tile = TileRun({**values, **self.load_axis(others, not by_rows)}, shape, self.buffers, (0, 0))
        (accumulator,) = self.accumulators
        assert accumulator is not None
        code = self.code.variant({})
        assert code is not None
        tile.run(code, lambda reducer, owned, tile: accumulator.step(reducer, owned, tile, at, others))
        skip_small_tiles.count_tile(True, *shape)


def _box_distances(low: Tensor, high: Tensor, others_low: Tensor, others_high: Tensor) -> Tensor:
    """Squared distances between boxes, features first; NaN for unbounded boxes."""
    return torch.maximum(others_low - high, low - others_high).clamp_(min=0).square_().sum(0)


def _bounding_boxes(points: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Minimum and maximum of every feature [d, blocks], for each block of points."""
    blocks = -(-len(order) // FOLDED_BLOCK)
    filled = torch.cat([order, order[-1:].expand(blocks * FOLDED_BLOCK - len(order))])
    parts = points[filled].view(blocks, FOLDED_BLOCK, -1)
    return parts.amin(1).mT.contiguous(), parts.amax(1).mT.contiguous()


def sort_into_blocks(points: Tensor, block: int) -> Tensor:
    """A permutation of points [n, d] that puts near points into the same block: slabs along one feature, each cut into
    slabs along the next.

    The widest feature comes first, with as many slabs as make blocks about equally long in all features. Widths are
    those of a sample, without its extremes."""
    count, _ = points.shape
    sample = points[:: max(1, count // 1024)].sort(0).values
    tenth = len(sample) // 10
    wide = (sample[len(sample) - 1 - tenth] - sample[tenth]).double().nan_to_num(0.0, 0.0, 0.0).clamp_(min=0)
    sorted_by = wide.sort(descending=True, stable=True)
    widths = [w for w in sorted_by.values.tolist() if w > 0]
    found, slabs = torch.arange(count, device=points.device), 1
    for n, (feature, width) in enumerate(zip(sorted_by.indices.tolist(), widths, strict=False)):
        key = points[found, feature].argsort(stable=True)
        slab = torch.arange(count, device=points.device) * slabs // count
        found = found[key[slab[key].argsort(stable=True)]]
        left = max(1.0, count / block / slabs)
        edge = math.exp((math.fsum(map(math.log, widths[n:])) - math.log(left)) / (len(widths) - n))
        slabs *= max(1, min(round(width / edge), math.ceil(left)))
        if slabs * block >= count:
            break
    return found


MIN_SEARCHED = 8192  # below, all pairs take about as long as the call itself
MIN_BATCHED = 65536  # the same for batches of few queries: each batch element is a search of its own
MANY_POINTS = 2**20  # from which all pairs of a single query take 10 ms in torch, and compiling a search pays
MOST_FEATURES = 4  # of more, too few boxes can be skipped to pay for them in one call
# Measured with 10 neighbours on one core of an ARM Neoverse N1, and of a Xeon: a tree takes 300 ns for each point, a
# pass over the points 3 ns for each and 10 ns for each pair that it compares.
MOST_BOXED, POINTS_PER_QUERY = 1024, 256  # queries up to which a pass is faster than a tree
_PAIRS_PER_POINT, _WORTH = 30, 8  # pairs that are as fast as a tree; the share of all pairs that is as fast as all


def search_boxes(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> list[Tensor] | None:
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
        found = point_search.search_once(points, queries, k, excluded, most)
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
    least = MIN_BATCHED if kept <= MOST_BOXED and torch.Size(sizes.batch).numel() > 1 else MIN_SEARCHED
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

"""Near points on a CPU: a tree of boxes is built and searched in C++, query by query, nearest box first.

The distance of a pair is computed as the generated folds of few features compute it, operation by operation, so that
a search finds the same numbers as all pairs do, and of equal numbers the first column. A box is skipped only where
every distance in it, rounding included, is larger than the k-th found so far.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from ...common.point_tree import PointTree, choose_depth, split_finite
from . import compiler

MOST_FEATURES = 16  # beyond, generated folds multiply matrices, and boxes exclude nothing
_TYPES = {torch.float32: ("float", "1e-5f"), torch.float64: ("double", "1e-13")}


def build(points: Tensor) -> PointTree | None:
    """The tree of points [N, D]; None where there is no compiler."""
    library = _load(points.shape[1], points.dtype)
    if library is None:
        return None
    order, count = split_finite(points)
    points = points.contiguous()
    depth = choose_depth(count)
    boxes = points.new_zeros(2 ** (depth + 1), 2 * points.shape[1])
    sorted_points = points.new_empty(points.shape[1], len(points))
    threads = torch.get_num_threads()
    call(library, [0, points, order, sorted_points, boxes, len(points), count, depth, threads])
    return PointTree(sorted_points, order, boxes, count)


def search(tree: PointTree, queries: Tensor, k: int, excluded: int | None = None) -> tuple[Tensor, Tensor] | None:
    """Squared distances and places [M, k] of the k points nearest to each query [M, D], nearest first, the first of
    equals first; None where there is no compiler. ``excluded``: query i is not to find the point ``excluded + i``.

    Infinite distances have the place -1, as in every fold."""
    library = _load(tree.features, tree.sorted.dtype)
    if library is None:
        return None
    values = queries.new_empty(len(queries), k)
    places = torch.empty(len(queries), k, dtype=torch.int64, device="cpu")
    own = -(2**62) if excluded is None else excluded
    sizes = [tree.count, tree.finite, tree.depth, len(queries), k, own, torch.get_num_threads()]
    call(
        library,
        [1, queries.contiguous(), tree.sorted, tree.order, tree.boxes, values, places, *sizes, 0],
    )
    return values, places


def measure_share(tree: PointTree, queries: Tensor, k: int) -> float | None:
    """Which share of all points a search compares these queries with: what pruning by boxes leaves over."""
    library = _load(tree.features, tree.sorted.dtype)
    if library is None or not len(queries) or not tree.count:
        return None
    values = queries.new_empty(len(queries), k)
    places = torch.empty(len(queries), k, dtype=torch.int64, device="cpu")
    visited = torch.zeros((), dtype=torch.int64, device="cpu")
    sizes = [tree.count, tree.finite, tree.depth, len(queries), k, -(2**62), 1]
    call(
        library,
        [1, queries.contiguous(), tree.sorted, tree.order, tree.boxes, values, places, *sizes, visited],
    )
    return int(visited) / (len(queries) * tree.count)


def is_available(features: int, dtype: torch.dtype) -> bool:
    """Whether trees of such points can be built here; compiles the search if need be."""
    return 0 < features <= MOST_FEATURES and dtype in _TYPES and _load(features, dtype) is not None


def call(library: ctypes.CDLL, arguments: list[Tensor | int]) -> None:
    held = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
    packed = (ctypes.c_int64 * len(held))(*held)
    library.run_fold(ctypes.addressof(packed))


@functools.lru_cache(maxsize=64)
def _load(features: int, dtype: torch.dtype) -> ctypes.CDLL | None:
    if dtype not in _TYPES or not 0 < features <= MOST_FEATURES:
        return None
    lines = distance_lines(features, "query[{f}]", "from[{f} * total + j]")
    text = _TEXT.replace("DISTANCE", lines).replace("TOTAL", f"s{features - 1}")
    return compiler.load(header(features, dtype) + text)


def distance_lines(features: int, query: str, point: str) -> str:
    """The squared distance of a pair as C++, ``s0`` to ``s{features - 1}``: one sum per line, as generated folds have
    it, so that a compiler that fuses additions fuses the same ones."""
    lines = []
    for f in range(features):
        lines.append(f"const F g{f} = {query.format(f=f)} - {point.format(f=f)};")
        lines.append(f"const F s{f} = g{f} * g{f}{f' + s{f - 1}' if f else ''};")
    return " ".join(lines)


def header(features: int, dtype: torch.dtype) -> str:
    """What a search text begins with: its number of features, its type, and the order of what is found."""
    number, rounding = _TYPES[dtype]
    return f"#define D {features}\n#define ROUNDING {rounding}\ntypedef {number} F;\n{_ORDER}"


_ORDER = r"""
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>
typedef int64_t I;
struct Found { F value; I place; };
// Whether a stands before b: smaller, or equal and earlier; NaN is the largest of all.
static inline bool before(const Found& a, const Found& b) {
  if (a.value < b.value) return true;
  if (a.value == b.value) return a.place < b.place;
  const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
  return a_nan == b_nan ? a_nan && a.place < b.place : b_nan;
}
"""

_TEXT = r"""
static const F INF = std::numeric_limits<F>::infinity();

// Build ------------------------------------------------------------------------------------------------------------
struct Point { F at[D]; I place; };

static void split(Point* points, F* boxes, I count, int depth, int level, I node) {
  const I start = (node * count) >> level, stop = ((node + 1) * count) >> level;
  F* const box = boxes + (((I)1 << level) + node) * 2 * D;
  F low[D], high[D];
  for (int f = 0; f < D; f++) { low[f] = INF; high[f] = -INF; }
  for (I p = start; p < stop; p++)
    for (int f = 0; f < D; f++) {
      const F v = points[p].at[f];
      low[f] = v < low[f] ? v : low[f];
      high[f] = v > high[f] ? v : high[f];
    }
  int widest = 0;
  for (int f = 0; f < D; f++) {
    box[f] = low[f]; box[D + f] = high[f];
    if (high[f] - low[f] > high[widest] - low[widest]) widest = f;
  }
  if (level == depth) {
    std::sort(points + start, points + stop, [](const Point& a, const Point& b) { return a.place < b.place; });
    return;
  }
  const I middle = ((2 * node + 1) * count) >> (level + 1);
  std::nth_element(points + start, points + middle, points + stop, [widest](const Point& a, const Point& b) {
    return a.at[widest] < b.at[widest] || (a.at[widest] == b.at[widest] && a.place < b.place);
  });
  if (stop - start > 65536) {
    #pragma omp task
    split(points, boxes, count, depth, level + 1, 2 * node);
    split(points, boxes, count, depth, level + 1, 2 * node + 1);
    #pragma omp taskwait
  } else {
    split(points, boxes, count, depth, level + 1, 2 * node);
    split(points, boxes, count, depth, level + 1, 2 * node + 1);
  }
}

static void build(const I* a) {
  const F* const given = (const F*)a[1];
  I* const order = (I*)a[2];
  F* const sorted = (F*)a[3];
  F* const boxes = (F*)a[4];
  const I total = a[5], count = a[6];
  const int depth = (int)a[7], threads = (int)a[8];
  std::vector<Point> points(total);
  #pragma omp parallel for num_threads(threads)
  for (I p = 0; p < total; p++) {
    points[p].place = order[p];
    for (int f = 0; f < D; f++) points[p].at[f] = given[order[p] * D + f];
  }
  #pragma omp parallel num_threads(threads)
  #pragma omp single
  split(points.data(), boxes, count, depth, 0, 0);
  #pragma omp parallel for num_threads(threads)
  for (I p = 0; p < total; p++) {
    order[p] = points[p].place;
    for (int f = 0; f < D; f++) sorted[f * total + p] = points[p].at[f];
  }
}

// Search -----------------------------------------------------------------------------------------------------------
struct Search {
  const F* sorted; const I* order; const F* boxes; I total, count; int depth; I k;
  I visited = 0;
  std::vector<Found> best;  // a heap whose first is the last of the k best

  F worst() const { return (I)best.size() < k ? INF : best[0].value; }
  void consider(F value, I place) {
    const Found one{value, place};
    if ((I)best.size() < k) { best.push_back(one); std::push_heap(best.begin(), best.end(), before); return; }
    if (!before(one, best[0])) return;
    I hole = 0;  // the last of the best leaves; what was beneath moves up
    for (;;) {
      I next = 2 * hole + 1;
      if (next >= k) break;
      if (next + 1 < k && before(best[next], best[next + 1])) next++;
      if (!before(one, best[next])) break;
      best[hole] = best[next]; hole = next;
    }
    best[hole] = one;
  }
  void scan(const F* query, I start, I stop, I own) {
    visited += stop - start;
    for (; start < stop; start += 32) {
      const int many = stop - start < 32 ? (int)(stop - start) : 32;
      F near[32];
      const F* const from = sorted + start;
      for (int j = 0; j < many; j++) {
        DISTANCE
        near[j] = TOTAL;
      }
      const F edge = worst();
      uint32_t may = 0;
      for (int j = 0; j < many; j++) may |= (uint32_t)!(near[j] > edge) << j;
      while (may) {
        const int j = __builtin_ctz(may);
        may &= may - 1;
        const I place = order[start + j];
        consider(place == own ? INF : near[j], place);
      }
    }
  }
  F box_distance(const F* query, I node) const {
    const F* const box = boxes + node * 2 * D;
    F near = 0;
    for (int f = 0; f < D; f++) {
      const F below = box[f] - query[f], above = query[f] - box[D + f];
      F gap = below > above ? below : above;
      gap = gap > 0 ? gap : 0;
      near = gap * gap + near;
    }
    return near;
  }
  void run(const F* query, I own) {
    best.clear();
    scan(query, count, total, own);
    struct Open { I node; F near; } open[64];
    int many = 0;
    if (count) open[many++] = {1, 0};
    const I leaves = (I)1 << depth;
    while (many) {
      Open now = open[--many];
      for (;;) {
        if (now.near * (1 - ROUNDING) > worst()) break;
        if (now.node >= leaves) {
          const I leaf = now.node - leaves;
          scan(query, (leaf * count) >> depth, ((leaf + 1) * count) >> depth, own);
          break;
        }
        Open left{2 * now.node, box_distance(query, 2 * now.node)};
        Open right{2 * now.node + 1, box_distance(query, 2 * now.node + 1)};
        const bool swap = right.near < left.near;
        open[many++] = swap ? left : right;
        now = swap ? right : left;
      }
    }
    std::sort(best.begin(), best.end(), before);
  }
};

static void search(const I* a) {
  const F* const queries = (const F*)a[1];
  F* const values = (F*)a[5];
  I* const places = (I*)a[6];
  const I rows = a[10], k = a[11], own = a[12];
  const int most = (int)(rows < 16 * a[13] ? (rows + 15) / 16 : a[13]);
  I* const visited = (I*)a[14];
  #pragma omp parallel num_threads(most < 1 ? 1 : most)
  {
    Search one{(const F*)a[2], (const I*)a[3], (const F*)a[4], a[7], a[8], (int)a[9], k};
    one.best.reserve(k + 1);
    #pragma omp for schedule(dynamic, 16)
    for (I i = 0; i < rows; i++) {
      one.run(queries + i * D, own + i);
      for (I s = 0; s < k; s++) {
        const bool some = s < (I)one.best.size();
        values[i * k + s] = some ? one.best[s].value : INF;
        places[i * k + s] = some && one.best[s].value != INF ? one.best[s].place : -1;
      }
    }
    if (visited) {
      #pragma omp atomic
      *visited += one.visited;
    }
  }
}

extern "C" int run_fold(void* given) {
  const I* const a = (const I*)given;
  if (a[0] == 0) build(a); else search(a);
  return 0;
}
"""

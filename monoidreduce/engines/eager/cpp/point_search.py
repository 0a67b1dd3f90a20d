"""Near points on a CPU. For points that are kept: a tree of boxes is built and searched in C++, query by query,
nearest box first. For points that are searched once, one pass over them: nothing is sorted or built.

The distance of a pair is computed as the generated folds of few features compute it, operation by operation, so that
a search finds the same numbers as all pairs do, and of equal numbers the first column. A box is skipped only where
every distance in it, rounding included, is larger than the k-th found so far.

In one pass, a few thousand of the points bound how far away the k-th neighbour of each query can be. That makes a ball
around each query; a grid of cells says which balls' bounding boxes reach into a cell. Each point then looks up its cell
and is compared only with the queries listed there, mostly none. Few queries are compared with every point, many points
at a time: that takes less than looking up a cell.
"""

from __future__ import annotations

import ctypes
import functools
import math

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


_FEW = 64  # queries that are compared with every point: 22 ms of 2,000,000 in 3 dimensions on one core, by cells 40
_SAMPLED = 8192  # points of the sample, at least
_BALANCE = 8  # pairs that take as long as sorting a point of the sample into a tree


def search_once(
    points: Tensor, queries: Tensor, k: int, excluded: int | None, most_pairs: int
) -> tuple[Tensor, Tensor] | None:
    """Squared distances and places [M, k] of the points [N, D] nearest to the queries [M, D], as
    :func:`point_search.search` gives them; None where more than about ``most_pairs`` pairs would have to be compared
    (balls that hold a large share of the points), or where some query has no k points at a finite distance."""
    few = len(queries) <= _FEW
    most = max(_SAMPLED, math.isqrt(len(queries) * k * len(points) // _BALANCE))  # least of both, tree and pairs
    sample = points[:: max(1, len(points) // min(most, len(points) // 8))]
    wanted = k + (excluded is not None)
    if 4 * wanted > len(sample):
        return None
    reach = queries.new_empty(0) if few else _search_sample(sample, queries, wanted)
    library = _load_balls(points.shape[1], points.dtype)
    if reach is None or library is None or not bool(reach.isfinite().all()):
        return None
    values, places = queries.new_empty(len(queries), k), torch.empty(len(queries), k, dtype=torch.int64, device="cpu")
    reach, paid = reach.contiguous(), torch.zeros((), dtype=torch.int64, device="cpu")
    own = -(2**62) if excluded is None else excluded
    sizes = [len(points), len(queries), k, own, torch.get_num_threads(), most_pairs, len(sample) if few else 0]
    call(library, [points.contiguous(), queries.contiguous(), reach, values, places, paid, *sizes])
    return (values, places) if int(paid) else None


def _search_sample(sample: Tensor, queries: Tensor, k: int) -> Tensor | None:
    """Squared distances [M] of the k-th of the sample's points."""
    tree = build(sample)
    found = None if tree is None else search(tree, queries, k)
    return None if found is None else found[0][:, -1]


@functools.lru_cache(maxsize=64)
def _load_balls(features: int, dtype: torch.dtype):
    text = _BALLS_TEXT.replace("TOTAL", f"s{features - 1}")
    for name, point in (("DISTANCE", "at[{f}]"), ("DISTANCES", "block[{f}][j]")):
        text = text.replace(f"{name};", distance_lines(features, "of[{f}]", point))
    return compiler.load(header(features, dtype) + text)


_BALLS_TEXT = r"""
#include <limits>
#include <type_traits>
static const I ENTRIES = 1 << 24, PROBED = 4096;
static const double WIDE = 4096;  // cells of a ball above which its query is compared with every point instead

// Cells of one width, hashed into a table: which balls' boxes reach into a cell. A collision costs comparisons alone.
struct Grid {
  F low[D], high[D], scale;
  uint32_t mask = 0;
  std::vector<int32_t> starts, listed, wide;  // the queries of each slot; slot 0 is everywhere else, and empty
  std::vector<uint8_t> busy;

  // Rounding keeps the order of coordinates: the cell of what lies between two ends lies between theirs.
  inline int32_t along(F at, int f) const { return (int32_t)std::min((at - low[f]) * scale, (F)(1 << 30)); }
  inline uint32_t slot(const int32_t* cell) const {
    uint32_t found = 0;
    for (int f = 0; f < D; f++) found = (found ^ (uint32_t)cell[f]) * 0x9E3779B1u;
    return ((found ^ (found >> 15)) & mask) + 1;
  }
  inline bool holds(const F* at) const {
    bool inside = true;
    for (int f = 0; f < D; f++) inside &= (at[f] >= low[f]) & (at[f] <= high[f]);
    return inside;
  }
  inline uint32_t find(const F* at) const {
    int32_t cell[D];
    for (int f = 0; f < D; f++) cell[f] = along(at[f], f);
    const uint32_t found = slot(cell);
    return holds(at) ? found : 0;
  }
  double ends(const F* query, F reach, int32_t* first, int32_t* last) const {
    double cells = 1;
    for (int f = 0; f < D; f++) {
      first[f] = along(query[f] - reach, f);
      last[f] = along(query[f] + reach, f);
      cells *= (double)last[f] - first[f] + 1;
    }
    return cells;
  }
  template <class Each> void cover(const F* query, F reach, Each each) const {
    int32_t first[D], last[D], now[D];
    if (ends(query, reach, first, last) > WIDE) return;
    std::copy(first, first + D, now);
    for (;;) {
      each(slot(now));
      int f = D - 1;
      while (f >= 0 && now[f] == last[f]) { now[f] = first[f]; f--; }
      if (f < 0) return;
      now[f]++;
    }
  }
  bool make(const F* queries, const std::vector<F>& reach) {
    const I rows = (I)reach.size();
    for (int f = 0; f < D; f++) { low[f] = std::numeric_limits<F>::infinity(); high[f] = -low[f]; }
    for (I i = 0; i < rows; i++)
      for (int f = 0; f < D; f++) {
        low[f] = std::min(low[f], queries[i * D + f] - reach[i]);
        high[f] = std::max(high[f], queries[i * D + f] + reach[i]);
      }
    std::vector<F> middle(reach);
    std::nth_element(middle.begin(), middle.begin() + rows / 2, middle.end());
    scale = 1 / middle[rows / 2];  // two cells across the middle ball
    if (!(scale > 0 && scale <= std::numeric_limits<F>::max())) return false;
    int32_t first[D], last[D];
    double many = 0;
    for (I i = 0; i < rows; i++) {
      const double cells = ends(queries + i * D, reach[i], first, last);
      if (cells > WIDE) wide.push_back((int32_t)i); else many += cells;
    }
    if (many > ENTRIES) return false;
    I slots = 1024;
    while (slots < 4 * many) slots *= 2;
    mask = (uint32_t)slots - 1;
    starts.assign(slots + 2, 0);
    busy.assign(slots + 1, 0);
    std::vector<int32_t> next(slots + 1, -1);  // the last query of each slot: two of its cells may share one
    for (I i = 0; i < rows; i++)
      cover_slots(queries + i * D, reach[i], (int32_t)i, next, [&](uint32_t c) { starts[c + 1]++; busy[c] = 1; });
    for (I c = 1; c <= slots; c++) starts[c + 1] += starts[c];
    listed.resize(starts[slots + 1]);
    std::fill(next.begin(), next.end(), -1);
    std::vector<int32_t> at(starts.begin(), starts.end() - 1);
    for (I i = 0; i < rows; i++)
      cover_slots(queries + i * D, reach[i], (int32_t)i, next, [&](uint32_t c) { listed[at[c]++] = (int32_t)i; });
    return true;
  }
  template <class Each>
  void cover_slots(const F* query, F reach, int32_t i, std::vector<int32_t>& last, Each each) {
    cover(query, reach, [&](uint32_t c) { if (last[c] != i) { last[c] = i; each(c); } });
  }
};

struct Best {
  I k = 0;
  std::vector<Found> kept;  // k slots for each query: a heap whose first is the last of the k best
  std::vector<I> size;
  std::vector<F> edge;

  Best() {}
  Best(I rows, I k, std::vector<F> edge) : k(k), kept(rows * k), size(rows, 0), edge(std::move(edge)) {}
  void consider(I i, Found one) {
    Found* const best = kept.data() + i * k;
    if (size[i] < k) {
      best[size[i]++] = one;
      std::push_heap(best, best + size[i], before);
    } else if (before(one, best[0])) {
      std::pop_heap(best, best + k, before);
      best[k - 1] = one;
      std::push_heap(best, best + k, before);
    } else return;
    if (size[i] == k) edge[i] = std::min(edge[i], best[0].value);
  }
};

// What all threads have found, the nearest first.
static void join(std::vector<Best>& found, I rows, F* values, I* places) {
  const I k = found[0].k;
  for (I i = 0; i < rows; i++) {
    for (size_t t = 1; t < found.size(); t++)
      for (I s = 0; s < found[t].size[i]; s++) found[0].consider(i, found[t].kept[i * k + s]);
    Found* const best = found[0].kept.data() + i * k;
    std::sort(best, best + k, before);
    for (I s = 0; s < k; s++) { values[i * k + s] = best[s].value; places[i * k + s] = best[s].place; }
  }
}

static const int EACH = 128;
static const I STRETCH = 1 << 15;  // points that a thread takes at a time

// Compare all queries with some points, `many` at a time.
template <class Count> static inline void scan_block(
    const F* points, I start, Count many, const F* queries, I rows, I own, Best& best) {
  F block[D][EACH], square[EACH];
  _Pragma("omp simd")
  for (int j = 0; j < many; j++)
    for (int f = 0; f < D; f++) block[f][j] = points[(start + j) * D + f];
  for (I i = 0; i < rows; i++) {
    const F* const of = queries + i * D;
    const F edge = best.edge[i];
    int32_t any = 0;
    _Pragma("omp simd reduction(|:any)")
    for (int j = 0; j < many; j++) {
      DISTANCES;
      square[j] = TOTAL;
      any |= (int32_t)(TOTAL <= edge);
    }
    if (any)
      for (int j = 0; j < many; j++)
        if (square[j] <= best.edge[i] && own + i != start + j) best.consider(i, {square[j], start + j});
  }
}
static void scan(const F* points, I start, I stop, const F* queries, I rows, I own, Best& best) {
  for (; start + EACH <= stop; start += EACH)
    scan_block(points, start, std::integral_constant<int, EACH>(), queries, rows, own, best);
  if (start < stop) scan_block(points, start, (int)(stop - start), queries, rows, own, best);
}

// The k points nearest to few queries, `sampled` of the points first; 0 where one has none at finite distances.
static int scan_all(const F* points, I total, const F* queries, I rows, I k, I own, int threads, I sampled, F* values,
                    I* places) {
  const F inf = std::numeric_limits<F>::infinity();
  Best first(rows, k, std::vector<F>(rows, inf));
  for (I p = 0, step = std::max<I>(EACH, total * EACH / sampled); p + EACH <= total; p += step)
    scan(points, p, p + EACH, queries, rows, own, first);
  for (I i = 0; i < rows; i++) if (!(first.edge[i] < inf)) return 0;
  std::vector<Best> found(threads, Best(rows, k, first.edge));
  I next = 0;
  #pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int t = 0; t < threads; t++)
    for (I start; (start = __atomic_fetch_add(&next, STRETCH, __ATOMIC_RELAXED)) < total;)
      scan(points, start, std::min(total, start + STRETCH), queries, rows, own, found[t]);
  join(found, rows, values, places);
  return 1;
}

extern "C" int run_fold(void* given) {
  const I* const a = (const I*)given;
  const F* const points = (const F*)a[0];
  const F* const queries = (const F*)a[1];
  const F* const squares = (const F*)a[2];
  F* const values = (F*)a[3];
  I* const places = (I*)a[4];
  const I total = a[6], rows = a[7], k = a[8], own = a[9];
  if (a[12]) {
    const int all = (int)std::max<I>(1, std::min<I>(a[10], total / 16384));
    *(I*)a[5] = scan_all(points, total, queries, rows, k, own, all, a[12], values, places);
    return 0;
  }
  std::vector<F> reach(rows);
  for (I i = 0; i < rows; i++)  // a little more: what rounding, also to 0, may have taken
    reach[i] = std::sqrt(squares[i]) * (1 + ROUNDING) + 2 * std::sqrt(std::numeric_limits<F>::min());
  Grid grid;
  if (!grid.make(queries, reach)) return 0;
  double pairs = 0;
  const I step = std::max<I>(1, total / PROBED);
  for (I p = 0; p < total; p += step) {
    const uint32_t c = grid.find(points + p * D);
    pairs += grid.starts[c + 1] - grid.starts[c] + (I)grid.wide.size();
  }
  if (pairs * step > a[11]) return 0;
  *(I*)a[5] = 1;
  const I each = std::max<I>(1, ((I)1 << 26) / (rows * k * (I)sizeof(Found)));  // lists of all threads: 64 MB
  const int threads = (int)std::max<I>(1, std::min({a[10], each, total / 16384}));
  const auto compare = [&](Best& best, I i, I place) {
    const F* const of = queries + i * D;
    const F* const at = points + place * D;
    DISTANCE;
    if (TOTAL <= best.edge[i] && own + i != place) best.consider(i, {TOTAL, place});
  };
  std::vector<Best> found(threads);
  #pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int t = 0; t < threads; t++) {
    Best& best = found[t];
    best = Best(rows, k, std::vector<F>(squares, squares + rows));
    for (I start = total * t / threads, stop = total * (t + 1) / threads; start < stop; start += 64) {
      const int many = stop - start < 64 ? (int)(stop - start) : 64;
      uint32_t slot[64], some = 0;
      for (int j = 0; j < many; j++) some |= grid.holds(points + (start + j) * D);
      if (some) {
        for (int j = 0; j < many; j++) slot[j] = grid.find(points + (start + j) * D);
        for (int j = 0; j < many; j++)
          if (grid.busy[slot[j]])
            for (int32_t e = grid.starts[slot[j]]; e < grid.starts[slot[j] + 1]; e++)
              compare(best, grid.listed[e], start + j);
      }
      for (const int32_t i : grid.wide)
        for (int j = 0; j < many; j++) compare(best, i, start + j);
    }
  }
  join(found, rows, values, places);
  return 0;
}
"""

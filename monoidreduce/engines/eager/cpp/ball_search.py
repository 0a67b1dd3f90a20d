"""Near points on a CPU in one pass over the points, for points that are searched once: nothing is sorted or built.

A few thousand of the points bound how far away the k-th neighbour of each query can be. That makes a ball around each
query; a grid of cells says which balls' bounding boxes reach into a cell. Each point then looks up its cell and is
compared only with the queries listed there, mostly none. Few queries are compared with every point, many points at a
time: that takes less than looking up a cell. Distances are computed as in ``point_search``, operation by
operation, and of equal ones the first column is found.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from . import compiler, point_search

_FEW = 64  # queries that are compared with every point: 22 ms of 2,000,000 in 3 dimensions on one core, by cells 40
_SAMPLED = 8192  # points of the sample, at least
_BALANCE = 8  # pairs that take as long as sorting a point of the sample into a tree


def search(
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
    library = _load(points.shape[1], points.dtype)
    if reach is None or library is None or not bool(reach.isfinite().all()):
        return None
    values, places = queries.new_empty(len(queries), k), torch.empty(len(queries), k, dtype=torch.int64, device="cpu")
    reach, paid = reach.contiguous(), torch.zeros((), dtype=torch.int64, device="cpu")
    own = -(2**62) if excluded is None else excluded
    sizes = [len(points), len(queries), k, own, torch.get_num_threads(), most_pairs, len(sample) if few else 0]
    point_search.call(library, [points.contiguous(), queries.contiguous(), reach, values, places, paid, *sizes])
    return (values, places) if int(paid) else None


def _search_sample(sample: Tensor, queries: Tensor, k: int) -> Tensor | None:
    """Squared distances [M] of the k-th of the sample's points."""
    tree = point_search.build(sample)
    found = None if tree is None else point_search.search(tree, queries, k)
    return None if found is None else found[0][:, -1]


@functools.lru_cache(maxsize=64)
def _load(features: int, dtype: torch.dtype):
    text = _TEXT.replace("TOTAL", f"s{features - 1}")
    for name, point in (("DISTANCE", "at[{f}]"), ("DISTANCES", "block[{f}][j]")):
        text = text.replace(f"{name};", point_search.distance_lines(features, "of[{f}]", point))
    return compiler.load(point_search.header(features, dtype) + text)


_TEXT = r"""
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

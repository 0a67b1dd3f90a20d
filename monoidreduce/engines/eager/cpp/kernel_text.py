"""Writes a fold as C++: one function that walks all tiles, with threads, and one that folds a tile for each variant.

The *kept* axis is the one whose results stay (rows, unless every reduction folds rows); its blocks are the tasks. The
other is the *folded* axis. A tile is three steps: matrix products fill its buffers, one loop over the pairs of each
kept index does all the arithmetic and the sums, and matrix products contract what the loop wrote. Products of few
features are done in the loop. Everything that a reduction accumulates lies in its results, so that a kept block may be
left and taken up again.

Folds that sum over both axes are walked in rounds: the blocks of both axes are dealt to as many sets as there are
threads, and in round s set t meets set t + s. No two threads then write to one result, no result is held twice, and
the order of every sum is fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ....program.expression import Expr, topological
from ....program.lower import Fold
from ....program.primitives import PRIMITIVES
from ....reductions import kind_of, outputs_of
from ..tile_code import Reducer
from . import primitive_text, support
from .primitive_text import NUMBER, Unsupported, literal, write_primitive
from .tile_text import MOST_SORTED, PAD, TileText

HEAD = 19  # arguments before the leaves
LEAF = 5  # numbers of a leaf among the arguments
OUTPUT = 3  # and of a result: address, stride of the batch, stride of its axis


@dataclass(frozen=True)
class Form:
    """What the text depends on beside the fold: the type of arithmetic, features, tiles and the leaves' forms."""

    single: bool
    widths: tuple[tuple[str, int], ...]
    block: tuple[int, int]  # kept and folded indices that a tile has at most; calls say how many it has
    numbers: tuple[Expr, ...]  # leaves and sizes that are Python numbers
    pairs: tuple[tuple[Expr, str, int], ...]  # leaves per pair: type in C++, stride along the folded axis (2: any)
    swapped: bool
    kinds: tuple[int, ...]  # of numbers in vectors that are leaves
    begun: tuple[Expr, ...] = ()  # reductions whose results are given and added to
    transposed: bool = False  # folded operands of products are copied with features first, before the walk

    def width(self, e: Expr) -> int:
        letter = str(e.feature).lstrip("#")
        return int(letter) if letter.isdigit() else dict(self.widths)[letter]


@dataclass
class Room:
    """Offsets, in numbers, into the memory of a thread."""

    total: int = 0
    names: dict[object, int] = field(default_factory=dict)

    def take(self, name: object, count: int) -> int:
        if name not in self.names:
            self.names[name] = self.total
            self.total += -(-count // 16) * 16
        return self.names[name]


class KernelText:
    """The text of one fold; ``variants``: the reducers of each variant of its tiles."""

    def __init__(self, fold: Fold, variants: Sequence[tuple[Reducer, ...]], form: Form):
        self.fold, self.variants, self.form = fold, variants, form
        self.room = Room()
        self.kept_axis = "rows" if not form.swapped else "cols"
        self.leaf_at = {e: HEAD + LEAF * k for k, e in enumerate(fold.leaves)}
        self.number_at = {e: k for k, e in enumerate(form.numbers)}
        at, self.output_at = HEAD + LEAF * len(fold.leaves), {}
        for r in fold.reductions:
            self.output_at[r] = at
            at += OUTPUT * len(outputs_of(r))
        self.arguments = at
        self.kept_vectors: dict[Expr, int] = {}
        self.packed: dict[Expr, int] = {}  # folded leaves that are copied, and the features of those before
        bodies = [TileText(self, k, reducers).write() for k, reducers in enumerate(variants)]
        own = [*bodies, self._load_rows(), self._pack_tile(), self._walk()]
        self.text = "\n".join([*self._head("".join(bodies)), *own])

    def is_kept(self, e: Expr) -> bool:
        return e.cols if self.form.swapped else e.rows

    def is_folded(self, e: Expr) -> bool:
        return e.rows if self.form.swapped else e.cols

    def folds(self, r: Expr) -> bool:
        """Whether a reduction is over the folded axis."""
        return (r.attrs[1] == "cols") != self.form.swapped

    @property
    def mixed(self) -> bool:
        """Whether results of both axes are summed: two tasks may then add to one."""
        return any(not self.folds(r) and not kind_of(r).per_pair for r in self.fold.reductions)

    def output(self, r: Expr, k: int, index: str) -> str:
        """The address of the result of batch element ``b`` at an index: of a number, or of a vector."""
        at, kind = self.output_at[r] + OUTPUT * k, "F" if outputs_of(r)[k][1] == "float" else "I"
        return f"(({kind}*)a[{at}] + b * a[{at + 1}] + ({index}) * a[{at + 2}])"

    def pitch(self, r: Expr, k: int) -> str:
        """Numbers from one vector of a result to the next."""
        return f"(int)a[{self.output_at[r] + OUTPUT * k + 2}]"

    def feature_width(self, feature: object) -> int:
        letter = str(feature).lstrip("#")
        return int(letter) if letter.isdigit() else dict(self.form.widths)[letter]

    def _head(self, used: str) -> list[str]:
        """The fixed part; ``used``: the text that calls its functions."""
        kind = "float" if self.form.single else "double"
        folded = self.form.block[1]
        extremes = any(e.op in ("famax", "famin") for e in topological(self.fold.reductions))
        return [
            *([_SAME_ROUNDING] if extremes else []),
            f"typedef {kind} F;",
            f"static const int BN = {folded}, LD = {folded + PAD};  // folded indices at most, and a buffer's pitch",
            "#define ROWS a[13]  // kept and folded indices of a tile of this call",
            "#define COLS a[14]",
            "#define SETS a[15]  // of blocks, of a walk that sums over both axes",
            f"#define ARGUMENTS {self.arguments}  // of a split, behind those of the one before; a[18]: splits",
            support.TYPES,
            support.FUNCTIONS,
            *([primitive_text.FUNCTIONS] if primitive_text.used_by(used) else []),
            *([support.DRAWS] if "gumbel_" in used or "coin_" in used else []),
            support.NUMBERS,
            support.reading(self.form.kinds),
            support.TILES,
            *([_SETS] if self.mixed else []),
            *(text for name, text in support.REDUCTIONS.items() if name in used),
        ]

    # Vectors of the kept axis, read once for a block -----------------------------------------------------------

    def kept_vectors_call(self, e: Expr) -> str:
        """C++ that gives a block of kept vectors; ``load_rows`` has copied those that cannot be read in place."""
        width = self.form.width(e)
        room = self.room.take(("kept", e), width * self.form.block[0])
        self.kept_vectors[e] = room
        if e.op == "leaf":
            return f"find_vectors(a + {self.leaf_at[e]}, b, i0, {width}, w + {room})"
        return f"{{w + {room}, {width}}}"

    @property
    def packed_width(self) -> int:
        """Features of all folded leaves that are copied."""
        return sum(self.form.width(e) for e in self.packed)

    def packed_call(self, e: Expr) -> str:
        """C++ that gives the copy of a tile's folded vectors, features first."""
        before = self.packed.setdefault(e, self.packed_width)
        width = self.form.width(e)
        across = "((N + COLS - 1) / COLS)"
        return f"(const F*)a[11] + a[0] * {across} * BN * {before} + (b * {across} + j0 / COLS) * {width} * BN"

    def _pack_tile(self) -> str:
        lines = []
        for e in self.packed:
            call = self.packed_call(e)
            lines.append(f"load_features(a + {self.leaf_at[e]}, b, j0, n, {self.form.width(e)}, (F*)({call}), BN);")
        head = "static const bool PACKS = " + ("true" if self.packed else "false") + ";\n"
        return f"""{head}static void pack_tile(const I* a, I b, I j0) {{
  const I N = a[2];
  const int n = (int)(N - j0 < COLS ? N - j0 : COLS); (void)n;
  {chr(10).join(lines)}
}}
"""

    def pack_lines(self, e: Expr, room: int, index: str, start: str, count: str) -> list[str]:
        """Lines that compute a vector expression of one side, index by index."""
        names: dict[Expr, str] = {}
        loaded: list[str] = []
        outer: list[str] = []
        inner: list[str] = []
        for n in topological([e]):
            if n.op == "const":
                names[n] = literal(n.const, n.dtype)
                continue
            names[n] = f"p{len(names)}"
            if n in self.number_at:
                kind = "double" if n.dtype == "float" else "I"
                text = f"(({kind} const*)a[10])[{self.number_at[n]}]"
            elif n.op == "leaf" and n.feature is not None:
                width, axis = self.form.width(n), n.rows or n.cols
                own = self.room.take(("operand", n), width * (self.form.block[index == "j"] if axis else 1))
                where = f"b, {start}, {count}" if axis else "b, 0, 1"
                loaded.append(
                    f"const Vectors {names[n]}v = load_vectors(a + {self.leaf_at[n]}, {where}, {width}, w + {own});"
                )
                text = f"{names[n]}v.at[{f'(I){index} * {names[n]}v.ld + ' if axis else ''}f]"
            elif n.op == "leaf":
                at, axis = self.leaf_at[n], n.rows or n.cols
                place = f"b * a[{at + 1}]" + (f" + ({start} + {index}) * a[{at + 2}]" if axis else "")
                kind = {"float": "F", "int": "I", "bool": "uint8_t"}[n.dtype]
                text = f"((const {kind}*)a[{at}])[{place}]"
            elif n.op == "spread":
                text = names[n.args[0]]
            elif n.op in PRIMITIVES:
                text = write_primitive(n, [names[a] for a in n.args], self.form.single).replace("quick_", "")
            else:
                raise Unsupported(f"{n.op} of one side has no C++ form")
            (outer if n.feature is None else inner).append(
                f"const {NUMBER[n.dtype]} {names[n]} = ({NUMBER[n.dtype]})({text});"
            )
        width = self.form.width(e)
        return [
            "{",
            *loaded,
            f"for (int {index} = 0; {index} < {count}; {index}++) {{",
            *outer,
            f"F* const to = w + {room} + (I){index} * {width};",
            '_Pragma("omp simd")',
            f"for (int f = 0; f < {width}; f++) {{",
            *inner,
            f"to[f] = {names[e]};",
            "}",
            "}",
            "}",
        ]

    def _load_rows(self) -> str:
        lines = []
        for e, room in self.kept_vectors.items():
            if e.op == "leaf":
                lines.append(f"load_vectors(a + {self.leaf_at[e]}, b, i0, m, {self.form.width(e)}, w + {room});")
            else:
                lines += self.pack_lines(e, room, "i", "i0", "m")
        return "static void load_rows(const I* a, I b, I i0, int m, F* w) {\n  " + "\n  ".join(lines) + "\n}\n"

    # The walk over tiles ------------------------------------------------------------------------------------

    def _walk(self) -> str:
        init, finish = [], []
        for r in self.fold.reductions:
            if not self.folds(r):
                continue
            if r not in self.form.begun:
                init += _init_lines(self, r)
            finish += _finish_lines(self, r)
        cases = "\n".join(
            f"    case {k + 1}: tile_{k}(a, b, i0, m, j0, n, w); break;" for k in range(len(self.variants))
        )
        head = "const I K = a[1], N = a[2]; (void)K; (void)N;"
        parts = [
            f"static void start_rows(const I* a, I b, I i0, int m) {{ {head}\n  " + "\n  ".join(init) + "\n}",
            f"static void finish_rows(const I* a, I b, I i0, int m) {{ {head}\n  " + "\n  ".join(finish) + "\n}",
            f"""// Neighbours of one variant, among `own`, are one tile where it has room. Returns the next.
template <class Own> static I tile(const I* a, I b, I row, I col, Own own, F* w) {{
  {head}
  const I i0 = row * ROWS, j0 = col * COLS, across = (N + COLS - 1) / COLS;
  auto variant = [&](I at) {{ return a[4] ? ((const int8_t*)a[4])[b * a[5] + row * across + at] : 1; }};
  const int which = variant(col);
  I stop = col + 1;
  if (!PACKS) while (stop < across && (stop - col + 1) * COLS <= BN && own(stop) && variant(stop) == which) stop++;
  const I most = (stop - col) * COLS;
  const int m = (int)(K - i0 < ROWS ? K - i0 : ROWS), n = (int)(N - j0 < most ? N - j0 : most);
  switch (which) {{
{cases}
  }}
  return stop;
}}""",
            _RUN_MIXED if self.mixed else _RUN_KEPT,
        ]
        return "\n".join(parts)


# A feature that is compared with the extreme it is a part of is rounded as it was there: no a * b + c in one step.
_SAME_ROUNDING = """#ifdef __clang__
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif"""
_TASKS = """
template <class Task> static void run_tasks(int threads, I count, Limit limit, Task task) {
  I next = 0;
  auto work = [&](int own) {
    if (limit) limit(1);
    for (;;) {
      const I k = __atomic_fetch_add(&next, (I)1, __ATOMIC_RELAXED);
      if (k >= count) break;
      task(k, own);
    }
    if (limit) limit(0);
  };
  if (threads > count) threads = (int)count;
  if (threads <= 1) { work(0); return; }
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
  work(omp_get_thread_num());
#else
  std::vector<std::thread> others;
  for (int t = 1; t < threads; t++) others.emplace_back(work, t);
  work(0);
  for (auto& t : others) t.join();
#endif
}
"""

_RUN_KEPT = (
    _TASKS
    + """
extern "C" int run_fold(const I* a) {
  gemm_ = (Gemm)a[8];
  const int before = zero_divisors;
  const I rows = (a[1] + ROWS - 1) / ROWS, cols = (a[2] + COLS - 1) / COLS;
  if (PACKS) run_tasks((int)a[3], a[0] * cols, 0, [&](I k, int) { pack_tile(a, k / cols, k % cols * COLS); });
  const I* const first = a;
  run_tasks((int)a[3], a[18] * a[0] * rows, (Limit)a[9], [&](I k, int own) {
    const I* const a = first + k % first[18] * ARGUMENTS;
    k /= a[18];
    const I b = k / rows, row = rows - 1 - k % rows, i0 = row * ROWS;  // the last first: of causal rows the longest
    const int m = (int)(a[1] - i0 < ROWS ? a[1] - i0 : ROWS);
    F* w = (F*)a[6] + own * a[7];
    start_rows(a, b, i0, m);
    load_rows(a, b, i0, m, w);
    for (I col = a[16]; col < a[17];) col = tile(a, b, row, col, [&](I at) { return at < a[17]; }, w);
    finish_rows(a, b, i0, m);
  });
  return zero_divisors != before;
}
"""
)

_SETS = """
static int set_of(I block, int sets) {
  const int x = (int)(block % (2 * sets));
  return x < sets ? x : 2 * sets - 1 - x;
}
"""

_RUN_MIXED = (
    _TASKS
    + """
extern "C" int run_fold(const I* a) {
  gemm_ = (Gemm)a[8];
  const int before = zero_divisors;
  const I rows = (a[1] + ROWS - 1) / ROWS, cols = (a[2] + COLS - 1) / COLS;
  if (PACKS) run_tasks((int)a[3], a[0] * cols, 0, [&](I k, int) { pack_tile(a, k / cols, k % cols * COLS); });
  const int sets = (int)SETS;
  for (int round = 0; round < sets; round++)
    run_tasks((int)a[3], a[0] * sets, (Limit)a[9], [&](I k, int own) {
      const I b = k / sets;
      const int mine = (int)(k % sets), theirs = (mine + round) % sets;
      F* w = (F*)a[6] + own * a[7];
      for (I row = 0; row < rows; row++) {
        if (set_of(row, sets) != mine) continue;
        const I i0 = row * ROWS;
        const int m = (int)(a[1] - i0 < ROWS ? a[1] - i0 : ROWS);
        if (round == 0) start_rows(a, b, i0, m);
        load_rows(a, b, i0, m, w);
        auto meets = [&](I col) { return set_of(col, sets) == theirs; };
        for (I col = 0; col < cols;) col = meets(col) ? tile(a, b, row, col, meets, w) : col + 1;
        if (round == sets - 1) finish_rows(a, b, i0, m);
      }
    });
  return zero_divisors != before;
}
"""
)


def _width(k: KernelText, r: Expr, result: int) -> int:
    feature = outputs_of(r)[result][0]
    return 1 if feature is None else k.feature_width(feature)


def _init_lines(k: KernelText, r: Expr) -> list[str]:
    """Kept results of no pairs."""
    kind, _, params = r.attrs
    count = len(outputs_of(r))
    clear = lambda v: f"memset({k.output(r, v, 'i0 + i')}, 0, {_width(k, r, v)} * {outputs_size(r, v)});"
    if kind in ("sum", "pick", "moments"):
        lines = [clear(v) for v in range(count)]
    elif kind == "soft":
        lines = [f"*{k.output(r, count - 1, 'i0 + i')} = -INF;", *(clear(v) for v in range(1, count - 1))]
    else:  # a best, or several
        worst = "(-INF)" if params[-1] else "INF"
        inside = f"{k.output(r, 0, 'i0 + i')}[s] = {worst}; {k.output(r, 1, 'i0 + i')}[s] = -1;"
        lines = [f"for (int s = 0; s < {_width(k, r, 0)}; s++) {{ {inside} }}"]
    return ["for (int i = 0; i < m; i++) {", *lines, "}"]


def outputs_size(r: Expr, result: int) -> str:
    return "sizeof(F)" if outputs_of(r)[result][1] == "float" else "sizeof(I)"


def _finish_lines(k: KernelText, r: Expr) -> list[str]:
    """Kept results from what was accumulated in them."""
    kind, _, params = r.attrs
    count = len(outputs_of(r))
    if kind == "soft":
        lines = [
            f"F *peak = {k.output(r, count - 1, 'i0 + i')}, *log_total = {k.output(r, count - 2, 'i0 + i')};",
            "const F total = *log_total, safe = (*peak == INF || *peak == -INF) ? (F)0 : *peak;",
            "const F seen = total == 0 ? (F)1 : total;  // a row that sees nothing has mean 0",
        ]
        for v in range(1, count - 2):
            loop = f"for (int f = 0; f < {_width(k, r, v)}; f++) v[f] /= seen;"
            lines.append(f"{{ F* v = {k.output(r, v, 'i0 + i')}; {loop} }}")
        lines += [
            "*log_total = total == 0 ? -INF : (F)__builtin_log((double)total);",
            f"*peak = safe; *{k.output(r, 0, 'i0 + i')} = *log_total + safe;",
        ]
    elif kind == "topk":
        worst = "(-INF)" if params[1] else "INF"
        change = f"if ({k.output(r, 0, 'i0 + i')}[s] == {worst}) {k.output(r, 1, 'i0 + i')}[s] = -1;"
        lines = [f"for (int s = 0; s < {params[0]}; s++) {change}"]
        if params[0] > MOST_SORTED:
            heap = f"sort_heap<{params[0]}, {'true' if params[1] else 'false'}>"
            lines.insert(0, f"{heap}({k.output(r, 0, 'i0 + i')}, {k.output(r, 1, 'i0 + i')});")
    else:
        return []
    return ["for (int i = 0; i < m; i++) {", *lines, "}"]

"""Writes the C++ function that folds one tile: the loops over pairs, one for each group of reductions, and contractions
(see ``kernel_text.py``). What they read is written by ``tile_values.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....program.constructors import Contraction
from ....program.expression import Expr, size
from ....reductions import outputs_of
from ..tile_code import FEW_FEATURES, Reducer, numbers_read
from .primitive_text import NUMBER, Unsupported
from .tile_values import TileValues

if TYPE_CHECKING:
    from .kernel_text import KernelText

FEW_SUMS = 4  # features of a result up to which they are summed in the loop over pairs
MOST_SORTED = 64  # of a top-k whose list is kept sorted by insertion; more are kept as a heap


class TileText:
    """The text of one variant: ``reducers`` say what each reduction reads of a tile."""

    def __init__(self, kernel: KernelText, number: int, reducers: tuple[Reducer, ...]):
        self.k, self.v, self.number, self.reducers = kernel, TileValues(kernel), number, reducers

    def write(self) -> str:
        roots = [n for r in self.reducers for n in numbers_read(r)]
        walked = [r for r in self.reducers if any(c.walk for v in r.values for c in v)]
        if any(self.k.fold.reductions[r.place].attrs[0] != "sum" for r in walked):
            raise Unsupported("vectors per pair that are not summed")
        self.v.prepare_products(dict.fromkeys(roots))
        groups: dict[str, list[Reducer]] = {n: [] for n in ("pick", "sum", "soft", "moments", "best", "topk")}
        for r in self.reducers:
            kind = self.k.fold.reductions[r.place].attrs[0]
            groups["sum" if kind in ("histogram", "pair") else kind].append(r)
        rest = [g for kind, g in groups.items() if g and kind != "pick"]
        self.shared = len(rest) > 1 or len(groups["soft"]) > 1
        loops = [line for r in groups["pick"] for line in self._pick(r)]  # before anything is overwritten
        if groups["sum"]:
            loops += self._sums(groups["sum"])
        for r in groups["soft"]:
            loops += self._softmax(r)
        for r in groups["moments"]:
            loops += self._moments(r)
        for r in (*groups["best"], *groups["topk"]):
            loops += self._select(r)
        rows = [f"F* const {s} = w + {self.v.slot_room(s)} + (I)i * LD;" for s in dict.fromkeys(self.v.slots.values())]
        inside = "\n    ".join([*rows, *self.v.row, *loops])
        head = "\n  ".join(self.v.top)
        tail = "\n  ".join(self.v.after)
        return f"""static void tile_{self.number}(const I* a, I b, I i0, int m, I j0, int n, F* w) {{
  const I K = a[1], N = a[2]; (void)K; (void)N;
  {head}
  for (int i = 0; i < m; i++) {{
    {inside}
  }}
  {tail}
}}
"""

    def _sums(self, reducers: list[Reducer]) -> list[str]:
        self.v.begin_loop()
        before, extra, behind, names = [], [], [], []  # type: list[str], list[str], list[str], list[str]
        stored: dict[Expr, str] = {}
        for r in reducers:
            red = self.k.fold.reductions[r.place]
            if red.attrs[0] == "histogram":
                self._histogram(r, extra, behind)
            if red.attrs[0] == "pair":  # behind all values: it may lie where a product is read
                place = f"{self.k.output(red, 0, 'i0 + i')} + j0"
                extra.append(f"{self.v.once(('written', red), 'F*', place, self.v.row)}[j] = {self.v.get(r.roots[0])};")
            for c in r.values[0] if r.values else ():
                if c.walk:
                    behind += self._walk_sum(red, c.weight)
                else:
                    self._add(red, 0, c, self.v.get(c.weight), before, extra, behind, names, stored)
        return [*before, *self.v.end_loop({"+": names}, extra), *behind]

    def _walk_sum(self, red: Expr, vector: Expr) -> list[str]:
        """Add the vectors of all pairs of a row of the tile to a result, feature by feature."""
        if outputs_of(red)[0][1] != "float":
            raise Unsupported("integers over features")
        if self.k.folds(red):
            own, out = self.v.name(), self.k.output(red, 0, "i0 + i")
            one = [f"F {own} = 0;"], lambda x: [f"{own} += {x};"], [f"{out}[f] += {own};"]
            return self.v.walk_features(vector, *one, f" reduction(+:{own})")
        width = self.k.form.width(vector)
        own = self._sums_of_tile(red, width)
        return self.v.walk_features(vector, [], lambda x: [f"{own}[f * BN + j] += {x};"], [])

    def _sums_of_tile(self, red: Expr, width: int) -> str:
        """A buffer of a tile for sums over its kept indices: one long chain of additions would lose digits."""
        room = self.k.room.take(("cols", red), width * self.k.form.block[1])
        if ("cols", red) not in self.v.names:
            own = self.v.names["cols", red] = self.v.name()
            self.v.top.append(f"F* const {own} = w + {room}; memset({own}, 0, sizeof(F) * {width} * BN);")
            self.v.after.append(
                f"for (int j = 0; j < n; j++) for (int f = 0; f < {width}; f++) "
                f"{self.k.output(red, 0, 'j0 + j')}[f] += {own}[f * BN + j];"
            )
        return self.v.names["cols", red]

    def _histogram(self, r: Reducer, extra: list[str], behind: list[str]) -> None:
        """Add the numbers of a row of the tile to their entries, one after the other: two may have the same."""
        red, across = self.k.fold.reductions[r.place], self.k.form.block[1]
        value, index = self.v.get(r.roots[0]), self.v.get(red.args[1])
        count = self.v.get(size(str(red.args[2].feature)))
        numbers = self.v.once(("values", red), "F*", f"w + {self.k.room.take(('values', red), across)}", self.v.top)
        room = self.k.room.take(("places", red), across * (2 if self.k.form.single else 1))
        places = self.v.once(("places", red), "I*", f"(I*)(w + {room})", self.v.top)
        own = self.v.once("set", "int", "set_of(i0 / ROWS, (int)SETS)", self.v.top)
        at = self.k.output_at[red]
        out = f"(double*)a[{at}] + b * a[{at + 1}] + {own} * a[{at + 2}]"
        total = self.v.once(("entries", red), "double*", out, self.v.top)
        extra += [f"{numbers}[j] = {value};", f"{places}[j] = {index};"]
        inside = f"{places}[j] >= 0 && {places}[j] < {count}"
        behind.append(f"for (int j = 0; j < n; j++) if ({inside}) {total}[{places}[j]] += {numbers}[j];")

    def _add(
        self,
        red: Expr,
        result: int,
        c: Contraction,
        weight: str,
        before: list[str],
        extra: list[str],
        behind: list[str],
        names: list[str],
        stored: dict[Expr, str],
        key: Expr | None = None,
    ) -> None:
        """Add Σ weight × vector of one contraction to a result: lines before, in and behind the loop."""
        folds = self.k.folds(red)
        number = NUMBER["int" if outputs_of(red)[result][1] == "int" else "float"]
        feature = outputs_of(red)[result][0]
        width = -1 if feature is None else self.k.feature_width(feature)
        if width > FEW_SUMS and not (c.minus is not None and width <= FEW_FEATURES):
            self._contract(red, result, c, weight, extra, behind, before, names, stored, key or c.weight)
            return
        for f in range(max(1, abs(width))):
            value = weight
            if c.minus is not None:
                assert c.vector is not None
                value = f"{weight} * ({self.v.component(c.vector, f)} - {self.v.component(c.minus, f)})"
            elif c.vector is not None:
                value = f"{weight} * {self.v.component(c.vector, f)}"
            place = f"[{max(0, f)}]"
            if folds:
                own = self.v.name()
                names.append(own)
                before.append(f"{number} {own} = 0;")
                extra.append(f"{own} += {value};")
                behind.append(f"{self.k.output(red, result, 'i0 + i')}{place} += {own};")
            elif number == "I":
                pointer = self.v.once(("out", red, result), f"{number}*", self.k.output(red, result, "j0"), self.v.top)
                extra.append(f"{pointer}[j] += {value};")
            else:
                own = self._sums_of_tile(red, max(1, width))
                pointer = self.v.once(("cols", red, f), "F*", f"{own} + {f} * BN", self.v.top)
                extra.append(f"{pointer}[j] += {value};")

    def _contract(
        self,
        red: Expr,
        result: int,
        c: Contraction,
        weight: str,
        extra: list[str],
        behind: list[str],
        before: list[str],
        names: list[str],
        stored: dict[Expr, str],
        key: Expr,
    ) -> None:
        """The same by a matrix product, after the loops."""
        assert c.vector is not None
        folds, width = self.k.folds(red), self.k.feature_width(outputs_of(red)[result][0])
        if key not in stored:
            free = [s for s in self.v.slots.values() if s not in stored.values()] if not self.shared else []
            stored[key] = free[0] if free else self.v.slot(("stored", red, result, key))
            extra.append(f"{stored[key]}[j] = {weight};")
        slot = stored[key]
        at = f"w + {self.v.slot_room(slot)}"
        out, pitch = self.k.output(red, result, "i0" if folds else "j0"), self.k.pitch(red, result)
        if c.minus is None:
            v = self.v.vectors(c.vector)
            if folds:
                self.v.after.append(f"contract({out}, {pitch}, {at}, LD, {v}.at, {v}.ld, m, n, {width});")
            else:
                self.v.after.append(f"contract_rows({out}, {pitch}, {at}, LD, {v}.at, {v}.ld, m, n, {width});")
            return
        kept, folded = self.v.sides(c.vector, c.minus)
        block, across = self.k.form.block
        most, left, right = self.v.centred(kept, folded)
        total = self.k.room.take(("weights", red), block if folds else across)
        if folds:
            sums = self.v.name()
            names.append(sums)
            before.append(f"F {sums} = 0;")
            extra.append(f"{sums} += {weight};")
            behind.append(f"w[{total} + i] = {sums};")
        else:
            self.v.top.append(f"memset(w + {total}, 0, sizeof(F) * BN);")
            pointer = self.v.once(("weights", red), "F*", f"w + {total}", self.v.top)
            extra.append(f"{pointer}[j] += {weight};")
        arguments = f"{at}, w + {left}, w + {right}, w + {total}, m, n, {width}, {'true' if folds else 'false'}"
        self.v.after.append(
            f"(void){most}; contract_gap({out}, {pitch}, {arguments}, {1 if kept is c.vector else -1});"
        )

    def _softmax(self, r: Reducer) -> list[str]:
        red = self.k.fold.reductions[r.place]
        if not self.k.folds(red):
            return self._kept_softmax(r, red)
        count, logit = len(outputs_of(red)), r.roots[0]
        self.v.begin_loop()
        x = self.v.get(logit)
        place = self.v.alias.get(logit, logit)
        in_place = not self.shared and place in self.v.slots
        if in_place:
            slot, write = self.v.slots[place], []
        else:
            read_again = any(self.k.is_folded(c.weight) for v in r.values for c in v)  # values made of products too
            free = [] if self.shared or read_again else list(self.v.slots.values())
            slot = free[0] if free else self.v.slot(("logit", red))
            write = [f"{slot}[j] = {x};"]
        lines = self.v.end_loop({}, write) if write else []
        top = self.v.name()
        lines.append(f"const F {top} = greatest_({slot}, n);")
        peak, total = (f"*{self.k.output(red, count - k, 'i0 + i')}" for k in (1, 2))
        old, new, safe, shrink, sums = (self.v.name() for _ in range(5))
        lines += [
            f"const F {old} = {peak}, {new} = {old} > {top} ? {old} : {top};",
            f"const F {safe} = {new} == INF || {new} == -INF ? (F)0 : {new};",
            f"const F {shrink} = exp_({old} - {safe});",
            f"{peak} = {new};",
        ]
        self.v.begin_loop()
        weight = self.v.name()
        before, extra, behind, names = [f"F {sums} = 0;"], [], [], [sums]  # type: list[str], list[str], list[str], list[str]
        stored: dict[Expr, str] = {}
        self.v.lines.append(f"const F {weight} = exp_falling({slot}[j] - {safe});")
        for v, parts in enumerate(r.values, 1):
            feature = outputs_of(red)[v][0]
            width = 1 if feature is None else self.k.feature_width(feature)
            behind.append(
                f"if ({shrink} != 1) {{ F* v = {self.k.output(red, v, 'i0 + i')}; "
                f"for (int f = 0; f < {width}; f++) v[f] *= {shrink}; }}"
            )
            for c in parts:
                plain = c.weight.op == "const" and c.weight.const == 1
                own = weight
                if not plain:
                    own = self.v.name()
                    self.v.lines.append(f"const F {own} = {weight} * {self.v.get(c.weight)};")
                if plain:
                    stored.setdefault(c.weight, "")
                    if not stored[c.weight]:
                        del stored[c.weight]
                        if self._goes_by_product(red, v, c):
                            stored[c.weight] = slot
                            extra.append(f"{slot}[j] = {weight};")
                self._add(red, v, c, own, before, extra, behind, names, stored)
        extra.append(f"{sums} += {weight};")
        loop = self.v.end_loop({"+": names}, extra)
        any_number = [line.replace("exp_falling", "exp_weight") for line in loop]
        lines += [*before, f"if ({new} < INF) {{", *loop, "} else {", *any_number, "}"]
        return [*lines, f"{total} = {total} * {shrink} + {sums};", *behind]

    def _kept_softmax(self, r: Reducer, red: Expr) -> list[str]:
        """A softmax over the kept axis, beside reductions over the other: the tile's maxima in the loop over pairs,
        its weights after all of them. The fold's end turns peaks and totals into results (``__init__.py``)."""
        if r.values:
            raise Unsupported("a softmax mean over the kept axis, beside reductions over the other")
        count, across = len(outputs_of(red)), self.k.form.block[1]
        self.v.begin_loop()
        x, place = self.v.get(r.roots[0]), self.v.alias.get(r.roots[0], r.roots[0])
        plain = place in self.v.slots
        slot = self.v.slots[place] if plain else self.v.slot(("logit", red))
        top, sums = (self.k.room.take((what, red), across) for what in ("top", "sums"))
        peak, total = (self.k.output(red, count - k, "j0") for k in (1, 2))
        most = self.v.once(("top", red), "F*", f"w + {top}", self.v.top)
        self.v.top.append(f"for (int j = 0; j < n; j++) {most}[j] = {peak}[j];")
        write = [] if plain else [f"{slot}[j] = {x};"]
        lines = self.v.end_loop({}, [*write, f"{most}[j] = {x} > {most}[j] ? {x} : {most}[j];"])
        self.v.after += [
            f"{{ F* const sums = w + {sums}; F *peak = {peak}, *total = {total};",
            "for (int j = 0; j < n; j++) {",
            f"  const F old = peak[j], top = {most}[j], safe = top == INF || top == -INF ? (F)0 : top;",
            f"  total[j] *= exp_(old - safe); peak[j] = top; {most}[j] = safe; sums[j] = 0;",
            "}",
            "for (int i = 0; i < m; i++) {",
            f"  const F* const x = w + {self.v.slot_room(slot)} + (I)i * LD;",
            '  _Pragma("omp simd")',
            f"  for (int j = 0; j < n; j++) sums[j] += exp_weight(x[j] - {most}[j]);",
            "}",
            "for (int j = 0; j < n; j++) total[j] += sums[j]; }",
        ]
        return lines

    def _goes_by_product(self, red: Expr, result: int, c: Contraction) -> bool:
        feature = outputs_of(red)[result][0]
        width = -1 if feature is None else self.k.feature_width(feature)
        return width > FEW_SUMS and not (c.minus is not None and width <= FEW_FEATURES)

    def _pick(self, r: Reducer) -> list[str]:
        """The number at one folded index."""
        red = self.k.fold.reductions[r.place]
        target = red.args[0]
        if not self.k.folds(red) or self.k.is_folded(target) or target.dtype != "int" or r.roots[0].dtype != "float":
            raise Unsupported("a label of the kept axis")
        there, self_loop = self.v.get(target), self.v.name()
        self.v.begin_loop()
        x = self.v.get(r.roots[0])
        inside = " ".join(self.v.lines).replace("quick_", "")
        return [
            f"const I {self_loop} = {there} - j0;",
            f"if ({self_loop} >= 0 && {self_loop} < n) {{ const int j = (int){self_loop}; {inside} "
            f"*{self.k.output(red, 0, 'i0 + i')} += {x}; }}",
        ]

    def _kept_best(self, r: Reducer, red: Expr) -> list[str]:
        """A best over the kept axis, beside reductions over the other: the tile's for each folded index in the loop
        over pairs, joined with that of other tiles after all of them."""
        self.v.begin_loop()
        x, across = self.v.get(r.roots[0]), self.k.form.block[1]
        value, place = (self.k.output(red, k, "j0") for k in (0, 1))
        best, at = (self.v.once((what, red), kind, f"({kind})(w + {self.k.room.take((what, red), across)})", self.v.top)
                    for what, kind in (("best", "F*"), ("at", "int32_t*")))  # fmt: skip
        sign, worst = (">", "(-INF)") if red.attrs[2][-1] else ("<", "INF")
        self.v.top.append(f"for (int j = 0; j < n; j++) {{ {best}[j] = {worst}; {at}[j] = -1; }}")
        better = self.v.name()
        self.v.after += [
            f"{{ F* const value = {value}; I* const place = {place};",
            f"for (int j = 0; j < n; j++) if ({at}[j] >= 0) {{",
            f"  const F x = {best}[j], v = value[j]; const I here = i0 + {at}[j];",
            "  const bool equal = x == v || (x != x && v != v);",
            f"  if (x {sign} v || (x != x && v == v) || (equal && here < place[j])) value[j] = x, place[j] = here;",
            "} }",
        ]
        return self.v.end_loop({}, [
            f"const bool {better} = ({x} {sign} {best}[j]) | (({x} != {x}) & ({best}[j] == {best}[j]));",
            f"{best}[j] = {better} ? {x} : {best}[j]; {at}[j] = {better} ? i : {at}[j];",
        ])  # fmt: skip

    def _moments(self, r: Reducer) -> list[str]:
        """The tile's mean and squared deviations from it, merged with those of the tiles before by Chan's formula."""
        red = self.k.fold.reductions[r.place]
        if not self.k.folds(red) or self.k.mixed:  # tiles must come in their order, which says how many pairs were
            raise Unsupported("moments over the kept axis, or beside reductions over it")
        self.v.begin_loop()
        x, row = self.v.get(r.roots[0]), self.k.room.take(("scanned", red), self.k.form.block[1])
        scanned, sums, mean, spread, gap, share = (self.v.name() for _ in range(6))
        loop = self.v.end_loop({"+": [sums]}, [f"{scanned}[j] = (F){x};", f"{sums} += (F){x};"])
        middle, total = (self.k.output(red, k, "i0 + i") for k in (0, 1))
        return [
            f"F* const {scanned} = w + {row}; F {sums} = 0, {spread} = 0;",
            *loop,
            f"const F {mean} = {sums} / n;",
            f'_Pragma("omp simd reduction(+:{spread})")',
            f"for (int j = 0; j < n; j++) {spread} += ({scanned}[j] - {mean}) * ({scanned}[j] - {mean});",
            f"const F {gap} = {mean} - *{middle}, {share} = (F)n / (F)(j0 + n);",
            f"*{middle} += {gap} * {share}; *{total} += {spread} + {gap} * {gap} * ((F)j0 * {share});",
        ]

    def _select(self, r: Reducer) -> list[str]:
        """A best, or a top-k: the tile's numbers are kept for one index, and looked at only where one is better."""
        red = self.k.fold.reductions[r.place]
        kind, _, params = red.attrs
        if r.roots[0].dtype != "float" or not (self.k.folds(red) or kind == "best"):
            raise Unsupported(f"{kind} of integers, or many best over the kept axis")
        if not self.k.folds(red):
            return self._kept_best(r, red)
        count, largest = (params[0] if kind == "topk" else 1), params[-1]
        self.v.begin_loop()
        x = self.v.get(r.roots[0])
        row = self.k.room.take(("scanned", red), self.k.form.block[1])
        best, odd = self.v.name(), self.v.name()
        sign, op, worst = (">", "max", "-INF") if largest else ("<", "min", "INF")
        scanned = f"scanned{r.place}"
        extra = [
            f"{scanned}[j] = {x};",
            f"{best} = {x} {sign} {best} ? {x} : {best};",
            f"{odd} |= (int32_t)({x} != {x});",
        ]
        lines = [f"F* const {scanned} = w + {row};", f"F {best} = {worst}; int32_t {odd} = 0;"]
        lines += self.v.end_loop({op: [best], "|": [odd]}, extra)
        values, places = (self.k.output(red, k, "i0 + i") for k in (0, 1))
        call = (
            f"select_best<{'true' if largest else 'false'}>"
            if kind == "best"
            else f"{'select_top' if count <= MOST_SORTED else 'select_heap'}<{count}, {'true' if largest else 'false'}>"
        )
        return [*lines, f"{call}({scanned}, n, j0, {best}, {odd}, {values}, {places});"]

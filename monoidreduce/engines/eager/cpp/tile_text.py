"""Writes the C++ function that folds one tile: what it reads, the loops over pairs, one for each group of reductions,
and contractions (see ``kernel_text.py``).

Numbers, vectors and products are each written once, where they belong: what does not change along the folded indices
before the loop over them, what does not change in a tile before all loops; products of many features are BLAS's, into
buffers of a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ....program.constructors import Contraction
from ....program.expression import Expr, size, topological
from ....program.primitives import PRIMITIVES
from ....reductions import outputs_of
from ..tile_code import FEW_FEATURES, WALKED, Reducer, numbers_read
from .primitive_text import NUMBER, Unsupported, literal, write_primitive

if TYPE_CHECKING:
    from .kernel_text import KernelText

FEW = 8  # features up to which products are done in the loop over pairs
MOST_WALKED = 256  # features of a vector per pair
PAD = 16  # numbers between two rows of a buffer: rows 2 kB apart would meet in the same lines of the cache
_OF_FEATURES = ("dot", "sqdist", *WALKED)
_COMPARES = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_MIRROR = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}


def _join(e: Expr, total: str, x: str) -> str:
    """One feature more of a sum, or of an extreme, where NaN stays."""
    if e.op == "fsum":
        return f"{total} + {x}"
    return f"{x} {'>' if e.op == 'famax' else '<'} {total} || {x} != {x} ? {x} : {total}"


def _makes_weights(x: Expr) -> bool:
    """Whether the exponential of a number is a weight of which 1e-38 is nothing: of a softmax (a pair number minus a
    number of one side) or of a distance."""
    if x.op == "sub" and x.args[0].is_pair and not x.args[1].is_pair and x.dtype == "float":
        return True
    return any(n.op == "sqdist" for n in topological([x], stop=lambda n: not n.is_pair or n.op == "dot"))


class TileValues:
    """The lines of one variant that compute what its reductions read of a tile."""

    def __init__(self, kernel: KernelText):
        self.k = kernel
        self.top: list[str] = []  # once for the tile
        self.row: list[str] = []  # once for each kept index
        self.after: list[str] = []  # once, after the loops
        self.names: dict[object, str] = {}  # values of the tile and of the kept index
        self.own: dict[object, str] = {}  # values of the loop that is being written
        self.lines: list[str] = []  # of that loop
        self.asked: list[str] = []  # values of it that quick forms of functions take up to QUICK_TURNS
        self.slots: dict[object, str] = {}  # tile-sized buffers by what they hold
        self.alpha: dict[Expr, str] = {}
        self.alias: dict[Expr, Expr] = {}
        self.count = 0

    # Values -------------------------------------------------------------------------------------------------

    def name(self) -> str:
        self.count += 1
        return f"t{self.count}"

    def level(self, e: Expr) -> tuple[dict[object, str], list[str]]:
        if self.k.is_folded(e):
            return self.own, self.lines
        return self.names, self.row if self.k.is_kept(e) else self.top

    def get(self, e: Expr) -> str:
        """The name of a number, written where it belongs if it is not yet."""
        stop = lambda n: n in self.own or n in self.names or n.op in _OF_FEATURES
        for n in topological([e], stop=stop):
            if n not in self.own and n not in self.names and n not in self.k.fold.tables:
                known, lines = self.level(n)
                text = self._text(n)
                if n.op in ("const", "nan"):
                    known[n] = text
                    continue
                known[n] = self.name()
                lines.append(f"const {NUMBER[n.dtype]} {known[n]} = {text};")
        return self.own[e] if e in self.own else self.names[e]

    def _text(self, e: Expr) -> str:
        e = self.alias.get(e, e)
        if e.op == "const":
            return literal(e.const, e.dtype)
        if e.op == "nan":
            return "NaN"
        if e in self.k.number_at:
            at = self.k.number_at[e]
            return f"({NUMBER[e.dtype]})((const {'double' if e.dtype == 'float' else 'I'}*)a[10])[{at}]"
        if e.op == "leaf":
            return self._leaf(e)
        if e.op in ("row_index", "col_index"):
            return f"(I)({'j0 + j' if self.k.is_folded(e) else 'i0 + i'}{self._begin(e)})"
        if e.op in _OF_FEATURES and e in self.slots:
            return f"{self.slots[e]}[j]"
        if e.op in _OF_FEATURES:
            return self._small_walk(e) if e.op in WALKED else self._small_product(e)
        if e.op in _COMPARES and (text := self._compare_index(e)):
            return text
        if e.op == "lookup":
            return self._look_up(e)
        if e.op == "gumbel":
            return self._gumbel(e)
        if e.op == "coin":
            row, mark, col = (self.get(a) for a in e.args)
            return f"coin_((U){row}, (U){mark}, (U){col})"
        if e.op not in PRIMITIVES or e.feature is not None:
            raise Unsupported(f"{e.op} has no C++ form")
        if e.op == "div" and e.dtype == "float" and e.args[1].dtype == "float" and e.args[1] in self.k.number_at:
            own = self.once(
                ("over", e.args[1]), "F", f"(F)(1 / ((const double*)a[10])[{self.k.number_at[e.args[1]]}])", self.top
            )
            return f"(F)({self.get(e.args[0])}) * {own}"
        if e.op == "exp" and _makes_weights(e.args[0]):
            return f"exp_weight({self.get(e.args[0])})"
        return self._primitive(e, [self.get(a) for a in e.args])

    def _primitive(self, e: Expr, args: list[str]) -> str:
        """The text of a primitive; of a quick form that not every number has, its argument is noted for the loop."""
        text = write_primitive(e, args, self.k.form.single)
        if "quick_" in text:
            if not self.k.is_folded(e):
                return text.replace("quick_", "")
            self.asked += args
        return text

    def _leaf(self, e: Expr) -> str:
        if e.feature is not None:
            raise Unsupported("a vector where a number is read")
        at = self.k.leaf_at[e]
        kind = {"float": "F", "int": "I", "bool": "uint8_t"}[e.dtype]
        if e.is_pair:
            _, kind, step = next(p for p in self.k.form.pairs if p[0] is e)
            kept, folded = (3, 2) if self.k.form.swapped else (2, 3)
            pointer = self.once(
                ("pair", e),
                f"const {kind}*",
                f"(const {kind}*)a[{at}] + b * a[{at + 1}] + (i0 + i) * a[{at + kept}] + j0 * a[{at + folded}]",
                self.row,
            )
            where = {0: "0", 1: "j"}.get(step, f"j * a[{at + folded}]")
            if kind == "uint16_t":
                return f"(F)from_{'half' if step >= 10 else 'bf16'}({pointer}[{where}])"
            return f"({NUMBER[e.dtype]})({pointer}[{where}]{' != 0' if e.dtype == 'bool' else ''})"
        if self.k.is_folded(e):
            pointer = self.once(
                ("col", e), f"const {kind}*", f"(const {kind}*)a[{at}] + b * a[{at + 1}] + j0", self.top
            )
            return f"({NUMBER[e.dtype]})({pointer}[j])"
        place = f"b * a[{at + 1}]" + (f" + (i0 + i) * a[{at + 2}]" if self.k.is_kept(e) else "")
        return f"({NUMBER[e.dtype]})((const {kind}*)a[{at}])[{place}]"

    def once(self, key: object, kind: str, text: str, lines: list[str]) -> str:
        if key not in self.names:
            self.names[key] = self.name()
            lines.append(f"{kind} const {self.names[key]} = {text};")
        return self.names[key]

    def _look_up(self, e: Expr) -> str:
        """An entry of a table; NaN, or 0 of an integer, where there is none."""
        table, kind = e.args[0], {"float": "F", "int": "I", "bool": "uint8_t"}[e.dtype]
        at, index, count = self.k.leaf_at[table], self.get(e.args[1]), self.get(size(str(table.feature)))
        pointer = self.once(("table", table), f"const {kind}*", f"(const {kind}*)a[{at}] + b * a[{at + 1}]", self.top)
        safe = f"{pointer}[{index} < 0 ? 0 : {index} >= {count} ? {count} - 1 : {index}]"
        outside = "NaN" if e.dtype == "float" else "0"
        return f"({NUMBER[e.dtype]})({index} >= 0 && {index} < {count} ? {safe} : {outside})"

    def _begin(self, e: Expr) -> str:
        """What is added to an index of the rows: the leaves may hold some rows of many."""
        return " + a[12]" if e.op == "row_index" else ""

    def _compare_index(self, e: Expr) -> str:
        """A comparison of the folded index with a number of the kept one: in 32 bits, counted from the tile's start."""
        (left, right), own = e.args, _COMPARES[e.op]
        for x, y, sign in ((left, right, own), (right, left, _MIRROR[own])):
            if (
                x.op in ("row_index", "col_index")
                and self.k.is_folded(x)
                and not self.k.is_folded(y)
                and y.dtype == "int"
            ):
                there = self.get(y)
                lines = self.row if self.k.is_kept(y) else self.top
                at = f"({there} - j0{self._begin(x).replace('+', '-')})"
                text = f"(int32_t)({at} < -1 ? -1 : {at} > BN ? BN : {at})"
                return f"(j {sign} {self.once(('at', y), 'int32_t', text, lines)})"
        return ""

    def _gumbel(self, e: Expr) -> str:
        if not self.k.form.single:
            raise Unsupported("gumbel has no C++ form in double")
        seed, batch, i, j = e.args
        place = self.get(j)
        three = ", ".join(self.get(a) for a in (seed, batch, i))
        folded = any(self.k.is_folded(a) for a in (seed, batch, i))
        known, lines = (self.own, self.lines) if folded else (self.names, self.row)
        for what in ("begin", "step"):
            if (what, e) not in known:
                known[what, e] = self.name()
                lines.append(f"const U {known[what, e]} = draw_{what}({three});")
        return f"gumbel_({known['begin', e]}, {known['step', e]}, (U){place})"

    # Vectors ------------------------------------------------------------------------------------------------

    def component(self, e: Expr, f: int) -> str:
        """Feature ``f`` of a vector, as a number."""
        if e.feature is None:
            return self.get(e)
        known, lines = self.level(e)
        if (e, f) in self.own or (e, f) in self.names:
            return self.own.get((e, f)) or self.names[e, f]
        if e.op == "leaf" and not e.is_pair and e.dtype == "float":
            if self.k.is_folded(e):
                start = self.features(e)
                text = f"{self.once(('feature', e, f), 'const F*', f'{start} + {f} * BN', self.top)}[j]"
            else:
                at = self.k.leaf_at[e]
                place = f"b * a[{at + 1}]" + (f" + (i0 + i) * a[{at + 2}]" if self.k.is_kept(e) else "")
                text = f"read_number((const char*)a[{at}], {place} + {f} * a[{at + 3}], (int)a[{at + 4}])"
        elif e.op == "spread":
            return self.get(e.args[0])
        elif e.op in PRIMITIVES:
            text = self._primitive(e, [self.component(a, f) for a in e.args])
        else:
            raise Unsupported(f"{e.op} of vectors has no C++ form")
        known[e, f] = self.name()
        lines.append(f"const {NUMBER[e.dtype]} {known[e, f]} = {text};")
        return known[e, f]

    def features(self, e: Expr) -> str:
        """A folded leaf of the tile with its features first."""
        width, at = self.k.form.width(e), self.k.leaf_at[e]
        room = self.k.room.take(("features", e), width * self.k.form.block[1])
        if ("features", e) not in self.names:
            self.names["features", e] = self.name()
            own = self.names["features", e]
            self.top.append(f"F* const {own} = w + {room}; load_features(a + {at}, b, j0, n, {width}, {own}, BN);")
        return self.names["features", e]

    def vectors(self, e: Expr) -> str:
        """The name of a block of vectors of one side, as an operand of products."""
        key = ("vectors", e)
        if key in self.names:
            return self.names[key]
        if e.is_pair or e.dtype != "float" or not (self.k.is_kept(e) or self.k.is_folded(e)):
            raise Unsupported("an operand that is no float vector of one side")
        own = self.names[key] = self.name()
        width = self.k.form.width(e)
        if self.k.is_kept(e):
            self.top.append(f"const Vectors {own} = {self.k.kept_vectors_call(e)};")
        elif e.op == "leaf":
            room = self.k.room.take(key, width * self.k.form.block[1])
            at = self.k.leaf_at[e]
            self.top.append(f"const Vectors {own} = load_vectors(a + {at}, b, j0, n, {width}, w + {room});")
        else:
            room = self.k.room.take(key, width * self.k.form.block[1])
            self.top.append(f"const Vectors {own} = {{w + {room}, {width}}};")
            self.top += self.k.pack_lines(e, room, "j", "j0", "n")
        return own

    # Products -----------------------------------------------------------------------------------------------

    def is_small(self, e: Expr) -> bool:
        return self.k.form.width(e.args[0]) <= (FEW_FEATURES if e.op == "sqdist" else FEW)

    def sides(self, x: Expr, y: Expr) -> tuple[Expr, Expr]:
        """The kept and the folded one of two vectors."""
        if self.k.is_kept(x) and self.k.is_folded(y) and not (x.is_pair or y.is_pair):
            return x, y
        if self.k.is_kept(y) and self.k.is_folded(x) and not (x.is_pair or y.is_pair):
            return y, x
        raise Unsupported("a product of vectors that are not of two sides")

    def _small_product(self, e: Expr) -> str:
        kept, folded = self.sides(*e.args)
        total = ""
        for f in range(self.k.form.width(kept)):
            x, y = self.component(kept, f), self.component(folded, f)
            if e.op == "sqdist":
                own = self.name()
                self.lines.append(f"const F {own} = {x} - {y};")
                x = y = own
            term, own = f"{x} * {y}" + (f" + {total}" if total else ""), self.name()
            self.lines.append(f"const F {own} = {term};")
            total = own
        return total or "(F)0"

    def prepare_products(self, roots: Iterable[Expr]) -> None:
        """Give every product of many features its buffer, and scalar factors of it to the product itself."""
        order = topological(roots, stop=lambda n: n.op in ("dot", "sqdist"))
        uses: dict[Expr, int] = {}
        for used in (*roots, *(a for e in order if e.op not in ("dot", "sqdist") for a in e.args)):
            uses[used] = uses.get(used, 0) + 1
        for e in order:
            if e.op == "mul" and e.dtype == "float":
                for x, factor in (e.args, e.args[::-1]):
                    scalar = factor.op == "const" or factor in self.k.number_at
                    if x.op == "dot" and scalar and uses[x] == 1 and x not in self.alpha and not self.is_small(x):
                        self.alpha[x], self.alias[e] = self.get(factor), x
                        break
        for e in order:
            if e.op in ("dot", "sqdist") and e.dtype != "float":
                raise Unsupported("a product of integers")
            if e.op in WALKED and not (e.is_pair and e.dtype == "float"):
                raise Unsupported("integers over features")
            if e.op in _OF_FEATURES and not self.is_small(e):
                self.slot(e)
                self._walk_row(e) if e.op in WALKED else self._product(e)

    def slot(self, key: object) -> str:
        """A buffer of one tile."""
        if key not in self.slots:
            self.slots[key] = f"S{len(self.slots)}"
        return self.slots[key]

    def slot_room(self, name: str) -> int:
        block, folded = self.k.form.block
        return self.k.room.take(("slot", name), block * (folded + PAD))

    def _product(self, e: Expr) -> None:
        kept, folded = self.sides(*e.args)
        width = self.k.form.width(kept)
        x, out, alpha = self.vectors(kept), self.slot_room(self.slots[e]), self.alpha.get(e, "(F)1")
        if e.op == "dot" and self.k.form.transposed and folded.op == "leaf":
            y = self.once(("packed", folded), "const F*", self.k.packed_call(folded), self.top)
            self.top.append(f"multiply_packed(w + {out}, LD, {x}.at, {x}.ld, {y}, m, n, {width}, {alpha});")
            return
        y = self.vectors(folded)
        if e.op == "dot":
            self.top.append(f"multiply(w + {out}, LD, {x}.at, {x}.ld, {y}.at, {y}.ld, m, n, {width}, {alpha});")
            return
        most, left, right = self.centred(kept, folded)
        self.top.append(f"distances(w + {out}, LD, {x}, {y}, m, n, {width}, {most}, w + {left}, w + {right});")

    def centred(self, kept: Expr, folded: Expr) -> tuple[str, int, int]:
        """Vectors of both sides less a mean: the largest norm of the folded ones, and the rooms of both."""
        width, (block, across) = self.k.form.width(kept), self.k.form.block
        left = self.k.room.take(("left", kept, folded), block * (width + 4))
        right = self.k.room.take(("right", kept, folded), (across + 1) * (width + 4))
        x, y = self.vectors(kept), self.vectors(folded)
        call = f"centred({x}, {y}, m, n, {width}, w + {left}, w + {right})"
        return self.once(("centred", kept, folded), "F", call, self.top), left, right

    # Vectors per pair ---------------------------------------------------------------------------------------

    def _small_walk(self, e: Expr) -> str:
        """The sum or the extreme of a vector per pair, feature by feature in the loop over pairs."""
        total = ""
        for f in range(self.k.form.width(e.args[0])):
            x, own = self.component(e.args[0], f), self.name()
            self.lines.append(f"const F {own} = {_join(e, total, x) if total else x};")
            total = own
        return total or "(F)0"

    def _walk_row(self, e: Expr) -> None:
        """The same for all pairs of a kept index, into its row of a buffer, before the loops over pairs."""
        slot, first = self.slots[e], {"fsum": "0", "famax": "-INF", "famin": "INF"}[e.op]
        to = f"{slot}[j]"
        self.row += [f"for (int j = 0; j < n; j++) {to} = {first};"]
        self.row += self.walk_features(e.args[0], [], lambda x: [f"{to} = {_join(e, to, x)};"], [])

    def walk_features(
        self, x: Expr, before: list[str], inside: Callable[[str], list[str]], behind: list[str], reduced: str = ""
    ) -> list[str]:
        """A loop over the features of a vector per pair: ``before``, a loop over pairs with ``inside`` of its number,
        and ``behind``. Numbers per pair that it is made of are computed once for all features."""
        width = self.k.form.width(x)
        if width > MOST_WALKED:
            raise Unsupported("a vector per pair of many features")
        outer: list[str] = []
        inner: list[str] = []
        known: dict[Expr, str] = {}
        for e in topological([x], stop=lambda e: e.feature is None):
            if e.feature is None:
                known[e] = self._row_number(e)
            elif e.op == "spread":
                known[e] = known[e.args[0]]
            else:
                text = self._leaf_feature(e) if e.op == "leaf" else self._feature_primitive(e, known)
                known[e] = self.name()
                lines = inner if self.k.is_folded(e) else outer
                lines.append(f"const {NUMBER[e.dtype]} {known[e]} = {text};")
        return [
            f"for (int f = 0; f < {width}; f++) {{",
            *outer,
            *before,
            f'_Pragma("omp simd{reduced}")',
            "for (int j = 0; j < n; j++) {",
            *inner,
            *inside(known[x]),
            "}",
            *behind,
            "}",
        ]

    def _feature_primitive(self, e: Expr, known: dict[Expr, str]) -> str:
        if e.op not in PRIMITIVES:
            raise Unsupported(f"{e.op} of vectors has no C++ form")
        return write_primitive(e, [known[a] for a in e.args], self.k.form.single).replace("quick_", "")

    def _leaf_feature(self, e: Expr) -> str:
        """Feature ``f`` of a leaf of one side, or of none."""
        if e.is_pair or e.dtype != "float" or e.packing is not None:
            raise Unsupported("vectors per pair that are given")
        if self.k.is_folded(e):
            return f"{self.features(e)}[f * BN + j]"
        if self.k.is_kept(e):
            own = self.vectors(e)
            return f"{own}.at[(I)i * {own}.ld + f]"
        at = self.k.leaf_at[e]
        return f"read_number((const char*)a[{at}], b * a[{at + 1}] + f * a[{at + 3}], (int)a[{at + 4}])"

    def _row_number(self, e: Expr) -> str:
        """A number that a loop over features reads: of a pair, from a buffer that is filled before."""
        if not self.k.is_folded(e):
            return self.get(e)
        if e in self.slots:
            return f"{self.slots[e]}[j]"
        if e.dtype == "int":
            raise Unsupported("integers beside vectors per pair")
        key = ("number", e)
        if key not in self.names:
            buffer = self.once(key, "F*", f"w + {self.k.room.take(key, self.k.form.block[1])}", self.top)
            loop = self.own, self.lines, self.asked
            self.begin_loop()
            value = self.get(e)
            self.row += self.end_loop({}, [f"{buffer}[j] = {value};"])
            self.own, self.lines, self.asked = loop
        return f"{self.names[key]}[j]" + (" != 0" if e.dtype == "bool" else "")

    # Loops --------------------------------------------------------------------------------------------------

    def begin_loop(self) -> None:
        self.own, self.lines, self.asked = {}, [], []

    def end_loop(self, reductions: dict[str, list[str]], extra: list[str]) -> list[str]:
        """The text of a loop over the folded indices: its values, then ``extra``."""
        said = "".join(f" reduction({op}:{', '.join(names)})" for op, names in reductions.items() if names)
        head = "for (int j = 0; j < n; j++) {"
        loop = [f'_Pragma("omp simd{said}")', head, *(f"  {line}" for line in (*self.lines, *extra)), "}"]
        if not self.asked:
            return loop
        large = self.name()
        test = " | ".join(f"!({x} <= QUICK_TURNS && {x} >= -QUICK_TURNS)" for x in dict.fromkeys(self.asked))
        ask = [f"int32_t {large} = 0;", f'_Pragma("omp simd reduction(|:{large})")', head, *self.lines]
        slow = [line.replace("quick_", "") for line in loop]
        return [*ask, f"{large} |= (int32_t)({test});", "}", f"if (!{large}) {{", *loop, "} else {", *slow, "}"]


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

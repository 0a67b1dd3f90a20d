"""The values of a tile in C++: numbers, vectors and products, each written once, where it belongs.

What does not change along the folded indices is written before the loop over them, what does not change in a tile
before all loops; products of many features are BLAS's, into buffers of a tile. ``tile_text.py`` writes the loops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ....program.expression import Expr, size, topological
from ....program.primitives import PRIMITIVES
from ..tile_code import FEW_FEATURES, WALKED
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

"""Expressions as lines of a kernel.

A number lives in a block that broadcasts to ``[KEPT, FOLDED]``: ``[KEPT, 1]`` on the kept side, ``[1, FOLDED]`` on the
folded side. A vector is either a block ``[side, features]``, for matrix products, or is met feature by feature
(:meth:`Values.component`). What does not vary along the folded axis is bound once, before the loop.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ....program.constructors import ONE
from ....program.expression import Expr, const, topological, widest
from ....program.philox import DRAWS
from ....program.primitives import PRIMITIVES
from . import expression_depth, k_loop
from .blocks import Blocks
from .exponents import literal
from .kernel_spec import TINY, WIDEST, Spec, Unsupported

_INTEGER_GROWS = ("mul", "square")  # int32 indices are raised to int64 before these
_TYPED = ("minimum", "maximum", "remainder", "floor_divide", "logaddexp", "pow", "xlogy")  # these ask for a type
_SMALL_POWERS = (3, 4, 5, 6, -2, -3, -4)
_CLOSE = 0.05  # a squared distance below this share of the squared norms has lost more than a digit
_QUICK = re.compile(r"(?<![\w.])(log|tanh|sigmoid|(?:normal_)?gate|gelu_\w+|gumbel)\(")  # with quick forms, for 16 bits
_SCALES = ("neg", "mul", "div")  # one factor in their place costs float32 no digit
_COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")


class Values(Blocks):
    """The names bound so far, before the loop and inside it, and the lines that bind them."""

    def __init__(self, spec: Spec):
        self.spec = spec
        self.float = f"tl.{spec.compute}"
        self.before: list[str] = []
        self.inside: list[str] = []
        self.outer: dict[object, str] = {}
        self.inner: dict[object, str] = {}
        self.masked = False  # whether this loop meets the end of the folded axis
        self.count = 0
        self.blocks: dict[Expr, None] = {}  # the leaves held as blocks, in order
        self.state_width = 0  # features of all running sums that are blocks
        self.scalars = False  # inside a monoid's combine: plain literals only
        self.shifts: list[tuple[Expr, Expr]] = []
        self.layered: set[str] = set()  # features (or "": numbers) of deep expressions that are being bound
        self.late = False  # whether in this loop a tile's last products may wait for the next tile
        self.factors = {a for e in topological(spec.fold.reductions) if e.op in ("dot", "sqdist") for a in e.args}

    def loop(self, masked: bool) -> None:
        """Start the body of another loop."""
        self.inside, self.inner, self.masked = [], {}, masked

    def bind(self, key: object, text: str, folded: bool, name: str = "") -> str:
        """Name a value, once; before the loop unless it varies along the folded axis."""
        found = self.outer.get(key) or self.inner.get(key)
        if found:
            return found
        if not name:
            name, self.count = f"v{self.count}", self.count + 1
        (self.inside if folded else self.before).append(f"{name} = {text}")
        (self.inner if folded else self.outer)[key] = name
        return name

    # Numbers

    def number(self, e: Expr) -> str:
        """The text (a name or a literal) of a number."""
        found = self.outer.get(e) or self.inner.get(e)
        if found:
            return found
        if e.op in ("const", "nan"):
            value = float("nan") if e.op == "nan" else e.const
            if e.dtype == "float" and self.float == "tl.float64" and not self.scalars:
                return self.bind(e, f"tl.full([1, 1], {literal(value)}, tl.float64)", False)
            return literal(value)
        expression_depth.bind_numbers(self, e)
        return self.bind(e, self._text(e), self.spec.folds(e), self._name(e))

    def full(self, e: Expr) -> str:
        """A number as a whole ``[KEPT, FOLDED]`` block."""
        text = self.number(e)
        kind = {"float": self.float, "int": "tl.int64", "bool": "tl.int1"}[e.dtype]
        return text if e.is_pair else self.bind((e, "full"), f"tl.zeros([KEPT, FOLDED], {kind}) + {text}", True)

    def own_place(self, target: Expr) -> str:
        """A kept index's own folded index."""
        return self.number(target)

    def divided(self, block: str, name: str) -> str:
        """Vectors by a number per kept index."""
        return f"{block} / {name}[:, None]"

    def _name(self, e: Expr) -> str:
        return str(e.attrs[0]) if e.op == "leaf" and not self.spec.is_number(e) else ""

    def _text(self, e: Expr) -> str:
        if e.op == "leaf":
            return self._leaf(e)
        if e.op == "size":
            axis = e.attrs[0]
            if axis not in ("rows", "cols"):
                return repr(self.spec.width(axis))
            return "folded_size" if axis == self.spec.over else "kept_size"
        if e.op in ("row_index", "col_index"):
            return "folded_at[None, :]" if self.spec.folds(e) else "kept_at[:, None]"
        if e.op in ("dot", "sqdist", "fsum"):
            return self._over_features(e)
        if e.op == "exp" and (self.spec.narrow or (self.spec.compute == "float32" and e.args[0].op in _SCALES)):
            return self.exp(e.args[0])
        if e.op == "mul" and self.spec.narrow and e.args[0].op == "exp" and e.args[1].op == "decay":
            return self.exp(e.args[0].args[0], e.args[1].args[0])
        if e in self.spec.near_of:
            return self._distance(e)
        if e.op == "where" or (e.op == "mul" and any(a.op == "where" for a in e.args)):
            self.products(*e.args)  # before a condition, whose truths would be held while they are computed
        if e.op == "coin":
            return self._primitive(e, [*map(self.number, e.args[:2]), self.block_of(e.args[2])])
        if e.op in ("div", "tanh") and self.spec.narrow and e.is_pair:
            return self.joined(e)
        return self._primitive(e, [self.argument(a, want) for a, want in zip(e.args, self._wants(e), strict=True)])

    def block_of(self, col: Expr) -> str:
        """Which block of columns a column is of, for coins: a number where that holds for a whole tile."""
        if col.op != "col_index":
            return f"({self.number(col)} >> 7)"
        folded = self.spec.folds(col)
        first, size = ("start", "FOLDED") if folded else ("tile * KEPT", "KEPT")
        return self.bind((col, "block"), f"block_of({first}, {self.number(col)}, {size})", folded)

    def _leaf(self, e: Expr) -> str:
        name, kind = str(e.attrs[0]), self.spec.type_of[e]
        if self.spec.is_number(e):
            text = f"{name}_number"
            return f"tl.cast({text}, INT)" if e.dtype == "int" else f"({text} != 0)" if e.dtype == "bool" else text
        if e.is_pair:
            kept, folded = self.pair_strides(e)
            mask = "kept_in[:, None]" + (" & folded_in[None, :]" if self.masked else "")
            place = f"{self.pointer(e)} + kept_lane[:, None] * {kept} + folded_lane[None, :] * {folded}"
            text = f"tl.load({place}, mask={mask}, other=0)"
        elif e in self.spec.box_of:
            text = f"{self.boxed(e, 'start')}[None, :]"
        elif self.spec.folds(e):
            mask = ", mask=folded_in, other=0" if self.masked else ""
            text = f"tl.load({self.pointer(e)} + folded_lane * {name}_s{mask})[None, :]"
        elif self.spec.keeps(e):
            text = f"tl.load({self.pointer(e)} + kept_lane * {name}_s, mask=kept_in, other=0)[:, None]"
        else:
            text = f"tl.load({self.pointer(e)})"
        return self._loaded(text, e, kind)

    def pair_strides(self, e: Expr) -> tuple[str, str]:
        """The strides along the kept and the folded axis of a leaf per pair."""
        row, col = f"{e.attrs[0]}_r", f"{e.attrs[0]}_c"
        return (row, col) if self.spec.over == "cols" else (col, row)

    def _loaded(self, text: str, e: Expr, kind: str) -> str:
        if e.dtype == "float":
            return text if kind == self.spec.compute else f"{text}.to({self.float})"
        return text if kind in ("bool", "int64", "int32") else f"{text}.to(tl.int64)"

    def base(self, e: Expr) -> str:
        """Where a leaf's batch element begins."""
        name = str(e.attrs[0])
        batch = "".join(f" + b{k} * {name}_b{k}" for k in range(self.spec.rank))
        return self.bind((e, "base"), f"{name}_ptr{batch}", False, f"{name}_base")

    def pointer(self, e: Expr) -> str:
        """Where a leaf's tile (or its batch element) begins."""
        name, base = str(e.attrs[0]), self.base(e)
        if e.is_pair:
            kept, folded = self.pair_strides(e)
            text = f"{base} + tl.cast(tile * KEPT, tl.int64) * {kept} + tl.cast(start, tl.int64) * {folded}"
            return self.bind((e, "at"), text, True, f"{name}_at")
        if self.spec.folds(e):
            return self.bind((e, "at"), f"{base} + tl.cast(start, tl.int64) * {name}_s", True, f"{name}_at")
        if self.spec.keeps(e):
            return self.bind((e, "at"), f"{base} + tl.cast(tile * KEPT, tl.int64) * {name}_s", False, f"{name}_at")
        return base

    # Elementwise arithmetic

    def _wants(self, e: Expr) -> list[str]:
        """The number class in which a primitive takes each argument."""
        p = PRIMITIVES[e.op]
        if e.op == "where":
            return ["bool", e.dtype, e.dtype]
        if e.op in _COMPARE:
            return [widest(e.args)] * len(e.args)
        if e.op in ("cast", "detach", *DRAWS):
            return [a.dtype for a in e.args]
        if p.result == "bool":
            return ["float" if e.op in ("isnan", "isinf") else "bool"] * len(e.args)
        if e.dtype == "bool" and e.op != "mul":
            raise Unsupported(f"{e.op} of truth values")
        return [e.dtype] * len(e.args)

    def argument(self, a: Expr, want: str) -> str:
        if a.dtype == want:
            return self.number(a)
        return self.gap(a, want) or self.convert(self.number(a), a, want)

    def convert(self, text: str, a: Expr, want: str) -> str:
        """A number of one class as one of another."""
        if a.dtype == want:
            return text
        if a.op == "const":
            return self.number(const({"float": float, "int": int, "bool": bool}[want](a.const)))
        if want == "bool":
            return f"({text} != 0)"
        return f"{text}.to({self.float})" if want == "float" else f"{text}.to(tl.int{32 if a.dtype == 'bool' else 64})"

    def _primitive(self, e: Expr, args: list[str]) -> str:
        p = PRIMITIVES[e.op]
        if not p.triton:
            raise Unsupported(f"{e.op} has no Triton text")
        if e.op == "cast":
            return self.convert(args[0], e.args[0], e.attrs[0])
        if e.op == "nan_to_num":
            most = torch.finfo(getattr(torch, self.spec.compute)).max
            fill = [literal(d if v is None else v) for v, d in zip(e.attrs, (0.0, most, -most), strict=True)]
            return p.triton.format(args[0], **dict(zip(p.attributes, fill, strict=True)))
        if e.dtype == "int" and e.op in ("floor", "ceil", "round", "trunc"):
            return args[0]
        if e.op == "pow" and e.args[1].const in _SMALL_POWERS:
            product = " * ".join([args[0]] * abs(int(e.args[1].const)))
            return product if e.args[1].const > 0 else f"1.0 / ({product})"
        if e.op in _TYPED:
            args = [self._typed(t, a, e) for t, a in zip(args, e.args, strict=True)]
        if e.dtype == "int" and (e.op in _INTEGER_GROWS or self._sums_of_int32(e)):
            args = [t if a.op == "const" else f"{t}.to(tl.int64)" for t, a in zip(args, e.args, strict=True)]
        if e.op == "mul" and e.dtype == "bool":
            return f"{args[0]} & {args[1]}"
        if e.op in ("div", "reciprocal") and self._divides_exactly(e):
            return f"tl.div_rn({', '.join(args if e.op == 'div' else ('1.0', *args))})"
        if e.op == "uniform":
            return f"{p.triton.format(*args)}.to({self.float})"
        if e.op == "gumbel":
            args.append(self.float)
        attributes = {k: v if isinstance(v, str) else literal(v) for k, v in zip(p.attributes, e.attrs, strict=True)}
        text = p.triton.format(*args, **attributes)
        return _QUICK.sub(r"native_\1(" if self.spec.native else r"quick_\1(", text) if self.spec.narrow else text

    def _sums_of_int32(self, e: Expr) -> bool:
        """Whether a sum would wrap around in int32, where torch's does not: of int32 data. Indices are small enough."""
        return e.op in ("add", "sub", "neg", "abs") and any(self.spec.type_of.get(a) == "int32" for a in e.args)

    def _divides_exactly(self, e: Expr) -> bool:
        """A GPU's own float32 form may be off by two units of the last place, torch's by half of one: a logit that was
        divided so has weights of three times the error. One number for all pairs (a bandwidth) is not worth it."""
        single = self.spec.compute == "float32" and not self.spec.narrow and all(a.dtype == "float" for a in e.args)
        return single and (e.args[-1].rows or e.args[-1].cols)

    def _typed(self, text: str, a: Expr, e: Expr) -> str:
        if a.op != "const" or (self.float == "tl.float64" and e.dtype == "float" and not self.scalars):
            return text
        kind = self.float if e.dtype == "float" else "tl.int32" if abs(a.const) < 2**31 else "tl.int64"
        return f"tl.full({'()' if self.scalars else '[1, 1]'}, {text}, {kind})"

    # Features

    def _over_features(self, e: Expr) -> str:
        """A number per pair made from vectors: by a matrix product where it is one, else feature by feature."""
        if e.op == "fsum":
            return self._walked(e.args[0], lambda f: self.component(e.args[0], f), e)
        x, y = e.args
        leaves = x.op == y.op == "leaf"
        if self.spec.width(x.feature) > TINY and e.dtype == "float" and leaves:
            if e.op == "dot":
                return self.product(x, y)
            norms = [self._norm(v) for v in (x, y)]
            square = f"tl.maximum({norms[0]} + {norms[1]} - 2.0 * {self.product(x, y)}, 0.0)"
            if self.spec.narrow:  # products of 16-bit numbers are exact: cancellation costs less than their rounding
                return square
            name = self.bind((e, "square"), square, True)
            if self.spec.exact:
                self._near(e, name, norms)
            return name

        def part(f: str) -> str:
            a, b = self.component(x, f), self.component(y, f)
            if e.op == "dot":
                return f"{a} * {b}"
            gap = self.bind((e, f, "gap"), f"{a} - {b}", True)
            return f"{gap} * {gap}"

        return self._walked(x, part, e)

    def _near(self, e: Expr, square: str, norms: list[str]) -> None:
        """Where a tile has pairs so close that the product cost digits, it is computed anew, feature by feature."""
        close = f"tl.max(tl.where({square} < {_CLOSE} * ({norms[0]} + {norms[1]}), 1, 0))"
        lines, self.inside = self.inside, []
        names = dict(self.inner)
        self.inside.append(f"{square} = tl.zeros([KEPT, FOLDED], {self.float})")
        with self.walk(self.spec.width(e.args[0].feature)) as f:
            gap = self.bind((e, f, "gap"), " - ".join(self.component(a, f) for a in e.args), True)
            self.inside.append(f"{square} += {gap} * {gap}")
        lines += [f"if {close} > 0:", *(f"    {line}" for line in self.inside)]
        self.inside, self.inner = lines, names

    def _distance(self, e: Expr) -> str:
        """A squared distance of norms and a product of pieces; what is close is computed anew, from whole vectors."""
        pair, norms = self.spec.near_of[e], self.number(e.args[0].args[0])
        text = self._primitive(e, [self.argument(a, "float") for a in e.args])
        name = self.bind((e, "square"), text, True)
        lines, names, self.inside = self.inside, dict(self.inner), []
        total = self.bind((e, "near"), f"tl.zeros([KEPT, FOLDED], {self.float})", True)
        with self.walk(self.spec.width(pair[0].feature)) as f:
            gap = self.bind((e, f, "gap"), " - ".join(self.component(a, f) for a in pair), True)
            self.inside.append(f"{total} += {gap} * {gap}")
        self.inside.append(f"{name} = tl.where({name} < {_CLOSE} * {norms}, {total}, {name})")
        lines += [f"if tl.min({name} - {_CLOSE} * {norms}) < 0:", *(f"    {line}" for line in self.inside)]
        self.inside, self.inner = lines, names
        return name

    def _norm(self, v: Expr) -> str:
        axis = "[None, :]" if self.spec.folds(v) else "[:, None]"
        block = self.block(v)
        text = f"tl.sum({block}.to({self.float}) * {block}.to({self.float}), 1){axis}"
        return self.bind((v, "norm"), text, self.spec.folds(v))

    def _walked(self, vector: Expr, part: Callable[[str], str], e: Expr) -> str:
        width = self.spec.width(vector.feature)
        for n in topological([vector], stop=lambda n: n.feature is None):
            if n.feature is None:
                self.number(n)
        kind = self.float if e.dtype == "float" else "tl.int64"
        if not width:  # a sum of no features
            return f"tl.zeros([KEPT, FOLDED], {kind})"
        if width <= TINY:
            return " + ".join(part(str(f)) for f in range(width))
        total = self.bind((e, "total"), f"tl.zeros([KEPT, FOLDED], {kind})", True)
        with self.walk(width) as f:
            self.inside.append(f"{total} += {part(f)}")
        return total

    @contextmanager
    def walk(self, width: int) -> Iterator[str]:
        """The body of a loop over features; what it binds is forgotten after it."""
        lines, names = self.inside, self.inner
        f, self.count = f"f{self.count}", self.count + 1
        self.inside, self.inner = [], dict(names)
        yield f
        lines += [f"for {f} in range(0, {width}):", *(f"    {line}" for line in self.inside)]
        self.inside, self.inner = lines, names

    def component(self, e: Expr, f: str) -> str:
        """Feature ``f`` of a vector, as a number."""
        if e.feature is None:
            return self.number(e)
        key = (e, f)
        found = self.outer.get(key) or self.inner.get(key)
        if found:
            return found
        folded = self.spec.folds(e) or not f.isdigit()
        if e.op == "spread":
            return self.number(e.args[0])
        if e.op == "leaf":
            return self.bind(key, self._leaf_component(e, f), folded, f"{e.attrs[0]}_{f}")
        expression_depth.bind_components(self, e, f)
        args = [self.convert(self.component(a, f), a, want) for a, want in zip(e.args, self._wants(e), strict=True)]
        return self.bind(key, self._primitive(e, args), folded)

    def _leaf_component(self, e: Expr, f: str) -> str:
        name = str(e.attrs[0])
        at = f"{self.pointer(e)} + {f} * {name}_f"
        if self.spec.folds(e):
            at, shape = f"{at} + folded_lane * {name}_s", "[None, :]"
            mask = ", mask=folded_in, other=0" if self.masked else ""
        elif self.spec.keeps(e):
            at, shape = f"{at} + kept_lane * {name}_s", "[:, None]"
            mask = ", mask=kept_in, other=0"
        else:
            shape = mask = ""
        return self._loaded(f"tl.load({at}{mask}){shape}", e, self.spec.type_of[e])

    # Products

    def product(self, x: Expr, y: Expr) -> str:
        """⟨x_i, y_j⟩ as one matrix product, the kept side on the left."""
        kept, folded = (y, x) if self.spec.folds(x) else (x, y)
        if self.spec.deep and self.spec.width(x.feature) > WIDEST:
            return k_loop.product(self, kept, folded)
        if self.spec.pieces:
            across = {2: "halves_across", 3: "thirds_across"}[self.spec.pieces]
            return f"{across}({self.pieces(kept)}, {self.pieces(folded)})"
        return f"tl.dot({self.block(kept)}, tl.trans({self.block(folded)}){self.options()})"


def is_one(e: Expr) -> bool:
    """Whether a weight is the constant 1."""
    return e is ONE

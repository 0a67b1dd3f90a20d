"""Draws random programs, from the page of the language alone. The same seed gives the same program everywhere."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from .programs import Param, Program, Run, Sizes, param_node
from .tree import Node, const, leaf, make, topological

# fmt: off
SMOOTH = [
    "tanh", "sigmoid", "sin", "cos", "erf", "atan", "softplus", "gelu", "silu", "mish", "elu", "logsigmoid",
    "softsign", "sqrt", "rsqrt", "log", "log1p", "reciprocal", "decay", "expm1",
]
EXACT = [
    "neg", "abs", "square", "relu", "clamp", "sign", "floor", "ceil", "round", "trunc", "frac", "leaky_relu",
    "hardtanh", "detach",
]
# fmt: on
BITS = {"float64": 45, "float32": 20, "bfloat16": 6, "float16": 8}
# fmt: off
OPERATORS = frozenset([
    "add", "sub", "mul", "div_int", "floor_divide", "remainder", "eq", "ne", "lt", "le", "gt", "ge",
])
# fmt: on
LARGEST = 2.0**17  # larger values are squashed: rounding errors stay far below the tolerance


def generate(seed: int, share: str = "unit") -> Program:
    """Program number ``seed``; ``share``: "unit", or "interpret" for small programs that kernels run."""
    return _Generator(seed, share).program()


class _Generator:
    def __init__(self, seed: int, share: str):
        self.seed = seed
        self.random = random.Random(f"{share} {seed}")
        self.share = share
        r = self.random
        self.dtype = self.pick({"float64": 70, "float32": 22, "bfloat16": 5, "float16": 3})
        if share == "interpret":
            self.dtype = self.pick({"float32": 85, "float64": 15})
        self.bits = BITS[self.dtype]
        self.sizes = self._sizes()
        self.params: list[Param] = []
        self.nodes: list[Node] = []  # of the parameters
        self.results: list[Node] = []  # reductions made so far
        self.chained = False
        self.shared: list[Node] = []  # pair numbers to be used again
        # the base parameters say how many rows and columns there are
        self.add("row", "f" if r.random() < 0.7 else None, "float")
        self.add("col", "f" if r.random() < 0.7 else None, "float")

    # Choices

    def pick(self, weights: dict[str, float]) -> str:
        return self.random.choices(list(weights), list(weights.values()))[0]

    def chance(self, p: float) -> bool:
        return self.random.random() < p

    def one(self, *calls: Callable[[], Node]) -> Node:
        return self.random.choice(calls)()

    def make(self, op: str, *args: Node, **attrs: Any) -> Node:
        """``tree.make``, where numbers of Python stand only where torch itself takes them."""
        plain = [a.op == "const" for a in args]
        if op in OPERATORS:
            replaced = [k == 0 and all(plain) for k in range(len(args))]
        else:
            replaced = [c and not (op in ("where", "pow", "trunc_divide") and k > 0) for k, c in enumerate(plain)]
        given = [self.param("number", None, a.cls) if r else a for a, r in zip(args, replaced, strict=True)]
        return make(op, *given, **attrs)

    def _sizes(self) -> Sizes:
        r = self.random
        length = lambda: r.choices([r.randint(2, 9), 1, 0, r.randint(20, 70)], [80, 8, 5, 7])[0]
        width = lambda: r.choices([r.randint(2, 5), 1, 0, 8, r.choice([17, 33, 80])], [68, 14, 8, 5, 5])[0]
        batch: tuple[int, ...] = r.choices(
            [(), (2,), (1,), (3,), (2, 2), (2, 1, 2), (0,), (2, 0)], [50, 20, 5, 5, 10, 3, 4, 3]
        )[0]
        rows, cols = length(), length()
        if self.share == "interpret":
            rows, cols = r.choice([0, 1, 3, 5, 9, 17]), r.choice([1, 2, 3, 5, 9, 17])
            batch = r.choice([(), (), (2,)])
        return Sizes(batch, rows, cols, (("f", width()), ("g", width())))

    # Parameters

    def add(self, axis: str, feature: str | None, cls: str, style: str | None = None) -> Node:
        if style is None:
            styles = {
                "float": {"grid": 55, "normal": 35, "large": 7, "zero": 3},
                "int": {"label": 40, "small": 40, "beyond 2**24": 8, "beyond 2**53": 8, "huge": 4},
                "bool": {"truth": 1},
            }[cls]
            style = self.pick(styles)
            if self.dtype in ("bfloat16", "float16") and style == "large":
                style = "grid"
        view, batch, grad, narrow = "plain", "full", cls == "float" and self.chance(0.85), self.chance(0.2)
        if axis == "number":
            view = "tensor" if self.chance(0.4 if cls == "float" else 0.2) else "plain"
            grad = grad and view == "tensor"
        else:
            view = self.pick(
                {"plain": 60, "transposed": 10, "strided": 10, "offset": 8, "repeated": 8, "flipped strides": 4}
            )
            # the first two parameters have the whole batch
            batch = self.pick({"full": 70, "none": 20, "ones": 10}) if len(self.params) > 1 else "full"
        name = f"{axis[0]}{len(self.params)}" if axis != "number" else f"n{len(self.params)}"
        alike = [q.name for q in self.params if (q.cls, q.style, q.grad) == (cls, style, grad) and q.axis != "number"]
        alias = self.random.choice(alike) if alike and axis != "number" and self.chance(0.08) else None
        p = Param(name, axis, feature, cls, style, view, batch, grad, narrow, alias)
        self.params.append(p)
        self.nodes.append(param_node(p))
        return self.nodes[-1]

    def param(self, axis: str, feature: str | None, cls: str, exact: bool = False) -> Node:
        """A parameter that is there already, or a new one."""
        found = [
            n
            for p, n in zip(self.params, self.nodes, strict=True)
            if (p.axis, p.feature, p.cls) == (axis, feature, cls) and (not exact or n.exact(self.bits)) and not n.holes
        ]
        if found and (self.chance(0.7) or len(self.params) > 8):
            return self.random.choice(found)
        return self.add(axis, feature, cls, "grid" if exact and cls == "float" else None)

    # Numbers of the class float

    def number(self, rows: bool, cols: bool, depth: int, exact: bool = False) -> Node:
        """A float on at most these axes; ``exact``: computed without rounding."""
        node = self._number(rows, cols, depth, exact)
        if node.cls != "float":
            node = self.make("mul", node, const(self.random.choice([0.5, 1.0, 2.0])))
        if exact and not node.exact(self.bits):
            node = self._exact_leaf(rows, cols)
        if node.bound > LARGEST:
            node = self.make("clamp", node, low=-8.0, high=8.0) if exact else self.make("tanh", node)
            if exact:  # clamped: the bound is known, the grain is the finer one
                node = replace(node, bound=8.0)
        return node

    def _exact_leaf(self, rows: bool, cols: bool) -> Node:
        if rows and cols and self.chance(0.5):
            return self.make("sub", self._exact_leaf(True, False), self._exact_leaf(False, True))
        if rows and (not cols or self.chance(0.5)):
            return self.param("row", None, "float", exact=True)
        if cols:
            return self.param("col", None, "float", exact=True)
        return const(self.random.choice([0.5, 1.0, -1.5, 2.0]))

    def _number(self, rows: bool, cols: bool, depth: int, exact: bool) -> Node:
        r = self.random
        # A mean over nothing is NaN, and NaN times a sum over nothing stays NaN: factors are taken out of sums.
        undefined = ("mr.mean", "mr.var") if 0 in (self.sizes.rows, self.sizes.cols) else ()
        usable = [
            n
            for n in self.results
            if n.feature is None and (rows or not n.rows) and (cols or not n.cols) and n.cls == "float"
            if n.op not in undefined
        ]
        if usable and self.chance(0.15):
            found = r.choice(usable)
            return self.make("clamp_min", found) if found.holes else found
        if self.shared and rows and cols and self.chance(0.2):
            return r.choice(self.shared)
        if depth <= 0:
            return self._leaf(rows, cols, exact)
        sub = lambda: self.number(rows, cols, depth - 1, exact)
        weights = {
            "leaf": 10, "features": 22 if rows and cols else 8, "unary": 18, "binary": 26, "where": 10,
            "int": 6, "bool": 4, "special": 0 if exact else 4,
        }  # fmt: skip
        kind = self.pick(weights)
        if kind == "leaf":
            return self._leaf(rows, cols, exact)
        if kind == "features":
            return self._features(rows, cols, depth - 1)
        if kind == "unary":
            op = r.choice(EXACT if exact or self.chance(0.35) else SMOOTH)
            x = sub()
            if op in ("floor", "ceil", "round", "trunc", "frac", "sign") and not x.exact(self.bits):
                op = "tanh"
            attrs = {"low": r.choice([-1.0, -0.5, 0.0]), "high": r.choice([0.5, 1.0, 2.0])} if op == "clamp" else {}
            return self.make(op, x, **attrs)
        if kind == "binary":
            a, b = (self.number(*self._part(rows, cols), depth - 1, exact) for _ in range(2))
            if exact:
                op = r.choice(["add", "sub", "mul", "minimum", "maximum", "fmax"])
                if self.chance(0.15):
                    return self.make(r.choice(["remainder", "floor_divide"]), a, const(r.choice([0.5, 2.0, -1.5, 3.0])))
                return self.make(op, a, b)
            op = r.choice(["add", "sub", "mul", "mul", "div", "logaddexp", "lerp", "xlogy"])
            if self.chance(0.15) and a.exact(self.bits) and b.exact(self.bits):
                op = r.choice(["minimum", "maximum", "fmax"])
            return self.make(op, a, b)
        if kind == "where":
            c = self.truth(rows, cols, depth - 1)
            other = const(r.choice([0.0, 0.0, 1.0, -2.0])) if self.chance(0.5) else sub()
            return self.make("where", c, sub(), other)
        if kind == "int":
            return self.make("mul", self.whole(rows, cols, depth - 1), const(r.choice([0.25, 0.5, -1.0])))
        if kind == "bool":
            return self.make("mul", self.truth(rows, cols, depth - 1), sub())
        x = self.make("tanh", sub())
        if not self.chained and self.chance(0.1):  # every step uses the one before it twice
            self.chained = True
            for _ in range(r.randint(5, 25)):
                x = self.make("sub", self.make("sin", x), self.make("mul", x, const(0.5)))
                x = replace(x, bound=2.0)
            return x
        return self.one(
            lambda: self.make("pow_const", self.number(rows, cols, 1), k=r.choice([1.0, 2.0, 1.5, 3, 0.5, 0])),
            lambda: self.make("pow_at_zero", self.make("tanh", sub()), self.make("tanh", sub())),
            lambda: self.make("pow", x, const(r.choice([2.0, -1.0, 0.5, 1.5, -0.5, 3]))),
            lambda: self.make("pow_int", x, k=r.choice([1, 2, 3])),
            lambda: self.make("div_int", self.whole(rows, cols, 1), const(r.choice([2, 3, 4]))),
            lambda: self.make("exp", self.make("tanh", sub())),
            lambda: self.make("exp", self.make("where", self.truth(rows, cols, 1), x, const(-float("inf")))),
        )

    def _part(self, rows: bool, cols: bool) -> tuple[bool, bool]:
        """The axes of one operand: often fewer than those of the result."""
        if rows and cols:
            return self.random.choice([(True, True), (True, True), (True, False), (False, True), (False, False)])
        return rows, cols

    def _leaf(self, rows: bool, cols: bool, exact: bool) -> Node:
        axes = ["number", "batch", "const"] + ["row"] * 4 * rows + ["col"] * 4 * cols
        axes += ["pair"] if rows and cols else []
        axis = self.random.choice(axes)
        if axis == "const":
            return const(self.random.choice([0.5, 1.0, -1.0, 2.0, 0.25, -0.5]))
        return self.param(axis, None, "float", exact)

    def _features(self, rows: bool, cols: bool, depth: int) -> Node:
        """A number made of vectors."""
        r = self.random
        letter = r.choice(["f", "f", "g"])
        both = rows and cols and self.chance(0.8)
        x = self.vector(True, False, letter, depth) if both or rows else self.vector(False, cols, letter, depth)
        y = self.vector(False, True, letter, depth) if both else self.vector(rows, cols and not rows, letter, depth)
        one_sided = ["fsum", "norm"] + (["fmean", "famax"] if self.sizes.of(letter) else [])
        if self.sizes.of(letter):
            one_sided.append("component")
        op = r.choice(["dot", "dot", "dot", "sqdist", "distance"]) if both else r.choice(["dot", *one_sided])
        if op == "sqdist" and self.sizes.of(letter) > 16:
            op = "distance"  # many features are centred first, which rounds
        if op in ("dot", "sqdist", "distance"):
            return self.make(op, x, y)
        if op == "famax" and not x.exact(self.bits):
            op = "fsum"
        return self.make(op, x, **({"k": r.randrange(self.sizes.of(letter))} if op == "component" else {}))

    def vector(self, rows: bool, cols: bool, letter: str, depth: int) -> Node:
        """A vector on one side, or of the batch."""
        axis = "row" if rows else "col" if cols else "batch"
        x = self.param(axis, letter, "float")
        if depth > 0 and self.chance(0.25):
            x = self.one(
                lambda: self.make("mul", x, self.number(rows, cols, depth - 1)),
                lambda: self.make("add", x, self.param(axis, letter, "float")),
                lambda: self.make("tanh", x),
                lambda: self.make("relu", x),
                lambda: self.make("mul", x, self.param("batch", letter, "float")),
            )
        return self.make("tanh", x) if x.bound > 1e3 else x

    # Whole numbers and truth

    def whole(self, rows: bool, cols: bool, depth: int) -> Node:
        node = self._whole(rows, cols, depth)
        return self.make("remainder", node, const(1000)) if node.bound > 2.0**24 else node

    def _whole(self, rows: bool, cols: bool, depth: int) -> Node:
        r = self.random
        usable = [
            n
            for n in self.results
            if n.feature is None and (rows or not n.rows) and (cols or not n.cols) and n.cls == "int" and not n.holes
        ]
        if usable and self.chance(0.1):
            return r.choice(usable)
        leaves = [lambda: const(r.randint(-2, 3)), lambda: leaf(r.choice(["mr.num_rows", "mr.num_cols"]))]
        leaves += [lambda: self.param("number", None, "int")] * 2
        if rows:
            leaves += [lambda: leaf("mr.row_index")] * 3 + [lambda: self.param("row", None, "int")] * 2
        if cols:
            leaves += [lambda: leaf("mr.col_index")] * 3 + [lambda: self.param("col", None, "int")] * 2
        if rows and cols:
            leaves += [lambda: self.param("pair", None, "int")]
        if depth <= 0 or self.chance(0.25):
            return self.one(*leaves)
        sub = lambda: self.whole(*self._part(rows, cols), depth - 1)
        small = lambda: const(r.choice([1, 2, 3, -2]))
        return self.one(
            lambda: self.make("add", sub(), sub()),
            lambda: self.make("sub", sub(), sub()),
            lambda: self.make("mul", sub(), small()),
            lambda: self.make("add", sub(), small()),
            lambda: self.make("floor_divide", sub(), small()),
            lambda: self.make("remainder", sub(), small()),
            lambda: self.make("trunc_divide", sub(), small()),
            lambda: self.make("abs", sub()),
            lambda: self.make("neg", sub()),
            lambda: self.make("square", sub()),
            lambda: self.make("sign", sub()),
            lambda: self.make("minimum", sub(), sub()),
            lambda: self.make("maximum", sub(), small()),
            lambda: self.make("where", self.truth(rows, cols, depth - 1), sub(), sub()),
            lambda: self.make("mul", self.truth(rows, cols, depth - 1), sub()),
            lambda: self.make("pow_int", self.make("remainder", sub(), const(7)), k=r.choice([0, 1, 2, 3])),
            lambda: self.make("to_int", self.number(rows, cols, depth - 1, exact=True)),
        )

    def truth(self, rows: bool, cols: bool, depth: int) -> Node:
        r = self.random
        comparison = r.choice(["eq", "ne", "lt", "le", "gt", "ge"])
        row, col = leaf("mr.row_index"), leaf("mr.col_index")
        forms: list[Callable[[], Node]] = [
            lambda: self.make(
                comparison, self.whole(*self._part(rows, cols), depth), self.whole(rows, cols, depth - 1)
            ),
            lambda: self.make(
                comparison, self.number(rows, cols, depth - 1, exact=True), self.number(rows, cols, 0, exact=True)
            ),
            lambda: self.param(r.choice(["row"] * rows + ["col"] * cols + ["number"]), None, "bool"),
        ]
        if rows and cols:
            forms += [
                lambda: self.make(r.choice(["le", "lt", "ge", "eq"]), col, row),  # causal
                lambda: self.make("le", self.make("abs", self.make("sub", row, col)), const(r.randint(0, 3))),  # window
                lambda: self.make(
                    "eq", self.make("remainder", self.make("add", row, col), const(2)), const(0)
                ),  # parity
                lambda: self.make("eq", col, self.label(True)),
                lambda: self.make("eq", row, self.label(False)),
                lambda: self.make(
                    r.choice(["eq", "le", "ne"]), self.param("row", None, "int"), self.param("col", None, "int")
                ),
                lambda: self.param("pair", None, "bool"),
            ]
        if depth > 0:
            sub = lambda: self.truth(rows, cols, depth - 1)
            forms += [lambda: self.make(r.choice(["and", "or", "xor"]), sub(), sub()), lambda: self.make("not", sub())]
            forms += [
                lambda: self.make(r.choice(["mul", "add"]), sub(), sub())
            ]  # of truth values torch makes truth values
        return self.one(*forms)

    def label(self, of_rows: bool) -> Node:
        """The column that a row picks (or the row that a column does): arithmetic on its own index, or data."""
        index = leaf("mr.row_index" if of_rows else "mr.col_index")
        data = lambda: self.param("row" if of_rows else "col", None, "int")
        r = self.random
        return self.one(
            data,
            data,
            lambda: self.make("add", index, const(r.choice([1, -1, 2]))),
            lambda: self.make("floor_divide", index, const(2)),
            lambda: self.make("mul", index, const(r.choice([2, 3]))),
            lambda: self.make("sub", self.make("sub", leaf("mr.num_cols"), const(1)), index),
            lambda: self.make("remainder", self.make("add", index, data()), const(3)),
            lambda: self.make("add", data(), const(1)),
            lambda: self.make("where", self.truth(of_rows, not of_rows, 0), data(), index),
            lambda: index,
            lambda: const(r.choice([0, 1, -1, 100])),
        )

    # Reductions

    def reduction(self) -> Node:
        r = self.random
        over = self.pick({"cols": 68, "rows": 32})
        depth = r.randint(1, 3)
        axes = r.choices([(True, True), (True, False), (False, True)], [90, 5, 5])[0]
        size = self.sizes.cols if over == "cols" else self.sizes.rows
        number = lambda exact=False: self.number(*axes, depth, exact)
        weights = {
            "sum": 18, "gather": 10, "mean": 5, "logsumexp": 10, "softmax_mean": 16, "weighted_mean": 5,
            "best": 12, "topk": 6 if size else 0, "truth": 8, "var": 4, "whole": 8, "vector sum": 8,
            "two passes": 5,
        }  # fmt: skip
        kind = self.pick(weights)
        if kind == "sum":
            return self.make("mr.sum", number(), over=over)
        if kind == "gather":
            to_rows = over == "cols" or self.chance(0.3)
            hit = self.make("eq", leaf("mr.col_index" if to_rows else "mr.row_index"), self.label(to_rows))
            return self.make("mr.sum", self.make("where", hit, number(), const(0.0)), over=over)
        if kind == "mean":
            return self.make("mr.mean", number() if self.chance(0.7) else self.whole(*axes, depth), over=over)
        if kind == "logsumexp":
            return self.make("mr.logsumexp", self.masked(number()), over=over)
        if kind == "softmax_mean":
            value = number() if self.chance(0.4) else self.pair_vector(over)
            return self.make("mr.softmax_mean", self.masked(number()), value, over=over)
        if kind == "weighted_mean":
            weight = self.one(
                lambda: self.make("sigmoid", number()),
                lambda: self.truth(*axes, 1),
                lambda: self.make("abs", self.whole(*axes, 1)),
            )
            return self.make(
                "mr.weighted_mean", weight, number() if self.chance(0.6) else self.pair_vector(over), over=over
            )
        if kind == "best":
            op = r.choice(["mr.max", "mr.max", "mr.min", "mr.argmax", "mr.argmin"])
            x = number(True) if self.chance(0.92) else self.truth(*axes, 1)
            masks = x.cls == "float" and op in ("mr.max", "mr.argmax") and self.chance(0.4)
            return self.make(op, self.masked(x, exact=True) if masks else x, over=over)
        if kind == "topk":
            return self.topk(over, size, number(True))
        if kind == "truth":
            return self.make(r.choice(["mr.any", "mr.all", "mr.count", "mr.sum"]), self.truth(*axes, 2), over=over)
        if kind == "var":
            return self.make("mr.var", number(), k=r.choice([0, 1]), over=over)
        if kind == "whole":
            op = r.choice(["mr.sum", "mr.max", "mr.min", "mr.argmax", "mr.sum"])
            x = self._whole(*axes, depth)  # ids beyond 2**53 too: whole numbers are exact
            return self.make(op, x if x.bound < 2.0**55 or op != "mr.sum" else self.whole(*axes, depth), over=over)
        if kind == "vector sum":
            return self.make(r.choice(["mr.sum", "mr.sum", "mr.mean"]), self.pair_vector(over), over=over)
        s = self.masked(number())
        z = self.make("mr.logsumexp", s, over=over)
        self.results.append(z)
        p = self.make("exp", self.make("sub", s, self.make("clamp_min", z)))
        return self.make("mr.sum", self.make("mul", p, number()), over=over)

    def masked(self, x: Node, exact: bool = False) -> Node:
        """Some pairs hidden. ``exact``: no function that rounds is put around it, which decides who is largest."""
        if x.bound > 60:
            x = self.make("tanh", x) if self.chance(0.5) and not exact else x
        self.shared.append(x) if x.rows and x.cols and not x.holes else None
        if not self.chance(0.5):
            return x
        if self.chance(0.25) and x.rows and x.cols:
            return self.make("add", x, self.add(self.random.choice(["pair", "col", "row"]), None, "float", "masking"))
        return self.make("where", self.truth(True, True, 1), x, const(-float("inf")))

    def pair_vector(self, over: str) -> Node:
        """A vector of the folded side, or of pairs: a number times a vector."""
        letter = self.random.choice(["f", "g"])
        side = self.vector(over == "rows", over == "cols", letter, 1)
        if self.chance(0.5):
            return side
        if self.chance(0.3):
            side = self.make(self.random.choice(["add", "sub", "mul"]), self.vector(True, False, letter, 0),
                        self.vector(False, True, letter, 0))  # fmt: skip
        return self.make("mul", self.make("tanh", self.number(True, True, 1)), side) if self.chance(0.6) else side

    def topk(self, over: str, size: int, x: Node) -> Node:
        """Which of several equal values are found at the edge is not defined: the index breaks ties."""
        r = self.random
        whole = self.chance(0.3)
        if whole:
            x = self.whole(True, True, 1)
        tie = leaf("mr.col_index" if over == "cols" else "mr.row_index")
        scale = const(128) if whole else const(1024.0)
        x = self.make("add", self.make("mul", x, scale), tie)
        if not x.exact(self.bits):
            return self.make("mr.max", self._exact_leaf(True, True), over=over)
        attrs = {"k": r.randint(1, min(size, 3)), "largest": self.chance(0.7), "over": over}
        if not whole and attrs["largest"] and self.chance(0.4):
            x = self.make("where", self.truth(True, True, 1), x, const(-float("inf")))
        return self.make(r.choice(["mr.topk.values", "mr.topk.indices"]), x, **attrs)

    # Programs

    def program(self) -> Program:
        r = self.random
        for _ in range(r.choices([1, 2, 3, 4], [45, 30, 15, 10])[0]):
            self.results.append(self.reduction())
        outputs = [self.output(n) for n in self.results if self.chance(0.8)] or self.results[-1:]
        form = "single" if len(outputs) == 1 and self.chance(0.8) else r.choice(["tuple", "dict"])
        run = self.run()
        if any(n.op == "elu" for n in topological(tuple(outputs))):  # at 0 torch's second derivative of elu is no limit
            run = replace(run, second=False)
        return Program(tuple(self.params), tuple(outputs), form, self.sizes, self.dtype, self.seed, run)

    def output(self, node: Node) -> Node:
        """What comes after a reduction: nothing, or arithmetic on a row's or a column's values."""
        if self.chance(0.65) or node.cls == "bool" or node.holes:
            return node
        if node.feature is not None:
            return node if node.cls != "float" else self.make("mul", node, self._leaf(node.rows, node.cols, False))
        other = self.number(node.rows, node.cols, 1)
        return self.make(self.random.choice(["add", "sub", "mul"]), node, other)

    def run(self) -> Run:
        r = self.random
        if self.share == "interpret":
            return Run("triton", second=self.chance(0.1))
        engine = self.pick({"eager": 36, "auto": 30, "panel": 20, "reference": 14})
        tile = None
        if engine == "auto" and self.chance(0.7):
            tile = (r.choice([1, 2]), r.choice([1, 2, 3, 4]), r.choice([1, 2, 3, 5]))
        mode = self.pick(
            {"plain": 66, "repeat": 12, "checkpoint": 6, "grad": 5, "vmap": 4, "inplace": 3, "total": 4, "reuse": 6}
        )
        if self.dtype not in ("float64", "float32"):
            mode = "plain"
        return Run(engine, tile, mode, second=mode == "plain" and self.dtype == "float64" and self.chance(0.25))


def programs(seeds: Sequence[int], share: str = "unit") -> list[Program]:
    return [generate(seed, share) for seed in seeds]

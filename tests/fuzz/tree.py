"""Syntax trees of the pair language, and their two renderings: the body of an op, and plain torch on whole tensors.

Every node knows what the generator needs to stay inside the language: where it lives (rows, columns, features), its
number class, a bound on its size, whether it may be infinite (``holes``), and its ``grain``: a number of which every
value is a whole multiple. Where bound / grain is small, floating-point arithmetic is exact, so two correct
implementations agree even where the program is discontinuous: comparisons, ties, rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

LONGEST, WIDEST = 128, 128  # rows or columns, and features, that bounds and grains allow for
ORDER = ("bool", "int", "float")


@dataclass(frozen=True, eq=False)
class Node:
    """One operation of a body."""

    op: str
    args: tuple[Node, ...]
    attrs: tuple[Any, ...]
    rows: bool
    cols: bool
    feature: str | None
    cls: str  # bool, int or float
    bound: float
    grain: float | None
    holes: bool

    @property
    def is_reduction(self) -> bool:
        return self.op in REDUCTIONS

    def exact(self, bits: int) -> bool:
        return self.grain is not None and self.bound / self.grain < 2.0**bits


@dataclass(frozen=True)
class Rule:
    """An operation: its text (in both renderings), the class of its result, and how bound and grain follow."""

    text: str
    cls: str = "float"  # "same": the widest of the arguments
    bound: Callable[..., float] = lambda *b: max(b)
    grain: Callable[..., float | None] | None = None  # of the arguments' grains; None: the result is rounded
    floating: bool = False  # the arguments are converted to the floating type first


def _finest(*grains: float) -> float:
    return min(grains)


def _product(*grains: float) -> float:
    return math.prod(grains)


def _keep(g: float) -> float:
    return g


def _smooth(text: str, bound: Callable[..., float] = lambda *b: max(b)) -> Rule:
    return Rule(text, "float", bound, None, True)


RULES: dict[str, Rule] = {
    "add": Rule("({0} + {1})", "same", lambda a, b: a + b, _finest),
    "sub": Rule("({0} - {1})", "same", lambda a, b: a + b, _finest),
    "mul": Rule("({0} * {1})", "same", lambda a, b: a * b, _product),
    "div": Rule("({0} / (1.0 + {1}.abs()))", "float", lambda a, b: a, None, True),
    "div_int": Rule("({0} / {1})", "float", lambda a, b: 2 * a, None, True),
    "trunc_divide": Rule('torch.div({0}, {1}, rounding_mode="trunc")', "same", lambda a, b: a + 1, lambda a, b: 1.0),
    "floor_divide": Rule("({0} // {1})", "same", lambda a, b: 8 * a + 1, lambda a, b: 1.0),
    "remainder": Rule("({0} % {1})", "same", lambda a, b: b, _finest),
    "minimum": Rule("torch.minimum({0}, {1})", "same", max, _finest),
    "maximum": Rule("torch.maximum({0}, {1})", "same", max, _finest),
    "fmax": Rule("torch.fmax({0}, {1})", "float", max, _finest, True),
    "logaddexp": _smooth("torch.logaddexp({0}, {1})", lambda a, b: max(a, b) + 1),
    "lerp": _smooth("torch.lerp({0}, {1}, 0.25)", lambda a, b: a + b),
    "pow": _smooth("torch.pow({0}.abs() + 0.5, {1})", lambda a, b: (a + 0.5) ** min(b, 5) + 2 ** min(b, 5)),
    "pow_at_zero": _smooth("torch.pow({0}.abs(), {1}.abs())", lambda a, b: (a + 1) ** min(b, 5)),
    "pow_const": _smooth("torch.pow({0}.abs(), {k})", lambda a: (a + 1) ** 3),
    "pow_int": Rule("({0} ** {k})", "same", lambda a: (a + 1) ** 3, lambda g: min(g**3, g, 1.0)),
    "xlogy": _smooth("torch.xlogy({0}, 1.0 + {1}.abs())", lambda a, b: a * (b + 1)),
    "where": Rule("torch.where({0}, {1}, {2})", "same", lambda c, a, b: max(a, b), lambda c, a, b: min(a, b)),
    "neg": Rule("(-{0})", "same", grain=_keep),
    "abs": Rule("{0}.abs()", "same", grain=_keep),
    "square": Rule("torch.square({0})", "same", lambda a: a * a, lambda g: g * g),
    "relu": Rule("torch.relu({0})", "same", grain=_keep),
    "sign": Rule("torch.sign({0})", "same", lambda a: 1, lambda g: 1.0),
    "clamp": Rule("{0}.clamp(min={low}, max={high})", "same", lambda a: a, lambda g: min(g, 0.25)),
    "clamp_min": Rule("{0}.clamp(min=-20.0)", "float", lambda a: max(a, 20), lambda g: min(g, 1.0), True),
    "floor": Rule("torch.floor({0})", "same", lambda a: a + 1, lambda g: 1.0),
    "ceil": Rule("torch.ceil({0})", "same", lambda a: a + 1, lambda g: 1.0),
    "round": Rule("torch.round({0})", "same", lambda a: a + 1, lambda g: 1.0),
    "trunc": Rule("torch.trunc({0})", "same", lambda a: a + 1, lambda g: 1.0),
    "frac": Rule("torch.frac({0})", "float", lambda a: 1, lambda g: min(g, 1.0), True),
    "leaky_relu": Rule("F.leaky_relu({0}, 0.5)", "float", grain=lambda g: g / 2, floating=True),
    "hardtanh": Rule("F.hardtanh({0})", "float", lambda a: 1, lambda g: min(g, 1.0), True),
    "detach": Rule("{0}.detach()", "same", grain=_keep),
    "to_int": Rule("{0}.long()", "int", grain=lambda g: 1.0),
    "to_bool": Rule("{0}.bool()", "bool", lambda a: 1, lambda g: 1.0),
    "tanh": _smooth("torch.tanh({0})", lambda a: 1),
    "sigmoid": _smooth("torch.sigmoid({0})", lambda a: 1),
    "sin": _smooth("torch.sin({0})", lambda a: 1),
    "cos": _smooth("{0}.cos()", lambda a: 1),
    "erf": _smooth("torch.erf({0})", lambda a: 1),
    "atan": _smooth("torch.atan({0})", lambda a: 2),
    "softplus": _smooth("F.softplus({0})", lambda a: a + 1),
    "gelu": _smooth("F.gelu({0})"),
    "silu": _smooth("F.silu({0})"),
    "mish": _smooth("F.mish({0})"),
    "elu": _smooth("F.elu({0})", lambda a: a + 1),
    "logsigmoid": _smooth("F.logsigmoid({0})", lambda a: a + 1),
    "softsign": _smooth("F.softsign({0})", lambda a: 1),
    "sqrt": _smooth("torch.sqrt({0} * {0} + 1.0)", lambda a: a + 1),
    "rsqrt": _smooth("torch.rsqrt({0} * {0} + 0.5)", lambda a: 2),
    "log": _smooth("torch.log({0}.abs() + 0.5)", lambda a: math.log1p(a) + 1),
    "log1p": _smooth("torch.log1p({0}.abs())", lambda a: math.log1p(a) + 1),
    "reciprocal": _smooth("(1.0 + {0}.abs()).reciprocal()", lambda a: 1),
    "decay": _smooth("torch.exp(-{0}.abs())", lambda a: 1),
    "exp": _smooth("torch.exp({0})", lambda a: math.exp(min(a, 4))),
    "expm1": _smooth("torch.expm1(torch.tanh({0}))", lambda a: 2),
    "eq": Rule("({0} == {1})", "bool"),
    "ne": Rule("({0} != {1})", "bool"),
    "lt": Rule("({0} < {1})", "bool"),
    "le": Rule("({0} <= {1})", "bool"),
    "gt": Rule("({0} > {1})", "bool"),
    "ge": Rule("({0} >= {1})", "bool"),
    "and": Rule("({0} & {1})", "bool"),
    "or": Rule("({0} | {1})", "bool"),
    "xor": Rule("({0} ^ {1})", "bool"),
    "not": Rule("(~{0})", "bool"),
}

# Of vectors, to one number: the text of the body, and the dense one.
FEATURES: dict[str, tuple[str, str]] = {
    "dot": ("({0} @ {1})", "({0} * {1}).sum(-1)"),
    "sqdist": ("mr.sqdist({0}, {1})", "({0} - {1}).square().sum(-1)"),
    "distance": ("({0} - {1}).abs().sum()", "({0} - {1}).abs().sum(-1)"),
    "fsum": ("{0}.sum()", "{0}.sum(-1)"),
    "fmean": ("{0}.mean()", "{0}.mean(-1)"),
    "norm": ("{0}.norm()", "torch.linalg.vector_norm({0}, dim=-1)"),
    "famax": ("{0}.amax()", "{0}.amax(-1)"),
    "component": ("{0}[{k}]", "{0}[..., {k}]"),
}
# Reductions: the text of the body (without over), the dense function, and its further arguments.
REDUCTIONS: dict[str, tuple[str, str]] = {
    "mr.sum": ("mr.sum({0}", "fold_sum({0}, {d})"),
    "mr.mean": ("mr.mean({0}", "fold_mean({0}, {d})"),
    "mr.logsumexp": ("mr.logsumexp({0}", "fold_logsumexp({0}, {d})"),
    "mr.softmax_mean": ("mr.softmax_mean({0}, {1}", "fold_softmax_mean{v}({0}, {1}, {d})"),
    "mr.weighted_mean": ("mr.weighted_mean({0}, {1}", "fold_weighted_mean{v}({0}, {1}, {d})"),
    "mr.max": ("mr.max({0}", "fold_max({0}, {d})"),
    "mr.min": ("mr.min({0}", "fold_min({0}, {d})"),
    "mr.argmax": ("mr.argmax({0}", "fold_argmax({0}, {d})"),
    "mr.argmin": ("mr.argmin({0}", "fold_argmin({0}, {d})"),
    "mr.topk.values": ("mr.topk({0}, {k}, largest={largest}", "fold_topk_values({0}, {d}, {k}, {largest})"),
    "mr.topk.indices": ("mr.topk({0}, {k}, largest={largest}", "fold_topk_indices({0}, {d}, {k}, {largest})"),
    "mr.any": ("mr.any({0}", "fold_any({0}, {d})"),
    "mr.all": ("mr.all({0}", "fold_all({0}, {d})"),
    "mr.count": ("mr.count({0}", "fold_count({0}, {d})"),
    "mr.var": ("mr.var({0}, correction={k}", "fold_var({0}, {d}, {k})"),
}
LEAVES = {"mr.row_index": (True, False), "mr.col_index": (False, True), "mr.num_rows": (False,) * 2}
LEAVES["mr.num_cols"] = (False, False)
_FLOATING = {"mr.mean", "mr.logsumexp", "mr.softmax_mean", "mr.weighted_mean", "mr.var"}
_CLASSES = {"mr.any": "bool", "mr.all": "bool", "mr.count": "int", "mr.argmax": "int", "mr.argmin": "int"}
_CLASSES["mr.topk.indices"] = "int"


def widest(nodes: Sequence[Node]) -> str:
    return max((n.cls for n in nodes), key=ORDER.index)


# Making nodes --------------------------------------------------------------------------------------------------------


def const(value: float | int | bool) -> Node:
    cls = type(value).__name__
    grain = None
    if math.isfinite(value):
        grain = 1.0 if cls != "float" else next((g for g in (1.0, 0.5, 0.25, 0.125) if value % g == 0), None)
    holes = math.isinf(value)
    return Node("const", (), (value,), False, False, None, cls, 0.0 if holes else abs(value), grain or 1.0, holes)


def leaf(op: str) -> Node:
    return Node(op, (), (), *LEAVES[op], None, "int", LONGEST, 1.0, False)


def make(op: str, *args: Node, **attrs: Any) -> Node:
    """The operation on these arguments."""
    rows, cols = any(a.rows for a in args), any(a.cols for a in args)
    feature = next((a.feature for a in args if a.feature is not None), None)
    items = tuple(sorted(attrs.items()))
    if op in REDUCTIONS:
        return _reduction(op, args, items, rows, cols, feature)
    if op in FEATURES:
        return _of_features(op, args, items, rows, cols)
    rule = RULES[op]
    cls = rule.cls if rule.cls != "same" else widest(args[1:] if op == "where" else args)
    bound = rule.bound(*(a.bound for a in args))
    grain = None
    if rule.grain is not None and all(a.grain is not None for a in args):
        grain = rule.grain(*(a.grain for a in args))
    if cls == "bool":
        bound, grain = 1.0, 1.0
    holes = any(a.holes for a in args) and op not in ("clamp_min", "exp")
    return Node(op, args, items, rows, cols, feature, cls, bound, grain, holes)


def _of_features(op: str, args: tuple[Node, ...], items: tuple, rows: bool, cols: bool) -> Node:
    bounds, grains = [a.bound for a in args], [a.grain for a in args]
    grain = min(grains) if None not in grains else None  # type: ignore[type-var]
    if op == "dot":
        bound, grain = WIDEST * math.prod(bounds), grain and math.prod(grains)  # type: ignore[arg-type]
    elif op == "sqdist":
        bound, grain = WIDEST * sum(bounds) ** 2, grain and grain**2
    else:
        bound = WIDEST * sum(bounds)
        grain = None if op in ("fmean", "norm") else grain
    cls = widest(args) if op not in ("fmean", "norm", "sqdist") else "float"
    return Node(op, args, items, rows, cols, None, cls, bound, grain, False)


def _reduction(op: str, args: tuple[Node, ...], items: tuple, rows: bool, cols: bool, feature: str | None) -> Node:
    attrs = dict(items)
    rows, cols = (rows, False) if attrs["over"] == "cols" else (False, cols)
    cls = "float" if op in _FLOATING else _CLASSES.get(op) or widest(args)
    if op == "mr.sum" and cls == "bool":
        cls = "int"
    value = args[-1]
    bound, grain = value.bound, value.grain
    if op in ("mr.sum", "mr.count"):
        bound *= LONGEST
    if op in _FLOATING:
        bound, grain = (bound + 6 if op != "mr.var" else bound * bound), None
    if op in _CLASSES:
        bound, grain = LONGEST, 1.0
    if op.startswith("mr.topk"):
        feature = f"{attrs['k']} best"
    holes = op in ("mr.max", "mr.min", "mr.logsumexp", "mr.mean", "mr.var") or op == "mr.topk.values"
    return Node(op, args, items, rows, cols, feature, cls, bound, grain, holes)


def topological(roots: Sequence[Node]) -> list[Node]:
    """All nodes under the roots, arguments first."""
    seen: dict[int, Node] = {}

    def visit(node: Node) -> None:
        if id(node) not in seen:
            for a in node.args:
                visit(a)
            seen[id(node)] = node

    for root in roots:
        visit(root)
    return list(seen.values())


# Rendering -----------------------------------------------------------------------------------------------------------


class Writer:
    """Renders trees: what is used twice, and every reduction, has a line and a name of its own."""

    def __init__(self, roots: Sequence[Node]):
        self.nodes = topological(roots)
        uses: dict[int, int] = {}
        for node in self.nodes:
            for a in node.args:
                uses[id(a)] = uses.get(id(a), 0) + 1
        named = [n for n in self.nodes if n.args and (n.is_reduction or uses.get(id(n), 0) > 1)]
        self.names = {id(n): f"t{k}" for k, n in enumerate(named)}
        self.roots = roots

    def lines(self) -> Iterator[str]:
        self.texts: dict[int, str] = {}
        for node in self.nodes:
            text = self.text(node, [self.texts[id(a)] for a in node.args])
            name = self.names.get(id(node))
            if name is not None:
                yield f"{name} = {text}"
            self.texts[id(node)] = name or text

    def returned(self) -> list[str]:
        return [self.texts[id(r)] for r in self.roots]

    def text(self, node: Node, args: list[str]) -> str:
        raise NotImplementedError


class BodyWriter(Writer):
    """The body of an op."""

    def text(self, node: Node, args: list[str]) -> str:
        attrs = dict(node.attrs) if node.args else {}
        if node.op == "const":
            value = node.attrs[0]
            return "-torch.inf" if value == -math.inf else repr(value)
        if node.op == "param":
            return node.attrs[0]
        if not node.args:
            return node.op
        if node.op in REDUCTIONS:
            over = "" if attrs["over"] == "cols" else ', over="rows"'
            text = REDUCTIONS[node.op][0].format(*args, **attrs) + over + ")"
            return text + (f".{node.op.rsplit('.')[-1]}" if node.op.startswith("mr.topk") else "")
        if node.op in FEATURES:
            return FEATURES[node.op][0].format(*args, **attrs)
        return RULES[node.op].text.format(*args, **attrs)


class DenseWriter(Writer):
    """The same in plain torch on whole tensors; see ``dense``."""

    def text(self, node: Node, args: list[str]) -> str:
        attrs = dict(node.attrs) if node.args else {}
        if node.op == "const":
            value = node.attrs[0]
            return f"const({'-math.inf' if value == -math.inf else repr(value)})"
        if node.op == "param":
            return node.attrs[0]
        if not node.args:
            return node.op.removeprefix("mr.")
        if node.op in REDUCTIONS:
            return self._fold(node, args, attrs)
        if node.op in FEATURES:
            if node.op in ("fmean", "norm", "sqdist"):
                args = [self._floating(a, t) for a, t in zip(node.args, args, strict=True)]
            return FEATURES[node.op][1].format(*args, **attrs)
        rule = RULES[node.op]
        if rule.floating:
            args = [self._floating(a, t) for a, t in zip(node.args, args, strict=True)]
        if node.feature is not None:
            args = [f"vec({t})" if a.feature is None else t for a, t in zip(node.args, args, strict=True)]
        if node.op == "floor_divide":  # a step function, for which torch has no derivative
            args = [f"{t}.detach()" for t in args]
        if node.op in ("minimum", "maximum"):  # torch wants one type
            args = [
                t if a.cls == node.cls else f"{t}.to({_dtype(node.cls)})" for a, t in zip(node.args, args, strict=True)
            ]
        return rule.text.format(*args, **attrs)

    @staticmethod
    def _floating(node: Node, text: str) -> str:
        return text if node.cls == "float" else f"{text}.to(dtype)"

    def _fold(self, node: Node, args: list[str], attrs: dict[str, Any]) -> str:
        dim, size = (-1, "N") if attrs["over"] == "cols" else (-2, "M")
        if node.op in _FLOATING and node.op != "mr.weighted_mean":
            args = [self._floating(a, t) for a, t in zip(node.args, args, strict=True)]
        elif node.op == "mr.weighted_mean":
            args = [args[0], self._floating(node.args[1], args[1])]
        elif node.op == "mr.sum" and node.args[0].cls == "bool":
            args = [f"{args[0]}.long()"]
        vector = node.args[-1].feature is not None
        spread = [f"full({t}, {dim - (a.feature is not None)}, {size})" for a, t in zip(node.args, args, strict=True)]
        mean = node.op in ("mr.softmax_mean", "mr.weighted_mean")
        d = dim if mean or not vector else dim - 1
        return REDUCTIONS[node.op][1].format(*spread, d=d, v="_vector" if vector and mean else "", **attrs)


def _dtype(cls: str) -> str:
    return {"bool": "torch.bool", "int": "torch.int64", "float": "dtype"}[cls]

"""How each kind of reduction is folded in a kernel: its state before the loop, one tile's step, its results.

The state is what computes best (a running maximum, sums not yet divided), in blocks of one number or one vector per
kept index. What every kind answers stands in ``reduction.py``.
"""

from __future__ import annotations

import math
from typing import Any

from ....program import constructors
from ....program.constructors import ONE, apply
from ....program.contract import contractions
from ....program.expression import Expr, const, node, topological
from ....program.symbol import Symbol, expr_of
from .accumulators import Accumulator, move_factors_to_weight
from .exponents import LOG2E, literal
from .expressions import ExpressionWriter, is_one
from .kernel_spec import Unsupported
from .label_gather import LabelColumnWriter, can_read_one_column
from .reduction import Kind
from .topk import TopK

_ABOVE = 60  # in powers of two: how far a guess lies above the maximum of one tile
_MOST = 2.0**40  # totals below this leave room for what weights are multiplied by


_LEAST = 2.0**-80  # totals above this lost nothing that counts


class Sum(Kind):
    def prepare(self) -> None:
        x = self.reduction.args[0]
        self.total = Accumulator(
            self.name, x.feature, "int" if x.dtype == "bool" else x.dtype, self.v, self.v.spec.lanes
        )

    @property
    def totals(self) -> list[Accumulator]:
        return [self.total]

    def start(self) -> list[str]:
        return self.total.start()

    def step(self, fields: tuple[Expr, ...]) -> None:
        parts = [move_factors_to_weight(c) for c in contractions(fields[0], self.over)]
        if self.total.waits(parts):
            self.v.products(parts[0].weight)
            self.v.inside.append(self.total.catch_up())
            self.v.inside.append(self.total.wait(self.weight(parts[0].weight)))
            return
        if self.v.late and len(parts) > 1:  # a product is waited for, and with it what was added to the sum before
            self.v.products(*(c.weight for c in parts if not c.walk))
        for c in parts:
            self.total.add(c, None if c.walk else self.weight(c.weight))

    def weight(self, w: Expr) -> str:
        """The name of a whole block of weights, 0 beyond the folded axis."""
        text = self.v.full(w)
        text = f"{text}.to(tl.int32)" if w.dtype == "bool" else f"{text}.to(tl.int64)" if w.dtype == "int" else text
        return self.v.seen_name(text, "0")

    def finish(self) -> list[tuple[list[str], Any]]:
        texts = self.total.result()
        if self.scale is not ONE:
            factor = self.v.number(self.scale)
            if self.total.tiny and not self.v.spec.keeps(self.scale):
                factor = f"tl.sum({factor} + tl.zeros([1, 1], {self.v.float}), 1)"
            elif self.total.tiny:
                factor = f"tl.reshape({factor}, [KEPT])"
            texts = [f"{t} * {factor}" for t in texts]
        return [(texts, self.total.feature)]


class Soft(Kind):
    """Running maximum ``top``, Σ exp(s - top), and Σ exp(s - top) v for each value.

    With bfloat16 products whole tiles go without: ``top`` is then a little above the maximum of the first of them, and
    weights have the range of float32 on both sides. Where one is out of it (later logits lie 2¹⁰⁰ above), which the
    total shows, the program instance begins again.

    A weight is rounded to 16 bits for its product. Measured from the running maximum the largest weight is exactly 1;
    measured from a guess it is rounded too, and where it outweighs all others the mean would inherit its error. So the
    largest weights are noted (``largest``: one for each thread that holds a part of the row), and what rounding took
    off them is taken off the divisor as well: numerator and divisor hold the same weights, and the error cancels. The
    logsumexp is of the exact total.

    With 16-bit products the maximum is kept times log2(e), so that a weight is one multiply-subtract and one exp2; in
    float32 the difference is taken first, so that large logits keep their digits.
    """

    def prepare(self) -> None:
        n = self.name
        self.fast = self.v.spec.narrow is not None
        self.sloped = False
        self.means = [
            Accumulator(f"{n}_mean{k}", x.feature, "float", self.v, False)
            for k, x in enumerate(self.reduction.args[1:])
        ]
        self.level = self.v.spec.guess and self._level()
        self.guesses = self.level and not self._short()
        self.rounded = [self._is_rounded(m, x) for m, x in zip(self.means, self.reduction.args[1:], strict=True)]
        self.compensates = self.guesses and any(self.rounded)
        self.restarted = False  # whether this loop has begun again with a running maximum

    def _is_rounded(self, mean: Accumulator, value: Expr) -> bool:
        """Whether a mean's weights, and nothing but them, are rounded to 16 bits for a matrix product."""
        parts = [move_factors_to_weight(c) for c in contractions(value, self.over)]
        plain = [is_one(c.weight) and not c.walk and c.vector is not None and c.vector.op == "leaf" for c in parts]
        return all(plain) and not mean.tiny

    def _level(self) -> bool:
        """Whether one tile is like another: no data of the folded axis, such as a bias, raises logits.

        ``sloped``: logits fall with a distance between indices, and the tile to look at is the one nearest to the rows'
        own indices."""
        logit = self.reduction.args[0]
        while logit.op == "where" and logit.args[2].const == -math.inf:
            logit = logit.args[1]
        numbers = [e for e in topological([logit]) if e.feature is None and not e.is_pair and self.v.spec.folds(e)]
        self.sloped = bool(numbers)
        return not any(e.op == "leaf" for e in numbers)

    def _short(self) -> bool:
        """Whether walks are too short to look at a tile twice: several conditions, or data, say what is seen."""
        logit = self.reduction.args[0]
        conditions = topological(logit.args[:1]) if logit.op == "where" else []
        return any(e.op in ("logical_and", "leaf") for e in conditions)

    def guess(self, fields: tuple[Expr, ...]) -> None:
        """A maximum for whole tiles, from one of them."""
        n, (s, factor) = self.name, self._logit(fields[0])
        self.v.inside += [
            f"{n}_top = tl.max({s}, 1){factor} + {_ABOVE}",
            f'{n}_top = tl.where(tl.abs({n}_top) == float("inf"), 0.0, {n}_top)',
        ]

    def before_whole_tiles(self) -> list[str]:
        """What whole tiles add to where a guess stands in for the maximum: numbers of each thread's own."""
        n = self.name
        largest = [f"{n}_largest = tl.zeros([KEPT, 4], tl.int32)"] if self.compensates else []
        return [f"{n}_total = tl.zeros([KEPT, 4], {self.v.float})", *largest]

    def after_whole_tiles(self) -> list[str]:
        """The same of each row."""
        n = self.name
        largest = f"rounding(tl.cast({n}_largest, tl.float32, bitcast=True), tl.{self.v.spec.narrow})"
        rounding = [f"{n}_rounding = tl.sum({largest}, 1)"] if self.compensates else []
        return [f"{n}_total = tl.sum({n}_total, 1)", *rounding]

    def guessed(self, also: str = "") -> str:
        """Whether no weight is out of range, and what else is asked of a total; NaN is not in range."""
        near = f"({self.name}_total < {literal(_MOST)})"
        near = f"{near} & ({self.name}_total > {literal(_LEAST)})" if self.sloped else near
        return f"tl.max(tl.where({near}{also}, 0, 1)) == 0"

    def start(self) -> list[str]:
        n, kind = self.name, self.v.float
        lines = [f'{n}_top = tl.full([KEPT], float("-inf"), {kind})', f"{n}_total = tl.zeros([KEPT], {kind})"]
        lines += [f"{n}_rounding = tl.zeros([KEPT], {kind})"] if self.compensates else []
        return lines + [line for m in self.means for line in m.start()]

    @property
    def totals(self) -> list[Accumulator]:
        return self.means

    def step(self, fields: tuple[Expr, ...]) -> None:
        v, n = self.v, self.name
        parts = [[move_factors_to_weight(c) for c in contractions(value, self.over)] for value in fields[1:]]
        late = [self.guessing and is_one(p[0].weight) and m.waits(p) for m, p in zip(self.means, parts, strict=True)]
        s, factor = self._logit(fields[0])
        v.inside += [m.catch_up() for m, waits in zip(self.means, late, strict=True) if waits]
        self._weigh(s, factor)
        for mean, cs, waits in zip(self.means, parts, late, strict=True):
            v.inside += [] if self.guessing else mean.scale(f"{n}_shrink")
            if waits:
                v.inside.append(mean.wait(f"{n}_weight"))
                continue
            for c in cs:
                plain = c.walk or is_one(c.weight)
                part = f"{n}_weight" if plain else v.seen(f"{n}_weight * {v.number(c.weight)}", "0.0")
                mean.add(c, part)

    def weigh(self, logit: Expr) -> None:
        """What one tile does to the maximum and to the total: its weights, and what the sums before it shrink by."""
        self._weigh(*self._logit(logit))

    def _weigh(self, s: str, factor: str) -> None:
        n, power = self.name, "tl.exp2" if self.fast else "tl.exp"
        if self.guessing:
            self.v.inside.append(f"{n}_weight = {power}({s}{factor} - {n}_top[:, None])")
            self.add_weights()
            return
        self.v.inside += [
            f"{n}_new = tl.maximum({n}_top, tl.max({s}, 1){factor})",
            f'{n}_safe = tl.where(tl.abs({n}_new) == float("inf"), 0.0, {n}_new)  # rows that saw nothing yet',
            f"{n}_weight = {power}({s}{factor} - {n}_safe[:, None])",
            f"{n}_shrink = {power}({n}_top - {n}_safe)",
            f"{n}_total = {n}_total * {n}_shrink + tl.sum({n}_weight, 1)",
            f"{n}_top = {n}_new",
        ]
        if self.compensates and not self.restarted:
            self.v.inside += [
                f"{n}_most = tl.cast(tl.max(tl.cast({n}_weight, tl.int32, bitcast=True), 1), tl.float32, bitcast=True)",
                f"{n}_rounding = {n}_rounding * {n}_shrink + rounding({n}_most, tl.{self.v.spec.narrow})",
            ]

    def add_weights(self) -> None:
        """Add a tile's weights, measured from a guess, to the total."""
        n = self.name
        self.v.inside.append(f"{n}_total += lanes({n}_weight)")
        if self.compensates:
            self.v.inside.append(f"{n}_largest = tl.maximum({n}_largest, lane_largest({n}_weight))")

    def _logit(self, logit: Expr) -> tuple[str, str]:
        """The name of a whole block of logits, and the text that multiplies them, if anything does."""
        v, factor = self.v, ""
        if self.fast:
            logit, factor = self._scaled(logit)
        s = v.seen_name(v.full(logit), 'float("-inf")')
        return s, f" * {factor}" if factor else ""

    def _scaled(self, logit: Expr) -> tuple[Expr, str]:
        """A logit as core × (positive factor), the factor taken out of a ``where`` against minus infinity too."""
        core, factor = self.v.linear(logit, positive=True)
        return (core, factor) if core.is_pair else (logit, self.v.factor(LOG2E))

    def finish(self) -> list[tuple[list[str], Any]]:
        n = self.name
        self.v.inside += [
            f'{n}_peak = tl.where(tl.abs({n}_top) == float("inf"), 0.0, {n}_top)'
            + (f" * {literal(1 / LOG2E)}" if self.fast else ""),
            f"{n}_log = tl.log({n}_total)",
            f"{n}_seen = tl.where({n}_total == 0.0, 1.0, {n}_total)  # a row that sees nothing has mean 0",
        ]
        if self.compensates:
            self.v.inside.append(f"{n}_rounded = {n}_seen - {n}_rounding  # the total of the weights as multiplied")
        results: list[tuple[list[str], Any]] = [([f"{n}_log + {n}_peak"], None)]
        for m, rounded in zip(self.means, self.rounded, strict=True):
            block = m.feature is not None and not m.tiny
            by = f"{n}_rounded" if self.compensates and rounded else f"{n}_seen"
            texts = [self.v.divided(t, by) if block else f"{t} / {by}" for t in m.result()]
            results.append((texts, m.feature))
        return [*results, ([f"{n}_log"], None), ([f"{n}_peak"], None)]


class Pick(Kind):
    """The number at one index of the folded axis.

    With 16-bit products it is computed once per kept index, from what lies there; in float32 it is read from the tile
    that holds it, so that a small loss is the difference of numbers that were rounded alike.
    """

    def prepare(self) -> None:
        self.direct = self.v.spec.narrow is not None and can_read_one_column(self.reduction.args[1], self.v.spec)
        self.total = Accumulator(self.name, None, "float", self.v, self.v.spec.lanes)

    def start(self) -> list[str]:
        return [] if self.direct else self.total.start()

    def step(self, fields: tuple[Expr, ...]) -> None:
        if self.direct:
            return
        target, value, _ = fields
        hit = f"folded_at[None, :] == {self.v.own_place(target)}"
        if self.v.masked:  # what lies beyond the axis is no match, whatever the index
            hit = f"({hit}) & folded_in[None, :]"
        self.total._sum(self.name, f"tl.where({hit}, {self.v.full(value)}, 0.0)")

    def finish(self) -> list[tuple[list[str], Any]]:
        if not self.direct:
            return [(self.total.result(), None)]
        target, value, _ = self.reduction.args
        there = LabelColumnWriter(self.v, self.name, target)
        text = there.number(value)
        self.v.inside += there.before
        zeros = f"tl.zeros([KEPT, 1], {self.v.float})"
        return [([f"tl.reshape(tl.where({there.inside_text}, {text} + {zeros}, 0.0), [KEPT])"], None)]


class Best(Kind):
    """The best value so far and its place; -1 until something better than infinity was seen."""

    def prepare(self) -> None:
        x = self.reduction.args[0]
        self.type = self.v.float if x.dtype == "float" else "tl.int64"
        self.worst = literal(-math.inf if self.params[0] else math.inf)
        if x.dtype != "float":
            self.worst = repr(-(2**63) if self.params[0] else 2**63 - 1)
        self.better, self.extreme = ("larger", "highest") if self.params[0] else ("smaller", "lowest")

    def start(self) -> list[str]:
        n = self.name
        return [f"{n} = tl.full([KEPT], {self.worst}, {self.type})", f"{n}_at = tl.full([KEPT], -1, tl.int32)"]

    def seen(self, x: Expr) -> str:
        """A tile's values, the worst where nothing is."""
        value = self.v.full(x) if x.dtype == "float" else f"{self.v.full(x)}.to(tl.int64)"
        return self.v.seen(value, f"tl.full([1, 1], {self.worst}, {self.type})")

    def step(self, fields: tuple[Expr, ...]) -> None:
        v, n = self.v, self.name
        v.inside += [
            f"{n}_new = {self.seen(fields[0])}",
            f"{n}_tile = tl.reduce({n}_new, 1, {self.extreme})",
            f"{n}_here = {self._here(fields[0])}",
            f"{n}_place = tl.min(tl.where({n}_here, folded_at[None, :], 2147483647), 1)",
            f"{n}, {n}_at = {self.better}({n}, {n}_at, {n}_tile, {n}_place)",
        ]

    def _here(self, x: Expr) -> str:
        """Where a tile's best is: what is no number is best. NVIDIA's sums make only one such, so those with noise are
        compared bit by bit: half the instructions, and a sample's hide behind no others."""
        new, tile = f"{self.name}_new", f"{self.name}_tile[:, None]"
        if self.v.spec.native and x.op == "add" and any(a.op == "gumbel" for a in x.args):
            return f"{new}.to(tl.int32, bitcast=True) == {tile}.to(tl.int32, bitcast=True)"
        return f"({new} == {tile}) | ({new} != {new})"

    def finish(self) -> list[tuple[list[str], Any]]:
        return [([self.name], None), ([f"{self.name}_at.to(tl.int64)"], None)]


class Moments(Kind):
    """Mean and sum of squared deviations; tiles are merged by Chan's formula."""

    def start(self) -> list[str]:
        n, kind = self.name, self.v.float
        return [f"{n}_{part} = tl.zeros([KEPT], {kind})" for part in ("mean", "spread", "count")]

    def step(self, fields: tuple[Expr, ...]) -> None:
        v, n = self.v, self.name
        x = v.full(fields[0])
        size = "tl.minimum(folded_size - start, FOLDED)" if v.masked else "FOLDED"
        v.inside += [
            f"{n}_n = tl.zeros([KEPT], {v.float}) + {size}",
            f"{n}_tile = tl.sum({v.seen(x, '0.0')}, 1) / {n}_n",
            f"{n}_dev = {v.seen(f'{x} - {n}_tile[:, None]', '0.0')}",
            f"{n}_gap = {n}_tile - {n}_mean",
            f"{n}_all = {n}_count + {n}_n",
            f"{n}_spread += tl.sum({n}_dev * {n}_dev, 1) + {n}_gap * {n}_gap * ({n}_count * {n}_n / {n}_all)",
            f"{n}_mean += {n}_gap * ({n}_n / {n}_all)",
            f"{n}_count = {n}_all",
        ]

    def finish(self) -> list[tuple[list[str], Any]]:
        n = self.name
        return [([f'tl.where({n}_count == 0.0, float("nan"), {n}_mean)'], None), ([f"{n}_spread"], None)]


class User(Kind):
    """A monoid of numbers: its traced ``combine`` is a function that tl.reduce folds a tile with."""

    def prepare(self) -> None:
        (monoid,) = self.params
        if any(f.feature is not None for f in self.reduction.args):
            raise Unsupported(f"{monoid.__name__} has vector fields")
        self.fields = list(monoid.fields())
        self.identities = [literal(float(field.identity)) for field in monoid.fields().values()]
        sides = [{n: _plain(f"{side}_{n}") for n in self.fields} for side in "ab"]
        a, b = (monoid(**{n: Symbol(e) for n, e in side.items()}) for side in sides)
        combined = monoid.combine(a, b)
        inner = ExpressionWriter(self.v.spec)
        inner.scalars = True
        inner.outer |= {e: str(e.attrs[0]) for side in sides for e in side.values()}
        results = [inner.number(apply("cast", expr_of(getattr(combined, n)), to="float")) for n in self.fields]
        arguments = [str(e.attrs[0]) for side in sides for e in side.values()]
        self.helpers = [f"def combine{self.place}({', '.join(arguments)}):"]
        self.helpers += [f"    {line}" for line in inner.before] + [f"    return {', '.join(results)}"]

    def start(self) -> list[str]:
        kind = self.v.float
        pairs = zip(self.fields, self.identities, strict=True)
        return [f"{self.name}_{f} = tl.full([KEPT], {identity}, {kind})" for f, identity in pairs]

    def step(self, fields: tuple[Expr, ...]) -> None:
        v = self.v
        zeros = f"tl.zeros([KEPT, FOLDED], {v.float})"
        blocks = [
            v.seen(v.full(e) if e.is_pair else f"{zeros} + {v.number(e)}", f"tl.full([1, 1], {identity}, {v.float})")
            for e, identity in zip(fields, self.identities, strict=True)
        ]
        elements = blocks[0] if len(blocks) == 1 else f"({', '.join(blocks)})"
        state = ", ".join(f"{self.name}_{f}" for f in self.fields)
        tile = ", ".join(f"{self.name}_{f}_tile" for f in self.fields)
        combine = f"combine{self.place}"
        v.inside += [
            f"{tile} = tl.reduce({elements}, 1, {combine})",
            f"{state} = {combine}({state}, {tile})",
        ]

    def finish(self) -> list[tuple[list[str], Any]]:
        return [([f"{self.name}_{f}"], None) for f in self.fields]


def _plain(name: str) -> Expr:
    return node("leaf", (), (name,), rows=False, cols=False, feature=None, dtype="float")


KINDS: dict[str, type[Kind]] = {
    "sum": Sum,
    "soft": Soft,
    "pick": Pick,
    "best": Best,
    "moments": Moments,
    "user": User,
    "topk": TopK,
}


def make(place: int, reduction: Expr, scale: Expr, v: ExpressionWriter) -> Kind:
    kind = KINDS.get(reduction.attrs[0])
    if kind is None:
        raise Unsupported(f"{reduction.attrs[0]} has no kernel")
    return kind(place, reduction, scale, v)


def known(e: Expr, truths: dict[Expr, bool]) -> Expr:
    """An expression with some conditions known."""
    return constructors.substitute((e,), {c: const(t) for c, t in truths.items()})[0] if truths else e

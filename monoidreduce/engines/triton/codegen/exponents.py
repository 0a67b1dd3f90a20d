"""Exponentials in a kernel: as powers of two, with every factor and one-sided part joined outside the pairs."""

from __future__ import annotations

import math

from ....program.constructors import apply
from ....program.expression import Expr, const
from .kernel_spec import Spec

LOG2E = math.log2(math.e)
_DEEPEST = 128  # nodes under an exponent, up to which factors are taken out of its sums and conditions
Taken = tuple[Expr, float, list[tuple[Expr, bool]]]  # what is left, and what it is multiplied by, or divided (True)


def literal(value: float | int | bool) -> str:
    if isinstance(value, float) and (math.isinf(value) or math.isnan(value)):
        return f'float("{value}")'
    return repr(value)


class Exponents:
    """The part of :class:`Values` that knows of exponents, and of what lies beyond the folded axis."""

    spec: Spec
    shifts: list[tuple[Expr, Expr]]  # of exponents, which the launch computes: a number and the logarithm beside it
    masked: bool

    def number(self, e: Expr) -> str:
        raise NotImplementedError

    def argument(self, a: Expr, want: str) -> str:
        raise NotImplementedError

    def bind(self, key: object, text: str, folded: bool, name: str = "") -> str:
        raise NotImplementedError

    def _primitive(self, e: Expr, args: list[str]) -> str:
        raise NotImplementedError

    def seen(self, text: str, otherwise: str) -> str:
        """A block with what lies beyond the folded axis replaced."""
        return f"tl.where(folded_in[None, :], {text}, {otherwise})" if self.masked else text

    def seen_name(self, text: str, otherwise: str) -> str:
        """The same by name."""
        return self.bind((text, otherwise), self.seen(text, otherwise), True) if self.masked else text

    def exp(self, x: Expr, total: Expr | None = None) -> str:
        """exp as exp2, the factors of the exponent and log2(e) joined, one-sided parts scaled outside the pairs.

        Only where products are of 16 bits: a fused multiply-subtract of large logits costs float32 its last digits.
        ``total``: the logarithm of what the exponential is divided by; it joins the one-sided part.
        """
        if total is not None:
            one_sided = x.op == "sub" and x.is_pair and not x.args[1].is_pair
            if not one_sided or self.spec.folds(x.args[1]) != self.spec.folds(total):
                return f"{self.exp(x)} * decay({self.number(total)})"
            core, factor = self.linear(x.args[0])
            pair = self.argument(core, "float")  # first, so that numbers are loaded while it is computed
            if self.spec.join and self.spec.folds(total) and x.args[1].op == total.op == "leaf":
                return f"tl.exp2({pair} * {factor} - {self._shift(x.args[1], total)})"
            shift = f"({self.number(x.args[1])} + unseen({self.number(total)})) * {literal(LOG2E)}"
            shift = self.bind((x.args[1], total, "log2"), shift, self.spec.folds(total))
            return f"tl.exp2({pair} * {factor} - {shift})"
        if x.op in ("sub", "add") and (x.args[0].is_pair != x.args[1].is_pair) and x.is_pair:
            parts = []
            for a in x.args:
                core, factor = self.linear(a) if a.is_pair else (a, self.factor(LOG2E))
                text = f"{self.argument(core, 'float')} * {factor}"
                parts.append(text if a.is_pair else self.bind((a, "log2"), text, self.spec.folds(a)))
            return f"tl.exp2({parts[0]} {'-' if x.op == 'sub' else '+'} {parts[1]})"
        core, factor = self.linear(x)
        return f"tl.exp2({self.argument(core, 'float')} * {factor})"

    def _shift(self, number: Expr, total: Expr) -> str:
        """(number + the logarithm of a total) × log2(e), as the launch has made it."""
        if (number, total) not in self.shifts:
            self.shifts.append((number, total))
        name = f"shift{self.shifts.index((number, total))}"
        if self.spec.line:
            text = f"tl.reshape({name}_box.load([tl.cast(batch, tl.int32), start]), [FOLDED])[None, :]"
            return self.bind(name, text, True, name)
        base = f"{name}_ptr + tl.cast(batch, tl.int64) * folded_size"
        base = self.bind((name, "base"), base, False, f"{name}_base")
        mask = ", mask=folded_in, other=0" if self.masked else ""
        return self.bind(name, f"tl.load({base} + start + folded_lane{mask})[None, :]", True, name)

    def linear(self, e: Expr, positive: bool = False, unit: float = LOG2E) -> tuple[Expr, str]:
        """e as core × factor: the factor, times a unit, is a number known before the loop, so it costs nothing.

        ``positive``: only factors above zero are taken out.
        """
        core, factor, numbers = self._taken_out(e, positive)
        return core, self.factor(factor * unit, *numbers)

    def _taken_out(self, e: Expr, positive: bool) -> Taken:
        factor = 1.0
        numbers: list[tuple[Expr, bool]] = []
        while True:
            k = None
            if e.op == "neg" and not positive:
                e, factor = e.args[0], -factor
                continue
            hides = e.op == "where" and e.args[2].op == "const" and e.depth <= _DEEPEST
            if hides and e.args[2].const == -math.inf:  # what is hidden stays so
                core, inner, more = self._taken_out(e.args[1], positive=True)
                return apply("where", e.args[0], core, e.args[2]), factor * inner, [*numbers, *more]
            if e.op in ("add", "sub") and (made := self._from_both(e)) is not None:
                core, inner, more = made
                return core, factor * inner, [*numbers, *more]
            if e.op in ("mul", "div"):
                k = next((a for a in (e.args if e.op == "mul" else e.args[1:]) if self._factors_out(a, positive)), None)
            if k is None:
                return e, factor, numbers
            rest = e.args[1] if k is e.args[0] else e.args[0]
            if k.op == "const":
                factor = factor / k.const if e.op == "div" else factor * k.const
            else:
                numbers.append((k, e.op == "div"))
            e = rest

    def _from_both(self, e: Expr) -> Taken | None:
        """A sum's factor: what its first part is multiplied by divides the other's number, before the loop."""
        first, other = e.args
        if e.depth > _DEEPEST or not first.is_pair or other.op != "mul" or not other.is_pair:
            return None
        number, rest = other.args if not other.args[0].is_pair else other.args[::-1]
        core, factor, numbers = self._taken_out(first, positive=True)
        if number.is_pair or self.spec.folds(number) or number.feature is not None or core is first:
            return None
        by: Expr = const(factor)
        for k, over in numbers:
            by = apply("div" if over else "mul", by, k)
        return apply(e.op, core, apply("mul", apply("div", number, by), rest)), factor, numbers

    def _factors_out(self, k: Expr, positive: bool) -> bool:
        if k.dtype != "float" or k.rows or k.cols or k.feature is not None:
            return False
        if k.op == "const":
            return k.const > 0 if positive else k.const != 0
        return k.op == "leaf" and (not positive or self.spec.type_of[k] == "positive")

    def joined(self, e: Expr) -> str:
        """A quotient, or tanh, of pairs with their numbers joined to one factor: a pair divides by none."""
        whole = e if e.op == "div" else e.args[0]
        core, factor = self.linear(whole, unit=1.0)
        text = None if core is whole or factor == "1.0" else f"{self.argument(core, 'float')} * {factor}"
        if e.op == "div":
            return text or self._primitive(e, [self.argument(a, "float") for a in e.args])
        return self._primitive(e, [text or self.argument(whole, "float")])

    def factor(self, constant: float, *numbers: tuple[Expr, bool]) -> str:
        """A constant times (or over) numbers, as a literal or a name bound before the loop."""
        if not numbers:
            return literal(constant)
        text = literal(constant) + "".join(f" {'/' if over else '*'} {self.number(k)}" for k, over in numbers)
        return self.bind(("factor", constant, numbers), text, False)

    # Distances

    def gap(self, a: Expr, want: str) -> str | None:
        """The distance of a kept index from a folded one, or how far it lies above it, where float32 is wanted.

        Both count from the tile's first index, so that float32 holds them; beyond 2²⁴ a distance is rounded anyway."""
        if want != "float" or self.spec.narrow is None:
            return None
        if a.op == "abs":
            gap = self.gap(a.args[0], want)
            return gap and f"tl.abs({gap})"
        if a.op != "sub" or a.args[1].op not in ("row_index", "col_index"):
            return None
        at, index = a.args
        if not self.spec.folds(index) or not self.spec.keeps(at) or self.spec.folds(at):
            return None
        return self.bind((a, "gap"), self.apart(self.number(at)), True)

    def apart(self, at: str) -> str:
        """Kept indices less those of a tile, as float32."""
        return f"({at} - start).to(tl.float32) - folded_lane.to(tl.float32)[None, :]"

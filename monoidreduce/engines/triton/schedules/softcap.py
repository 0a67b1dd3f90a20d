"""A tanh under a softmax, in staged kernels: by a polynomial in whole tiles, where a row's total shows that it holds.

A tanh takes eight instructions' time of a pair, an odd polynomial of degree five takes three. Within ``_FAR`` it is
tanh to 3.4e-4 of itself, which is little beside logits of bfloat16 vectors; beyond, it is wrong, but it rises
everywhere. So a logit beyond would make the total of its row at least as large as one at the end of the range: a
smaller total had none. Logits below the range count for nothing, in truth and by the polynomial, if the total is large
beside as many as there are columns. A row that shows neither begins again, and exactly, as after a wrong guess.

Its coefficients are made before the launch: what is computed in a kernel lies in a thread's registers, whose reading
costs as much as the arithmetic; arguments lie in those that all threads share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ....program.expression import Expr
from ....reductions.softmax import SoftmaxLines
from ..codegen.exponents import LOG2E, factor_out, literal

Made = tuple[float, tuple[tuple[Expr, int], ...]]  # a constant times powers of leaves that are Python numbers

# x, x³ and x⁵ times these; the derivative has no zero, since 9 b² < 20 a c
_A, _B, _C = 0.9997233, -0.324903, 0.0940892
_FAR = 0.8
_REACH = 0.6638  # of both tanh and polynomial there, or less
_MOST = 64.0  # log2 of weights, at most: 3.4e-4 of larger logits would be seen
_SPARE = 12  # in powers of two: how far a total must lie above what was too low for the polynomial
_LARGEST = 3e38  # that an argument can be
NAMES = "bent_gain", "bent_shift", "bent_base"  # of a s ((s² + shift)² + base), which is the polynomial


@dataclass(frozen=True)
class Bend:
    """One tanh: of a block of pairs times ``inner``, then times ``outer``, which is ``factor`` in the text."""

    soft: SoftmaxLines
    core: Expr
    inner: Made
    outer: Made
    factor: str

    def made(self) -> tuple[Made, ...]:
        """The polynomial's coefficients for the block as it is, by ``NAMES``: products of powers of both factors."""
        shift = _B / (2 * _C)
        powers = ((_C, 5, 1), (shift, -2, 0), (_A / _C - shift**2, -4, 0))
        return tuple(_product(c, (self.inner, n), (self.outer, m)) for c, n, m in powers)

    def reach(self) -> str:
        """The name of the largest logit, times log2(e), for which the polynomial stands."""
        text = f"tl.minimum({self.factor} * {literal(_REACH)}, {literal(_MOST)})"
        return self.soft.v.bind((self.core, "reach"), text, False)

    def weigh(self) -> None:
        """What one tile does to the total, by a guess of the maximum: its weights."""
        v, n, (gain, shift, base) = self.soft.v, self.soft.name, NAMES
        score = v.full(self.core)
        v.inside += [
            f"{n}_bow = {score} * {score} + {shift}",
            f"{n}_weight = tl.exp2(({score} * {gain}) * ({n}_bow * {n}_bow + {base}) - {n}_top[:, None])",
        ]
        self.soft.add_weights()

    def chosen(self) -> str:
        """1 where the first tile's total, as large for every tile, shows that the polynomial holds, with room on both
        sides; else 0. What is rounded to nothing does not bend."""
        n, gain = self.soft.name, NAMES[0]
        total = f"tl.convert_layout(tl.sum({n}_total, 1), tl.SliceLayout(1, SCORES)) * visits"
        holds = f"bounded({total} * 8.0, {n}_top, {self.reach()}, folded_size * 64.0)"
        return f"tl.where((tl.max(tl.where({holds}, 0, 1)) == 0) & ({gain} * {gain} > 0.0), 1, 0)"

    def held(self) -> str:
        """Whether a row's total shows that the polynomial stood, or nothing went by it."""
        n = self.soft.name
        return f"(bounded({n}_total, {n}_top, {self.reach()}, folded_size) | ({n}_bends == 0))"


def bend(soft: SoftmaxLines, logit: Expr) -> Bend | None:
    """The tanh of a logit that is one, times numbers; None for any other."""
    v = soft.v
    whole, factor, numbers = factor_out(logit, v.spec, positive=True)
    if whole.op != "tanh" or not whole.is_pair:
        return None
    core, inner, more = factor_out(whole.args[0], v.spec, positive=False)
    if not all(v.spec.is_number(e) for e, _ in [*numbers, *more]):
        return None
    text = v.factor(factor * LOG2E, *numbers)
    return Bend(soft, core, _made(inner, more), _made(factor * LOG2E, numbers), text)


def _made(factor: float, numbers: list[tuple[Expr, bool]]) -> Made:
    return factor, tuple((e, -1 if over else 1) for e, over in numbers)


def _product(constant: float, *factors: tuple[Made, int]) -> Made:
    """A constant times some powers of others."""
    powers = [(e, k * n) for (_, numbers), n in factors for e, k in numbers if n]
    for (c, _), n in factors:
        constant *= c**n
    return constant, tuple(powers)


def value(made: Made, of: Callable[[Expr], float]) -> float:
    """What an argument is, by its leaves' values; 0 where float32 does not hold it."""
    found, powers = made
    try:
        for e, n in powers:
            found *= float(of(e)) ** n
    except (OverflowError, ZeroDivisionError):
        return 0.0
    return found if abs(found) < _LARGEST else 0.0


BOUNDED = f"""
@gluon.jit
def bounded(total, top, reach, size):
    # whether all logits were below the end of a polynomial's range, and all below its beginning count for nothing
    return (total < tl.exp2(reach - top)) & (total > size * tl.exp2({_SPARE} - reach - top))
"""

"""Cheaper forms of what hand-scheduled kernels do to each pair: a soft cap (tanh), ALiBi (index distance), dropout.

**Softcap.** A tanh costs a pair as much as eight instructions, an odd polynomial of degree five costs three. Within
0.8 of 0 the polynomial equals tanh to 3.4e-4 of itself, little beside logits of bfloat16 vectors. Beyond, it is
wrong but still rising, so a logit beyond the range makes its row's total at least as large as one at the end of the
range would: a smaller total proves that there was none. Logits below the range count for nothing, in truth and by the
polynomial, when the total is large compared with the number of columns. A row that proves neither is computed again
with tanh and a running maximum, as after a wrong guess of the maximum.

The coefficients are kernel arguments, computed before the launch: arguments lie in constant memory, while what a kernel
computes lies in each thread's registers, and reading it costs as much as the arithmetic.

**ALiBi.** A distance costs a pair two instructions: a difference and a product with its absolute value. But only the
tile nearest to the kept indices, which is computed first, has pairs on both sides of the diagonal. In any other tile a
row's logits are a line in the column, whose slope has one sign for the whole tile and whose columns are constants of
the kernel: one instruction a pair, and subtracting the maximum is part of it.

**Dropout** takes two columns from each 32-bit random word.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ....program.constructors import ZERO
from ....program.expression import Expr
from ....reductions.softmax import SoftmaxLines
from ..codegen.kernel_spec import LOG2E, Spec, factor_out, literal

Coefficient = tuple[float, tuple[tuple[Expr, int], ...]]  # a constant times powers of leaves that are Python numbers

# x, x³ and x⁵ times these; the derivative has no zero, since 9 b² < 20 a c
_A, _B, _C = 0.9997233, -0.324903, 0.0940892
_REACH = 0.6638  # of tanh and of the polynomial at the end of the range (0.8): the smaller of the two
_MOST = 64.0  # log2 of weights, at most: 3.4e-4 of larger logits would be seen
_SPARE = 12  # in powers of two: how far a total must lie above what was too low for the polynomial
_LARGEST = 3e38  # float32 holds no larger argument
COEFFICIENTS = "cap_gain", "cap_shift", "cap_base"  # the polynomial is gain s ((s² + shift)² + base)
_INDICES = ("row_index", "col_index")


@dataclass(frozen=True)
class SoftcapPolynomial:
    """The tanh of a block of pairs times ``inner``, then times ``outer``, which is ``factor`` in the text."""

    soft: SoftmaxLines
    core: Expr
    inner: Coefficient
    outer: Coefficient
    factor: str

    def coefficients(self) -> tuple[Coefficient, ...]:
        """The kernel's arguments ``COEFFICIENTS``: products of powers of both factors."""
        shift = _B / (2 * _C)
        powers = ((_C, 5, 1), (shift, -2, 0), (_A / _C - shift**2, -4, 0))
        return tuple(_multiply(c, (self.inner, n), (self.outer, m)) for c, n, m in powers)

    def write_weights(self) -> None:
        """Write the weights of one tile, by a guessed maximum."""
        v, n, (gain, shift, base) = self.soft.v, self.soft.name, COEFFICIENTS
        score = v.full(self.core)
        v.inside += [
            f"{n}_bow = {score} * {score} + {shift}",
            f"{n}_weight = tl.exp2(({score} * {gain}) * ({n}_bow * {n}_bow + {base}) - {n}_top[:, None])",
        ]
        self.soft.add_weights()

    def applies(self) -> str:
        """1 when the first tile's total, taken for every tile's, proves the polynomial with a margin on both sides;
        else 0. A gain that float32 rounds to nothing does not apply."""
        n, gain = self.soft.name, COEFFICIENTS[0]
        total = f"tl.convert_layout(tl.sum({n}_total, 1), tl.SliceLayout(1, SCORES)) * steps"
        holds = f"in_polynomial_range({total} * 8.0, {n}_top, {self._name_reach()}, folded_size * 64.0)"
        return f"tl.where((tl.max(tl.where({holds}, 0, 1)) == 0) & ({gain} * {gain} > 0.0), 1, 0)"

    def was_right(self) -> str:
        """True when a row's total proves that the polynomial was right, or it was not used."""
        n = self.soft.name
        return f"(in_polynomial_range({n}_total, {n}_top, {self._name_reach()}, folded_size) | ({n}_capped == 0))"

    def _name_reach(self) -> str:
        """The name of the largest logit, times log2(e), for which the polynomial stands."""
        text = f"tl.minimum({self.factor} * {literal(_REACH)}, {literal(_MOST)})"
        return self.soft.v.bind((self.core, "reach"), text, False)


@dataclass(frozen=True)
class AlibiLine:
    """Logits that are a block of pairs times ``factor``, less a ``rate`` times a distance of indices."""

    soft: SoftmaxLines
    core: Expr
    factor: str
    rate: str  # a name, bound before the loop
    sided: bool  # whether the distance may have either sign

    def write_weights(self) -> None:
        """Write the weights of one tile that lies on one side of the diagonal, by a guessed maximum."""
        v, n = self.soft.v, self.soft.name
        score, slope = v.full(self.core), self.rate
        if self.sided:
            slope = f"{n}_slope"
            v.inside.append(f"{slope} = tl.where(start < tile * KEPT, {self.rate}, -{self.rate})")
        v.inside += [
            f"{n}_base = -{n}_top - {slope} * (kept_at - start).to(tl.float32)",
            f"{n}_weight = tl.exp2({score} * {self.factor} + alibi_line({n}_base, {slope}, {score}))",
        ]
        self.soft.add_weights()


def match_softcap(soft: SoftmaxLines, logit: Expr) -> SoftcapPolynomial | None:
    """The polynomial of a logit that is a tanh times numbers; None for any other."""
    v = soft.v
    whole, factor, numbers = factor_out(logit, v.spec, positive=True)
    if whole.op != "tanh" or not whole.is_pair:
        return None
    core, inner, more = factor_out(whole.args[0], v.spec, positive=False)
    if not all(v.spec.is_number(e) for e, _ in [*numbers, *more]):
        return None
    text = v.factor(factor * LOG2E, *numbers)
    return SoftcapPolynomial(
        soft, core, _make_coefficient(inner, more), _make_coefficient(factor * LOG2E, numbers), text
    )


def match_alibi(soft: SoftmaxLines, logit: Expr) -> AlibiLine | None:
    """The line of a logit that is pairs and a number times a distance, or a difference, of plain indices."""
    v = soft.v
    whole, factor = soft.scaled_logit(logit)
    if whole.op not in ("add", "sub") or not all(a.is_pair for a in whole.args):
        return None
    core, fall = whole.args
    if fall.op != "mul":
        return None
    number, distance = fall.args[::-1] if fall.args[0].is_pair else fall.args
    if number.is_pair or number.feature is not None or v.spec.keeps(number) or v.spec.folds(number):
        return None
    sided = distance.op == "abs"
    difference = distance.args[0] if sided else distance
    if difference.op != "sub" or any(a.op not in _INDICES for a in difference.args) or not difference.is_pair:
        return None
    falls = (whole.op == "sub") ^ (not sided and v.spec.folds(difference.args[0]))
    rate = f"{'' if falls else '-'}({factor} * {v.argument(number, 'float')})"
    return AlibiLine(soft, core, factor, v.bind((fall, factor, "rate"), rate, False), sided)


def evaluate_coefficient(coefficient: Coefficient, value_of: Callable[[Expr], float]) -> float:
    """The value of an argument, given its leaves'; 0 when float32 does not hold it, which turns the polynomial off."""
    found, powers = coefficient
    try:
        for e, n in powers:
            found *= float(value_of(e)) ** n
    except (OverflowError, ZeroDivisionError):
        return 0.0
    return found if abs(found) < _LARGEST else 0.0


def _make_coefficient(factor: float, numbers: list[tuple[Expr, bool]]) -> Coefficient:
    return factor, tuple((e, -1 if over else 1) for e, over in numbers)


def _multiply(constant: float, *factors: tuple[Coefficient, int]) -> Coefficient:
    """A constant times some powers of others."""
    powers = [(e, k * n) for (_, numbers), n in factors for e, k in numbers if n]
    for (c, _), n in factors:
        constant *= c**n
    return constant, tuple(powers)


POLYNOMIAL_RANGE = f"""
@gluon.jit
def in_polynomial_range(total, top, reach, size):
    # True when all logits were below the end of the range, and those below its beginning count for nothing
    return (total < tl.exp2(reach - top)) & (total > size * tl.exp2({_SPARE} - reach - top))
"""

# Layouts of [KEPT, EIGHTS, 8]: an index inside an eight varies within a thread, which eight it is by constants.
ALIBI_LINE = """
@gluon.jit
def alibi_line(base, slope, like):
    # base + slope x column: eight columns, then each further eight by a constant times the slope
    KEPT: tl.constexpr = like.shape[0]
    EIGHTS: tl.constexpr = like.shape[1] // 8
    LAYOUT: tl.constexpr = tl.reshape(like, [KEPT, EIGHTS, 8]).type.layout
    eight: tl.constexpr = tl.SliceLayout(1, LAYOUT)
    base = tl.convert_layout(base, tl.SliceLayout(1, eight))[:, None]
    base += slope * tl.arange(0, 8, tl.SliceLayout(0, eight)).to(tl.float32)[None, :]
    more = tl.arange(0, EIGHTS, tl.SliceLayout(0, tl.SliceLayout(2, LAYOUT))).to(tl.float32) * 8.0
    line = more[None, :][:, :, None] * slope + base[:, None, :]
    return tl.convert_layout(tl.reshape(line, [KEPT, EIGHTS * 8]), like.type.layout)
"""
INDEX_DISTANCE = """
@gluon.jit
def index_distance(at, start, like):
    # at - column: eight columns, then each further eight by a constant less
    KEPT: tl.constexpr = like.shape[0]
    EIGHTS: tl.constexpr = like.shape[1] // 8
    LAYOUT: tl.constexpr = tl.reshape(like, [KEPT, EIGHTS, 8]).type.layout
    eight: tl.constexpr = tl.SliceLayout(1, LAYOUT)
    above = tl.convert_layout((at - start).to(tl.float32), tl.SliceLayout(1, eight))
    above = above[:, None] - tl.arange(0, 8, tl.SliceLayout(0, eight)).to(tl.float32)[None, :]
    less = tl.arange(0, EIGHTS, tl.SliceLayout(0, tl.SliceLayout(2, LAYOUT))).to(tl.float32) * 8.0
    gap = above[:, None, :] - less[None, :][:, :, None]
    return tl.convert_layout(tl.reshape(gap, [KEPT, EIGHTS * 8]), like.type.layout)
"""


# A product of a row's and a column pair's words has the random bits of two neighbouring columns in its halves, without
# their signs. They are compared as float16, whose order is that of its bits (NaN above all). Dropped weights are not
# multiplied.
_ROWS = """
@gluon.jit
def thrown(weight, pair, less, row, mark):
    # weight × (pair, where its coin lets it stay, + less): folded columns are neighbours in a thread
    return tl.inline_asm_elementwise(
        "{{ .reg .b32 t, l; .reg .pred p, q; mov.b32 l, {least}; mul.lo.u32 t, $8, $11; abs.f16x2 t, t; "
        "setp.geu.f16x2 p|q, t, l; mul.f32 $0, $2, $6; mul.f32 $1, $3, $7; "
        "@p fma.rn.f32 $0, $2, $4, $0; @q fma.rn.f32 $1, $3, $5, $1; }}",
        "=f,=f,f,f,f,f,f,f,r,r,r,r",
        [weight, pair, less, row, mark],
        dtype=tl.float32,
        is_pure=True,
        pack=2,
    )
"""
_COLUMNS = """
@gluon.jit
def neighbours(at):
    # a thread has the kept columns g and g + 8 of sixteen: they are to be neighbours
    return (at & -16) | ((at & 7) << 1) | ((at >> 3) & 1)


@gluon.jit
def spared(weight, row, mark):
    # 0 where a coin lets a weight fall: of four pairs two are of each column
    return tl.inline_asm_elementwise(
        "{{ .reg .b32 s, t, l; .reg .pred p, q; mov.b32 l, {least}; "
        "mul.lo.u32 s, $8, $14; mul.lo.u32 t, $9, $14; abs.f16x2 s, s; abs.f16x2 t, t; "
        "setp.geu.f16x2 p|q, s, l; selp.f32 $0, $4, 0f00000000, p; selp.f32 $2, $6, 0f00000000, q; "
        "setp.geu.f16x2 p|q, t, l; selp.f32 $1, $5, 0f00000000, p; selp.f32 $3, $7, 0f00000000, q; }}",
        "=f,=f,=f,=f,f,f,f,f,r,r,r,r,r,r,r,r",
        [weight, row, mark],
        dtype=tl.float32,
        is_pure=True,
        pack=4,
    )
"""
_NESTED = 16  # nested conditions that a weight may be under
_INFINITE = 0x7C00  # the bits of float16 infinity: NaN compares as above all


@dataclass(frozen=True)
class DropoutFactor:
    """A dropout mask times its scale: ``factor`` where the random bits of a pair are at least ``least``, else 0."""

    row: Expr
    mark: Expr
    col: Expr
    least: int
    factor: float

    def by_rows(self) -> str:
        """The device function that applies it to weights whose columns are folded."""
        return _ROWS.format(least=self.least * 0x10001)

    def by_columns(self) -> str:
        """The same where columns are the kept axis."""
        return _COLUMNS.format(least=self.least * 0x10001)


def match_dropout_factor(e: Expr, spec: Spec) -> DropoutFactor | None:
    """An expression as such a factor; None where it is none, or its words are not int32 leaves."""
    if e.op != "where" or e.args[1].op != "const" or e.args[2] is not ZERO or e.args[0].op != "ge":
        return None
    coin, least = e.args[0].args
    if coin.op != "coin" or least.op != "const" or not 0 < least.const <= _INFINITE:
        return None
    row, mark, col = coin.args
    words = row.op == mark.op == "leaf" and not row.cols and not mark.rows and col.op == "col_index"
    plain = words and spec.type_of[row] == spec.type_of[mark] == "int32"
    return DropoutFactor(row, mark, col, int(least.const), e.args[1].const) if plain else None


def match_dropped_number(e: Expr, spec: Spec) -> tuple[Expr, DropoutFactor] | None:
    """An expression as a number per pair times such a factor: both; None where it is none."""
    if e.op != "mul" or not all(a.is_pair for a in e.args):
        return None
    for factor, rest in (e.args, e.args[::-1]):
        if (found := match_dropout_factor(factor, spec)) is not None:
            return rest, found
    return None


@dataclass(frozen=True)
class DroppedWeight:
    """A weight ``w * t``, or ``w * (t * x - y)``: t is a dropout factor, y a number per row."""

    weight: Expr
    dropout: DropoutFactor
    pair: Expr | None = None  # x
    number: Expr | None = None  # y


def match_dropped_weight(e: Expr, spec: Spec) -> DroppedWeight | None:
    """An expression as such a weight, perhaps under a condition; None where it is none."""
    hidden = 0
    while e.op == "where" and e.args[2] is ZERO and match_dropout_factor(e, spec) is None:
        e, hidden = e.args[1], hidden + 1
    if hidden > _NESTED:
        return None
    if (one := match_dropped_number(e, spec)) is not None:
        return DroppedWeight(*one)
    if e.op != "mul" or e.args[1].op != "sub" or not e.args[0].is_pair:
        return None
    product, number = e.args[1].args
    found = match_dropped_number(product, spec)
    plain = number.op == "leaf" and not number.cols and number.dtype == "float"
    return DroppedWeight(e.args[0], found[1], found[0], number) if found and plain else None

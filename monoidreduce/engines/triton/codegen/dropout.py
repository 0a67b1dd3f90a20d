"""Dropout in hand-scheduled kernels: two columns per 32-bit random word."""

from __future__ import annotations

from dataclasses import dataclass

from ....program.constructors import ZERO
from ....program.expression import Expr
from .kernel_spec import Spec

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

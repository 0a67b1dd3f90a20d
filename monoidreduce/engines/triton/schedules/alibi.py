"""A logit that falls with the distance of two indices (ALiBi), in staged kernels: a line on each side of the diagonal.

A distance costs a pair two instructions: a difference, and a product that takes its absolute value. But only the tile
nearest to the kept indices, which is met first, has pairs on both sides of the diagonal. In any other a row's logits
are a line in the column, whose slope has one sign for the whole tile and whose columns are constants of the text: that
is one instruction a pair, and the maximum that is taken off joins it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....program.expression import Expr
from ....reductions.softmax import SoftmaxLines

_INDICES = ("row_index", "col_index")


@dataclass(frozen=True)
class Slant:
    """Logits that are a block of pairs times ``factor``, less a ``rate`` times a distance of indices."""

    soft: SoftmaxLines
    core: Expr
    factor: str
    rate: str  # a name, bound before the loop
    sided: bool  # whether the distance is not of one sign

    def weigh(self) -> None:
        """What one tile that lies on one side does to the total, by a guess of the maximum: its weights."""
        v, n = self.soft.v, self.soft.name
        score, rise = v.full(self.core), self.rate
        if self.sided:
            rise = f"{n}_rise"
            v.inside.append(f"{rise} = tl.where(start < tile * KEPT, {self.rate}, -{self.rate})")
        v.inside += [
            f"{n}_base = -{n}_top - {rise} * (kept_at - start).to(tl.float32)",
            f"{n}_weight = tl.exp2({score} * {self.factor} + slanted({n}_base, {rise}, {score}))",
        ]
        self.soft.add_weights()


def slant(soft: SoftmaxLines, logit: Expr) -> Slant | None:
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
    apart = distance.args[0] if sided else distance
    if apart.op != "sub" or any(a.op not in _INDICES for a in apart.args) or not apart.is_pair:
        return None
    falls = (whole.op == "sub") ^ (not sided and v.spec.folds(apart.args[0]))
    rate = f"{'' if falls else '-'}({factor} * {v.argument(number, 'float')})"
    return Slant(soft, core, factor, v.bind((fall, factor, "rate"), rate, False), sided)


SLANTED = """
@gluon.jit
def slanted(base, rise, like):
    # lines in a tile's folded indices: of eight, and each further eight by a constant times the rise
    KEPT: tl.constexpr = like.shape[0]
    EIGHTS: tl.constexpr = like.shape[1] // 8
    LAYOUT: tl.constexpr = tl.reshape(like, [KEPT, EIGHTS, 8]).type.layout
    eight: tl.constexpr = tl.SliceLayout(1, LAYOUT)
    base = tl.convert_layout(base, tl.SliceLayout(1, eight))[:, None]
    base += rise * tl.arange(0, 8, tl.SliceLayout(0, eight)).to(tl.float32)[None, :]
    more = tl.arange(0, EIGHTS, tl.SliceLayout(0, tl.SliceLayout(2, LAYOUT))).to(tl.float32) * 8.0
    line = more[None, :][:, :, None] * rise + base[:, None, :]
    return tl.convert_layout(tl.reshape(line, [KEPT, EIGHTS * 8]), like.type.layout)
"""

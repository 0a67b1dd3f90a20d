"""Kinds of reductions where a program instance owns one row: running values are kept per lane, and joined at the end.

A row of a panel is long and its tiles are wide. Reducing every tile would make all warps wait for each other several
times a tile; a lane that keeps its own waits for nobody.
"""

from __future__ import annotations

from typing import Any

from ....program.expression import Expr
from . import reductions
from .exponents import LOG2E
from .expressions import ExpressionWriter
from .label_gather import can_read_one_column
from .reduction import Kind

_FAR = 60  # in powers of two: up to here above what was guessed, the sums neither overflow nor lose digits


class LaneSoft(reductions.Soft):
    """Σ exp(s - ref) per lane, with the first tile's maximum as ``ref``, and the true maximum kept beside it.

    So a pair costs one exponential and nothing waits for a maximum. Where the maximum proves to lie too far from the
    guess, which sums could not bear, the row is walked again, measured from the true one.
    """

    def prepare(self) -> None:
        self.fast, self.guesses = self.v.spec.narrow is not None, False
        self.means = []
        self.sums = [f"{self.name}_total", *(f"{self.name}_mean{k}" for k in range(len(self.reduction.args) - 1))]

    def peek(self, fields: tuple[Expr, ...]) -> None:
        """The guess, from one tile."""
        s, factor = self._logit(fields[0])
        self.v.inside.append(f"{self.name}_ref = finite(tl.max({s}, 1){factor})")

    def start(self) -> list[str]:
        top = f'{self.name}_top = tl.full([KEPT, FOLDED], float("-inf"), {self.v.float})'
        return [top, *self.clear()]

    def clear(self) -> list[str]:
        return [f"{name} = tl.zeros([KEPT, FOLDED], {self.v.float})" for name in self.sums]

    def step(self, fields: tuple[Expr, ...]) -> None:
        v, n = self.v, self.name
        s, factor = self._logit(fields[0])
        v.inside += [
            f"{n}_top = tl.maximum({n}_top, {s})",
            f"{n}_weight = {'tl.exp2' if self.fast else 'tl.exp'}({s}{factor} - {n}_ref[:, None])",
            f"{n}_total += {n}_weight",
        ]
        for name, value in zip(self.sums[1:], fields[1:], strict=True):
            part = f"{n}_weight * {v.full(value)}"
            v.inside.append(f"{name} += {v.seen(part, '0.0')}")

    def check(self, factor: str) -> list[str]:
        """``{name}_far``: how far the guess lay from the maximum of a row that has one."""
        n = self.name
        return [
            f"{n}_most = tl.max({n}_top, 1){factor}",
            f'{n}_far = tl.max(tl.where({n}_most == float("-inf"), 0.0, tl.abs({n}_most - {n}_ref)))',
        ]

    def correct(self) -> list[str]:
        return [f"{self.name}_ref = finite({self.name}_most)", *self.clear()]

    def finish(self) -> list[tuple[list[str], Any]]:
        n = self.name
        self.v.inside += [
            *(f"{name}_row = tl.sum({name}, 1)" for name in self.sums),
            f"{n}_peak = tl.where({n}_total_row == 0.0, 0.0, {n}_ref)" + (f" * {1 / LOG2E!r}" if self.fast else ""),
            f"{n}_log = tl.log({n}_total_row)",
            f"{n}_seen = tl.where({n}_total_row == 0.0, 1.0, {n}_total_row)  # a row that sees nothing has mean 0",
        ]
        means = [([f"{name}_row / {n}_seen"], None) for name in self.sums[1:]]
        return [([f"{n}_log + {n}_peak"], None), *means, ([f"{n}_log"], None), ([f"{n}_peak"], None)]


def guarded(guessing: list[LaneSoft], walk: list[str], again: list[str]) -> list[str]:
    """A walk, and another one where a guess was too far off."""
    if not guessing:
        return walk
    checks = [line for k in guessing for line in k.check(k._logit(k.reduction.args[0])[1])]
    far = " | ".join(f"({k.name}_far > {_FAR})" for k in guessing)
    corrections = [line for k in guessing for line in k.correct()]
    return [*walk, *checks, f"if {far}:", *(f"    {line}" for line in [*corrections, *again])]


class LaneBest(reductions.Best):
    """The best of each lane and its place."""

    def start(self) -> list[str]:
        n = self.name
        worst = f"{n} = tl.full([KEPT, FOLDED], {self.worst}, {self.type})"
        return [worst, f"{n}_at = tl.full([KEPT, FOLDED], -1, tl.int32)"]

    def step(self, fields: tuple[Expr, ...]) -> None:
        v, n = self.v, self.name
        v.inside += [
            f"{n}_x = {self.seen(fields[0])}",
            f"{n}_place = tl.zeros([KEPT, FOLDED], tl.int32) + folded_at[None, :]",
            f"{n}, {n}_at = {self.better}({n}, {n}_at, {n}_x, {n}_place)",
        ]

    def finish(self) -> list[tuple[list[str], Any]]:
        n = self.name
        self.v.inside.append(f"{n}_row, {n}_row_at = tl.reduce(({n}, {n}_at), 1, {self.better})")
        return [([f"{n}_row"], None), ([f"{n}_row_at.to(tl.int64)"], None)]


class LanePick(reductions.Pick):
    """Read from where it lies: pairs of a panel are in memory."""

    def prepare(self) -> None:
        super().prepare()
        self.direct = can_read_one_column(self.reduction.args[1], self.v.spec)


def make(place: int, reduction: Expr, v: ExpressionWriter) -> Kind:
    """A reduction in a kernel that owns one row."""
    own: dict[str, type[Kind]] = {"soft": LaneSoft, "best": LaneBest, "pick": LanePick}
    kind = own.get(reduction.attrs[0], reductions.KINDS.get(reduction.attrs[0]))
    if kind is None:
        return reductions.make(place, reduction, reductions.ONE, v)
    return kind(place, reduction, reductions.ONE, v)

"""Kinds of reductions where a program instance owns one row: running values are kept per lane, and joined at the end.

A row of a panel is long and its tiles are wide. Reducing every tile would make all warps wait for each other several
times a tile; a lane that keeps its own maximum and sum waits for nobody, and needs one exponential a pair.
"""

from __future__ import annotations

from typing import Any

from ...program.expr import Expr
from . import kinds
from .kinds import Kind
from .matched import matches
from .values import Values

_LEAST = "-3.4028234663852886e+38"  # a finite start: -inf - -inf would be NaN


class LaneSoft(kinds.Soft):
    """A maximum and Σ exp(s - maximum) per lane. exp(-|s - top|) is the new pair's weight, or the old sum's."""

    def prepare(self) -> None:
        self.fast, self.product = False, None
        self.values = [x.feature for x in self.reduction.args[1:]]

    def start(self) -> list[str]:
        n, kind = self.name, self.v.float
        state = [f"{n}_total", *(f"{n}_mean{k}" for k in range(len(self.values)))]
        least = f"{n}_top = tl.full([KEPT, FOLDED], {_LEAST}, {kind})"
        return [least, *(f"{name} = tl.zeros([KEPT, FOLDED], {kind})" for name in state)]

    def step(self, fields: tuple[Expr, ...]) -> None:
        v, n = self.v, self.name
        s = v.seen(v.full(fields[0]), 'float("-inf")')
        v.inside += [
            f"{n}_s = {s}",
            f"{n}_more = {n}_s > {n}_top",
            f"{n}_gap = tl.where({n}_s == {n}_top, 1.0, tl.exp(-tl.abs({n}_s - {n}_top)))  # infinity meets itself",
            f"{n}_weight = tl.where({n}_more, 1.0, {n}_gap)",
            f"{n}_shrink = tl.where({n}_more, {n}_gap, 1.0)",
            f"{n}_total = {n}_total * {n}_shrink + {n}_weight",
            f"{n}_top = tl.where({n}_more, {n}_s, {n}_top)",
        ]
        for k, value in enumerate(fields[1:]):
            part = v.seen(f"{n}_weight * {v.full(value)}", "0.0")
            v.inside.append(f"{n}_mean{k} = {n}_mean{k} * {n}_shrink + {part}")

    def finish(self) -> list[tuple[list[str], Any]]:
        n, infinite = self.name, 'float("inf")'
        names = [f"{n}_total", *(f"{n}_mean{k}" for k in range(len(self.values)))]
        self.v.inside += [
            f"{n}_most = tl.max({n}_top, 1)",
            f"{n}_share = tl.where({n}_top == {n}_most[:, None], 1.0, tl.exp({n}_top - {n}_most[:, None]))",
            f"{n}_share *= tl.where({n}_most == {infinite}, {infinite}, 1.0)[:, None]",
            *(f"{name}_row = tl.sum({name} * {n}_share, 1)" for name in names),
            f"{n}_none = ({n}_total_row == 0.0) | ({n}_most == {infinite})",
            f"{n}_peak = tl.where({n}_none, 0.0, {n}_most)",
            f"{n}_log = tl.log({n}_total_row)",
            f"{n}_seen = tl.where({n}_total_row == 0.0, 1.0, {n}_total_row)  # a row that sees nothing has mean 0",
        ]
        means = [([f"{name}_row / {n}_seen"], None) for name in names[1:]]
        return [([f"{n}_log + {n}_peak"], None), *means, ([f"{n}_log"], None), ([f"{n}_peak"], None)]


class LaneBest(kinds.Best):
    """The best of each lane and its place."""

    def start(self) -> list[str]:
        n = self.name
        worst = f"{n} = tl.full([KEPT, FOLDED], {self.worst}, {self.type})"
        return [worst, f"{n}_at = tl.full([KEPT, FOLDED], -1, tl.int32)"]

    def step(self, fields: tuple[Expr, ...]) -> None:
        v, n = self.v, self.name
        worst = f"tl.full([1, 1], {self.worst}, {self.type})"
        x = v.full(fields[0])
        x = x if fields[0].dtype == "float" else f"{x}.to(tl.int64)"
        v.inside += [
            f"{n}_x = {v.seen(x, worst)}",
            f"{n}_place = tl.zeros([KEPT, FOLDED], tl.int32) + folded_at[None, :]",
            f"{n}, {n}_at = {self.better}({n}, {n}_at, {n}_x, {n}_place)",
        ]

    def finish(self) -> list[tuple[list[str], Any]]:
        n = self.name
        self.v.inside.append(f"{n}_row, {n}_row_at = tl.reduce(({n}, {n}_at), 1, {self.better})")
        return [([f"{n}_row"], None), ([f"{n}_row_at.to(tl.int64)"], None)]


class LanePick(kinds.Pick):
    """Read from where it lies: pairs of a panel are in memory."""

    def prepare(self) -> None:
        super().prepare()
        self.direct = matches(self.reduction.args[1], self.v.spec)


def make(place: int, reduction: Expr, v: Values) -> Kind:
    """A reduction in a kernel that owns one row."""
    own: dict[str, type[Kind]] = {"soft": LaneSoft, "best": LaneBest, "pick": LanePick}
    kind = own.get(reduction.attrs[0], kinds.KINDS.get(reduction.attrs[0]))
    if kind is None:
        return kinds.make(place, reduction, kinds.ONE, v)
    return kind(place, reduction, kinds.ONE, v)

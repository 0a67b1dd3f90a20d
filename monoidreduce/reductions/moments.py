"""``moments``: the mean of all pairs and the sum of squared deviations from it, by Welford's and Chan's formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..program.expression import Expr, size
from ..program.symbol import Symbol
from .base import Accumulator, FastForm, Lines, Offset, Outputs, Reads, Reduction, State, folded_dim, per_part, stretch


class MomentsAccumulator(Accumulator):
    """Welford's mean and sum of squared deviations, tiles merged by Chan's formula."""

    def start(self) -> None:
        self.mean, self.spread = self.totals(-1), self.totals(-1)
        self.count = self.numbers(0)

    def step(self, reducer: Any, owned: tuple[bool, ...], tile: Any, at: slice, offset: Offset) -> None:
        x = tile.full(reducer.roots[0])
        n = x.shape[self.dim]
        mean = x.mean(self.dim)
        spread = (x - self.across(mean)).square_().sum(self.dim)
        old = self.count[:, at]
        total = old + n
        gap = mean - self.mean[:, at]
        self.mean[:, at] += gap * (n / total)
        self.spread[:, at] += spread + gap.square() * (old * n / total)
        self.count[:, at] = total

    def finish(self) -> list[Tensor]:
        return [torch.where(self.count == 0, torch.nan, self.mean), self.spread]


class MomentsLines(Lines):
    """Mean and sum of squared deviations of what a thread holds of a row; tiles, and in the end a row's four threads,
    are merged by Chan's formula. So threads do not wait for each other inside the loop."""

    def start(self) -> list[str]:
        n, kind = self.name, self.v.float
        lanes = [f"{n}_{part} = tl.zeros([KEPT, 4], {kind})" for part in ("means", "spreads")]
        return [*lanes, f"{n}_counts = tl.zeros([1, 4], {kind})"]

    def step(self, fields: tuple[Expr, ...]) -> None:
        v, n = self.v, self.name
        inside = "folded_in[None, :]" if v.masked else "tl.full([1, FOLDED], 1, tl.int1)"
        v.inside += [
            f"{n}_n, {n}_mean, {n}_spread = lane_moments({v.full(fields[0])}, {inside})",
            f"{n}_gap = {n}_mean - {n}_means",
            f"{n}_share = {n}_n / tl.maximum({n}_counts + {n}_n, 1.0)",
            f"{n}_means += {n}_gap * {n}_share",
            f"{n}_spreads += {n}_spread + {n}_gap * {n}_gap * ({n}_counts * {n}_share)",
            f"{n}_counts += {n}_n",
        ]

    def finish(self) -> list[tuple[list[str], Any]]:
        n = self.name
        self.v.inside += [
            f"{n}_all = tl.sum({n}_counts + tl.zeros([KEPT, 4], {self.v.float}), 1)",
            f"{n}_middle = tl.sum({n}_means * {n}_counts, 1) / {n}_all  # NaN of no pairs",
            f"{n}_apart = tl.where({n}_counts > 0.0, {n}_means - {n}_middle[:, None], 0.0)",
            f"{n}_sum = tl.sum({n}_spreads + {n}_counts * {n}_apart * {n}_apart, 1)",
        ]
        return [([f"{n}_middle"], None), ([f"{n}_sum"], None)]


class Moments(Reduction):
    """Its state: the mean, the sum of squared deviations, and how many pairs there were."""

    name = "moments"
    fast_forms = FastForm.CPP | FastForm.LISTS
    accumulator, lines = MomentsAccumulator, MomentsLines
    plain_ops, combine_ops = 4, 16

    def outputs(self, fields: tuple[Expr, ...], params: tuple) -> Outputs:
        return [(None, "float")] * 2

    def result_names(self, fields: tuple[Expr, ...], params: tuple) -> tuple[str, ...]:
        return "mean", "m2"

    def pullback(self, over: str, params: tuple, fields: list, results: list, g: list) -> list:
        total = 0.0
        if g[0] is not None:
            total = g[0] / Symbol(size(over))
        if g[1] is not None:
            total = total + 2 * g[1] * (fields[0] - results[0])
        return [total]

    def identity(self, params: tuple) -> tuple[float, ...]:
        return (0.0, 0.0, 0.0)

    def dense(self, fields: list[Tensor], vectors: list[bool], over: str, params: tuple, size: int) -> list[Tensor]:
        (x,) = stretch(fields, vectors, over, size)
        mean = x.mean(folded_dim(over), keepdim=True)
        return [mean, (x - mean).square().sum(folded_dim(over), keepdim=True)]

    def open(self, params: tuple, results: State, lengths: Sequence[int]) -> State:
        mean, spread = results
        count = per_part(lengths, mean).expand_as(mean)
        return [torch.where(count == 0, 0.0, mean), spread, count]

    def merge(self, params: tuple, state: State) -> State:
        """Chan's formula for many parts: means around the first one, so that a large common mean costs no digits."""
        mean, spread, count = state
        total = count.sum(0, keepdim=True)
        share = count / torch.where(total == 0, 1.0, total)
        base = mean.gather(0, (count > 0).to(torch.uint8).argmax(0, keepdim=True))
        base = torch.where(base.isinf(), 0.0, base)
        middle = base + (share * (mean - base)).sum(0, keepdim=True)
        spread = spread + count * (mean - middle).square()
        return [middle, spread.sum(0, keepdim=True), total]

    def close(self, params: tuple, state: State) -> State:
        mean, spread, count = state
        return [torch.where(count == 0, math.nan, mean), spread]

    def tile_bytes(self, memory: Any, params: tuple, reads: Reads, owned: tuple[bool, ...]) -> int:
        return memory.wide

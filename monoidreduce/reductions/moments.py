"""``moments``: the mean of all pairs and the sum of squared deviations from it, by Welford's and Chan's formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..program.expression import Expr, size
from ..program.symbol import Symbol
from .accumulator import Accumulator, Offset
from .base import Outputs, Reads, Reduction, State, folded_dim, per_part, stretch
from .kernel_lines import Lines


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
    """Mean and sum of squared deviations; tiles are merged by Chan's formula."""

    def start(self) -> list[str]:
        n, kind = self.name, self.v.float
        return [f"{n}_{part} = tl.zeros([KEPT], {kind})" for part in ("mean", "spread", "count")]

    def step(self, fields: tuple[Expr, ...]) -> None:
        v, n = self.v, self.name
        x = v.full(fields[0])
        v.inside += [
            f"{n}_n = tl.zeros([KEPT], {v.float}) + {v.tile_count()}",
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


class Moments(Reduction):
    """Its state: the mean, the sum of squared deviations, and how many pairs there were."""

    name = "moments"
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

"""``histogram``: for every entry of a table, the sum of a number over the pairs whose index is that entry.

Fields: the number, the index, and the table, of which only the size is read. It folds both axes: its result is one
vector a batch element. Only gradients of lookups make this kind. Pairs whose index is outside of the table are left
out. The order of summation is fixed: tile by tile, and along diagonals where the index is a function of i - j.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..program import intervals as iv
from ..program.constructors import is_along_diagonals, look_up
from ..program.expression import Expr
from .base import Accumulator, Exchange, FastForm, Offset, Outputs, Reads, Reduction, State


class HistogramAccumulator(Accumulator):
    """A vector [b, n], kept in its result's place."""

    def start(self) -> None:
        self.total = self.homes[0].zero_() if self.homes else self._zeros()

    def _zeros(self) -> Tensor:
        return torch.zeros(self.batch, self.widths[2], dtype=self.compute, device=self.device)

    def step(self, reducer: Any, owned: tuple[bool, ...], tile: Any, at: slice, offset: Offset) -> None:
        value = tile.full(reducer.roots[0])
        if is_along_diagonals(self.fields[1]):
            add_at(self.total, sum_diagonals(value), tile.along_diagonals(self.fields[1]))
        else:
            add_at(self.total, value, tile.full(reducer.roots[1]))

    def finish(self) -> list[Tensor]:
        return [self.total]


class Histogram(Reduction):
    """Its state is its result."""

    name = "histogram"
    fast_forms = FastForm.CPP | FastForm.EDGES | FastForm.LISTS | FastForm.CUT_LISTS
    both_axes = True
    accumulator = HistogramAccumulator
    plain_ops, combine_ops = 6, 1

    def outputs(self, fields: tuple[Expr, ...], params: tuple) -> Outputs:
        return [(fields[2].feature, "float")]

    def pullback(self, over: str, params: tuple, fields: list, results: list, g: list) -> list:
        at = fields[1].expr
        return [type(fields[1])(look_up(g[0].expr, at)), None, None]

    def idle(self, params: tuple, fields: list[iv.Interval]) -> bool:
        return fields[0] == iv.FALSE

    def identity(self, params: tuple) -> tuple[float, ...]:
        return (0.0,)

    def dense(self, fields: list[Tensor], vectors: list[bool], over: str, params: tuple, size: Any) -> list[Tensor]:
        value, index, table = fields
        batch = torch.broadcast_shapes(value.shape[:-2], index.shape[:-2], table.shape[:-3])
        return [
            count_entries(value.expand(*batch, *size), index.expand(*batch, *size), table.shape[-1])
            .unsqueeze(-2)
            .unsqueeze(-2)
        ]

    def whole_form(self, r: Expr, writer: Any, used: frozenset[int]) -> tuple[Callable[..., list[Tensor]], list[str]]:
        return _count_dense, [writer.matrix(r.args[0]), writer.matrix(r.args[1]), writer.vectors(r.args[2])]

    def merge(self, params: tuple, state: State) -> State:
        return [state[0].sum(0, keepdim=True)]

    def exchange(self, params: tuple, state: State) -> Exchange:
        return (yield "SUM", state)

    def tile_reads(self, fields: tuple[Expr, ...], over: str) -> Reads:
        index = fields[1]  # of one tile: it may be a constant there and no function of the diagonal elsewhere
        return (fields[:1] if (index.rows or index.cols) and is_along_diagonals(index) else fields[:2]), ()

    def tile_width(self, r: Expr, size_of: Callable[[str], int]) -> int:
        return 1

    def tile_bytes(self, memory: Any, params: tuple, reads: Reads, owned: tuple[bool, ...]) -> int:
        return memory.wide * 4 if len(reads[0]) == 1 else 4 * 8 + 3

    def count_pair(self, counter: Any, r: Expr) -> None:
        for a in r.args[:2]:
            counter.count_number(a)
        counter.plain += self.plain_ops

    def exchanged_bytes(self, r: Expr, width: Callable[[Expr], int], item: int) -> tuple[int, int]:
        return 0, 0  # of no row and of no column


def _count_dense(sizes: Any, value: Tensor, index: Tensor, table: Tensor) -> list[Tensor]:
    shape = (*sizes.batch, sizes.rows, sizes.cols)
    return [count_entries(value.expand(shape), index.expand(shape), table.shape[-1])]


def count_entries(value: Tensor, index: Tensor, entries: int) -> Tensor:
    """Σ of ``value`` [*batch, M, N] over the pairs of each ``index``: [*batch, entries], differentiable."""
    batch = value.shape[:-2]
    total = value.new_zeros(batch.numel(), entries + 1)
    inside = (index >= 0) & (index < entries)
    flat = torch.where(inside, index, entries).reshape(batch.numel(), -1)
    flat = flat + torch.arange(batch.numel(), device=flat.device).unsqueeze(-1) * (entries + 1)
    whole = total.reshape(-1).index_put((flat.reshape(-1),), value.reshape(-1), accumulate=True)
    return whole.view(batch.numel(), entries + 1)[:, :entries].reshape(*batch, entries)


def add_at(total: Tensor, value: Tensor, index: Tensor) -> None:
    """``total[b, index] += value`` for ``[b, ...]``, in a fixed order; an index outside is left out."""
    batch, entries = total.shape
    inside = (index >= 0) & (index < entries)
    steps = torch.arange(batch, device=total.device).view(-1, *(1,) * (value.dim() - 1)) * (entries + 1)
    flat = (torch.where(inside, index, entries) + steps).expand(value.shape).reshape(-1)
    # one entry may be the sum of all pairs of a tile, one after the other: in float64
    own, given = total.new_zeros(batch * (entries + 1), dtype=torch.float64), value.reshape(-1).double()
    if own.device.type == "cpu":
        own.scatter_add_(0, flat, given)
    else:
        own.index_put_((flat,), given, accumulate=True)  # sorted, so deterministic on GPUs
    total += own.view(batch, entries + 1)[:, :entries]


_STRIP = 64  # rows that are skewed at once: more, and most of what is added up is padding


def sum_diagonals(x: Tensor) -> Tensor:
    """The sums along the diagonals of ``[b, m, n]``, from the last column's corner to the last row's: entry
    ``i - j + n - 1``.

    >>> sum_diagonals(torch.tensor([[[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]]]))
    tensor([[ 3., 32., 21., 10.]])
    """
    b, m, n = x.shape
    total = x.new_zeros(b, m + n - 1)
    for first in range(0, m, _STRIP):
        rows = min(_STRIP, m - first)
        skewed = x.new_zeros(b, rows, n + rows)  # its rows follow each other: read one shorter, each starts one later
        skewed[..., :n] = x[:, first : first + rows].flip(-1)
        skewed = skewed.view(b, -1)[:, : rows * (n + rows - 1)].view(b, rows, n + rows - 1)
        total[:, first : first + rows + n - 1] += skewed.sum(1)
    return total

"""``sum``: Σ of a number or a vector per pair. Sums of number × vector are matrix products (contractions)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..program import intervals as iv
from ..program.constructors import ONE, contractions
from ..program.expression import Expr
from .base import (
    FLOATS,
    Accumulator,
    CombineLaunch,
    Exchange,
    FastForm,
    Form,
    Lines,
    Offset,
    Outputs,
    Reads,
    Reduction,
    State,
    folded_dim,
    split_blocks,
    stretch,
)


class SumAccumulator(Accumulator):
    def start(self) -> None:
        if self.fields[0].dtype == "float":
            self.total = self.totals(self.widths[0], result=0)
        else:
            tail = self.widths[:1] if self.widths[0] >= 0 else []
            self.total = torch.zeros(self.batch, self.length, *tail, dtype=torch.int64, device=self.device)

    def step(self, reducer: Any, owned: tuple[bool, ...], tile: Any, at: slice, offset: Offset) -> None:
        for c in reducer.values[0]:
            weight = None if c.walk else tile.full(c.weight)
            self.engine.contract(self.total[:, at], weight, c, tile)

    def finish(self) -> list[Tensor]:
        return [self.total]


class SumLines(Lines):
    def prepare(self) -> None:
        x, lanes = self.reduction.args[0], self.v.spec.lanes
        dtype = "int" if x.dtype == "bool" else x.dtype
        stored = self.tools.stored_sum(self.name, self.reduction, self.v)
        self.total = stored or self.tools.running_sum(self.name, x.feature, dtype, self.v, lanes)

    @property
    def totals(self) -> list[Any]:
        return [self.total]

    def start(self) -> list[str]:
        return self.total.start()

    def step(self, fields: tuple[Expr, ...]) -> None:
        parts = [self.tools.move_factors(c) for c in contractions(fields[0], self.over)]
        if self.total.delays_product(parts):
            self.v.products(parts[0].weight)
            self.v.inside += self.total.add_delayed_product()
            self.v.inside.append(self.total.delay_product(self.weight(parts[0].weight)))
            return
        if self.v.delays_products and len(parts) > 1:  # waiting for a product waits for what the sum had before too
            self.v.products(*(c.weight for c in parts if not c.walk))
        for c in parts:
            self.total.add(c, None if c.walk else self.weight(c.weight))

    def weight(self, w: Expr) -> str:
        """The name of a whole block of weights, 0 beyond the folded axis."""
        text = self.v.full(w)
        text = f"{text}.to(tl.int32)" if w.dtype == "bool" else f"{text}.to(tl.int64)" if w.dtype == "int" else text
        return self.v.bind_masked(text, "0")

    def finish(self) -> list[tuple[list[str], Any]]:
        texts = self.total.result()
        if self.scale is not ONE:
            factor = self.v.number(self.scale)
            if self.total.tiny and not self.v.spec.keeps(self.scale):
                factor = f"tl.sum({factor} + tl.zeros([1, 1], {self.v.float}), 1)"
            elif self.total.tiny:
                factor = f"tl.reshape({factor}, [KEPT])"
            texts = [f"{t} * {factor}" for t in texts]
            if not texts:
                self.v.inside += self.total.scale(factor)
        return [(texts, self.total.feature)]


class Sum(Reduction):
    """Its state is its result."""

    name = "sum"
    fast_forms = FastForm.CPP | FastForm.EDGES | FastForm.FEW_ROWS | FastForm.ALL_LISTS
    accumulator, lines = SumAccumulator, SumLines
    sums_vectors = True
    combine_ops = 1

    def outputs(self, fields: tuple[Expr, ...], params: tuple) -> Outputs:
        return [(fields[0].feature, "int" if fields[0].dtype == "bool" else fields[0].dtype)]

    def summed(self, fields: tuple[Expr, ...]) -> tuple[Expr, ...]:
        return fields[:1]

    def pullback(self, over: str, params: tuple, fields: list, results: list, g: list) -> list:
        return [g[0]]

    def idle(self, params: tuple, fields: list[iv.Interval]) -> bool:
        return fields[0] == iv.FALSE

    def absent(self, params: tuple, fields: tuple[Expr, ...]) -> Sequence[float | None]:
        return (0.0 if fields[0].dtype == "float" else False if fields[0].dtype == "bool" else 0,)

    def identity(self, params: tuple) -> tuple[float, ...]:
        return (0.0,)

    def dense(self, fields: list[Tensor], vectors: list[bool], over: str, params: tuple, size: int) -> list[Tensor]:
        (x,) = stretch(fields, vectors, over, size)
        return [x.sum(folded_dim(over, vectors[0]), keepdim=True)]

    def whole_form(self, r: Expr, writer: Any, used: frozenset[int]) -> tuple[Callable[..., list[Tensor]], list[str]]:
        if r.args[0].dtype != "float":
            return super().whole_form(r, writer, used)
        parts, names = contracted(r.args[0], r.attrs[1], writer)
        return WholeSum(r.attrs[1], parts), names

    def merge(self, params: tuple, state: State) -> State:
        return [state[0].sum(0, keepdim=True)]

    def exchange(self, params: tuple, state: State) -> Exchange:
        return (yield "SUM", state)

    def tile_reads(self, fields: tuple[Expr, ...], over: str) -> Reads:
        return (), (contractions(fields[0], over),)

    def tile_width(self, r: Expr, size_of: Callable[[str], int]) -> int:
        return 1

    def tile_bytes(self, memory: Any, params: tuple, reads: Reads, owned: tuple[bool, ...]) -> int:
        return max([0, *(memory.contraction(c, weighted=False) for v in reads[1] for c in v)])

    def no_kernel(self, r: Expr) -> str:
        return ""

    combine_text = """

@triton.jit(do_not_specialize=["parts"])
def unite_sum(out, x, parts, rows, PARTS: tl.constexpr, ROWS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, PARTS)
    inside = (k < parts)[:, None] & (at < rows)[None, :]
    v = tl.load(x + k[:, None].to(tl.int64) * rows + at[None, :], mask=inside, other=0)
    tl.store(out + at, tl.sum(v, 0), mask=at < rows)
"""

    def combine_launches(self, params: tuple, stacked: tuple[Form, ...], splits: int) -> list[CombineLaunch] | None:
        return sum_launches(stacked, splits)

    def count_pair(self, counter: Any, r: Expr) -> None:
        for c in contractions(r.args[0], r.attrs[1]):
            counter.count_contraction(c)

    def exchanged_bytes(self, r: Expr, width: Callable[[Expr], int], item: int) -> tuple[int, int]:
        return width(r.args[0]) * (item if r.args[0].dtype == "float" else 8), 0


def sum_launches(stacked: tuple[Form, ...], splits: int) -> list[CombineLaunch] | None:
    """The launch that adds up one result of all splits."""
    ((shape, dtype),) = stacked
    if dtype not in (*FLOATS, torch.int64):
        return None
    return [CombineLaunch("unite_sum", (0,), (0,), splits, math.prod(shape[1:]), split_blocks(splits))]


# Contractions of whole matrices ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class WholeContraction:
    """One contraction: Σ weight × vector (a product), Σ weight, a walk over features, or a gap between two vectors."""

    plain: bool  # the weight is one
    product: bool
    walk: bool
    gap: bool

    @property
    def count(self) -> int:
        """How many values it takes."""
        return 1 if self.walk else 3 if self.gap else self.product + (not (self.plain and self.product))

    def __call__(self, values: Sequence[Tensor], over: str, weight: Tensor | None, sizes: Any) -> Tensor:
        dim = -1 if over == "cols" else -2
        if self.walk or self.gap:
            value = values[0]
            if self.gap:
                x, y = values[1:]  # a row's vector and a column's
                value = value.unsqueeze(-1) * (x.unsqueeze(-2) - y.unsqueeze(-3))
            if value.dim() == len(sizes.batch) + 2:
                return (value if weight is None else weight * value).sum(dim)
            return (value if weight is None else weight.unsqueeze(-1) * value).sum(dim - 1)
        number = weight
        if not (self.plain and self.product):
            number = values[0] if weight is None else weight if self.plain else weight * values[0]
        if number is None:
            number = values[-1].new_ones(sizes.rows, sizes.cols)
        if not self.product:
            return number.sum(dim)
        return (number if over == "cols" else number.mT) @ values[-1]


def contracted(value: Expr, over: str, writer: Any) -> tuple[tuple[WholeContraction, ...], list[str]]:
    """How Σ value is computed on whole matrices, and the names of what it is computed from."""
    parts, names = [], []
    for c in contractions(value, over):
        parts.append(WholeContraction(c.weight is ONE, c.vector is not None, c.walk, c.minus is not None))
        if c.walk:
            names.append(writer.field(c.weight))
            continue
        alone = c.weight is ONE and c.vector is not None and c.minus is None
        names += [] if alone else [writer.matrix(c.weight)]
        names += [writer.vectors(v) for v in (c.vector, c.minus) if v is not None]
    return tuple(parts), names


def contract_all(
    parts: tuple[WholeContraction, ...], values: Sequence[Tensor], over: str, weight: Tensor | None, sizes: Any
) -> Tensor:
    """The sum of all contractions, each of ``weight`` × its own."""
    total: Any = None
    at = 0
    for p in parts:
        found = p(values[at : at + p.count], over, weight, sizes)
        at += p.count
        total = found if total is None else total + found
    return total


@dataclass(frozen=True)
class WholeSum:
    over: str
    parts: tuple[WholeContraction, ...]

    def __call__(self, sizes: Any, *values: Tensor) -> list[Tensor]:
        return [contract_all(self.parts, values, self.over, None, sizes)]

"""Layers that look up tables, each with its dense twin in plain torch, shared by the tests of all engines."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import monoidreduce as mr
from monoidreduce import Batch, Col, Pair, Row, Table

SIDE = 3  # of a window of a picture, in tiles of a picture
BUCKETS, FAR = 16, 40


@mr.op
def relative(q: Row["f"], k: Col["f"], v: Col["d"], bias: Table["n"]):
    """Attention with a bias for every distance."""
    return mr.softmax_mean(q @ k + mr.lookup(bias, mr.row_index - mr.col_index + mr.num_cols - 1), v)


@mr.op
def causal(q: Row["f"], k: Col["f"], v: Col["d"], bias: Table["n"]):
    """The same of earlier columns alone: the index is negative where nothing is seen."""
    back = mr.row_index - mr.col_index
    return mr.softmax_mean(torch.where(back >= 0, q @ k + mr.lookup(bias, back), -torch.inf), v)


def bucket(d: Any) -> Any:
    """T5's bucket of a distance, of both directions: exact when near, logarithmic when far."""
    half, near = BUCKETS // 2, BUCKETS // 4
    share = torch.log(d.abs().clamp(min=1).to(torch.float64) / near) / math.log(FAR / near)
    far = (share * near + 1e-3).to(torch.int64) + near  # past whole numbers, which float32 may fall short of
    return torch.where(d < 0, half, 0) + torch.where(d.abs() < near, d.abs(), far.clamp(max=half - 1))


@mr.op
def t5(q: Row["f"], k: Col["f"], v: Col["d"], bias: Table["n"]):
    return mr.softmax_mean(q @ k + mr.lookup(bias, bucket(mr.row_index - mr.col_index)), v)


@mr.op
def swin(q: Row["f"], k: Col["f"], v: Col["d"], bias: Table["n"]):
    """Rows and columns are the places of a picture of SIDE columns."""
    down = mr.row_index // SIDE - mr.col_index // SIDE + mr.num_cols // SIDE
    return mr.softmax_mean(
        q @ k + mr.lookup(bias, down * (2 * SIDE - 1) + mr.row_index % SIDE - mr.col_index % SIDE + SIDE - 1), v
    )


@mr.op
def graph(q: Row["f"], k: Col["f"], v: Col["d"], hops: Pair, bias: Table["n"]):
    """Graphormer: a bias by the distance of two nodes, given for every pair."""
    return mr.softmax_mean(q @ k + mr.lookup(bias, hops), v)


@mr.op
def blocks(q: Row["f"], k: Col["f"], v: Col["d"], scale: Table["n"]):
    """A number for every block of 8 × 8 pairs, over both axes, and squared."""
    s = (q @ k) * mr.lookup(scale, (mr.row_index // 8) * ((mr.num_cols + 7) // 8) + mr.col_index // 8) ** 2
    return mr.sum(s * v), mr.sum(torch.tanh(s), over="rows")


@mr.op
def kinds(x: Row["f"], y: Col["f"], a: Row, b: Col, head: Batch, one: Table["m"], two: Table["n"]):
    """Two tables by integers of rows, columns and batch elements; one of them read three times, and in a condition."""
    s = x @ y * mr.lookup(one, (a + b) % 5, clamp=True) + mr.lookup(two, a * 3 - b + head, clamp=True)
    s = torch.where(mr.lookup(one, b) > mr.lookup(two, a), s, -s)
    return mr.logsumexp(s), mr.max(s), mr.sum(s * mr.lookup(one, mr.row_index - mr.col_index, clamp=True))


def _entries(table: Tensor, index: Tensor) -> Tensor:
    """``table[..., index]`` for tables and indices with batch dimensions that broadcast."""
    batch = torch.broadcast_shapes(table.shape[:-1], index.shape[:-2])
    flat = index.expand(*batch, *index.shape[-2:]).flatten(-2)
    return table.expand(*batch, table.shape[-1]).gather(-1, flat).unflatten(-1, index.shape[-2:])


def _distance(q: Tensor, k: Tensor) -> Tensor:
    return torch.arange(q.shape[-2]).unsqueeze(-1) - torch.arange(k.shape[-2])


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT + bias, -1) @ v


def dense_relative(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return _attend(q, k, v, _entries(bias, _distance(q, k) + k.shape[-2] - 1))


def dense_causal(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    back = _distance(q, k)
    seen = torch.where(back >= 0, _entries(bias, back.clamp(min=0)), -torch.inf)
    return _attend(q, k, v, seen)


def dense_t5(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return _attend(q, k, v, _entries(bias, bucket(_distance(q, k))))


def dense_swin(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    i, j = torch.arange(q.shape[-2]).unsqueeze(-1), torch.arange(k.shape[-2])
    down = i // SIDE - j // SIDE + k.shape[-2] // SIDE
    return _attend(q, k, v, _entries(bias, down * (2 * SIDE - 1) + i % SIDE - j % SIDE + SIDE - 1))


def dense_graph(q: Tensor, k: Tensor, v: Tensor, hops: Tensor, bias: Tensor) -> Tensor:
    return _attend(q, k, v, _entries(bias, hops))


def dense_blocks(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    i, j = torch.arange(q.shape[-2]).unsqueeze(-1), torch.arange(k.shape[-2])
    s = q @ k.mT * _entries(scale, i // 8 * ((k.shape[-2] + 7) // 8) + j // 8) ** 2
    return s @ v, torch.tanh(s).sum(-2)


def dense_kinds(
    x: Tensor, y: Tensor, a: Tensor, b: Tensor, head: Tensor, one: Tensor, two: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    m, n = one.shape[-1], two.shape[-1]
    a, b, h = a.unsqueeze(-1), b.unsqueeze(-2), head[..., None, None]
    s = x @ y.mT * _entries(one, ((a + b) % 5).clamp(max=m - 1)) + _entries(two, (a * 3 - b + h).clamp(0, n - 1))
    s = torch.where(_entries(one, b) > _entries(two, a), s, -s)
    near = _entries(one, _distance(x, y).clamp(0, m - 1))
    return s.logsumexp(-1), s.amax(-1), (s * near).sum(-1)


@dataclass(frozen=True)
class Case:
    """A layer, its twin, and its arguments for so many rows and columns, features and batch dimensions."""

    name: str
    op: Callable[..., Any]
    dense: Callable[..., Any]
    table: Callable[[int, int], int]

    def problem(
        self, rows: int, cols: int, batch: tuple[int, ...] = (), features: int = 4, dtype: torch.dtype = torch.float64
    ) -> list[Tensor]:
        make = torch.Generator().manual_seed(rows * 100 + cols)
        draw = lambda *shape: torch.randn(shape, generator=make, dtype=torch.float64).to(dtype)
        entries = self.table(rows, cols)
        tables = [draw(*batch[1:], entries)]  # of a batch of heads: a table for every head
        given = [draw(*batch, rows, features), draw(*batch, cols, features)]
        if self.op is kinds:
            whole = [torch.randint(0, 4, (*batch, size), generator=make) for size in (rows, cols)]
            head = torch.arange(math.prod(batch)).view(batch) % 3
            return [*given, *whole, head, tables[0], draw(*(1,) * len(batch), entries + 2)]
        pairs = [torch.randint(0, entries, (*batch[1:], rows, cols), generator=make)] if self.op is graph else []
        return [*given, draw(*batch, cols, features - 1), *pairs, *tables]


CASES = (
    Case("relative", relative, dense_relative, lambda rows, cols: rows + cols - 1),
    Case("causal", causal, dense_causal, lambda rows, cols: rows),
    Case("t5", t5, dense_t5, lambda rows, cols: BUCKETS),
    Case("swin", swin, dense_swin, lambda rows, cols: ((rows + cols) // SIDE + 2) * (2 * SIDE - 1)),
    Case("graph", graph, dense_graph, lambda rows, cols: 7),
    Case("blocks", blocks, dense_blocks, lambda rows, cols: -(-rows // 8) * -(-cols // 8)),
    Case("kinds", kinds, dense_kinds, lambda rows, cols: 6),
)


def with_gradients(function: Callable[..., Any], args: Sequence[Tensor]) -> list[Tensor]:
    """The values of a function, and its gradients for a cotangent that weighs all of them differently."""
    given = [a.detach().clone().requires_grad_(a.is_floating_point()) for a in args]
    found = function(*given)
    values = [found] if isinstance(found, Tensor) else list(found)
    cotangents = [torch.cos(torch.arange(v.numel(), dtype=torch.float64)).view_as(v).to(v.dtype) for v in values]
    asked = [a for a in given if a.requires_grad]
    return [*(v.detach() for v in values), *torch.autograd.grad(values, asked, cotangents)]


def assert_right(case: Case, found: Sequence[Tensor], args: Sequence[Tensor], tolerance: float = 1e-9) -> None:
    """Values and gradients against the twin in float64."""
    wide = [a.double() if a.is_floating_point() else a for a in args]
    for got, right in zip(found, with_gradients(case.dense, wide), strict=True):
        torch.testing.assert_close(got.double(), right, rtol=tolerance, atol=tolerance)

"""Integers far beyond what float32 and float64 hold, through every integer operation: beside plain torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import monoidreduce as mr
from monoidreduce import Col, Row

LARGE = torch.tensor([2**24 + 1, 2**31 + 5, 2**53 + 1, 2**60 + 7, -(2**53) - 3, -(2**24) - 1, 7, -7, 0])
DIVISORS = torch.tensor([3, -3, 2, 2**31 + 1, -(2**53) - 1, 2**53 + 1, 5])


@dataclass(frozen=True)
class Case:
    """A reduction of integers per pair, and the same of the matrix of pairs."""

    reduce: Callable[[Any], Any]
    dense: Callable[[Tensor], Tensor]
    pair: Callable[[Any, Any], Any]
    rows: Tensor = LARGE
    cols: Tensor = DIVISORS

    def check(self, engine: str) -> None:
        @mr.op
        def op(x: Row, y: Col):
            return self.reduce(self.pair(x, y))

        with mr.use(engine=engine):
            got = op(self.rows, self.cols)
        expected = self.dense(self.pair(self.rows.long().unsqueeze(-1), self.cols.long()))
        assert got.dtype == expected.dtype == torch.int64 and torch.equal(got, expected), (got, expected)


MOST = (mr.max, lambda m: m.amax(1))
LEAST = (mr.min, lambda m: m.amin(1))
SUM = (mr.sum, lambda m: m.sum(1))
SMALL = torch.tensor([2**31 - 5, -(2**31), 7, -1], dtype=torch.int32)

CASES = {
    "floor": Case(*MOST, lambda x, y: torch.div(x, y, rounding_mode="floor")),
    "trunc": Case(*LEAST, lambda x, y: torch.div(x, y, rounding_mode="trunc")),
    "trunc of rows": Case(*SUM, lambda x, y: torch.div(x, 3, rounding_mode="trunc") + y),
    "//": Case(*SUM, lambda x, y: x // y),
    "%": Case(*SUM, lambda x, y: x % y),
    "fmod": Case(*SUM, lambda x, y: torch.fmod(x, y)),
    "** 0": Case(*SUM, lambda x, y: x**0 + y),
    "** 2": Case(*MOST, lambda x, y: (x % 10000019) ** 2 + y),
    "** 9": Case(*LEAST, lambda x, y: (x % 100) ** 9 - y),
    "** 40": Case(*SUM, lambda x, y: (x % 3) ** 40 - y),
    "** y": Case(*SUM, lambda x, y: (x % 100 - 50) ** (y % 9)),
    "2 ** y": Case(*SUM, lambda x, y: 2 ** (y % 61) + x),
    "x ** -y": Case(*SUM, lambda x, y: (x % 3 - 1) ** -abs(y % 4)),
    "max": Case(*MOST, lambda x, y: x - y),
    "argmax": Case(mr.argmax, lambda m: m.argmax(1), lambda x, y: x + y),
    "argmin": Case(mr.argmin, lambda m: m.argmin(1), lambda x, y: x - y),
    "sum": Case(*SUM, lambda x, y: x - y),
    "sum over rows": Case(lambda p: mr.sum(p, over="rows"), lambda m: m.sum(0), lambda x, y: x - y),
    "count": Case(mr.count, lambda m: m.sum(1), lambda x, y: x == y),
    "where": Case(*SUM, lambda x, y: torch.where(x > y, x, y)),
    "clamp": Case(*SUM, lambda x, y: (x - y).clamp(min=2**53 + 1)),
    "minimum": Case(*SUM, lambda x, y: torch.minimum(x, y) - abs(y)),
    "topk": Case(lambda p: mr.topk(p, 3).values, lambda m: m.topk(3).values, lambda x, y: x - y),
    "topk indices": Case(lambda p: mr.topk(p, 3).indices, lambda m: m.topk(3).indices, lambda x, y: x - y),
    "smallest": Case(
        lambda p: mr.topk(p, 2, largest=False).values, lambda m: m.topk(2, largest=False).values, lambda x, y: x + y
    ),
    "sum of int32": Case(*SUM, lambda x, y: torch.where(x > y, x, y), SMALL, SMALL.repeat(3)),
    "int32": Case(*MOST, lambda x, y: x - y, SMALL, SMALL),
}


def vectors(engine: str) -> None:
    x = torch.tensor([[2**40 + 1, 3], [5, -(2**33) - 1]])
    y = torch.tensor([[2**20 + 1, 7], [1, 1], [2**22 + 3, -5]])

    @mr.op
    def op(x: Row["d"], y: Col["d"]):
        return mr.max(x @ y), mr.sum(x * y), mr.sum(x + y, over="rows"), mr.sum(x[0] - y[1])

    with mr.use(engine=engine):
        got = op(x, y)
    pairs = x.unsqueeze(1) * y
    sums = (x.unsqueeze(1) + y).sum(0)
    expected = pairs.sum(-1).amax(1), pairs.sum(1), sums, (x[:, :1] - y[:, 1]).sum(1)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == torch.int64 and torch.equal(a, b), (a, b)


@mr.op
def _inside(q: Row["f"], k: Col["f"], v: Col["d"], mine: Row, theirs: Col):
    return mr.softmax_mean(torch.where(mine == theirs, q @ k, -torch.inf), v)


def leaks(ids: Tensor) -> Tensor:
    n = len(ids)
    return _inside(torch.ones(n, 4), torch.ones(n, 4), torch.ones(n, 2), ids, ids)


def documents(engine: str, base: int) -> None:
    """Attention within documents whose ids differ by one, beyond float64's integers."""
    ids = base + torch.arange(5).repeat_interleave(20)
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(100, 8, generator=draw, requires_grad=True) for _ in range(3))

    @mr.op
    def inside(q: Row["f"], k: Col["f"], v: Col["d"], mine: Row, theirs: Col):
        return mr.softmax_mean(torch.where(mine == theirs, q @ k, -torch.inf), v)

    with mr.use(engine=engine):
        got = inside(q, k, v, ids, ids)
        grads = torch.autograd.grad(got.square().sum(), [q, k, v])
    scores = torch.where(ids.unsqueeze(-1) == ids, q @ k.mT, -torch.inf)
    expected = scores.softmax(-1) @ v
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    plain = torch.autograd.grad(expected.square().sum(), [q, k, v])
    torch.testing.assert_close(grads, plain, rtol=1e-4, atol=1e-4)


def pairs(engine: str) -> None:
    """Numbers per pair of fewer bits, indices and constants: sums, products and shifts of theirs have 64."""
    draw = torch.Generator().manual_seed(2)
    kinds = [torch.int8, torch.uint8, torch.int16, torch.int32]
    given = [torch.randint(-(2**31), 2**31, (2, 6, 40), generator=draw).to(kind) for kind in kinds]
    i, j = torch.arange(6).view(-1, 1), torch.arange(40)

    def values(i: Any, j: Any, given: Any) -> list[Any]:
        byte, small, short, whole = given
        count = j % 70 - 3  # also below 0, and beyond all bits
        return [
            byte * byte * short * short * short, whole * 2**31 - i, (whole << 33) + byte, (small << 63) + j, -whole - 1,
            i - 2**31, j + 2**31 - 1 + i, 2**40 - j - i, whole >> count, small << count, (whole & 7 | byte) << count,
            torch.where((whole >> count) > 0, j, 2**40), abs(whole) // 3 + (short ^ whole) % 7,
        ]  # fmt: skip

    @mr.op
    def op(x: Row, y: Col, a: mr.Pair, b: mr.Pair, c: mr.Pair, d: mr.Pair):
        found = values(mr.row_index, mr.col_index, (a, b, c, d))
        seen = (mr.sum(torch.where(v > -5, x + y, 0.0)) for v in found)
        return *map(mr.sum, found), *map(mr.max, found), *seen, *map(mr.count, (v > 2**31 for v in found))

    x, y = torch.rand(6, generator=draw), torch.rand(40, generator=draw)
    with mr.use(engine=engine):
        got = op(x, y, *given)
    dense = [v.expand(2, 6, 40) for v in values(i, j, [g.long() for g in given])]
    seen = [torch.where(v > -5, x.unsqueeze(-1) + y, 0.0).sum(-1) for v in dense]
    expected = [v.sum(-1) for v in dense], [v.amax(-1) for v in dense], seen, [(v > 2**31).sum(-1) for v in dense]
    for a, b in zip(got, [v for part in expected for v in part], strict=True):
        torch.testing.assert_close(a.expand_as(b), b)


def shifts_by_data(engine: str) -> None:
    """A condition whose tiles are shifted by any number of bits, negative ones too: no tile is skipped wrongly."""
    x, count = torch.tensor([5, -7, 2**62, -(2**63)]), torch.tensor([-1, 64] * 40 + [0, 1, 62, 63, -(2**40), 2**40])

    @mr.op
    def seen(x: Row, count: Col):
        return mr.sum(torch.where(x >> count > 0, 1.0, 0.0)), mr.sum(torch.where(x << count < 0, 1.0, 0.0))

    with mr.use(engine=engine):
        right, left = seen(x, count)
    torch.testing.assert_close(right, ((x.unsqueeze(-1) >> count) > 0).sum(-1).float())
    torch.testing.assert_close(left, ((x.unsqueeze(-1) << count) < 0).sum(-1).float())

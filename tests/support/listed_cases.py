"""Ops, lists and dense twins for tests of folds over listed pairs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import monoidreduce as mr
from monoidreduce import Col, Pair, Row


def offsets(lengths: Tensor) -> Tensor:
    """Running totals from 0."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def cut(length: int, part: int, parts: int) -> slice:
    """The share of one of several parts; the first has nothing."""
    ends = [0, 0, *(length * k // (parts - 1) for k in range(1, parts))]
    return slice(ends[part], ends[part + 1])


def cotangent(like: Tensor) -> Tensor:
    """A number for each row that does not depend on which rows there are beside it."""
    return torch.full_like(like, 0.5)


def ones(like: Tensor) -> Tensor:
    return torch.ones_like(like)


@mr.op
def both_ways(x: Row["f"], y: Col["f"], v: Col["d"], bias: Pair):
    s = torch.tanh(x @ y) + bias
    return mr.softmax_mean(s, v), mr.logsumexp(s, over="rows")


# Random lists --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """A domain and the sizes of a call that it fits; ``batch``: of the rows and of the columns."""

    domain: Any
    rows: int
    cols: int
    row_batch: tuple[int, ...] = ()
    col_batch: tuple[int, ...] = ()

    def args(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
        """Rows and columns with f = 3 features and columns with d = 2 values."""
        chance = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=chance).to(dtype).requires_grad_()
        return [
            draw(*self.row_batch, self.rows, 3),
            draw(*self.col_batch, self.cols, 3),
            draw(*self.col_batch, self.cols, 2),
        ]

    @property
    def times(self) -> Tensor:
        """How often each pair is folded."""
        return self.domain.mask(self.rows, self.cols)


def random_problem(seed: int, repeats: bool = True) -> Problem:
    """Edges, blocks or packed sequences with ragged sizes: empty lists, one long list, repeated entries, batches."""
    chance = torch.Generator().manual_seed(seed)
    number = lambda low, high: int(torch.randint(low, high + 1, (), generator=chance))
    draw = lambda high, *shape: torch.randint(0, high, shape, generator=chance)
    rows, cols = number(1, 13), number(1, 13)
    kind = ("edges", "blocks", "jagged")[seed % 3]
    if kind == "jagged":
        return _random_jagged(number, draw, rows, cols)
    batch = ((), (3,), (2, 1), (2, 3))[number(0, 3)]
    row_batch, col_batch = ((), (3,), (2, 3))[number(0, 2)], ((), (3,), (2, 1))[number(0, 2)]
    if kind == "edges":
        most = cols if not repeats else 2 * cols
        lengths = draw(min(most, 5) + 1, rows)
        lengths[number(0, rows - 1)] = most
        order = lambda n: torch.randperm(cols, generator=chance)[:n] if not repeats else draw(cols, n)
        lists = [torch.cat([order(int(n)) for n in lengths]) for _ in range(torch.Size(batch).numel())]
        index = torch.stack(lists).view(*batch, -1)
        return Problem(mr.edges(offsets(lengths).expand(*batch, -1), index), rows, cols, row_batch, col_batch)
    high, wide = number(1, 5), number(1, 5)
    groups, blocks = -(-rows // high), -(-cols // wide)
    most = number(1, blocks + 2) if repeats else blocks
    index = torch.rand(*batch, groups, blocks, generator=chance).argsort(-1)
    index = draw(blocks, *batch, groups, most) if repeats else index
    count = draw(most + 1, *batch, groups) if number(0, 2) else None
    domain = mr.blocks(index.int(), None if count is None else count.int(), rows=high, cols=wide)
    return Problem(domain, rows, cols, row_batch, col_batch)


def _random_jagged(number: Callable, draw: Callable, rows: int, cols: int) -> Problem:
    sequences = number(1, 4)
    ends = lambda length: torch.cat([torch.zeros(1).long(), draw(length + 1, sequences).sort().values])
    square = bool(number(0, 1))
    own = ends(rows)
    batch = ((), (2,))[number(0, 1)]
    if square:
        return Problem(mr.jagged(own), rows, rows, batch, batch)
    return Problem(mr.jagged(own, ends(cols)), rows, cols, batch, ())


# Ops and dense twins --------------------------------------------------------------------------------------------


@mr.op
def bundle(x: Row["f"], y: Col["f"], v: Col["d"]):
    """Reductions of every family at once, in both directions."""
    s = x @ y
    return (
        mr.softmax_mean(s, v),
        mr.logsumexp(s),
        mr.sum(torch.relu(s) * v),
        mr.max(s),
        mr.mean(s),
        mr.logsumexp(s, over="rows"),
        mr.sum(s * x, over="rows"),
        mr.argmax(s),
        mr.count(s > 0),
    )


def dense_bundle(x: Tensor, y: Tensor, v: Tensor, times: Tensor) -> tuple[Tensor, ...]:
    """The same in plain torch, from whole matrices and how often each pair counts."""
    s = x @ y.mT
    s, times = torch.broadcast_tensors(s, times)
    hidden = torch.where(times > 0, s, -torch.inf)
    weight = times * torch.exp(s)
    total, column = weight.sum(-1), weight.sum(-2)
    log = lambda t: torch.where(t > 0, torch.where(t > 0, t, 1.0).log(), -torch.inf)
    count = times.sum(-1)
    return (
        (weight / torch.where(total > 0, total, 1.0).unsqueeze(-1)) @ v,
        log(total),
        (times * torch.relu(s)) @ v,
        hidden.amax(-1) if s.shape[-1] else hidden.sum(-1),
        torch.where(count > 0, (times * s).sum(-1) / count.clamp(min=1), torch.nan),
        log(column),
        (times * s).mT @ x,
        torch.where(count > 0, hidden.argmax(-1), -1),
        (times * (s > 0)).sum(-1),
    )


def gradients(results: Any, args: list[Tensor]) -> list[Tensor]:
    """Gradients of finite results, weighted so that each is another sum."""
    total: Any = 0.0
    for k, t in enumerate(t for t in results if t.is_floating_point() and t.requires_grad):
        weight = torch.linspace(0.5, 1.5 + k, t.numel(), dtype=t.dtype, device=t.device).view(t.shape)
        total = total + (torch.where(t.isfinite(), t, 0.0) * weight).sum()
    found = torch.autograd.grad(total, args, allow_unused=True) if isinstance(total, Tensor) else [None] * len(args)
    return [torch.zeros_like(a) if g is None else g for a, g in zip(args, found, strict=True)]


def check_random_lists(seed: int, engine: str = "eager") -> None:
    """One random problem against its twin: values and gradients in float64."""
    problem = random_problem(seed)
    args = problem.args(seed=seed)
    with mr.use(engine=engine):
        found = bundle(*args, cols=problem.domain)
        grads = gradients(found, args)
    expected = dense_bundle(*args, problem.times)
    for one, other in zip((*found, *grads), (*expected, *gradients(expected, args)), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)

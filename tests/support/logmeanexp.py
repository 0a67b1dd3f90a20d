"""A kind of reduction that the library does not have, in one file: log (1/N Σ_j exp x_j), with a state of its own.

It says the least that a kind must say (``monoidreduce/reductions/base.py``): everything else follows. ``logmeanexp`` is
what a body calls. Below it is what tests need (``new_kinds.py``, which lists this file): ``KIND``, ops, and ``plain``.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import monoidreduce as mr
from monoidreduce import Col, Row
from monoidreduce.program import constructors
from monoidreduce.program.expression import Expr, size
from monoidreduce.program.symbol import Symbol, expr_of
from monoidreduce.reductions import Outputs, Reduction, State, make
from monoidreduce.reductions.base import per_part


class LogMeanExp(Reduction):
    """State: the largest number, Σ exp(x - largest), and how many pairs there were."""

    name = "logmeanexp"

    def outputs(self, fields: tuple[Expr, ...], params: tuple) -> Outputs:
        return [(None, "float")]

    def pullback(self, over: str, params: tuple, fields: list, results: list, g: list) -> list:
        value: Any = torch.where(torch.isinf(results[0]), 0.0, results[0])
        return [g[0] * torch.exp(fields[0] - value) / Symbol(size(over))]

    def identity(self, params: tuple) -> tuple[float, ...]:
        return (-math.inf, 0.0, 0.0)

    def lift(self, params: tuple, fields: Sequence[Any]) -> list[Any]:
        return [fields[0], 1.0, 1.0]

    def combine(self, params: tuple, a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
        top = torch.maximum(a[0], b[0])
        safe = torch.where(torch.isinf(top), 0.0, top)
        return [top, a[1] * torch.exp(a[0] - safe) + b[1] * torch.exp(b[0] - safe), a[2] + b[2]]

    def finish(self, params: tuple, state: Sequence[Any]) -> list[Any]:
        top, total, count = state
        safe = torch.where(torch.isinf(top), 0.0, top)
        total = total * torch.exp(top - safe)  # 0 or infinite where the largest number is
        nothing = total == 0
        return [torch.where(nothing, -math.inf, torch.log(torch.where(nothing, 1.0, total) / count) + safe)]

    def open(self, params: tuple, results: State, lengths: Sequence[int]) -> State:
        count = per_part(lengths, results[0]).expand_as(results[0])
        return [torch.where(count == 0, -math.inf, results[0]), count, count]


KIND = LogMeanExp()


def logmeanexp(x: Any, over: str = "cols") -> Any:
    """What a body calls."""
    number = constructors.apply("cast", expr_of(x), to="float")
    return Symbol(make(LogMeanExp.name, over, (), (number,))[0])


@mr.op
def by_rows(x: Row["d"], y: Col["d"], b: Col):
    """Results per row alone, so that columns may be streamed; one beside a kind of the library."""
    s = x @ y + b
    seen = mr.col_index <= 2 * mr.row_index
    return logmeanexp(s), logmeanexp(torch.where(seen, s, -torch.inf)), mr.logsumexp(s)


@mr.op
def both_ways(x: Row["d"], y: Col["d"], b: Col):
    """Over columns and over rows; of a column's own numbers; and on top of an earlier pass."""
    s = torch.tanh(x @ y) + b
    z = logmeanexp(s)
    return z, logmeanexp(s, over="rows"), mr.sum(torch.exp(s - z)), z + logmeanexp(b)


OPS = {"by_rows": by_rows, "both_ways": both_ways}
AXES = {"by_rows": ["rows"] * 3, "both_ways": ["rows", "cols", "rows", "rows"]}  # of the results


def plain(op: str, x: Tensor, y: Tensor, b: Tensor) -> list[Tensor]:
    """The same in plain torch."""
    mean = lambda t, dim: t.logsumexp(dim) - math.log(t.shape[dim])
    s = x @ y.T + b
    if op == "by_rows":
        seen = torch.arange(len(y)) <= 2 * torch.arange(len(x)).unsqueeze(-1)
        return [mean(s, 1), mean(torch.where(seen, s, -torch.inf), 1), s.logsumexp(1)]
    s = torch.tanh(x @ y.T) + b
    z = mean(s, 1)
    return [z, mean(s, 0), torch.exp(s - z.unsqueeze(1)).sum(1), z + mean(b, 0)]

"""Another kind that the library does not have, 1/N Σ_j x_j²: smooth everywhere, and 0 pairs are no mean."""

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


class MeanSquare(Reduction):
    """State: the sum of squares, and how many pairs there were."""

    name = "mean_square"

    def outputs(self, fields: tuple[Expr, ...], params: tuple) -> Outputs:
        return [(None, "float")]

    def pullback(self, over: str, params: tuple, fields: list, results: list, g: list) -> list:
        return [g[0] * fields[0] * 2.0 / Symbol(size(over))]

    def identity(self, params: tuple) -> tuple[float, ...]:
        return (0.0, 0.0)

    def lift(self, params: tuple, fields: Sequence[Any]) -> list[Any]:
        return [fields[0] * fields[0], 1.0]

    def combine(self, params: tuple, a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
        return [a[0] + b[0], a[1] + b[1]]

    def finish(self, params: tuple, state: Sequence[Any]) -> list[Any]:
        return [state[0] / state[1]]

    def open(self, params: tuple, results: State, lengths: Sequence[int]) -> State:
        count = per_part(lengths, results[0]).expand_as(results[0])
        return [torch.where(count == 0, 0.0, results[0] * count), count]


KIND = MeanSquare()


@mr.op
def by_rows(x: Row["d"], y: Col["d"], b: Col):
    s = x @ y + b
    return Symbol(make("mean_square", "cols", (), (constructors.apply("cast", expr_of(s), to="float"),))[0]), mr.max(s)


OPS = {"by_rows": by_rows}
AXES = {"by_rows": ["rows", "rows"]}  # of the results


def plain(op: str, x: Tensor, y: Tensor, b: Tensor) -> list[Tensor]:
    """The same in plain torch."""
    s = x @ y.T + b
    return [s.square().mean(1), s.amax(1)]

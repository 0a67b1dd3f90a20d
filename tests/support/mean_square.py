"""Another kind that the library does not have, 1/N Σ_j x_j²: smooth everywhere, and 0 pairs are no mean.

It counts its pairs by a field of ones, so that calls may say which pairs exist (``cols=``)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import monoidreduce as mr
from monoidreduce import Col, Row
from monoidreduce.program import constructors
from monoidreduce.program.expression import Expr
from monoidreduce.program.symbol import Symbol, expr_of
from monoidreduce.reductions import Outputs, Reduction, State, make


class MeanSquare(Reduction):
    """Fields: a number, and 1, or 0 of a pair that does not exist. State: the sum of squares, and the count."""

    name = "mean_square"
    fixed = (1,)

    def outputs(self, fields: tuple[Expr, ...], params: tuple) -> Outputs:
        return [(None, "float")] * 2

    def pullback(self, over: str, params: tuple, fields: list, results: list, g: list) -> list:
        return [g[0] * fields[1] * fields[0] * 2.0 / results[1], None]

    def identity(self, params: tuple) -> tuple[float, ...]:
        return (0.0, 0.0)

    def lift(self, params: tuple, fields: Sequence[Any]) -> list[Any]:
        return [fields[0] * fields[0] * fields[1], fields[1]]

    def combine(self, params: tuple, a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
        return [a[0] + b[0], a[1] + b[1]]

    def finish(self, params: tuple, state: Sequence[Any]) -> list[Any]:
        return [state[0] / state[1], state[1]]

    def open(self, params: tuple, results: State, lengths: Sequence[int]) -> State:
        mean, count = results
        return [torch.where(count == 0, 0.0, mean * count), count]

    def absent(self, params: tuple, fields: tuple[Expr, ...]) -> Sequence[float | None]:
        return 0.0, 0.0


KIND = MeanSquare()


@mr.op
def by_rows(x: Row["d"], y: Col["d"], b: Col):
    s = x @ y + b
    fields = tuple(constructors.apply("cast", expr_of(number), to="float") for number in (s, 1.0))
    return Symbol(make("mean_square", "cols", (), fields)[0]), mr.max(s)


OPS = {"by_rows": by_rows}
AXES = {"by_rows": ["rows", "rows"]}  # of the results


def plain(op: str, x: Tensor, y: Tensor, b: Tensor) -> list[Tensor]:
    """The same in plain torch."""
    s = x @ y.T + b
    return [s.square().mean(1), s.amax(1)]

"""Ops in a module with ``from __future__ import annotations``: declarations reach the decorator as texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Batch, Col, Row

X, Y = torch.randn(5, 3), torch.randn(7, 3)


@mr.op
def attention(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(q @ k, v)


@mr.op
def everything(
    q: mr.Row["f"],
    k: mr.Col["f"],
    bias: Row | None = None,
    slope: Batch | None = None,
    t: float = 1.0,
    causal: bool = False,
    k_best: int = 2,
    f: Callable = torch.tanh,
    kind: Literal["max", "sum"] = "sum",
    pair: Row[2] | None = None,
):
    s = f(q @ k) * t
    s = s if bias is None else s + bias
    s = torch.where(mr.col_index <= mr.row_index, s, 0.0) if causal else s
    return mr.topk(s, k_best).values if kind == "max" else mr.sum(s)


def test_declarations_are_read():
    assert repr(attention) == '<op attention(q: Row["f"], k: Col["f"], v: Col["d"])>'
    torch.testing.assert_close(attention(X, Y, Y), torch.softmax(X @ Y.T, 1) @ Y)


def test_every_kind_of_declaration():
    s = torch.tanh(X @ Y.T)
    torch.testing.assert_close(everything(X, Y), s.sum(1))
    torch.testing.assert_close(everything(X, Y, bias=torch.ones(5), t=0.5), (s * 0.5 + 1).sum(1))
    torch.testing.assert_close(everything(X, Y, causal=True), s.tril().sum(1))
    torch.testing.assert_close(everything(X, Y, kind="max", k_best=3), s.topk(3).values)


def test_a_letter_from_an_enclosing_function():
    """Names that only the enclosing function knows are found, too."""
    Vector = Row["f"]

    @mr.op
    def op(q: Vector, k: Col["f"]):
        return mr.sum(q @ k, over="rows") if Vector else None

    torch.testing.assert_close(op(X, Y), (X @ Y.T).sum(0))


def test_a_name_that_nobody_knows():
    with pytest.raises(mr.DeclarationError, match=r"cannot read q: Rwo\[.f.\]"):

        @mr.op
        def op(q: Rwo["f"], k: Col["f"]):
            return mr.sum(q @ k)


def test_a_monoid_declared_with_texts():
    class Total(mr.Monoid):
        v: mr.Scalar = 0.0

        def combine(a, b):
            return Total(v=a.v + b.v)

        def pullback(c, a, g):
            return g

    @mr.op
    def op(q: Row["f"], k: Col["f"]):
        return mr.reduce(Total, v=q @ k).v

    x = X.clone().requires_grad_()
    y = op(x, Y)
    torch.testing.assert_close(y, (X @ Y.T).sum(1))
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], Y.sum(0).expand(5, 3))

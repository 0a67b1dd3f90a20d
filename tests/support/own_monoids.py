"""Monoids that bring no gradient, ops that fold them, and the same by autograd through a plain sequential fold."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import monoidreduce as mr
from monoidreduce import Col, Row
from monoidreduce.algebra import Domain


class Attention(mr.Monoid):
    """Logsumexp with a vector, as one writes it down: local, and the trace finds it."""

    z: mr.Scalar = -math.inf
    v: mr.Vector = 0.0

    def combine(a, b):
        z = torch.logaddexp(a.z, b.z)
        return Attention(z=z, v=a.v * torch.exp(a.z - z) + b.v * torch.exp(b.z - z))


class Extent(mr.Monoid):
    low: mr.Scalar = math.inf
    high: mr.Scalar = -math.inf

    def combine(a, b):
        return Extent(low=torch.minimum(a.low, b.low), high=torch.maximum(a.high, b.high))


class Norm(mr.Monoid):
    n: mr.Scalar = 0.0
    domain = {"n": Domain(low=0.0)}

    def combine(a, b):
        return Norm(n=torch.sqrt(a.n * a.n + b.n * b.n))


class ProductSum(mr.Monoid):
    """A product, whose derivative is not known where a factor is 0, and a sum of vectors."""

    p: mr.Scalar = 1.0
    v: mr.Vector = 0.0

    def combine(a, b):
        return ProductSum(p=a.p * b.p, v=a.v + b.v)


class Variance(mr.Monoid):
    """Welford's, as everybody writes it."""

    n: mr.Scalar = 0.0
    mean: mr.Scalar = 0.0
    m2: mr.Scalar = 0.0
    domain = {"n": Domain(low=0.0), "m2": Domain(low=0.0)}

    def combine(a, b):
        n = a.n + b.n
        gap, some = b.mean - a.mean, torch.where(n == 0, 1.0, n)
        return Variance(n=n, mean=a.mean + gap * b.n / some, m2=a.m2 + b.m2 + gap * gap * a.n * b.n / some)


class TopTwo(mr.Monoid):
    first: mr.Scalar = -math.inf
    second: mr.Scalar = -math.inf

    @staticmethod
    def domain(x):
        return x.first >= x.second

    def combine(a, b):
        return TopTwo(
            first=torch.maximum(a.first, b.first),
            second=torch.maximum(torch.minimum(a.first, b.first), torch.maximum(a.second, b.second)),
        )


class Pooled(mr.Monoid):
    """Guarded, and with an inner product of vectors in combine: a sum of vectors, and of their products two by two."""

    s: mr.Vector = 0.0
    q: mr.Scalar = 0.0

    def combine(a, b):
        return Pooled(s=a.s + b.s, q=a.q + b.q + mr.dot(a.s, b.s))


class Steps(mr.Monoid):
    """Nothing in it has a derivative."""

    v: mr.Scalar = 0.0

    def combine(a, b):
        return Steps(v=torch.floor(a.v) + torch.floor(b.v))


ROADS = {Attention: "trace", Extent: "trace", Norm: "trace"}
ROADS |= {ProductSum: "others", Variance: "others", TopTwo: "others", Pooled: "others", Steps: "none"}


@mr.op
def attention(x: Row["d"], y: Col["d"], v: Col["e"]):
    seen = mr.reduce(Attention, z=x @ y, v=v)
    return seen.v, seen.z


@mr.op
def extent(x: Row["d"], y: Col["d"], v: Col["e"]):
    s = x @ y  # one value for both fields
    seen = mr.reduce(Extent, low=s, high=s)
    return seen.high, seen.low


@mr.op
def length(x: Row["d"], y: Col["d"], v: Col["e"]):
    return (mr.reduce(Norm, n=(x @ y).abs()).n,)


@mr.op
def product_sum(x: Row["d"], y: Col["d"], v: Col["e"]):
    """Beside a reduction that has a formula, with pairs that are left out."""
    s = x @ y
    near = mr.col_index <= 2 * mr.row_index
    seen = mr.reduce(ProductSum, p=torch.where(near, 1 + 0.1 * s, 1.0), v=torch.where(near, s, 0.0) * v)
    return seen.v, seen.p, mr.logsumexp(s)


@mr.op
def variance(x: Row["d"], y: Col["d"], v: Col["e"]):
    seen = mr.reduce(Variance, n=1.0, mean=x @ y, m2=0.0)
    return seen.m2, seen.mean


@mr.op
def pooled(x: Row["d"], y: Col["d"], v: Col["e"]):
    seen = mr.reduce(Pooled, s=torch.tanh(x @ y) * v, q=0.0)
    return seen.s, seen.q


@mr.op
def both_ways(x: Row["d"], y: Col["d"], v: Col["e"]):
    """Over columns and over rows, of different monoids."""
    s = torch.tanh(x @ y)
    top = mr.reduce(TopTwo, first=s, second=-torch.inf)
    return top.first - top.second, mr.reduce(Variance, n=1.0, mean=s, m2=0.0, over="rows").m2


AXES = {"both_ways": ["rows", "cols"], "product_sum": ["rows"] * 3, "length": ["rows"]}  # of the results; else two
OPS = ["attention", "extent", "length", "product_sum", "variance", "pooled", "both_ways"]


def axes(op: str) -> list[str]:
    return AXES.get(op, ["rows"] * 2)


def fold_in_order(monoid: Any, **fields: Tensor) -> Any:
    """One pair after the other along the second axis of ``[rows, cols(, features)]``."""
    marks = monoid.fields()
    elements = [
        monoid(**{n: v[:, j] if marks[n].marker.axes else v[:, j, None] for n, v in fields.items()})
        for j in range(next(iter(fields.values())).shape[1])
    ]
    found = functools.reduce(monoid.combine, elements).asdict()
    return monoid(**{n: v if marks[n].marker.axes else v.squeeze(-1) for n, v in found.items()})


def plain(op: str, x: Tensor, y: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """The same op in plain torch."""
    s = x @ y.T
    ones, zeros, nothing = torch.ones_like(s), torch.zeros_like(s), torch.full_like(s, -math.inf)
    if op == "attention":
        seen = fold_in_order(Attention, z=s, v=v.expand(*s.shape, -1))
        return seen.v, seen.z
    if op == "extent":
        return s.amax(1), s.amin(1)
    if op == "length":
        return (fold_in_order(Norm, n=s.abs()).n,)
    if op == "product_sum":
        near = torch.arange(len(y)) <= 2 * torch.arange(len(x)).unsqueeze(-1)
        weighted = torch.where(near, s, 0.0).unsqueeze(-1) * v
        seen = fold_in_order(ProductSum, p=torch.where(near, 1 + 0.1 * s, 1.0), v=weighted)
        return seen.v, seen.p, s.logsumexp(1)
    if op == "variance":
        seen = fold_in_order(Variance, n=ones, mean=s, m2=zeros)
        return seen.m2, seen.mean
    if op == "pooled":
        seen = fold_in_order(Pooled, s=torch.tanh(s).unsqueeze(-1) * v, q=zeros)
        return seen.s, seen.q
    s = torch.tanh(s)
    top = fold_in_order(TopTwo, first=s, second=nothing)
    return top.first - top.second, fold_in_order(Variance, n=ones.T, mean=s.T, m2=zeros.T).m2


def problem(rows: int = 7, cols: int = 13, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = (rows, 4), (cols, 4), (cols, 3)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def cotangent(like: Tensor) -> Tensor:
    return torch.cos(torch.arange(like.numel(), dtype=torch.float64)).view(like.shape).to(like)


def with_gradients(function: Any, args: Sequence[Tensor], second: bool = False) -> list[Tensor]:
    """The values of a function, gradients, and with ``second`` the gradients of these."""
    given = [a.detach().clone().requires_grad_() for a in args]
    values = list(function(*given))
    found = torch.autograd.grad(values, given, [*map(cotangent, values)], create_graph=second, materialize_grads=True)
    if not second:
        return [*(v.detach() for v in values), *found]
    moving = [g for g in found if g.requires_grad]
    again = torch.autograd.grad(moving, given, [*map(cotangent, moving)], materialize_grads=True) if moving else ()
    return [t.detach() for t in (*values, *found, *again)]

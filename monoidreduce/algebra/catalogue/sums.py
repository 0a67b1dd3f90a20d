"""Sums, products and means: Sum, Count, Prod, WSum and Welford."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from monoidreduce.algebra.catalogue._numerics import divisor, weighted_tile
from monoidreduce.algebra.fields import all_close
from monoidreduce.algebra.monoid import Domain, Monoid, Scalar, Vector, dot


class Sum(Monoid):
    """``T = ℝ, a ⊙ b = a + b, id = 0``; ``D(c, a) g = g``.

    >>> import torch
    >>> from monoidreduce.algebra import fold
    >>> fold(Sum, torch.tensor([1.0, 2.0, 3.0])).v
    tensor(6.)
    """

    elementwise = True
    v: Scalar = 0.0

    def combine(a: Sum, b: Sum) -> Sum:
        return Sum(v=a.v + b.v)

    def pullback(c: Sum, a: Sum, g: Sum) -> Sum:
        return Sum(v=g.v)

    def fold_tile(x: Sum, dim: int) -> Sum:
        return Sum(v=x.v.sum(dim))


class Count(Monoid):
    """``T = ℝ≥0, a ⊙ b = a + b, id = 0``; one boolean counts as 0 or 1, any other number as 1.

    >>> from monoidreduce.algebra import fold
    >>> fold(Count, torch.tensor([True, False, True])).n, fold(Count, torch.tensor([5.0, 0.0, 7.0])).n
    (tensor(2), tensor(3))
    """

    elementwise = True
    domain = {"n": Domain(low=0.0)}
    n: Scalar = 0

    def combine(a: Count, b: Count) -> Count:
        return Count(n=a.n + b.n)

    def pullback(c: Count, a: Count, g: Count) -> Count:
        return Count(n=g.n)

    def fold_tile(x: Count, dim: int) -> Count:
        return Count(n=x.n.sum(dim))

    @classmethod
    def embed(cls, x: Any, dim: int | None, start: int = 0) -> Count:
        return Count(n=x.to(torch.int64) if x.dtype == torch.bool else torch.ones_like(x, dtype=torch.int64))


class Prod(Monoid):
    """``a ⊙ b = {v: a_v b_v, p: a_p b_p, zeros: a_zeros + b_zeros}``, ``id = (1, 1, 0)``; the product is ``v``.

    The derivative of a product by one factor is the product of the others. From ``c_v`` alone it is lost as soon as a
    factor is 0, so the fold also carries ``p``, the product of the factors that are not 0, and how many are 0:
    ``D(c, a) g = {v: g_v c_p / a_p, or 0 where another factor is 0; p: g_p c_p / a_p}``. A legal element has ``p ≠ 0``,
    and ``v = p`` if ``zeros = 0``, else ``v = 0``. Where ``p`` overflows, so does the gradient.

    >>> from monoidreduce.algebra import fold
    >>> x = torch.tensor([2.0, 0.0, 3.0], requires_grad=True)
    >>> fold(Prod, x).v.backward()
    >>> x.grad
    tensor([0., 6., 0.])
    """

    elementwise = True
    integers = ("zeros",)
    domain = {"zeros": Domain(low=0.0)}
    v: Scalar = 1.0
    p: Scalar = 1.0
    zeros: Scalar = 0

    def combine(a: Prod, b: Prod) -> Prod:
        return Prod(v=a.v * b.v, p=a.p * b.p, zeros=a.zeros + b.zeros)

    def pullback(c: Prod, a: Prod, g: Prod) -> Prod:
        others = c.p / a.p
        return Prod(v=g.v * torch.where(c.zeros == a.zeros, others, 0.0), p=g.p * others, zeros=a.zeros * 0)

    def fold_tile(x: Prod, dim: int) -> Prod:
        return Prod(v=x.v.prod(dim), p=x.p.prod(dim), zeros=x.zeros.sum(dim))

    def legal(x: Prod) -> Prod:
        p = torch.where(x.p == 0, 1.0, x.p)
        zeros = x.zeros.abs()
        return Prod(v=torch.where(zeros == 0, p, 0.0), p=p, zeros=zeros)

    @classmethod
    def embed(cls, x: Any, dim: int | None, start: int = 0) -> Prod:
        zero = x == 0
        return Prod(v=x, p=torch.where(zero, 1, x), zeros=zero.to(torch.int64))


class WSum(Monoid):
    """``c_w = a_w + b_w, c_v = (a_w a_v + b_w b_v) / c_w``, and 0 where ``c_w = 0``; weights ``≥ 0``; ``id = (0, 0)``.

    ``D(c, a) g = {w: g_w + ⟨g_v, a_v - c_v⟩ / c_w, v: g_v a_w / c_w}``. Where all weights are 0 the mean is undefined:
    its value is 0 there and it passes no gradient on.

    >>> from monoidreduce.algebra import fold
    >>> fold(WSum, {"w": torch.tensor([1.0, 3.0]), "v": torch.tensor([[4.0], [8.0]])}).v
    tensor([7.])
    """

    domain = {"w": Domain(low=0.0)}
    w: Scalar = 0.0
    v: Vector = 0.0

    def combine(a: WSum, b: WSum) -> WSum:
        w = a.w + b.w
        mean = a.v * (a.w / divisor(w)) + b.v * (b.w / divisor(w))
        return WSum(w=w, v=torch.where(w == 0, 0.0, mean))

    def pullback(c: WSum, a: WSum, g: WSum) -> WSum:
        moved = torch.where(c.w == 0, 0.0, dot(g.v, a.v - c.v) / divisor(c.w))
        return WSum(w=g.w + moved, v=g.v * (a.w / divisor(c.w)))

    def fold_tile(x: WSum, dim: int) -> WSum:
        w = x.w.sum(dim)
        mean = weighted_tile(x.w / divisor(w).unsqueeze(dim), x.v, dim)
        return WSum(w=w, v=torch.where(w == 0, 0.0, mean))

    def approx(a: WSum, b: WSum, *, scale: Mapping[str, Any] | None = None) -> bool:
        """The mean does not matter where the weight is 0."""
        sizes = scale or {}
        weighty = (a.w != 0) | (b.w != 0)
        return all_close(a.w, b.w, sizes.get("w", 1.0)) and all_close(a.v, b.v, sizes.get("v", 1.0), where=weighty)


class Welford(Monoid):
    """``n = a_n + b_n, mean = a_mean + δ b_n / n, m2 = a_m2 + b_m2 + δ² a_n b_n / n`` with ``δ = b_mean - a_mean``.

    ``id = (0, 0, 0)``; the variance is ``m2 / n`` (or ``m2 / (n - 1)``), exactly 0 for equal numbers. With ``d = a_mean
    - c_mean``: ``D(c, a) g = {n: g_n + g_mean d / c_n + g_m2 d², mean: a_n (g_mean / c_n + 2 g_m2 d), m2: g_m2}``.

    >>> from monoidreduce.algebra import fold
    >>> x = fold(Welford, torch.tensor([1.0, 2.0, 6.0]))
    >>> x.n, x.mean, x.m2
    (tensor(3.), tensor(3.), tensor(14.))
    """

    elementwise = True
    domain = {"n": Domain(low=0.0), "m2": Domain(low=0.0)}
    n: Scalar = 0.0
    mean: Scalar = 0.0
    m2: Scalar = 0.0

    def combine(a: Welford, b: Welford) -> Welford:
        n = a.n + b.n
        delta = b.mean - a.mean
        part = b.n / divisor(n)
        between = delta * (delta * (a.n * part))  # in this order 0 elements far away add 0, not 0 times infinity
        return Welford(n=n, mean=a.mean + delta * part, m2=a.m2 + b.m2 + between)

    def pullback(c: Welford, a: Welford, g: Welford) -> Welford:
        off = a.mean - c.mean
        mean = g.mean / divisor(c.n)
        return Welford(n=g.n + (mean + g.m2 * off) * off, mean=a.n * (mean + 2.0 * g.m2 * off), m2=g.m2)

    def fold_tile(x: Welford, dim: int) -> Welford:
        n = x.n.sum(dim, keepdim=True)
        start = x.mean.detach().narrow(dim, 0, 1)  # measured from here, equal numbers have a mean without rounding
        mean = start + (x.n * (x.mean - start)).sum(dim, keepdim=True) / divisor(n)
        m2 = (x.m2 + x.n * (x.mean - mean) ** 2).sum(dim)
        return Welford(n=n.squeeze(dim), mean=mean.squeeze(dim), m2=m2)

    def legal(x: Welford) -> Welford:
        n = x.n.clamp(max=100.0).round()
        mean = torch.where(n == 0, 0.0, x.mean)
        return Welford(n=n, mean=mean, m2=torch.where(n <= 1, 0.0, x.m2))

    def approx(a: Welford, b: Welford, *, scale: Mapping[str, Any] | None = None) -> bool:
        """The squared deviations are as good as the squares they are differences of."""
        sizes = scale or {}
        mean = torch.as_tensor(sizes.get("mean", 1.0))
        square = torch.maximum(torch.as_tensor(sizes.get("m2", 1.0)), mean * mean)
        return all_close(a.n, b.n) and all_close(a.mean, b.mean, mean) and all_close(a.m2, b.m2, square)

    @classmethod
    def embed(cls, x: Any, dim: int | None, start: int = 0) -> Welford:
        x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
        return Welford(n=torch.ones_like(x), mean=x, m2=torch.zeros_like(x))

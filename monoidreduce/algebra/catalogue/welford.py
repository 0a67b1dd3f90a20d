"""Welford: count, mean and sum of squared deviations, combined without cancellation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from monoidreduce.algebra.approx import all_close
from monoidreduce.algebra.catalogue._numerics import divisor
from monoidreduce.algebra.monoid import Domain, Monoid, Scalar


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

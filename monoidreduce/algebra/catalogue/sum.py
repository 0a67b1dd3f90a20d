"""Sum: the plain sum, whose pullback passes the cotangent on."""

from __future__ import annotations

from monoidreduce.algebra.monoid import Monoid, Scalar


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

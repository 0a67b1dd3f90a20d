"""Count: how many elements there are, or how many are true."""

from __future__ import annotations

from typing import Any

import torch

from monoidreduce.algebra.monoid import Domain, Monoid, Scalar


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

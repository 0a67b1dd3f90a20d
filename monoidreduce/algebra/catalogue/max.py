"""Max: the greatest of numbers."""

from __future__ import annotations

import math

import torch

from monoidreduce.algebra.monoid import Domain, Monoid, Scalar


class Max(Monoid):
    """``T = ℝ ∪ {±∞}, a ⊙ b = max(a, b), id = -∞``; ``D(c, a) g = g`` where ``a = c``, else 0. NaN wins.

    Where several elements are greatest the maximum has no derivative. The local rule cannot know how many there are
    and gives the whole cotangent to each; autograd through ``fold`` shares it out among them.

    >>> from monoidreduce.algebra import fold
    >>> fold(Max, torch.tensor([1.0, 5.0, 2.0])).v
    tensor(5.)
    """

    elementwise = True
    domain = {"v": Domain(specials=(-math.inf, math.inf))}
    v: Scalar = -math.inf

    def combine(a: Max, b: Max) -> Max:
        return Max(v=torch.maximum(a.v, b.v))

    def pullback(c: Max, a: Max, g: Max) -> Max:
        return Max(v=torch.where(a.v == c.v, g.v, 0.0))

    def fold_tile(x: Max, dim: int) -> Max:
        return Max(v=x.v.amax(dim))

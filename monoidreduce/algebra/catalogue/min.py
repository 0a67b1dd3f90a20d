"""Min: the least of numbers."""

from __future__ import annotations

import math

import torch

from monoidreduce.algebra.monoid import Domain, Monoid, Scalar


class Min(Monoid):
    """``T = ℝ ∪ {±∞}, a ⊙ b = min(a, b), id = +∞``; ``D(c, a) g = g`` where ``a = c``, else 0. NaN wins.

    Where several elements are least the minimum has no derivative. The local rule cannot know how many there are
    and gives the whole cotangent to each; autograd through ``fold`` shares it out among them.

    >>> from monoidreduce.algebra import fold
    >>> fold(Min, torch.tensor([1.0, 5.0, 2.0])).v
    tensor(1.)
    """

    elementwise = True
    domain = {"v": Domain(specials=(-math.inf, math.inf))}
    v: Scalar = math.inf

    def combine(a: Min, b: Min) -> Min:
        return Min(v=torch.minimum(a.v, b.v))

    def pullback(c: Min, a: Min, g: Min) -> Min:
        return Min(v=torch.where(a.v == c.v, g.v, 0.0))

    def fold_tile(x: Min, dim: int) -> Min:
        return Min(v=x.v.amin(dim))

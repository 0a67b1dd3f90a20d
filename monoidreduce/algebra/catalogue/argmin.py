"""ArgMin: the least of numbers and where it stands."""

from __future__ import annotations

import math
from typing import Any

import torch

from monoidreduce.algebra.catalogue._numerics import NO_INDEX, best_tile, better, positions
from monoidreduce.algebra.monoid import Domain, Monoid, Scalar


class ArgMin(Monoid):
    """``a ⊙ b`` = the one with the smaller ``v``, of equal ones that with the smaller ``index``; ``id = (+∞, last)``.

    ``D(c, a) g = {v: g_v if a is the winner, else 0}``: unlike Min it knows the winner, also among equals. A NaN wins.
    Indices are whole numbers below 2³¹ - 1, which is the index of the identity.

    >>> from monoidreduce.algebra import fold
    >>> fold(ArgMin, torch.tensor([7.0, 3.0, 3.0])).index
    tensor(1)
    """

    elementwise = True
    integers = ("index",)
    domain = {"v": Domain(specials=(-math.inf, math.inf)), "index": Domain(low=0.0)}
    v: Scalar = math.inf
    index: Scalar = NO_INDEX

    def combine(a: ArgMin, b: ArgMin) -> ArgMin:
        take_b = better(a.v, a.index, b.v, b.index, least=True)
        return ArgMin(v=torch.where(take_b, b.v, a.v), index=torch.where(take_b, b.index, a.index))

    def pullback(c: ArgMin, a: ArgMin, g: ArgMin) -> ArgMin:
        won = (a.v == c.v) & (a.index == c.index)
        return ArgMin(v=torch.where(won, g.v, 0.0), index=a.index * 0)

    def fold_tile(x: ArgMin, dim: int) -> ArgMin:
        v, index = torch.broadcast_tensors(x.v, x.index)
        winner = best_tile(v, index, dim, least=True)
        return ArgMin(v=v.gather(dim, winner).squeeze(dim), index=index.gather(dim, winner).squeeze(dim))

    @classmethod
    def embed(cls, x: Any, dim: int | None, start: int = 0) -> ArgMin:
        return ArgMin(v=x, index=positions(x, dim, start))

"""ArgMax: the greatest of numbers and where it stands."""

from __future__ import annotations

import math
from typing import Any

import torch

from monoidreduce.algebra.catalogue._numerics import NO_INDEX, best_tile, better, positions
from monoidreduce.algebra.monoid import Domain, Monoid, Scalar


class ArgMax(Monoid):
    """``a ⊙ b`` = the one with the greater ``v``, of equal ones that with the smaller ``index``; ``id = (-∞, last)``.

    ``D(c, a) g = {v: g_v if a is the winner, else 0}``: unlike Max it knows the winner, also among equals. A NaN wins.
    Indices are whole numbers below 2³¹ - 1, which is the index of the identity.

    >>> from monoidreduce.algebra import fold
    >>> fold(ArgMax, torch.tensor([3.0, 7.0, 7.0])).index
    tensor(1)
    """

    elementwise = True
    integers = ("index",)
    domain = {"v": Domain(specials=(-math.inf, math.inf)), "index": Domain(low=0.0)}
    v: Scalar = -math.inf
    index: Scalar = NO_INDEX

    def combine(a: ArgMax, b: ArgMax) -> ArgMax:
        take_b = better(a.v, a.index, b.v, b.index)
        return ArgMax(v=torch.where(take_b, b.v, a.v), index=torch.where(take_b, b.index, a.index))

    def pullback(c: ArgMax, a: ArgMax, g: ArgMax) -> ArgMax:
        won = (a.v == c.v) & (a.index == c.index)
        return ArgMax(v=torch.where(won, g.v, 0.0), index=a.index * 0)

    def fold_tile(x: ArgMax, dim: int) -> ArgMax:
        v, index = torch.broadcast_tensors(x.v, x.index)
        winner = best_tile(v, index, dim)
        return ArgMax(v=v.gather(dim, winner).squeeze(dim), index=index.gather(dim, winner).squeeze(dim))

    @classmethod
    def embed(cls, x: Any, dim: int | None, start: int = 0) -> ArgMax:
        return ArgMax(v=x, index=positions(x, dim, start))

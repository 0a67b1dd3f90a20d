"""And: whether all are true."""

from __future__ import annotations

import torch

from monoidreduce.algebra.monoid import Monoid, Scalar


class And(Monoid):
    """``T = {false, true}, a ⊙ b = a ∧ b, id = true``; no gradient.

    >>> from monoidreduce.algebra import fold
    >>> fold(And, torch.tensor([True, False])).v
    tensor(False)
    """

    elementwise = True
    v: Scalar = True

    def combine(a: And, b: And) -> And:
        return And(v=torch.logical_and(a.v, b.v))

    def fold_tile(x: And, dim: int) -> And:
        return And(v=x.v.all(dim))

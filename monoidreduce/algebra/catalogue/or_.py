"""Or: whether any is true."""

from __future__ import annotations

import torch

from monoidreduce.algebra.monoid import Monoid, Scalar


class Or(Monoid):
    """``T = {false, true}, a ⊙ b = a ∨ b, id = false``; no gradient.

    >>> from monoidreduce.algebra import fold
    >>> fold(Or, torch.tensor([True, False])).v
    tensor(True)
    """

    elementwise = True
    v: Scalar = False

    def combine(a: Or, b: Or) -> Or:
        return Or(v=torch.logical_or(a.v, b.v))

    def fold_tile(x: Or, dim: int) -> Or:
        return Or(v=x.v.any(dim))

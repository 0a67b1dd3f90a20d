"""LogSumExp: sums in log space, as in cross-entropy."""

from __future__ import annotations

import math

from monoidreduce.algebra.catalogue._numerics import log_add, log_sum_tile, share
from monoidreduce.algebra.monoid import Monoid, Scalar


class LogSumExp(Monoid):
    """``T = ℝ ∪ {-∞}, a ⊙ b = ln(eᵃ + eᵇ), id = -∞``; ``D(c, a) g = g exp(a - c)``.

    A fold that saw only ``-inf`` is ``-inf`` and has zero gradients. ``+inf`` gives ``+inf``, with NaN gradients, as in
    torch.

    >>> import torch
    >>> from monoidreduce.algebra import fold
    >>> fold(LogSumExp, torch.tensor([1e5, 1e5, -math.inf])).z - 1e5
    tensor(0.6953)
    """

    elementwise = True
    z: Scalar = -math.inf

    def combine(a: LogSumExp, b: LogSumExp) -> LogSumExp:
        return LogSumExp(z=log_add(a.z, b.z)[0])

    def pullback(c: LogSumExp, a: LogSumExp, g: LogSumExp) -> LogSumExp:
        return LogSumExp(z=g.z * share(a.z, c.z))

    def fold_tile(x: LogSumExp, dim: int) -> LogSumExp:
        return LogSumExp(z=log_sum_tile(x.z, dim)[0])

"""LogWSum: the weighted mean of vectors with weights in log space, which is attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from monoidreduce.algebra.approx import all_close
from monoidreduce.algebra.catalogue._numerics import log_add, log_sum_tile, share, weighted_tile
from monoidreduce.algebra.monoid import Monoid, Scalar, Vector, dot


class LogWSum(Monoid):
    """``c_z = ln(exp a_z + exp b_z), c_v = a_v exp(a_z - c_z) + b_v exp(b_z - c_z)``; ``id = (-∞, 0)``.

    ``softmax(z) · v`` is the ``v`` of its fold. ``D(c, a) g = {z: (g_z + ⟨g_v, a_v - c_v⟩) exp(a_z - c_z), v: g_v
    exp(a_z - c_z)}``; a fold that saw only ``z = -inf`` has ``v = 0`` and zero gradients.

    >>> import torch
    >>> from monoidreduce.algebra import fold
    >>> z, v = torch.tensor([0.0, 0.0, -math.inf]), torch.tensor([[1.0], [3.0], [50.0]])
    >>> fold(LogWSum, {"z": z, "v": v}).v
    tensor([2.])
    """

    z: Scalar = -math.inf
    v: Vector = 0.0

    def combine(a: LogWSum, b: LogWSum) -> LogWSum:
        z, a_part, b_part = log_add(a.z, b.z)
        return LogWSum(z=z, v=a.v * a_part + b.v * b_part)

    def pullback(c: LogWSum, a: LogWSum, g: LogWSum) -> LogWSum:
        part = share(a.z, c.z)
        return LogWSum(z=part * (g.z + dot(g.v, a.v - c.v)), v=part * g.v)

    def fold_tile(x: LogWSum, dim: int) -> LogWSum:
        z, parts = log_sum_tile(x.z, dim)
        return LogWSum(z=z, v=weighted_tile(parts, x.v, dim))

    def approx(a: LogWSum, b: LogWSum, *, scale: Mapping[str, Any] | None = None) -> bool:
        """The mean does not matter where the weight is exp(-inf) = 0."""
        sizes = scale or {}
        weighty = (a.z != -math.inf) | (b.z != -math.inf)
        return all_close(a.z, b.z, sizes.get("z", 1.0)) and all_close(a.v, b.v, sizes.get("v", 1.0), where=weighty)

"""WSum: the weighted mean of vectors, with the sum of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from monoidreduce.algebra.approx import all_close
from monoidreduce.algebra.catalogue._numerics import divisor, weighted_tile
from monoidreduce.algebra.monoid import Domain, Monoid, Scalar, Vector, dot


class WSum(Monoid):
    """``c_w = a_w + b_w, c_v = (a_w a_v + b_w b_v) / c_w``, and 0 where ``c_w = 0``; weights ``≥ 0``; ``id = (0, 0)``.

    ``D(c, a) g = {w: g_w + ⟨g_v, a_v - c_v⟩ / c_w, v: g_v a_w / c_w}``. Where all weights are 0 the mean is undefined:
    its value is 0 there and it passes no gradient on.

    >>> from monoidreduce.algebra import fold
    >>> fold(WSum, {"w": torch.tensor([1.0, 3.0]), "v": torch.tensor([[4.0], [8.0]])}).v
    tensor([7.])
    """

    domain = {"w": Domain(low=0.0)}
    w: Scalar = 0.0
    v: Vector = 0.0

    def combine(a: WSum, b: WSum) -> WSum:
        w = a.w + b.w
        mean = a.v * (a.w / divisor(w)) + b.v * (b.w / divisor(w))
        return WSum(w=w, v=torch.where(w == 0, 0.0, mean))

    def pullback(c: WSum, a: WSum, g: WSum) -> WSum:
        moved = torch.where(c.w == 0, 0.0, dot(g.v, a.v - c.v) / divisor(c.w))
        return WSum(w=g.w + moved, v=g.v * (a.w / divisor(c.w)))

    def fold_tile(x: WSum, dim: int) -> WSum:
        w = x.w.sum(dim)
        mean = weighted_tile(x.w / divisor(w).unsqueeze(dim), x.v, dim)
        return WSum(w=w, v=torch.where(w == 0, 0.0, mean))

    def approx(a: WSum, b: WSum, *, scale: Mapping[str, Any] | None = None) -> bool:
        """The mean does not matter where the weight is 0."""
        sizes = scale or {}
        weighty = (a.w != 0) | (b.w != 0)
        return all_close(a.w, b.w, sizes.get("w", 1.0)) and all_close(a.v, b.v, sizes.get("v", 1.0), where=weighty)

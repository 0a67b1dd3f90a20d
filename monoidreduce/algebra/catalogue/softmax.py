"""Weights in log space: LogSumExp, LogWSum (a softmax mean) and Sample (a draw from a softmax)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from monoidreduce.algebra.catalogue._numerics import (
    NO_INDEX,
    best_tile,
    better,
    log_add,
    log_sum_tile,
    share,
    weighted_tile,
)
from monoidreduce.algebra.fields import all_close
from monoidreduce.algebra.monoid import Domain, Monoid, Scalar, Vector, dot


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


class Sample(Monoid):
    """``z = ln(exp a_z + exp b_z)``, and ``(key, index)`` of the one with the greater key; ``id = (-∞, -∞, last)``.

    A coin tossed in ``combine``, as a sampler is usually written, makes a different result of every order of folding.
    Here each element brings its noise with it: ``key = logit + Gumbel noise``, whose maximum stands at index i with
    probability ``exp(logit_i - z)``. So ``combine`` is deterministic and associative. It has no gradient.

    >>> from monoidreduce.algebra import fold
    >>> logits, noise = torch.tensor([0.0, 9.0, -math.inf]), torch.tensor([0.5, 0.5, 0.5])
    >>> fold(Sample, Sample.perturbed(logits, noise, torch.arange(3))).index
    tensor(1)
    """

    elementwise = True
    integers = ("index",)
    domain = {"key": Domain(specials=(-math.inf,)), "index": Domain(low=0.0)}
    z: Scalar = -math.inf
    key: Scalar = -math.inf
    index: Scalar = NO_INDEX

    def combine(a: Sample, b: Sample) -> Sample:
        take_b = better(a.key, a.index, b.key, b.index)
        return Sample(
            z=log_add(a.z, b.z)[0],
            key=torch.where(take_b, b.key, a.key),
            index=torch.where(take_b, b.index, a.index),
        )

    def fold_tile(x: Sample, dim: int) -> Sample:
        key, index = torch.broadcast_tensors(x.key, x.index)
        winner = best_tile(key, index, dim)
        return Sample(
            z=log_sum_tile(x.z, dim)[0],
            key=key.gather(dim, winner).squeeze(dim),
            index=index.gather(dim, winner).squeeze(dim),
        )

    def approx(a: Sample, b: Sample, *, scale: Mapping[str, Any] | None = None) -> bool:
        """The same noise must choose the same index, exactly; nothing is chosen where the weight is exp(-inf) = 0."""
        sizes = scale or {}
        chosen = (a.z != -math.inf) | (b.z != -math.inf)
        same = all_close(a.index, b.index, where=chosen) and all_close(a.key, b.key, 0.0, where=chosen)
        return same and all_close(a.z, b.z, sizes.get("z", 1.0))

    @staticmethod
    def perturbed(logit: Tensor, uniform: Tensor, index: Tensor) -> Sample:
        """Elements from logits and independent uniform numbers in (0, 1): ``key = logit - ln(-ln uniform)``."""
        return Sample(z=logit, key=logit - torch.log(-torch.log(uniform)), index=index)

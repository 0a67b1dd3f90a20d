"""The catalogue: the monoids of the papers and the usual reductions, family by family.

To a user this is ``monoids``. A class docstring gives the equation of ⊙, the identity and the derivative ``D(c, a)``.

>>> import torch
>>>
>>> from monoidreduce import fold, monoids
>>> fold(monoids.Max, monoids.Max(v=torch.tensor([[1.0], [4.0]])), dim=0).v
tensor([4.])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from monoidreduce.algebra.fields import all_close
from monoidreduce.algebra.monoid import Domain, Function, List, Matrix, Monoid, Scalar, Vector, dot
from monoidreduce.errors import ArgumentError

__all__ = [
    "And",
    "ArgMax",
    "ArgMin",
    "Cat",
    "Compose",
    "Count",
    "LogSumExp",
    "LogWSum",
    "MMul",
    "Max",
    "Min",
    "Or",
    "Prod",
    "Sample",
    "Sum",
    "TopK",
    "WSum",
    "Welford",
]

# The guarded arithmetic that several monoids share: logarithmic weights, and the better of two candidates.
#
# All of it is elementwise and takes symbols as well as tensors, except the ``*_tile`` functions, which fold a whole
# axis of concrete tensors. Guards choose a harmless number *before* the operation that would give NaN, not after it:
# ``where`` sends a zero cotangent down the branch not taken, and zero times NaN is NaN.

# The index of the identity: loses every tie. The greatest 32-bit integer, so that generated kernels can hold it too.
NO_INDEX = 2**31 - 1


def log_add(a: Any, b: Any) -> tuple[Any, Any, Any]:
    """``z = ln(eᵃ + eᵇ)`` and the parts that a and b have in it, ``exp(a - z)`` and ``exp(b - z)``.

    Exact at the identity; -inf, with parts and derivatives 0, where both are -inf. The parts are divided by their sum
    instead of being taken from the rounded z, which at 1e5 is off by 0.004 in float32.

    Not ``torch.logaddexp``: its derivative is NaN at (-inf, -inf), and its second derivative wherever the two are more
    than 88 (float32) apart.
    """
    top = torch.maximum(a, b)
    nothing = top == -math.inf
    top = torch.where(nothing, 0.0, top)
    a_part, b_part = torch.exp(a - top), torch.exp(b - top)
    total = torch.where(nothing, 1.0, a_part + b_part)
    return torch.where(nothing, -math.inf, top + torch.log(total)), a_part / total, b_part / total


def log_sum_tile(z: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """``logsumexp(z, dim)`` and ``softmax(z, dim)``; the latter and all derivatives are 0 where all are -inf."""
    top = z.detach().amax(dim, keepdim=True)
    top = torch.where(torch.isfinite(top), top, 0.0)
    parts = torch.exp(z - top)
    total = parts.sum(dim, keepdim=True)
    nothing = total == 0
    total = torch.where(nothing, 1.0, total)
    return torch.where(nothing, -math.inf, top + torch.log(total)).squeeze(dim), parts / total


def share(a: Any, c: Any) -> Any:
    """``exp(a - c)``, the part that log-weight ``a`` has in the total ``c``; 0 where the total is -inf."""
    return torch.exp(a - torch.where(c == -math.inf, 0.0, c))


def divisor(total: Any) -> Any:
    """``total``, and 1 where it is 0: something to divide by."""
    return torch.where(total == 0, 1.0, total)


def better(a_key: Any, a_index: Any, b_key: Any, b_index: Any, *, least: bool = False) -> Any:
    """Whether b beats a: a greater (or ``least``) key, or an equal key and a smaller index. NaN beats every number."""
    ahead = b_key < a_key if least else b_key > a_key
    earlier = b_index < a_index
    return ahead | ((b_key == a_key) & earlier) | ((b_key != b_key) & ((a_key == a_key) | earlier))


def best_tile(key: Tensor, index: Tensor, dim: int, *, least: bool = False) -> Tensor:
    """The position along ``dim`` (which is kept, one long) of the element that is ``better`` than all others."""
    key = key.detach()
    top = key.amin(dim, keepdim=True) if least else key.amax(dim, keepdim=True)
    hit = (key == top) | (key != key)
    last = math.inf if index.is_floating_point() else torch.iinfo(index.dtype).max
    return torch.where(hit, index, last).argmin(dim, keepdim=True)


def weighted_tile(parts: Tensor, v: Tensor, dim: int) -> Tensor:
    """``(parts * v).sum(dim)`` for a scalar and a vector field, as a matrix product: the products are not stored."""
    return torch.matmul(parts.movedim(dim, -1), v.movedim(dim, -2)).squeeze(-2)


def positions(x: Tensor, dim: int | None, start: int) -> Tensor:
    """The index of each element of ``x`` along ``dim``, counted from ``start``; shaped like ``x``."""
    if dim is None:
        return torch.full_like(x, start, dtype=torch.int64)
    shape = [1] * x.dim()
    shape[dim] = -1
    return torch.arange(start, start + x.shape[dim], device=x.device).reshape(shape).expand(x.shape)


# Sums, products and means


class Sum(Monoid):
    """``T = ℝ, a ⊙ b = a + b, id = 0``; ``D(c, a) g = g``.

    >>> import torch
    >>> from monoidreduce.algebra import fold
    >>> fold(Sum, torch.tensor([1.0, 2.0, 3.0])).v
    tensor(6.)
    """

    elementwise = True
    v: Scalar = 0.0

    def combine(a: Sum, b: Sum) -> Sum:
        return Sum(v=a.v + b.v)

    def pullback(c: Sum, a: Sum, g: Sum) -> Sum:
        return Sum(v=g.v)

    def fold_tile(x: Sum, dim: int) -> Sum:
        return Sum(v=x.v.sum(dim))


class Count(Monoid):
    """``T = ℝ≥0, a ⊙ b = a + b, id = 0``; one boolean counts as 0 or 1, any other number as 1.

    >>> from monoidreduce.algebra import fold
    >>> fold(Count, torch.tensor([True, False, True])).n, fold(Count, torch.tensor([5.0, 0.0, 7.0])).n
    (tensor(2), tensor(3))
    """

    elementwise = True
    domain = {"n": Domain(low=0.0)}
    n: Scalar = 0

    def combine(a: Count, b: Count) -> Count:
        return Count(n=a.n + b.n)

    def pullback(c: Count, a: Count, g: Count) -> Count:
        return Count(n=g.n)

    def fold_tile(x: Count, dim: int) -> Count:
        return Count(n=x.n.sum(dim))

    @classmethod
    def embed(cls, x: Any, dim: int | None, start: int = 0) -> Count:
        return Count(n=x.to(torch.int64) if x.dtype == torch.bool else torch.ones_like(x, dtype=torch.int64))


class Prod(Monoid):
    """``a ⊙ b = {v: a_v b_v, p: a_p b_p, zeros: a_zeros + b_zeros}``, ``id = (1, 1, 0)``; the product is ``v``.

    The derivative of a product by one factor is the product of the others. From ``c_v`` alone it is lost as soon as a
    factor is 0, so the fold also carries ``p``, the product of the factors that are not 0, and how many are 0:
    ``D(c, a) g = {v: g_v c_p / a_p, or 0 where another factor is 0; p: g_p c_p / a_p}``. A legal element has ``p ≠ 0``,
    and ``v = p`` if ``zeros = 0``, else ``v = 0``. Where ``p`` overflows, so does the gradient.

    >>> from monoidreduce.algebra import fold
    >>> x = torch.tensor([2.0, 0.0, 3.0], requires_grad=True)
    >>> fold(Prod, x).v.backward()
    >>> x.grad
    tensor([0., 6., 0.])
    """

    elementwise = True
    integers = ("zeros",)
    domain = {"zeros": Domain(low=0.0)}
    v: Scalar = 1.0
    p: Scalar = 1.0
    zeros: Scalar = 0

    def combine(a: Prod, b: Prod) -> Prod:
        return Prod(v=a.v * b.v, p=a.p * b.p, zeros=a.zeros + b.zeros)

    def pullback(c: Prod, a: Prod, g: Prod) -> Prod:
        others = c.p / a.p
        return Prod(v=g.v * torch.where(c.zeros == a.zeros, others, 0.0), p=g.p * others, zeros=a.zeros * 0)

    def fold_tile(x: Prod, dim: int) -> Prod:
        return Prod(v=x.v.prod(dim), p=x.p.prod(dim), zeros=x.zeros.sum(dim))

    def legal(x: Prod) -> Prod:
        p = torch.where(x.p == 0, 1.0, x.p)
        zeros = x.zeros.abs()
        return Prod(v=torch.where(zeros == 0, p, 0.0), p=p, zeros=zeros)

    @classmethod
    def embed(cls, x: Any, dim: int | None, start: int = 0) -> Prod:
        zero = x == 0
        return Prod(v=x, p=torch.where(zero, 1, x), zeros=zero.to(torch.int64))


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


class Welford(Monoid):
    """``n = a_n + b_n, mean = a_mean + δ b_n / n, m2 = a_m2 + b_m2 + δ² a_n b_n / n`` with ``δ = b_mean - a_mean``.

    ``id = (0, 0, 0)``; the variance is ``m2 / n`` (or ``m2 / (n - 1)``), exactly 0 for equal numbers. With ``d = a_mean
    - c_mean``: ``D(c, a) g = {n: g_n + g_mean d / c_n + g_m2 d², mean: a_n (g_mean / c_n + 2 g_m2 d), m2: g_m2}``.

    >>> from monoidreduce.algebra import fold
    >>> x = fold(Welford, torch.tensor([1.0, 2.0, 6.0]))
    >>> x.n, x.mean, x.m2
    (tensor(3.), tensor(3.), tensor(14.))
    """

    elementwise = True
    domain = {"n": Domain(low=0.0), "m2": Domain(low=0.0)}
    n: Scalar = 0.0
    mean: Scalar = 0.0
    m2: Scalar = 0.0

    def combine(a: Welford, b: Welford) -> Welford:
        n = a.n + b.n
        delta = b.mean - a.mean
        part = b.n / divisor(n)
        between = delta * (delta * (a.n * part))  # in this order 0 elements far away add 0, not 0 times infinity
        return Welford(n=n, mean=a.mean + delta * part, m2=a.m2 + b.m2 + between)

    def pullback(c: Welford, a: Welford, g: Welford) -> Welford:
        off = a.mean - c.mean
        mean = g.mean / divisor(c.n)
        return Welford(n=g.n + (mean + g.m2 * off) * off, mean=a.n * (mean + 2.0 * g.m2 * off), m2=g.m2)

    def fold_tile(x: Welford, dim: int) -> Welford:
        n = x.n.sum(dim, keepdim=True)
        start = x.mean.detach().narrow(dim, 0, 1)  # measured from here, equal numbers have a mean without rounding
        mean = start + (x.n * (x.mean - start)).sum(dim, keepdim=True) / divisor(n)
        m2 = (x.m2 + x.n * (x.mean - mean) ** 2).sum(dim)
        return Welford(n=n.squeeze(dim), mean=mean.squeeze(dim), m2=m2)

    def legal(x: Welford) -> Welford:
        n = x.n.clamp(max=100.0).round()
        mean = torch.where(n == 0, 0.0, x.mean)
        return Welford(n=n, mean=mean, m2=torch.where(n <= 1, 0.0, x.m2))

    def approx(a: Welford, b: Welford, *, scale: Mapping[str, Any] | None = None) -> bool:
        """The squared deviations are as good as the squares they are differences of."""
        sizes = scale or {}
        mean = torch.as_tensor(sizes.get("mean", 1.0))
        square = torch.maximum(torch.as_tensor(sizes.get("m2", 1.0)), mean * mean)
        return all_close(a.n, b.n) and all_close(a.mean, b.mean, mean) and all_close(a.m2, b.m2, square)

    @classmethod
    def embed(cls, x: Any, dim: int | None, start: int = 0) -> Welford:
        x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
        return Welford(n=torch.ones_like(x), mean=x, m2=torch.zeros_like(x))


# Weights in log space


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


# The greatest and the least; And and Or


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


def TopK(k: int) -> type[Monoid]:
    """The monoid of lists of at most ``k`` numbers in falling order, with their indices; it needs tensors.

    ``a ⊙ b`` = the k greatest of both, equal numbers in the order of their indices; ``id`` = the empty list.
    ``D(c, a) g`` gives each number of ``a`` the cotangent of the place it took in ``c``, and 0 if it took none. NaN
    sorts first. A single number is a list of one; a fold over fewer than ``k`` of them is a shorter list.

    >>> from monoidreduce.algebra import fold
    >>> top = fold(TopK(2), torch.tensor([3.0, 9.0, 1.0, 9.0]))
    >>> top.v, top.index
    (tensor([9., 9.]), tensor([1, 3]))
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ArgumentError(
            detail=f"TopK needs a whole number k of at least 1, got {k!r}", fix="Pass for example TopK(5)"
        )
    return _topk(k)


@lru_cache(maxsize=256)
def _topk(k: int) -> type[Monoid]:
    class _TopK(Monoid):
        tensor_only = True
        integers = ("index",)
        domain = {"index": Domain(low=0.0)}
        v: List = ()
        index: List = ()

        def combine(a: _TopK, b: _TopK) -> _TopK:
            return _TopK(**_greatest(torch.cat([a.v, b.v], -1), torch.cat([a.index, b.index], -1), k))

        def pullback(c: _TopK, a: _TopK, g: _TopK) -> _TopK:
            took = (a.index.unsqueeze(-1) == c.index.unsqueeze(-2)) & (a.v.unsqueeze(-1) == c.v.unsqueeze(-2))
            return _TopK(v=torch.where(took, g.v.unsqueeze(-2), 0.0).sum(-1), index=a.index * 0)

        def fold_tile(x: _TopK, dim: int) -> _TopK:
            return _TopK(**_greatest(x.v.movedim(dim, -2).flatten(-2), x.index.movedim(dim, -2).flatten(-2), k))

        def legal(x: _TopK) -> _TopK:
            return _TopK(**_greatest(x.v, x.index, k))

        @classmethod
        def embed(cls, x: Any, dim: int | None, start: int = 0) -> _TopK:
            return _TopK(v=x.unsqueeze(-1), index=positions(x, dim, start).unsqueeze(-1))

    _TopK.__name__ = _TopK.__qualname__ = f"TopK({k})"
    return _TopK


def _greatest(v: Tensor, index: Tensor, k: int) -> dict[str, Tensor]:
    v, index = torch.broadcast_tensors(v, index)
    index, by_index = index.sort(dim=-1, stable=True)
    v, by_value = v.gather(-1, by_index).sort(dim=-1, descending=True, stable=True)
    return {"v": v[..., :k], "index": index.gather(-1, by_value)[..., :k]}


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


# Not commutative: folded in order


class Cat(Monoid):
    """``T = [ℝ], a ⊙ b`` = a followed by b, ``id = []``; not commutative, no local gradient; needs tensors.

    >>> from monoidreduce.algebra import fold
    >>> fold(Cat, [torch.tensor([1, 2]), torch.tensor([3])]).items
    tensor([1, 2, 3])
    """

    commutative = False
    tensor_only = True
    items: List = ()

    def combine(a: Cat, b: Cat) -> Cat:
        return Cat(items=torch.cat([a.items, b.items], -1))

    def fold_tile(x: Cat, dim: int) -> Cat:
        return Cat(items=x.items.movedim(dim, -2).flatten(-2))


class MMul(Monoid):
    """``T = ℝⁿˣⁿ, a ⊙ b = a b, id = 1``; not commutative; needs tensors.

    It has no local gradient (Theorem 2.1 asks for commutativity); autograd through ``fold`` works.

    >>> import torch
    >>> from monoidreduce.algebra import fold
    >>> x = torch.tensor([[[1.0, 1.0], [0.0, 1.0]], [[2.0, 0.0], [0.0, 1.0]]])
    >>> fold(MMul, x, dim=0).m
    tensor([[2., 1.],
            [0., 1.]])
    """

    commutative = False
    tensor_only = True
    m: Matrix = 1.0

    def combine(a: MMul, b: MMul) -> MMul:
        return MMul(m=a.m @ b.m)


class Chain:
    """Functions applied one after the other, the last one first; a loop, so that a long chain needs no deep stack.

    >>> Chain(str, abs)(-3)
    '3'
    """

    def __init__(self, *steps: Callable[[Any], Any]) -> None:
        self.steps: tuple[Callable[[Any], Any], ...] = tuple(
            inner for step in steps for inner in (step.steps if isinstance(step, Chain) else (step,))
        )

    def __call__(self, x: Any) -> Any:
        for step in reversed(self.steps):
            x = step(x)
        return x

    def __repr__(self) -> str:
        return " ∘ ".join(getattr(step, "__name__", repr(step)) for step in self.steps) or "id"


class Compose(Monoid):
    """``T = A → A, f ⊙ g = x ↦ f(g(x)), id = x ↦ x``; not commutative, no local gradient; folds streams of functions.

    >>> from monoidreduce.algebra import fold
    >>> fold(Compose, [lambda x: x + 1, lambda x: x * 10]).f(3)
    31
    """

    commutative = False
    tensor_only = True
    f: Function = Chain()

    def combine(a: Compose, b: Compose) -> Compose:
        return Compose(f=Chain(a.f, b.f))

    def approx(a: Compose, b: Compose, *, scale: Mapping[str, Any] | None = None) -> bool:
        """Functions are compared where it can be done: on a few numbers."""
        probes = torch.tensor([-2.5, -1.0, 0.0, 0.5, 3.0], dtype=torch.float64, device="cpu")
        return all_close(a.f(probes), b.f(probes))

"""The greatest and the least: Max, Min, ArgMax, ArgMin and TopK; and of truth values And and Or."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from monoidreduce.algebra.catalogue._numerics import NO_INDEX, best_tile, better, positions
from monoidreduce.algebra.monoid import Domain, List, Monoid, Scalar
from monoidreduce.errors import ArgumentError


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

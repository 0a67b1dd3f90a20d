"""TopK: the k greatest numbers and where they stand."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from monoidreduce.algebra.catalogue._numerics import positions
from monoidreduce.algebra.monoid import Domain, List, Monoid
from monoidreduce.errors import ArgumentError


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

"""Reductions over an axis that is there: the dense oracle's, and those of row or column vectors.

Each takes fields in the layout of ``evaluate.py``, says which are vectors, and returns its results with the folded
axis kept at size 1. Plain torch, differentiable, in the most direct form: this is what the fast engines are compared
with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...algebra import fold as fold_monoid
from ...errors import TopKError
from ...program.reductions import no_gradient


def _dim(over: str, vector: bool = False) -> int:
    return (-1 if over == "cols" else -2) - vector


def _stretch(fields: list[Tensor], vectors: list[bool], over: str, size: int) -> list[Tensor]:
    """Give every field the folded axis, and all fields one shape but for features."""
    base = torch.broadcast_shapes(*(f.shape[:-1] if v else f.shape for f, v in zip(fields, vectors, strict=True)))
    shape = list(base)
    shape[_dim(over)] = size
    return [f.expand(*shape, f.shape[-1]) if v else f.expand(*shape) for f, v in zip(fields, vectors, strict=True)]


def _sum(fields: list[Tensor], vectors: list[bool], over: str, params: tuple, size: int) -> list[Tensor]:
    (x,) = _stretch(fields, vectors, over, size)
    return [x.sum(_dim(over, vectors[0]), keepdim=True)]


def _soft(fields: list[Tensor], vectors: list[bool], over: str, params: tuple, size: int) -> list[Tensor]:
    logit, *values = _stretch(fields, vectors, over, size)
    dim = _dim(over)
    if size == 0:
        shape = list(logit.shape)
        shape[dim] = 1
        empty = logit.new_full(shape, -math.inf)
        return [empty, *(v.sum(_dim(over, is_v), keepdim=True) for v, is_v in zip(values, vectors[1:], strict=True))]
    blind = (logit == -math.inf).all(dim, keepdim=True)
    safe = torch.where(blind, 0.0, logit)
    z = torch.where(blind, -math.inf, torch.logsumexp(safe, dim, keepdim=True))
    weight = torch.where(blind, 0.0, torch.softmax(safe, dim))
    means = []
    for v, vector in zip(values, vectors[1:], strict=True):
        means.append((weight.unsqueeze(-1) * v if vector else weight * v).sum(_dim(over, vector), keepdim=True))
    return [z, *means]


def _best(fields: list[Tensor], vectors: list[bool], over: str, params: tuple, size: int) -> list[Tensor]:
    (x,) = _stretch(fields, vectors, over, size)
    (largest,) = params
    dim, worst = _dim(over), -math.inf if largest else math.inf
    if size == 0:
        shape = list(x.shape)
        shape[dim] = 1
        return [_full(x, shape, worst), torch.full(shape, -1, dtype=torch.int64, device=x.device)]
    at = (x.argmax if largest else x.argmin)(dim, keepdim=True)
    value = x.gather(dim, at)
    return [value, torch.where(value == worst, -1, at)]


def _full(like: Tensor, shape: list[int], value: float) -> Tensor:
    if not like.dtype.is_floating_point:
        info = torch.iinfo(like.dtype)
        return like.new_full(shape, info.min if value < 0 else info.max)
    return like.new_full(shape, value)


def _topk(fields: list[Tensor], vectors: list[bool], over: str, params: tuple, size: int) -> list[Tensor]:
    (x,) = _stretch(fields, vectors, over, size)
    k, largest = params
    if k > size:
        raise TopKError(k=k, size=size, axis=over)
    values, at = x.topk(k, dim=_dim(over), largest=largest)
    at = torch.where(values == (-math.inf if largest else math.inf), -1, at)
    return [t.movedim(_dim(over), -1).unsqueeze(_dim(over, vector=True)) for t in (values, at)]


def _moments(fields: list[Tensor], vectors: list[bool], over: str, params: tuple, size: int) -> list[Tensor]:
    (x,) = _stretch(fields, vectors, over, size)
    mean = x.mean(_dim(over), keepdim=True)
    return [mean, (x - mean).square().sum(_dim(over), keepdim=True)]


def _user(fields: list[Tensor], vectors: list[bool], over: str, params: tuple, size: int) -> list[Tensor]:
    (monoid,) = params
    names = list(monoid.fields())
    stretched = _stretch(fields, vectors, over, size)
    # the folded axis counted without features, from the front: the same number for scalars and vectors
    at = (stretched[0].dim() - vectors[0]) + _dim(over)
    folded = fold_monoid(monoid, dict(zip(names, stretched, strict=True)), dim=at)
    results = [getattr(folded, n).unsqueeze(at) for n in names]
    if not monoid.has_gradient:  # autograd could go through combine, but no other engine could follow
        for r in results:
            if r.requires_grad:
                r.register_hook(lambda g: _no_gradient(monoid))
    return results


def _no_gradient(monoid: type) -> None:
    raise no_gradient(monoid)


REDUCERS: dict[str, Callable[..., list[Any]]] = {
    "sum": _sum,
    "soft": _soft,
    "best": _best,
    "topk": _topk,
    "moments": _moments,
    "user": _user,
}

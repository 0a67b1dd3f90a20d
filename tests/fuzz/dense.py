"""Plain torch for the dense rendering of a program. Nothing here knows the library.

Layout: a number is ``[..., M or 1, N or 1]``, a vector ``[..., M or 1, N or 1, features]``. A reduction keeps its axis
with size 1, so that its result can be used in a later pair expression.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def vec(x: Tensor) -> Tensor:
    """A number beside vectors: one more axis, for the features."""
    return x.unsqueeze(-1)


def full(x: Tensor, dim: int, size: int) -> Tensor:
    """Repeat a value along an axis that it does not depend on."""
    shape = list(x.shape)
    shape[dim] = size
    return x.expand(shape)


def fold_sum(x: Tensor, dim: int) -> Tensor:
    return x.sum(dim, keepdim=True)


def fold_mean(x: Tensor, dim: int) -> Tensor:
    total = x.sum(dim, keepdim=True)
    return total / x.shape[dim] if x.shape[dim] else total + math.nan


def _weights(x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """exp(x - maximum), its sum (1 where there is nothing), and where there is something."""
    largest = x.detach().amax(dim, keepdim=True) if x.shape[dim] else torch.zeros_like(x.sum(dim, keepdim=True))
    shift = torch.where(largest.isinf(), 0.0, largest)
    weights = torch.exp(x - shift)
    total = weights.sum(dim, keepdim=True)
    seen = total != 0
    return weights, torch.where(seen, total, 1.0), seen


def fold_logsumexp(x: Tensor, dim: int) -> Tensor:
    largest = x.detach().amax(dim, keepdim=True) if x.shape[dim] else torch.zeros_like(x.sum(dim, keepdim=True))
    _, total, seen = _weights(x, dim)
    return torch.where(seen, torch.log(total) + torch.where(largest.isinf(), 0.0, largest), -math.inf)


def fold_softmax_mean(x: Tensor, value: Tensor, dim: int) -> Tensor:
    weights, total, _ = _weights(x, dim)
    return (weights * value).sum(dim, keepdim=True) / total


def fold_softmax_mean_vector(x: Tensor, value: Tensor, dim: int) -> Tensor:
    """As above for a vector value; ``dim`` counts the axes of numbers."""
    weights, total, _ = _weights(x, dim)
    return (weights.unsqueeze(-1) * value).sum(dim - 1, keepdim=True) / total.unsqueeze(-1)


def fold_weighted_mean(weight: Tensor, value: Tensor, dim: int) -> Tensor:
    total = weight.sum(dim, keepdim=True).to(value.dtype)
    seen = total != 0
    return torch.where(seen, (weight * value).sum(dim, keepdim=True) / torch.where(seen, total, 1.0), 0.0)


def fold_weighted_mean_vector(weight: Tensor, value: Tensor, dim: int) -> Tensor:
    return fold_weighted_mean(weight.unsqueeze(-1), value, dim - 1)


def _extreme_of_nothing(x: Tensor, dim: int, largest: bool) -> Tensor:
    none = x.sum(dim, keepdim=True)
    if x.dtype.is_floating_point:
        return none + (-math.inf if largest else math.inf)
    info = torch.iinfo(x.dtype)
    return torch.full_like(none, info.min if largest else info.max)


def _first(x: Tensor, dim: int, largest: bool) -> Tensor:
    """The index of the first of the equal extremes."""
    best = x.amax(dim, keepdim=True) if largest else x.amin(dim, keepdim=True)
    return (x == best).to(torch.uint8).argmax(dim, keepdim=True)  # of equal bytes torch's argmax takes the first


def fold_max(x: Tensor, dim: int, largest: bool = True) -> Tensor:
    if x.dtype == torch.bool:
        return fold_any(x, dim) if largest else fold_all(x, dim)
    if not x.shape[dim]:
        return _extreme_of_nothing(x, dim, largest)
    best = x.gather(dim, _first(x.detach(), dim, largest))
    return torch.where(best == (-math.inf if largest else math.inf), best.detach(), best)  # nothing was seen


def fold_min(x: Tensor, dim: int) -> Tensor:
    return fold_max(x, dim, largest=False)


def fold_argmax(x: Tensor, dim: int, largest: bool = True) -> Tensor:
    x = x.long() if x.dtype == torch.bool else x
    if not x.shape[dim]:
        return torch.full_like(x.sum(dim, keepdim=True), -1, dtype=torch.int64)
    index = _first(x.detach(), dim, largest)
    worst = -math.inf if largest else math.inf
    return torch.where(x.detach().gather(dim, index) == worst, -1, index)


def fold_argmin(x: Tensor, dim: int) -> Tensor:
    return fold_argmax(x, dim, largest=False)


def _topk(x: Tensor, dim: int, k: int, largest: bool) -> tuple[Tensor, Tensor]:
    index = x.detach().sort(dim=dim, descending=largest, stable=True).indices.narrow(dim, 0, k)
    values = x.gather(dim, index)
    return torch.where(values == (-math.inf if largest else math.inf), values.detach(), values), index


def _k_last(x: Tensor, dim: int) -> Tensor:
    """The axis of the k best becomes that of features; the folded axis has size 1."""
    return x.movedim(dim, -1).unsqueeze(dim - 1)


def fold_topk_values(x: Tensor, dim: int, k: int, largest: bool) -> Tensor:
    return _k_last(_topk(x, dim, k, largest)[0], dim)


def fold_topk_indices(x: Tensor, dim: int, k: int, largest: bool) -> Tensor:
    values, index = _topk(x, dim, k, largest)
    return _k_last(torch.where(values == (-math.inf if largest else math.inf), -1, index), dim)


def fold_any(x: Tensor, dim: int) -> Tensor:
    return x.bool().sum(dim, keepdim=True) > 0


def fold_all(x: Tensor, dim: int) -> Tensor:
    return x.bool().sum(dim, keepdim=True) == x.shape[dim]


def fold_count(x: Tensor, dim: int) -> Tensor:
    return x.bool().sum(dim, keepdim=True)


def fold_var(x: Tensor, dim: int, correction: int) -> Tensor:
    centred = x - fold_mean(x, dim)
    square = (centred * centred).sum(dim, keepdim=True)
    count = max(0, x.shape[dim] - correction)
    return square / count if count else square * math.nan


def as_view(x: Tensor, view: str) -> Tensor:
    """The same numbers in memory laid out differently (``repeated``: the first row or column for all of them)."""
    if view == "strided" and x.dim():
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), 77 if x.dtype != torch.bool else True, dtype=x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]
    if view == "offset" and x.dim():
        flat = torch.cat([torch.ones(3, dtype=x.dtype), x.reshape(-1), torch.ones(2, dtype=x.dtype)])
        return flat[3 : 3 + x.numel()].view(x.shape)
    if view == "transposed" and x.dim() > 1:
        return x.mT.contiguous().mT
    if view == "repeated" and x.dim() and x.shape[0]:
        return x[:1].expand(x.shape)
    if view == "flipped strides" and x.dim() > 2:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    return x

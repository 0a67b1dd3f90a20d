"""The guarded arithmetic that several monoids share: logarithmic weights, and the better of two candidates.

Everything here is elementwise and takes symbols as well as tensors, except the ``*_tile`` functions, which fold a whole
axis of concrete tensors. Guards choose a harmless number *before* the operation that would give NaN, not after it:
``where`` sends a zero cotangent down the branch not taken, and zero times NaN is NaN. Imports torch only.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

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

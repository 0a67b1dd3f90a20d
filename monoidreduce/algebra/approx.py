"""Approximate equality of tensors, as the laws need it: near for finite numbers, exact for infinities and NaN.

Floating-point folds obey their laws only approximately, so each monoid brings its own equality; this file is the part
they share. Imports torch only.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def close(x: Tensor, y: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """Elementwise: equal, or finite and ``|x - y| <= tol * max(1, |x|, |y|, scale)`` with tol the square root of eps.

    ``scale`` is the size of the numbers that x and y were computed from: a sum that cancels is only as good as its
    largest term. Integers and booleans must be equal; so must infinities; NaN equals NaN.

    >>> close(torch.tensor([1.0, -torch.inf, torch.nan]), torch.tensor([1.0001, -torch.inf, 0.0])).tolist()
    [True, True, False]
    """
    exact = (x == y) | ((x != x) & (y != y))
    if not (x.is_floating_point() and y.is_floating_point()):
        return exact
    tolerance = math.sqrt(max(torch.finfo(x.dtype).eps, torch.finfo(y.dtype).eps))
    x, y = x.double(), y.double()
    size = torch.maximum(x.abs(), y.abs()).clamp(min=1.0)
    size = torch.maximum(size, torch.as_tensor(scale, dtype=torch.float64, device=x.device))
    return exact | (torch.isfinite(x) & torch.isfinite(y) & ((x - y).abs() <= tolerance * size))


def all_close(x: Tensor, y: Tensor, scale: Tensor | float = 1.0, where: Tensor | None = None) -> bool:
    """Whether ``close`` holds everywhere (or wherever ``where`` is true); shapes that do not broadcast are not close.

    >>> all_close(torch.zeros(3), torch.zeros(2))
    False
    """
    try:
        near = close(x, y, scale)
    except RuntimeError:  # lists of different lengths are simply not equal
        return False
    return bool((near if where is None else near | ~where).all())


def approximately(a: Any, b: Any, scale: Mapping[str, Any]) -> bool:
    """The monoid's own ``approx``; one that was written without ``scale`` is asked without."""
    equal = type(a).approx
    if "scale" in inspect.signature(equal).parameters:
        return bool(equal(a, b, scale=scale))
    return bool(equal(a, b))


__all__ = ["all_close", "approximately", "close"]

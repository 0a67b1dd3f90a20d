"""Derivatives of functions between elements of a monoid, by autograd on concrete tensors.

Used to derive a pullback from ``remove`` and, by the laws, as the truth that a pullback is held against. Elements are
known here only by their fields. Imports torch only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def vjp(function: Callable[[Any], Any], a: Any, g: Any) -> Any:
    """The transposed derivative of ``function`` at the element ``a``, applied to the cotangent ``g``.

    Differentiable again where ``a`` or ``g`` require a gradient. Fields that do not hold floating-point numbers get
    zeros.
    """
    values, cotangent = a.asdict(), g.asdict()
    twice = torch.is_grad_enabled() and any(_needs_grad(v) for v in (*values.values(), *cotangent.values()))
    with torch.enable_grad():
        inner = {name: _argument(v) for name, v in values.items()}
        floats = [v for v in inner.values() if v.is_floating_point()]
        out = function(type(a)(**inner)).asdict()
        reached = {name: v for name, v in out.items() if _needs_grad(v)}
        grads: Sequence[Tensor | None] = [None] * len(floats)
        if reached and floats:
            seeds = [cotangent[name].to(v.dtype).expand_as(v) for name, v in reached.items()]
            grads = torch.autograd.grad(list(reached.values()), floats, seeds, create_graph=twice, allow_unused=True)
    answers = iter(grads)
    result = {}
    for name, v in inner.items():
        grad = next(answers) if v.is_floating_point() else None
        result[name] = torch.zeros_like(values[name]) if grad is None else grad
    return type(a)(**result)


def _argument(v: Tensor) -> Tensor:
    # A fresh view, so that only the way through this argument counts even if the function closes over the element.
    if not v.is_floating_point():
        return v
    return v.view_as(v) if v.requires_grad else v.detach().requires_grad_()


def _needs_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


__all__ = ["vjp"]

"""The definition of a layer and of its gradient, pair by pair in two loops: what every faster road must agree with.

Also the pullback of one tile function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # private, but what torch.func itself flattens its arguments with

from monoidreduce.errors import ShapeError

from .runtime.call_context import is_untraced

# The pullback of a function of tensors: autograd's own graph where nothing watches, ``torch.func.vjp`` inside its
# transforms.
#
# torch.func.vjp leaves a cycle of references behind, so what it made stays until the garbage is next collected: with
# one call for every tile, that is all the pairs. The plain graph goes when its last user does.

Pull = Callable[[tuple[Tensor, ...]], tuple[Tensor | None, ...]]


def _pullback_of(function: Callable[..., tuple[tuple[Tensor, ...], Any]], *leaves: Tensor) -> tuple[Pull, Any]:
    """``function`` gives (roots, anything else); its pullback from the roots to ``leaves``, and what else it gave.

    >>> pull, twice = _pullback_of(lambda x: ((x * x,), 2 * x), torch.tensor(3.0))
    >>> pull((torch.tensor(1.0),)), twice
    ((tensor(6.),), tensor(6.))
    """
    if not is_untraced():
        _, pull, rest = torch.func.vjp(function, *leaves, has_aux=True)  # type: ignore[misc]
        return pull, rest
    fresh = tuple(x.detach().requires_grad_() for x in leaves)
    with torch.enable_grad():
        roots, rest = function(*fresh)

    def back(cotangents: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        pairs = [(root, g) for root, g in zip(roots, cotangents, strict=True) if root.requires_grad]
        if not pairs or not fresh:
            return (None,) * len(fresh)
        return torch.autograd.grad([r for r, _ in pairs], fresh, [g for _, g in pairs], allow_unused=True)

    return back, pytree.tree_map_only(Tensor, Tensor.detach, rest)


__all__ = ["check_shape", "differentiable", "elementwise_fold", "elementwise_grad", "vjp"]

Tensors = tuple[Tensor, ...]
Gradients = tuple[Tensor | None, ...]


def elementwise_fold(monoid_id: Any, combine: Callable, f: Callable, rows: Tensors, cols: Tensors) -> list[Any]:
    """The definition, not speed: ``P_i = ⊙_j f(A_i, B_j)`` in two loops, as a list with one T-value per row.

    ``rows`` and ``cols`` are tuples of tensors; ``f`` gets the tuples of their i-th and j-th slices. A T-value is what
    ``f`` returns: a tensor, or a tuple or dict of tensors.

    >>> elementwise_fold(0.0, lambda x, y: x + y, lambda a, b: a[0] * b[0], (torch.ones(2),), (torch.arange(4.0),))
    [tensor(6.), tensor(6.)]
    """
    products = []
    for a in zip(*rows, strict=True):
        product = monoid_id
        for b in zip(*cols, strict=True):
            product = combine(product, f(a, b))
        products.append(product)
    return products


def elementwise_grad(
    D: Callable, f: Callable, rows: Tensors, cols: Tensors, products: Sequence[Any], cotangents: Sequence[Any]
) -> tuple[Gradients, Gradients]:
    """The definition of the gradient (corollary 2.1.1) in two loops: each pair sees its row's product, no other pair.

    ``D(product, h, g)`` is the cotangent of ``h = f(A_i, B_j)`` where ``g`` is that of the product. Answers the
    gradients of ``rows`` and of ``cols``, None for tensors that are not floating.

    >>> rows, cols, plus = (torch.ones(2),), (torch.arange(4.0),), lambda c, h, g: g
    >>> elementwise_grad(plus, lambda a, b: a[0] * b[0], rows, cols, [6.0, 6.0], [torch.tensor(1.0)] * 2)
    ((tensor([6., 6.]),), (tensor([2., 2., 2., 2.]),))
    """
    split = len(rows)
    needs = [differentiable(x) for x in rows + cols]
    grads = [torch.zeros_like(x) if need else None for x, need in zip(rows + cols, needs, strict=True)]
    for i, a in enumerate(zip(*rows, strict=True)):
        for j, b in enumerate(zip(*cols, strict=True)):
            h, pullback = vjp(lambda x: f(x[:split], x[split:]), a + b, needs)
            for k, local in enumerate(pullback(D(products[i], h, cotangents[i]))):
                if local is not None:
                    grads[k][i if k < split else j] += local  # type: ignore[index]
    return tuple(grads[:split]), tuple(grads[split:])


def vjp(f: Callable[[Tensors], Any], x: Tensors, needs: Sequence[bool]) -> tuple[Any, Callable[[Any], Gradients]]:
    """``f(x)`` and its pullback; ``x`` and ``f(x)`` may hold integers, which torch.func.vjp does not take."""

    def floating(*leaves: Tensor) -> tuple[Tensors, Any]:
        fresh = iter(leaves)
        h = f(tuple(next(fresh) if need else part for part, need in zip(x, needs, strict=True)))
        return tuple(part for part in pytree.tree_leaves(h) if differentiable(part)), h

    leaves = (part for part, need in zip(x, needs, strict=True) if need)
    pull, h = _pullback_of(floating, *leaves)

    def pullback(gh: Any) -> Gradients:
        pairs = zip(pytree.tree_leaves(gh), pytree.tree_leaves(h), strict=True)
        full = ((torch.zeros_like(h) if g is None else g, h) for g, h in pairs if differentiable(h))
        pulled = iter(pull(tuple(check_shape("D", g, h).to(h.dtype) for g, h in full)))
        return tuple(next(pulled) if need else None for need in needs)

    return h, pullback


def differentiable(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def check_shape(source: str, value: Tensor, like: Tensor) -> Tensor:
    if value.shape != like.shape:  # never broadcast in silence
        problem = f"{source} returned shape {list(value.shape)} for a tile of shape {list(like.shape)}"
        raise ShapeError(detail=problem, fix="Return each tensor in its tile's shape")
    return value

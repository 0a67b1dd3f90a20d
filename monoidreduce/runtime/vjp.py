"""The pullback of a function of tensors: autograd's own graph where nothing watches, ``torch.func.vjp`` inside its
transforms.

torch.func.vjp leaves a cycle of references behind, so what it made stays until the garbage is next collected: with one
call for every tile, that is all the pairs. The plain graph goes when its last user does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .call_context import is_untraced

Pull = Callable[[tuple[Tensor, ...]], tuple[Tensor | None, ...]]


def vjp(function: Callable[..., tuple[tuple[Tensor, ...], Any]], *leaves: Tensor) -> tuple[Pull, Any]:
    """``function`` gives (roots, anything else); its pullback from the roots to ``leaves``, and what else it gave.

    >>> pull, twice = vjp(lambda x: ((x * x,), 2 * x), torch.tensor(3.0))
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

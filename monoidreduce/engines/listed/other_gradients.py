"""Gradients over lists of monoids that have no local one: autograd through the pieces and their combination.

Such a gradient comes from ``combine`` with all other pairs of a list (``common/block_gradients.py``). The pieces of
lists are gathered once more, each batch of them when its gradient is due, and differentiated as small dense folds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...program.lower import Fold
from ..common.block_gradients import Blocks, iterate_block_reductions, refuse_lists
from ..common.evaluate import Sizes
from .run import run


def differentiate_by_pieces(
    fold: Fold, leaves: Sequence[Any], sizes: Sizes, wanted: Sequence[bool], cotangents: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients of leaves (those ``wanted``); as ``block_gradients.differentiate_by_blocks``, over a domain."""
    grads: list[Tensor | None] = [None] * len(leaves)
    again = torch.is_grad_enabled()
    for one, given in iterate_block_reductions(fold, cotangents, lists=True):
        if torch._C._are_functorch_transforms_active():
            refuse_lists(one.reductions[0], "under a transform of torch.func")
        asked = [k for k, w in enumerate(wanted) if w]
        with torch.enable_grad():
            own = [v if again or not w else v.detach().requires_grad_() for v, w in zip(leaves, wanted, strict=True)]
            wide = [v.to(sizes.compute) if w else v for v, w in zip(own, wanted, strict=True)]
            found = run(one, wide, sizes, _fold_piece, lambda *_: None)
        pairs = [(y, c.to(y.dtype)) for y, c in zip(found, given, strict=True) if c is not None and y.requires_grad]
        if not pairs:
            continue
        roots, directions = zip(*pairs, strict=True)
        made = torch.autograd.grad(roots, [own[k] for k in asked], directions, create_graph=again, allow_unused=True)
        for k, g in zip(asked, made, strict=True):
            before = grads[k]
            grads[k] = before if g is None else g if before is None else before + g
    return grads


def _fold_piece(fold: Fold, leaves: list[Any], sizes: Sizes) -> list[Tensor]:
    return Blocks(fold, sizes, tuple(leaves), (True,) * len(leaves)).states()

"""Cat: concatenation of lists, in order."""

from __future__ import annotations

import torch

from monoidreduce.algebra.monoid import List, Monoid


class Cat(Monoid):
    """``T = [ℝ], a ⊙ b`` = a followed by b, ``id = []``; not commutative, no local gradient; needs tensors.

    >>> from monoidreduce.algebra import fold
    >>> fold(Cat, [torch.tensor([1, 2]), torch.tensor([3])]).items
    tensor([1, 2, 3])
    """

    commutative = False
    tensor_only = True
    items: List = ()

    def combine(a: Cat, b: Cat) -> Cat:
        return Cat(items=torch.cat([a.items, b.items], -1))

    def fold_tile(x: Cat, dim: int) -> Cat:
        return Cat(items=x.items.movedim(dim, -2).flatten(-2))

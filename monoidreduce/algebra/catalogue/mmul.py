"""MMul: the product of square matrices, in order."""

from __future__ import annotations

from monoidreduce.algebra.monoid import Matrix, Monoid


class MMul(Monoid):
    """``T = ℝⁿˣⁿ, a ⊙ b = a b, id = 1``; not commutative; needs tensors.

    It has no local gradient (Theorem 2.1 asks for commutativity); autograd through ``fold`` works.

    >>> import torch
    >>> from monoidreduce.algebra import fold
    >>> x = torch.tensor([[[1.0, 1.0], [0.0, 1.0]], [[2.0, 0.0], [0.0, 1.0]]])
    >>> fold(MMul, x, dim=0).m
    tensor([[2., 1.],
            [0., 1.]])
    """

    commutative = False
    tensor_only = True
    m: Matrix = 1.0

    def combine(a: MMul, b: MMul) -> MMul:
        return MMul(m=a.m @ b.m)

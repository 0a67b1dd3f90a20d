"""Prod: the product of numbers, with a gradient that is right at zeros."""

from __future__ import annotations

from typing import Any

import torch

from monoidreduce.algebra.monoid import Domain, Monoid, Scalar


class Prod(Monoid):
    """``a ⊙ b = {v: a_v b_v, p: a_p b_p, zeros: a_zeros + b_zeros}``, ``id = (1, 1, 0)``; the product is ``v``.

    The derivative of a product by one factor is the product of the others. From ``c_v`` alone it is lost as soon as a
    factor is 0, so the fold also carries ``p``, the product of the factors that are not 0, and how many are 0:
    ``D(c, a) g = {v: g_v c_p / a_p, or 0 where another factor is 0; p: g_p c_p / a_p}``. A legal element has ``p ≠ 0``,
    and ``v = p`` if ``zeros = 0``, else ``v = 0``. Where ``p`` overflows, so does the gradient.

    >>> from monoidreduce.algebra import fold
    >>> x = torch.tensor([2.0, 0.0, 3.0], requires_grad=True)
    >>> fold(Prod, x).v.backward()
    >>> x.grad
    tensor([0., 6., 0.])
    """

    elementwise = True
    integers = ("zeros",)
    domain = {"zeros": Domain(low=0.0)}
    v: Scalar = 1.0
    p: Scalar = 1.0
    zeros: Scalar = 0

    def combine(a: Prod, b: Prod) -> Prod:
        return Prod(v=a.v * b.v, p=a.p * b.p, zeros=a.zeros + b.zeros)

    def pullback(c: Prod, a: Prod, g: Prod) -> Prod:
        others = c.p / a.p
        return Prod(v=g.v * torch.where(c.zeros == a.zeros, others, 0.0), p=g.p * others, zeros=a.zeros * 0)

    def fold_tile(x: Prod, dim: int) -> Prod:
        return Prod(v=x.v.prod(dim), p=x.p.prod(dim), zeros=x.zeros.sum(dim))

    def legal(x: Prod) -> Prod:
        p = torch.where(x.p == 0, 1.0, x.p)
        zeros = x.zeros.abs()
        return Prod(v=torch.where(zeros == 0, p, 0.0), p=p, zeros=zeros)

    @classmethod
    def embed(cls, x: Any, dim: int | None, start: int = 0) -> Prod:
        zero = x == 0
        return Prod(v=x, p=torch.where(zero, 1, x), zeros=zero.to(torch.int64))

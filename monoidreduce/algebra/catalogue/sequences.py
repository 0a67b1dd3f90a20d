"""Monoids that are not commutative and are folded in order: Cat, MMul and Compose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from monoidreduce.algebra.fields import all_close
from monoidreduce.algebra.monoid import Function, List, Matrix, Monoid


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


class Chain:
    """Functions applied one after the other, the last one first; a loop, so that a long chain needs no deep stack.

    >>> Chain(str, abs)(-3)
    '3'
    """

    def __init__(self, *steps: Callable[[Any], Any]) -> None:
        self.steps: tuple[Callable[[Any], Any], ...] = tuple(
            inner for step in steps for inner in (step.steps if isinstance(step, Chain) else (step,))
        )

    def __call__(self, x: Any) -> Any:
        for step in reversed(self.steps):
            x = step(x)
        return x

    def __repr__(self) -> str:
        return " ∘ ".join(getattr(step, "__name__", repr(step)) for step in self.steps) or "id"


class Compose(Monoid):
    """``T = A → A, f ⊙ g = x ↦ f(g(x)), id = x ↦ x``; not commutative, no local gradient; folds streams of functions.

    >>> from monoidreduce.algebra import fold
    >>> fold(Compose, [lambda x: x + 1, lambda x: x * 10]).f(3)
    31
    """

    commutative = False
    tensor_only = True
    f: Function = Chain()

    def combine(a: Compose, b: Compose) -> Compose:
        return Compose(f=Chain(a.f, b.f))

    def approx(a: Compose, b: Compose, *, scale: Mapping[str, Any] | None = None) -> bool:
        """Functions are compared where it can be done: on a few numbers."""
        probes = torch.tensor([-2.5, -1.0, 0.0, 0.5, 3.0], dtype=torch.float64, device="cpu")
        return all_close(a.f(probes), b.f(probes))

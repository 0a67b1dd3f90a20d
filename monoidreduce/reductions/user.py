"""``user``: any monoid of the user's, or of the catalogue. Parameters: ``(monoid,)``.

Its fields are the monoid's, and its results are its state. Nearly all of it follows from ``combine``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..algebra import fold as fold_monoid
from ..errors import NoGradientError
from ..program.constructors import find_listed, listed_node
from ..program.expression import Expr
from ..program.symbol import Symbol
from .base import Outputs, Reads, Reduction
from .derived_gradient import gradient_road, is_idempotent, local_pullback
from .vector_lines import VectorLines


def check_gradient(monoid: type) -> None:
    """Raise NoGradientError for a monoid that has no gradient, or none that is a formula of one pair."""
    road = gradient_road(monoid)
    if road == "none":
        raise NoGradientError(
            detail=f"a gradient was asked of {monoid.__name__}, whose combine has no derivative",
            fix="Detach what depends on it, or add pullback(c, a, g), the gradient that it should have",
        )
    if road == "others":
        raise NoGradientError(
            detail=f"the gradient of {monoid.__name__} is taken from combine with all other pairs, not from a formula",
            fix="Add pullback(c, a, g) (Theorem 2.1), or remove(c, a), to the monoid",
        )


class User(Reduction):
    name = "user"
    vector_lines = VectorLines
    merges_one = True  # x ⊙ identity: the form that every other fold has (0 for no weight)

    def outputs(self, fields: tuple[Expr, ...], params: tuple) -> Outputs:
        return [(f.feature, f.dtype) for f in fields]

    def result_names(self, fields: tuple[Expr, ...], params: tuple) -> tuple[str, ...]:
        return tuple(params[0].fields())

    def pullback(self, over: str, params: tuple, fields: list, results: list, g: list) -> list:
        (monoid,) = params
        names = list(monoid.fields())
        check_gradient(monoid)
        whole, part = (dict(zip(names, values, strict=True)) for values in (results, fields))
        cotangents = {n: 0.0 if v is None else v for n, v in zip(names, g, strict=True)}
        pulled = local_pullback(monoid, whole, part, cotangents)
        listed = find_listed([f.expr for f in fields if isinstance(f, Symbol)])
        if listed is not None and listed.attrs[0][0] != "pages" and is_idempotent(monoid):
            first = Symbol(listed_node("listed_once", *listed.attrs, listed.args))  # of equal entries of a list
            pulled = {n: v if v is None else torch.where(first, v, 0.0) for n, v in pulled.items()}
        return [pulled[n] for n in names]

    def identity(self, params: tuple) -> tuple[float, ...]:
        return tuple(float(field.identity) for field in params[0].fields().values())

    def absent(self, params: tuple, fields: tuple[Expr, ...]) -> Sequence[float | None]:
        return self.identity(params)

    def combine(self, params: tuple, a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
        (monoid,) = params
        names = list(monoid.fields())
        combined = monoid.combine(*(monoid(**dict(zip(names, values, strict=True))) for values in (a, b)))
        return [getattr(combined, n) for n in names]

    def state_names(self, params: tuple) -> list[str]:
        return list(params[0].fields())

    def fold(self, params: tuple, state: Sequence[Tensor], dim: int) -> list[Tensor]:
        (monoid,) = params
        names = list(monoid.fields())
        folded = fold_monoid(monoid, dict(zip(names, state, strict=True)), dim=dim)
        return [getattr(folded, n) for n in names]

    def dense(self, fields: list[Tensor], vectors: list[bool], over: str, params: tuple, size: int) -> list[Tensor]:
        (monoid,) = params
        results = super().dense(fields, vectors, over, params, size)
        for r in results:
            if r.requires_grad and gradient_road(monoid) == "none":  # autograd would give zeros
                r.register_hook(lambda g: check_gradient(monoid))
        return results

    def tile_bytes(self, memory: Any, params: tuple, reads: Reads, owned: tuple[bool, ...]) -> int:
        """The vectors, stacked, and the first levels of their tree."""
        return memory.wide * 2 * sum(memory.size_of(str(a.feature)) for a in reads[0] if a.feature is not None)

    def exchanged_bytes(self, r: Expr, width: Callable[[Expr], int], item: int) -> tuple[int, int]:
        return 0, sum(map(width, r.args)) * item

"""``user``: any monoid of the user's, or of the catalogue. Parameters: ``(monoid,)``.

Its fields are the monoid's, and its results are its state. Nearly all of it follows from ``combine``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..algebra import fold as fold_monoid
from ..errors import NoGradientError
from ..program import constructors
from ..program.expression import Expr, node
from ..program.reverse_mode import pull
from ..program.symbol import Symbol, expr_of
from .base import Outputs, Reads, Reduction


def no_gradient(monoid: type) -> NoGradientError:
    """What to say of a monoid whose gradient was asked for and that has none."""
    return NoGradientError(
        detail=f"a gradient was asked of {monoid.__name__}, which has no local gradient",
        fix="Add pullback(c, a, g) (Theorem 2.1), or remove(c, a), to the monoid",
    )


class User(Reduction):
    name = "user"
    merges_one = True  # x ⊙ identity: the form that every other fold has (0 for no weight)

    def outputs(self, fields: tuple[Expr, ...], params: tuple) -> Outputs:
        return [(f.feature, f.dtype) for f in fields]

    def result_names(self, fields: tuple[Expr, ...], params: tuple) -> tuple[str, ...]:
        return tuple(params[0].fields())

    def pullback(self, over: str, params: tuple, fields: list, results: list, g: list) -> list:
        (monoid,) = params
        names = list(monoid.fields())
        if not monoid.has_gradient:
            raise no_gradient(monoid)
        whole, part = (monoid(**dict(zip(names, values, strict=True))) for values in (results, fields))
        cotangents = monoid(**{n: 0.0 if v is None else v for n, v in zip(names, g, strict=True)})
        if monoid.gradient_road == "pullback":
            pulled = monoid.pullback(whole, part, cotangents)
            return [getattr(pulled, n) for n in names]
        return _pullback_from_remove(monoid, names, whole, part, cotangents)

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
        if not monoid.has_gradient:  # autograd could go through combine, but no other engine could follow
            for r in results:
                if r.requires_grad:
                    r.register_hook(lambda g: _raise_no_gradient(monoid))
        return results

    def tile_bytes(self, memory: Any, params: tuple, reads: Reads, owned: tuple[bool, ...]) -> int:
        """The vectors, stacked, and the first levels of their tree."""
        return memory.wide * 2 * sum(memory.size_of(str(a.feature)) for a in reads[0] if a.feature is not None)

    def no_kernel(self, r: Expr) -> str:
        return f"{r.attrs[2][0].__name__} has vector fields" if super().no_kernel(r) else ""

    def exchanged_bytes(self, r: Expr, width: Callable[[Expr], int], item: int) -> tuple[int, int]:
        return 0, sum(map(width, r.args)) * item


def _pullback_from_remove(monoid: Any, names: list[str], whole: Any, part: Any, g: Any) -> list:
    """D(c, a) g as the derivative of ``combine(a, rest)`` by a, then with ``rest = remove(c, a)`` put in its place."""
    rest = {n: expr_of(getattr(monoid.remove(whole, part), n)) for n in names}
    held = {
        n: node("leaf", (), (f"rest/{n}",), rows=e.rows, cols=e.cols, feature=e.feature, dtype=e.dtype)
        for n, e in rest.items()
    }
    combined = monoid.combine(part, monoid(**{n: Symbol(e) for n, e in held.items()}))
    seeds = [(expr_of(getattr(combined, n)), expr_of(getattr(g, n))) for n in names]
    pulled = pull(seeds, [expr_of(getattr(part, n)) for n in names])
    back = {held[n]: e for n, e in rest.items()}
    return [None if e is None else Symbol(constructors.substitute((e,), back)[0]) for e in pulled]


def _raise_no_gradient(monoid: type) -> None:
    raise no_gradient(monoid)

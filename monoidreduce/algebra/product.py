"""The product of monoids, and the type of monoid classes that lets one write it ``Sum * Count``.

Factors are known here only by what their classes say of themselves, so this file stands below the base class. Several
reductions in one pass are one fold over a product.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from monoidreduce.algebra.approx import approximately
from monoidreduce.algebra.fields import Field, Function
from monoidreduce.algebra.tree import fold_axis
from monoidreduce.errors import ArgumentError

from .fields import field_domains


class MonoidType(type):
    """The type of monoid classes; it exists so that ``Sum * Count`` can mean their product."""

    def __mul__(cls, other: Any) -> Any:
        return product(cls, other)


def product(*monoids: Any) -> Any:
    """The product of monoids: one pass that folds them all; also written ``A * B``.

    ``(a₁, a₂) ⊙ (b₁, b₂) = (a₁ ⊙ b₁, a₂ ⊙ b₂)``. Its fields are those of the factors; a name that occurs twice gets the
    factor's name in front (``sum_v``, ``max_v``; ``sum2_v`` for a second Sum). It has a gradient if every factor has,
    or holds only booleans and whole numbers.

    >>> import torch
    >>> from monoidreduce.algebra import fold, monoids
    >>> both = fold(product(monoids.Sum, monoids.Max), torch.tensor([1.0, 5.0, 2.0]))
    >>> both.sum_v.item(), both.max_v.item()
    (8.0, 5.0)
    """
    for monoid in monoids:
        if not (isinstance(monoid, MonoidType) and monoid.fields()):  # type: ignore[attr-defined]
            raise ArgumentError(detail=f"product takes monoid classes, got {monoid!r}", fix="Pass subclasses of Monoid")
    if not monoids:
        raise ArgumentError(detail="product needs at least one monoid", fix="Pass subclasses of Monoid")
    return _product(tuple(part for monoid in monoids for part in (monoid.components or (monoid,))))


@lru_cache(maxsize=256)
def _product(parts: tuple[Any, ...]) -> Any:
    renamed = _field_names(parts)  # for each factor: its own name of a field -> the product's

    def owners() -> Iterator[tuple[Any, str, str]]:
        for part, names in zip(parts, renamed, strict=True):
            for old, new in names.items():
                yield part, old, new

    def split(x: Any) -> list[Any]:
        values = x.asdict()
        pairs = zip(parts, renamed, strict=True)
        return [part(**{old: values[new] for old, new in names.items()}) for part, names in pairs]

    def join(pieces: Sequence[Any]) -> Any:
        values: dict[str, Any] = {}
        for piece, names in zip(pieces, renamed, strict=True):
            values.update({new: piece.asdict()[old] for old, new in names.items()})
        return cls(**values)

    def combine(a: Any, b: Any) -> Any:
        return join([type(x).combine(x, y) for x, y in zip(split(a), split(b), strict=True)])

    def pullback(c: Any, a: Any, g: Any) -> Any:
        return join([_pullback_or_zero(*each) for each in zip(split(c), split(a), split(g), strict=True)])

    def fold_tile(x: Any, dim: int) -> Any:
        return join([fold_axis(piece, dim) for piece in split(x)])

    def legal(x: Any) -> Any:
        return join([type(piece).legal(piece) for piece in split(x)])

    def approx(a: Any, b: Any, *, scale: Mapping[str, Any] | None = None) -> bool:
        sizes = scale or {}
        scales = [{old: sizes[new] for old, new in names.items() if new in sizes} for names in renamed]
        return all(approximately(*each) for each in zip(split(a), split(b), scales, strict=True))

    def embed(_: Any, x: Any, dim: int | None, start: int = 0) -> Any:
        return join([part.embed(x, dim, start) for part in parts])

    fields: dict[str, Field] = {new: part.fields()[old] for part, old, new in owners()}
    body: dict[str, Any] = {
        "__doc__": "The product of " + " and ".join(part.__name__ for part in parts) + ".",
        "_fields": fields,
        "components": parts,
        "commutative": all(part.commutative for part in parts),
        "elementwise": all(part.elementwise for part in parts),
        "tensor_only": any(part.tensor_only for part in parts),
        "integers": tuple(new for part, old, new in owners() if old in part.integers),
        "component_fields": tuple(renamed),
        "domain": {new: field_domains(part)[old] for part, old, new in owners() if old in field_domains(part)},
        "combine": combine,
        "legal": legal,
        "approx": approx,
        "embed": classmethod(embed),
    }
    if all(part.has_gradient or part.discrete() for part in parts) and any(part.has_gradient for part in parts):
        body["pullback"] = pullback
    if all(field.marker is not Function for field in fields.values()):
        body["fold_tile"] = fold_tile
    base = next(c for c in reversed(parts[0].__mro__) if isinstance(c, MonoidType))
    cls: Any = MonoidType("*".join(part.__name__ for part in parts), (base,), body)
    return cls


def _pullback_or_zero(c: Any, a: Any, g: Any) -> Any:
    if type(c).has_gradient:
        return type(c).pullback(c, a, g)
    return type(c)(**{name: value * 0 for name, value in a.asdict().items()})


def _field_names(parts: Sequence[Any]) -> list[dict[str, str]]:
    every = [name for part in parts for name in part.fields()]
    seen: dict[str, int] = {}
    renamed = []
    for part in parts:
        stem = "".join(letter for letter in part.__name__.lower() if letter.isalnum())
        seen[stem] = seen.get(stem, 0) + 1
        prefix = stem if seen[stem] == 1 else f"{stem}{seen[stem]}"
        renamed.append({name: f"{prefix}_{name}" if every.count(name) > 1 else name for name in part.fields()})
    return renamed


__all__ = ["MonoidType", "product"]

"""Folding one axis of a record of tensors: the balanced tree, and the monoid's own n-ary fold where it has one.

Works on the inner convention (a scalar field carries a trailing axis of size 1), in which all batch axes come first,
so that one ``dim >= 0`` means the same axis in every field. Imports only the errors.
"""

from __future__ import annotations

from typing import Any

from monoidreduce.errors import DeclarationError


def combined(a: Any, b: Any) -> Any:
    """``a ⊙ b``, insisting that the monoid's ``combine`` answers with an element of the monoid."""
    monoid = type(a)
    c = monoid.combine(a, b)
    if not isinstance(c, monoid):
        names = ", ".join(f"{name}=..." for name in monoid.fields())
        raise DeclarationError(
            detail=f"{monoid.__name__}.combine returned {type(c).__name__}, not {monoid.__name__}",
            fix=f"End it with return {monoid.__name__}({names})",
        )
    return c


def fold_axis(x: Any, dim: int) -> Any:
    """Fold axis ``dim >= 0`` (at least one long) of the record ``x``, in order; that axis is gone from the result.

    Neighbours are combined in pairs, level by level, so rounding errors grow with the logarithm of the length. What is
    left over at a level waits: left-overs always stand behind everything combined later, so the order is kept.
    """
    monoid = type(x)
    if monoid.fold_tile is not None:
        return monoid.fold_tile(x, dim)
    before = (slice(None),) * dim
    size = next(iter(x.asdict().values())).shape[dim]
    if size == 1:
        return with_identity(_take(x, (*before, 0)))
    waiting = None
    while size > 1:
        if size % 2:
            last = _take(x, (*before, slice(size - 1, size)))
            waiting = last if waiting is None else combined(last, waiting)
        end = size - size % 2
        x = combined(_take(x, (*before, slice(0, end, 2))), _take(x, (*before, slice(1, end, 2))))
        size //= 2
    if waiting is not None:
        x = combined(x, waiting)
    return _take(x, (*before, 0))


def with_identity(x: Any) -> Any:
    """``x ⊙ identity``: the fold of one element, brought to the form that every other fold has (0 for no weight)."""
    return combined(x, type(x).identity(x))


def _take(x: Any, index: tuple[Any, ...]) -> Any:
    return type(x)(**{name: value[index] for name, value in x.asdict().items()})


__all__ = ["combined", "fold_axis", "with_identity"]

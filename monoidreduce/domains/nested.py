"""The border of a call for jagged nested tensors (``torch.nested``): they go in as packed values with ``mr.jagged``,
and results that have an entry for each row come out nested as the rows were."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError, ShapeError
from .jagged import Jagged


def any_nested(values: Iterable[Any]) -> bool:
    """Whether a nested tensor is among these; written so that ``torch.compile`` can read it."""
    return any([isinstance(v, Tensor) and v.is_nested for v in values])


def call_with_values(
    call: Callable[..., Any],
    sides: Mapping[str, str],
    names: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    results: Callable[[Mapping[str, Any], Any], Any],
    takes_cols: bool = True,
) -> Any:
    """Call with packed values in place of nested tensors. ``sides`` says which arguments are an entry a row (``rows``)
    or a column (``cols``), ``names`` the positional arguments; ``results``, of the arguments and the results, the side
    of each result, in their form; ``takes_cols``: whether the call knows ``cols=``."""
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    found: dict[str, tuple[str, Any]] = {}  # the first nested argument of each side
    for name in list(given):
        value: Any = given[name]  # torch does not declare the methods of nested tensors
        if not any_nested([value]):
            continue
        side = sides.get(name)
        _check(name, value, side)
        first, like = found.setdefault(str(side), (name, value))
        if like.offsets() is not value.offsets():
            raise ShapeError(
                detail=f"{first} and {name} are nested tensors with offsets of their own",
                fix="Make both with the same offsets: torch.nested.nested_tensor_from_jagged(values, x.offsets())",
            )
        given[name] = value.values()
    if "rows" not in found:
        raise ArgumentError(
            detail=f"{found['cols'][0]} is nested, but the rows are not",
            fix="Give rows as a nested tensor too, or pack both and say cols=mr.jagged(row_offsets, col_offsets)",
        )
    rows = found["rows"][1]
    if "cols" in found:
        if given.get("cols") is not None or not takes_cols:
            detail = f"{found['cols'][0]} is nested" + (" beside cols=" if takes_cols else "")
            raise ArgumentError(detail=detail, fix="Give one of the two" if takes_cols else "Give dense columns")
        cols = found["cols"][1].offsets()
        given["cols"] = Jagged(rows.offsets(), cols)
    else:
        for name, value in given.items():
            if sides.get(name) == "cols" and isinstance(value, Tensor) and value.dim() > 2:
                raise ShapeError(
                    detail=f"{name} has shape {tuple(value.shape)} beside nested rows",
                    fix="Give columns [N, f] that all sequences share, or a nested tensor",
                )
    result = call(**given)
    return _nest(result, results(given, result), _axis(rows), {side: like for side, (_, like) in found.items()})


def _axis(nested: Any) -> int:
    """Which dimension of the values is the packed one."""
    return int(nested._ragged_idx) - 1


def _check(name: str, value: Any, side: str | None) -> None:
    if side is None:
        raise ArgumentError(detail=f"{name} is a nested tensor", fix="Only rows and columns may be nested")
    if value.layout is not torch.jagged or value.lengths() is not None:
        raise ArgumentError(
            detail=f"{name} is a nested tensor that is not packed", fix="Give layout=torch.jagged, without holes"
        )
    if value.values().dim() - _axis(value) not in (1, 2):
        raise ShapeError(
            detail=f"{name} has shape {tuple(map(str, value.shape))}",
            fix="The axis of unequal lengths is last but the features: [batch, ..., j, features]",
        )


def _nest(result: Any, sides: Any, axis: int, found: Mapping[str, Any]) -> Any:
    """A result, nested as the argument of its side was. ``axis``: of the packed values; a result that has none of that
    length (a mean over rows) stays as it is."""
    if isinstance(result, Tensor):
        like: Any = found.get(sides)
        if like is None or result.dim() <= axis or result.shape[axis] != like.values().shape[_axis(like)]:
            return result
        return torch.nested.nested_tensor_from_jagged(result, like.offsets(), jagged_dim=axis + 1)
    if isinstance(result, Mapping):
        each = {key: _nest(value, sides[key], axis, found) for key, value in result.items()}
        return type(result)(each)  # type: ignore[call-arg]
    if isinstance(result, (tuple, list)):
        inside = [_nest(value, side, axis, found) for value, side in zip(result, sides, strict=True)]
        return type(result)(*inside) if hasattr(result, "_fields") else type(result)(inside)
    if hasattr(result, "asdict") and hasattr(type(result), "fields"):  # an element of a monoid
        fields = {n: _nest(value, getattr(sides, n), axis, found) for n, value in result.asdict().items()}
        return type(result)(**fields)
    return result

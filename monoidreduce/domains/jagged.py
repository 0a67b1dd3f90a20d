"""Packed sequences: each folds its own stretch of the columns.

Jagged nested tensors (``torch.nested``) go in as packed values with ``mr.jagged``,
and results that have an entry for each row come out nested as the rows were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError, ShapeError
from . import base


@dataclass(frozen=True, eq=False, repr=False)
class Jagged(base.Domain):
    """Sequence s has the rows ``row_offsets[s]:row_offsets[s + 1]``, which fold the columns
    ``col_offsets[s]:col_offsets[s + 1]``.

    Offsets [S + 1] are running totals of lengths that start at 0: the ``cu_seqlens`` of varlen attention, the
    ``offsets`` of a jagged nested tensor. ``col_offsets`` is ``row_offsets`` if left out. ``mr.row_index`` and
    ``mr.col_index`` count from the start of the sequence, so that causal conditions and windows mean each sequence's
    own. A sequence may be empty; rows and columns beyond the last offset belong to no sequence and fold nothing.

    Raises :class:`ArgumentError`, :class:`DTypeError`, :class:`ShapeError` or :class:`DeviceError` for tensors that
    are no offsets, and :class:`ColumnListError` for offsets that decrease or pass the end of the axis (see
    ``mr.use(check=True)``).

    >>> import torch, monoidreduce as mr
    >>> mr.jagged(torch.tensor([0, 2, 3]), torch.tensor([0, 1, 4])).mask(3, 4)
    tensor([[1, 0, 0, 0],
            [1, 0, 0, 0],
            [0, 1, 1, 1]])
    """

    kind = "jagged"
    row_offsets: Tensor
    col_offsets: Tensor = None  # type: ignore[assignment]  # never None after __post_init__

    def __post_init__(self) -> None:
        self.take_arrays("row_offsets", "col_offsets")
        if self.col_offsets is None:
            object.__setattr__(self, "col_offsets", self.row_offsets)
        for name, offsets in (("row_offsets", self.row_offsets), ("col_offsets", self.col_offsets)):
            base.check_integers(name, offsets, "[S + 1]", 1, 1)
        base.check_one_device(row_offsets=self.row_offsets, col_offsets=self.col_offsets)
        if self.row_offsets.shape != self.col_offsets.shape or not len(self.row_offsets):
            raise ShapeError(
                detail=f"row_offsets has {len(self.row_offsets)} numbers and col_offsets {len(self.col_offsets)}",
                fix="Give one for the start of each sequence, and one for the end of the last",
            )

    @property
    def is_square(self) -> bool:
        """Whether rows and columns are packed alike: one tensor of offsets for both."""
        return self.col_offsets is self.row_offsets

    def tensors(self) -> tuple[Tensor, ...]:
        """``row_offsets``, and ``col_offsets`` if they differ."""
        return (self.row_offsets,) if self.is_square else (self.row_offsets, self.col_offsets)

    @property
    def form(self) -> tuple:
        return (self.kind, self.is_square)

    @classmethod
    def _restore(cls, form: tuple, tensors: tuple[Tensor, ...]) -> Jagged:
        return base.build(cls, row_offsets=tensors[0], col_offsets=tensors[-1])

    def _check_sizes(self, rows: int, cols: int) -> None:
        if self.is_square and rows != cols:
            raise ShapeError(
                detail=f"there are {rows} rows and {cols} columns, but one tensor of offsets for both",
                fix="Say where the columns of each sequence are: mr.jagged(row_offsets, col_offsets)",
            )

    def _check_values(self, rows: int, cols: int) -> None:
        base.check_offsets("row_offsets", self.row_offsets, rows, "rows")
        base.check_offsets("col_offsets", self.col_offsets, cols, "columns")

    def row_sequences(self, rows: int) -> Tensor:
        """The sequence of each row; S for rows of none."""
        return _number_sequences(self.row_offsets, rows)

    def col_sequences(self, cols: int) -> Tensor:
        """The sequence of each column; S + 1 for columns of none, so that they meet no row."""
        found, none = _number_sequences(self.col_offsets, cols), len(self.col_offsets) - 1
        return torch.where(found < none, found, none + 1)

    def row_positions(self, rows: int) -> Tensor:
        """The place of each row in its sequence."""
        return _count_positions(self.row_offsets, rows)

    def col_positions(self, cols: int) -> Tensor:
        """The place of each column in its sequence."""
        return _count_positions(self.col_offsets, cols)

    def mask(self, rows: int, cols: int) -> Tensor:
        """1 for pairs of one sequence, dense [rows, cols]: for tests and small sizes."""
        return (self.row_sequences(rows).unsqueeze(1) == self.col_sequences(cols)).long()

    def _sizes(self) -> str:
        how = "rows and columns alike" if self.is_square else "rows and columns by their own offsets"
        return f"{len(self.row_offsets) - 1} sequences, {how}"


def _number_sequences(offsets: Tensor, size: int) -> Tensor:
    at = torch.arange(size, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets[1:].contiguous(), at, right=True, out_int32=True)


def _count_positions(offsets: Tensor, size: int) -> Tensor:
    at = torch.arange(size, device=offsets.device, dtype=offsets.dtype)
    return (at - offsets[_number_sequences(offsets, size).long()]).to(torch.int32)


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

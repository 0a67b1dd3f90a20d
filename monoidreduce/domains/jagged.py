"""Packed sequences: each folds its own stretch of the columns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ShapeError
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

"""How a problem lies over ranks: which rows and columns each has, and what that means for one-sided arithmetic.

Tensors stay plain and local. Rows, columns or both are divided over the ranks of a group; what lacks a divided axis is
the same on all its ranks. Folds are the business of ``distributed_fold.py``; here is what plain torch does before and
after
them: indices count from the start of the whole, a reduction over a divided axis ends with an exchange, and what is the
same everywhere gets the sum of all gradients when it meets what is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...program.expression import Expr
from ...reductions import kind_of
from . import combine
from .collectives import AllGather, Group, ReplicatedInput

Ranges = tuple[tuple[int, int], ...]  # (start, stop) on the whole axis of consecutive stretches of a part


def count_indices(pieces: Ranges) -> int:
    return sum(stop - start for start, stop in pieces)


@dataclass(frozen=True)
class Axis:
    """Rows or columns: ``pieces[r]`` are those of rank r of the group; one entry and no group where all are here."""

    pieces: tuple[Ranges, ...]
    group: Group = None
    whole: int | None = None  # the length of the axis where the pieces are not all of it, as in a stream

    @property
    def total(self) -> int:
        return sum(map(count_indices, self.pieces)) if self.whole is None else self.whole

    @property
    def own(self) -> Ranges:
        return self.pieces[0 if self.group is None else self.group.rank()]

    def index(self, device: torch.device) -> Tensor:
        """The places of the local part on the whole axis."""
        return torch.cat([torch.arange(start, stop, device=device) for start, stop in self.own])


@dataclass(frozen=True)
class Shard:
    """The rows and the columns of a call; on one group they make a ring, or a grid (``grid.py``)."""

    rows: Axis
    cols: Axis
    batch: tuple[tuple[int, int, int], ...] = ()  # (dimension from the right, first index here, whole size), if divided
    slices: int | str | None = None  # of a grid: how many ranks' columns one takes; "best", or None for a ring
    shared: tuple[tuple[str, Group], ...] = ()  # what is given per pair and the same on all ranks of a group

    def batch_index(self, local: tuple[int, ...], device: torch.device) -> Tensor:
        """The places of the local batch elements in the whole batch, which is numbered in order."""
        start, whole = [0] * len(local), list(local)
        for right, first, size in self.batch:
            start[-right], whole[-right] = first, size
        found, step = torch.zeros(local, dtype=torch.int64, device=device), 1
        for d in reversed(range(len(local))):
            here = torch.arange(start[d], start[d] + local[d], device=device) * step
            found += here.view(*(-1 if k == d else 1 for k in range(len(local))))
            step *= whole[d]
        return found

    def axis(self, name: str) -> Axis:
        return self.rows if name == "rows" else self.cols

    @property
    def totals(self) -> tuple[int, int]:
        return self.rows.total, self.cols.total

    @property
    def ring(self) -> bool:
        return self.rows.group is not None and self.rows.group is self.cols.group

    @property
    def groups(self) -> list[Group]:
        found = [a.group for a in (self.rows, self.cols) if a.group is not None]
        return found[:1] if self.ring else found

    def given(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs, with the sum of all ranks' gradients for what is given per pair but shared."""
        found = dict(inputs)
        for name, group in self.shared:
            if found[name].requires_grad:
                found[name] = ReplicatedInput.apply(found[name], group)
        return found

    def met(self, value: Tensor, has: Expr, user: Expr) -> Tensor:
        """A value on its way into ``user``: summed gradients where it lacks a divided axis that ``user`` has."""
        lacks = [(user.rows and not has.rows, self.rows), (user.cols and not has.cols, self.cols)]
        for lacking, axis in lacks:
            if lacking and axis.group is not None and value.requires_grad:
                value = ReplicatedInput.apply(value, axis.group)
        return value

    def reduced(self, e: Expr, fields: list[Tensor], local: Callable[[list[Tensor], tuple, int], list[Tensor]]) -> Any:
        """A one-sided reduction: ``local(fields, params, length)`` here, then exchanged and combined."""
        kind, (_, over, params) = kind_of(e), e.attrs
        axis = self.axis(over)
        mine = count_indices(axis.own)
        if axis.group is None:
            return local(fields, params, mine)
        fields = [self.met(f, a, _with(over)) for f, a in zip(fields, e.args, strict=True)]
        results = kind.dense_part(local, fields, params, mine)
        if kind.place is not None:
            results[kind.place] = self._moved(results[kind.place], axis)
        results = kind.dense_results(results)
        stacked = [AllGather.apply(t, axis.group) for t in results]
        lengths = [count_indices(p) for p in axis.pieces]
        return combine.closed(e, combine.merged(e, [combine.opened(e, stacked, lengths, [0] * len(lengths))]))

    def _moved(self, place: Tensor, axis: Axis) -> Tensor:
        where = axis.index(place.device)
        return torch.where(place < 0, place, where[place.clamp(min=0)]) if len(where) else place


def _with(over: str) -> Any:
    return _Side(over == "rows", over == "cols")


@dataclass(frozen=True)
class _Side:
    rows: bool
    cols: bool

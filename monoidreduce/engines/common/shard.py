"""How a problem is sharded over ranks, and what that means for arithmetic on rows or columns alone.

Tensors stay plain and local. Rows, columns or both are sharded over the ranks of a group; a tensor without a sharded
axis is replicated. Folds over pairs are in ``distributed_fold.py``; this module serves the plain torch code before and
after them: indices are global, a reduction over a sharded axis ends with an all-gather, and the gradient of a
replicated tensor is summed over the ranks where it is used together with sharded ones.
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

Ranges = tuple[tuple[int, int], ...]  # (start, stop) on the global axis of each contiguous range of a shard


def count_indices(ranges: Ranges) -> int:
    """The number of indices in some ranges."""
    return sum(stop - start for start, stop in ranges)


@dataclass(frozen=True)
class Axis:
    """How rows or columns are sharded: ``ranges[r]`` are those of rank r of the group; one entry and no group where the
    axis is not sharded."""

    ranges: tuple[Ranges, ...]
    group: Group = None
    whole: int | None = None  # the length of the axis where the ranges do not cover it, as in a stream

    @property
    def total(self) -> int:
        return sum(map(count_indices, self.ranges)) if self.whole is None else self.whole

    @property
    def own(self) -> Ranges:
        return self.ranges[0 if self.group is None else self.group.rank()]

    def index(self, device: torch.device) -> Tensor:
        """The global indices of the local rows or columns."""
        return torch.cat([torch.arange(start, stop, device=device) for start, stop in self.own])


@dataclass(frozen=True)
class Shard:
    """How the rows and columns of a call are sharded; both over one group make a ring or a grid (``grid.py``)."""

    rows: Axis
    cols: Axis
    batch: tuple[tuple[int, int, int], ...] = ()  # (dimension from the right, first index, size)
    slices: int | str | None = None  # of a grid: how many ranks' columns each rank folds; "best", or None for a ring
    shared: tuple[tuple[str, Group], ...] = ()  # arguments per pair that are replicated over a group

    def batch_index(self, local: tuple[int, ...], device: torch.device) -> Tensor:
        """The global (row-major) indices of the local batch elements."""
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

    def replicate_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs; gradients of replicated arguments per pair are summed over the ranks."""
        found = dict(inputs)
        for name, group in self.shared:
            if found[name].requires_grad:
                found[name] = ReplicatedInput.apply(found[name], group)
        return found

    def replicate_operand(self, value: Tensor, has: Expr, user: Any) -> Tensor:
        """An operand of ``user``: its gradient is summed over the ranks of each sharded axis that only ``user`` has."""
        lacks = [(user.rows and not has.rows, self.rows), (user.cols and not has.cols, self.cols)]
        for lacking, axis in lacks:
            if lacking and axis.group is not None and value.requires_grad:
                value = ReplicatedInput.apply(value, axis.group)
        return value

    def reduce(self, e: Expr, fields: list[Tensor], local: Callable[[list[Tensor], tuple, int], list[Tensor]]) -> Any:
        """A reduction of row or column values: ``local(fields, params, length)`` on each rank, then an all-gather and a
        combination of the partial results."""
        kind, (_, over, params) = kind_of(e), e.attrs
        axis = self.axis(over)
        mine = count_indices(axis.own)
        if axis.group is None:
            return local(fields, params, mine)
        fields = [
            self.replicate_operand(f, a, _OneAxis(over == "rows", over == "cols"))
            for f, a in zip(fields, e.args, strict=True)
        ]
        results = kind.dense_part(local, fields, params, mine)
        if kind.place is not None:
            results[kind.place] = self._to_global(results[kind.place], axis)
        results = kind.dense_results(results)
        stacked = [AllGather.apply(t, axis.group) for t in results]
        lengths = [count_indices(p) for p in axis.ranges]
        return combine.closed(e, combine.merged(e, [combine.opened(e, stacked, lengths, [0] * len(lengths))]))

    def _to_global(self, place: Tensor, axis: Axis) -> Tensor:
        where = axis.index(place.device)
        return torch.where(place < 0, place, where[place.clamp(min=0)]) if len(where) else place


@dataclass(frozen=True)
class _OneAxis:
    """Stands for an expression that has this axis alone."""

    rows: bool
    cols: bool

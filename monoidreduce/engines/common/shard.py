"""How a problem is sharded over ranks, and what that means for arithmetic on rows or columns alone.

Tensors stay plain and local. Rows, columns or both are sharded over the ranks of a group; a tensor without a sharded
axis is replicated. Folds over pairs are in ``distributed_fold.py``; this module serves the plain torch code before and
after them: indices are global, a reduction over a sharded axis ends with an all-gather, and the gradient of a
replicated tensor is summed over the ranks where it is used together with sharded ones.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import RankError
from ...program.expression import Expr
from ...reductions import kind_of
from . import combine

# Collectives of ``torch.distributed``; every failure raises a typed error on every surviving rank.
#
# A rank that sees a failure closes its connections before it raises (:func:`abort_group`), so that ranks waiting for it
# fail at once too, instead of waiting for the group's timeout. The differentiable collectives come in pairs that are
# each other's transposes: a tensor without a sharded axis is replicated, and so is its gradient.

_ABORT_TAG = 0x6D72  # a tag that nothing is ever sent with
Group = Any  # torch.distributed.ProcessGroup, which not every build of torch has


def all_reduce(tensor: Tensor, op: str, group: Group) -> Tensor:
    """The sum, maximum or minimum over the ranks, in place; equal on all of them."""
    _run_checked(lambda: dist.all_reduce(tensor, getattr(dist.ReduceOp, op), group=group), group)
    return tensor


def all_gather(tensor: Tensor, group: Group) -> Tensor:
    """The tensors of all ranks (of one shape), stacked in rank order."""
    whole = tensor.new_empty(group.size(), *tensor.shape)
    _run_checked(lambda: dist.all_gather(list(whole.unbind()), tensor.contiguous(), group=group), group)
    return whole


def all_gather_texts(text: str, group: Group) -> list[str]:
    """The texts of all ranks, for error messages only."""
    found: list[Any] = [None] * group.size()
    _run_checked(lambda: dist.all_gather_object(found, text, group=group), group)
    return found


class RingTransfer:
    """One asynchronous step of a ring: tensors are sent to rank ``after`` and received from rank ``before``."""

    def __init__(self, send: Sequence[Tensor], receive: Sequence[Tensor], group: Group, after: int, before: int):
        self.group, self.received, self.sent = group, list(receive), [t.contiguous() for t in send]
        after, before = (dist.get_global_rank(group, rank) for rank in (after, before))
        moves = [dist.P2POp(dist.isend, _view_bytes(t), after, group) for t in self.sent if t.numel()]
        moves += [dist.P2POp(dist.irecv, _view_bytes(t), before, group) for t in self.received if t.numel()]
        self.works = _run_checked(lambda: dist.batch_isend_irecv(moves), group) if moves else []

    def wait(self) -> list[Tensor]:
        """Wait for the step to finish and return the received tensors."""
        for work in self.works:
            _run_checked(work.wait, self.group)
        return self.received


def _view_bytes(t: Tensor) -> Tensor:
    flat = t.view(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # the stride of one number may be anything


def _run_checked(call: Callable[[], Any], group: Group) -> Any:
    """Run a collective; if it fails, close this rank's connections and raise RankError."""
    try:
        return call()
    except RuntimeError as error:
        abort_group(group)
        reason = str(error).strip().split("\n")[0].split("] ")[-1]
        raise RankError(detail=f"rank {group.rank()} of {group.size()} lost the others: {reason}") from error


def abort_group(group: Group) -> None:
    """Close this rank's connections within the group, so that ranks waiting for it fail at once."""
    if dist.get_backend(group) != "gloo":
        with contextlib.suppress(RuntimeError, AttributeError):
            group.abort()
        return
    moment, nothing = datetime.timedelta(milliseconds=1), torch.empty(1, device="cpu")
    for peer in range(group.size()):  # a receive that times out closes all of a gloo group's connections
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):
                work = dist.irecv(nothing, dist.get_global_rank(group, peer), group=group, tag=_ABORT_TAG)
                if work is not None:
                    work.wait(moment)


class _Collective(torch.autograd.Function):
    """A linear map of a tensor, and its transpose: each is the gradient of the other."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, run: Callable[[Tensor], Tensor], transposed: Callable) -> Tensor:
        ctx.both = transposed, run
        return run(tensor)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        return _Collective.apply(g, *ctx.both), None, None


def _pair(run: Callable, transposed: Callable, tensor: Tensor, **given: Any) -> Tensor:
    found: Tensor = _Collective.apply(tensor, functools.partial(run, **given), functools.partial(transposed, **given))
    return found


def gather_ranks(tensor: Tensor, group: Group) -> Tensor:
    """All-gather: [...] on each rank to [ranks, ...] on all. Backward: this rank's slice of the gradient."""
    return _pair(all_gather, _take_own, tensor, group=group)


def own_slice(tensor: Tensor, group: Group) -> Tensor:
    """The transpose of :func:`gather_ranks`: this rank's slice of [ranks, ...], which is equal on all ranks."""
    return _pair(_take_own, all_gather, tensor, group=group)


def _take_own(tensor: Tensor, group: Group) -> Tensor:
    return tensor[group.rank()].clone()


def replicate(tensor: Tensor, group: Group) -> Tensor:
    """A replicated tensor used together with sharded ones: identity forward, all-reduce of the gradient backward."""
    return _pair(_view, _sum_copy, tensor, group=group)


def sum_replicas(tensor: Tensor, group: Group) -> Tensor:
    """The transpose of :func:`replicate`: all-reduce forward, identity backward."""
    return _pair(_sum_copy, _view, tensor, group=group)


def _view(tensor: Tensor, group: Group) -> Tensor:
    return tensor.view_as(tensor)


def _sum_copy(tensor: Tensor, group: Group) -> Tensor:
    return all_reduce(tensor.clone(memory_format=torch.contiguous_format), "SUM", group)


def find_chunk(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """The first index and the number of indices of a rank's shard, as ``torch.chunk`` and DTensors divide."""
    each = -(-size // ranks)
    start = min(size, each * rank)
    return start, min(each, size - start)


def own_chunk(tensor: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's chunk of a replicated tensor along a dimension. Backward: the gradients of all chunks, gathered."""
    return _pair(_cut_chunk, _join_chunks, tensor, dim=dim, size=tensor.shape[dim], group=group)


def gather_chunks(chunk: Tensor, dim: int, size: int, group: Group) -> Tensor:
    """The transpose of :func:`own_chunk`: a tensor of ``size`` along a dimension from every rank's chunk."""
    return _pair(_join_chunks, _cut_chunk, chunk, dim=dim, size=size, group=group)


def _cut_chunk(tensor: Tensor, dim: int, size: int, group: Group) -> Tensor:
    return tensor.narrow(dim, *find_chunk(size, group.size(), group.rank())).clone()


def _join_chunks(chunk: Tensor, dim: int, size: int, group: Group) -> Tensor:
    sizes = [find_chunk(size, group.size(), rank)[1] for rank in range(group.size())]
    padded = chunk.new_zeros([max(sizes) if d == dim else n for d, n in enumerate(chunk.shape)])
    padded.narrow(dim, 0, chunk.shape[dim]).copy_(chunk)
    parts = all_gather(padded, group)
    return torch.cat([part.narrow(dim, 0, n) for part, n in zip(parts, sizes, strict=True)], dim)


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
    """How the rows and columns of a call are sharded; both over one group make a ring or a grid."""

    rows: Axis
    cols: Axis
    batch: tuple[tuple[int, int, int], ...] = ()  # (dimension from the right, first index, size)
    slices: int | str | None = None  # of a grid: how many ranks' columns each rank folds; "best", or None for a ring
    shared: tuple[tuple[str, Group], ...] = ()  # arguments per pair that are replicated over a group

    def batch_index(self, local: tuple[int, ...], device: torch.device) -> Tensor:
        """The global (row-major) indices of the local batch elements."""
        start, sizes = [0] * len(local), list(local)
        for right, first, size in self.batch:
            start[-right], sizes[-right] = first, size
        found, step = torch.zeros(local, dtype=torch.int64, device=device), 1
        for d in reversed(range(len(local))):
            here = torch.arange(start[d], start[d] + local[d], device=device) * step
            found += here.view(*(-1 if k == d else 1 for k in range(len(local))))
            step *= sizes[d]
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
                found[name] = replicate(found[name], group)
        return found

    def replicate_operand(self, value: Tensor, has: Expr, user: Any) -> Tensor:
        """An operand of ``user``: its gradient is summed over the ranks of each sharded axis that only ``user`` has."""
        lacks = [(user.rows and not has.rows, self.rows), (user.cols and not has.cols, self.cols)]
        for lacking, axis in lacks:
            if lacking and axis.group is not None and value.requires_grad:
                value = replicate(value, axis.group)
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
        stacked = [gather_ranks(t, axis.group) for t in results]
        lengths = [count_indices(p) for p in axis.ranges]
        return combine.close_state(
            e, combine.merge_states(e, [combine.open_state(e, stacked, lengths, [0] * len(lengths))])
        )

    def _to_global(self, place: Tensor, axis: Axis) -> Tensor:
        where = axis.index(place.device)
        return torch.where(place < 0, place, where[place.clamp(min=0)]) if len(where) else place


@dataclass(frozen=True)
class _OneAxis:
    """Stands for an expression that has this axis alone."""

    rows: bool
    cols: bool

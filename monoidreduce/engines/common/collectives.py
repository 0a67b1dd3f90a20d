"""Collectives of ``torch.distributed``; every failure raises a typed error on every surviving rank.

A rank that sees a failure closes its connections before it raises (:func:`abort_group`), so that ranks waiting for it
fail at once too, instead of waiting for the group's timeout. The differentiable collectives come in pairs that are each
other's transposes: a tensor without a sharded axis is replicated, and so is its gradient.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import RankError

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
    moment, nothing = datetime.timedelta(milliseconds=1), torch.empty(1)
    for peer in range(group.size()):  # a receive that times out closes all of a gloo group's connections
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):
                work = dist.irecv(nothing, dist.get_global_rank(group, peer), group=group, tag=_ABORT_TAG)
                if work is not None:
                    work.wait(moment)


class AllGather(torch.autograd.Function):
    """All-gather: [...] on each rank to [ranks, ...] on all. Backward: this rank's slice of the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_gather(tensor, group)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        return OwnSlice.apply(g, ctx.group), None


class OwnSlice(torch.autograd.Function):
    """The transpose of :class:`AllGather`: this rank's slice of [ranks, ...], which is equal on all ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return tensor[group.rank()].clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        return AllGather.apply(g, ctx.group), None


class ReplicatedInput(torch.autograd.Function):
    """A replicated tensor used together with sharded ones: identity forward, all-reduce of the gradient backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        return AllReduceSum.apply(g, ctx.group), None


class AllReduceSum(torch.autograd.Function):
    """The transpose of :class:`ReplicatedInput`: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_reduce(tensor.clone(memory_format=torch.contiguous_format), "SUM", group)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        return ReplicatedInput.apply(g, ctx.group), None


def find_chunk(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """The first index and the number of indices of a rank's shard, as ``torch.chunk`` and DTensors divide."""
    each = -(-size // ranks)
    start = min(size, each * rank)
    return start, min(each, size - start)


class OwnChunk(torch.autograd.Function):
    """This rank's chunk of a replicated tensor along a dimension. Backward: the gradients of all chunks, gathered."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group, ctx.size = dim, group, tensor.shape[dim]
        start, size = find_chunk(tensor.shape[dim], group.size(), group.rank())
        return tensor.narrow(dim, start, size).clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        return GatherChunks.apply(g, ctx.dim, ctx.size, ctx.group), None, None


class GatherChunks(torch.autograd.Function):
    """The transpose of :class:`OwnChunk`: a tensor of ``size`` along a dimension from every rank's chunk."""

    @staticmethod
    def forward(ctx: Any, chunk: Tensor, dim: int, size: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        sizes = [find_chunk(size, group.size(), rank)[1] for rank in range(group.size())]
        padded = chunk.new_zeros([max(sizes) if d == dim else n for d, n in enumerate(chunk.shape)])
        padded.narrow(dim, 0, chunk.shape[dim]).copy_(chunk)
        parts = all_gather(padded, group)
        return torch.cat([part.narrow(dim, 0, n) for part, n in zip(parts, sizes, strict=True)], dim)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        return OwnChunk.apply(g, ctx.dim, ctx.group), None, None, None

"""What ranks say to each other: torch.distributed's collectives, with every failure a typed error on every survivor.

A rank that meets a failure *hangs up* on the group before it raises, so that ranks waiting for it, and not for the one
that failed, learn of it at once and hang up in turn: nobody waits for the group's timeout but for a rank that hangs.
The two differentiable steps are each other's transposes under one reading of a program: a tensor without a sharded axis
is the same on all ranks, and so is its gradient.
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
    """The ranks' tensors (of one shape), stacked in their order."""
    whole = tensor.new_empty(group.size(), *tensor.shape)
    _run_checked(lambda: dist.all_gather(list(whole.unbind()), tensor.contiguous(), group=group), group)
    return whole


def all_gather_texts(text: str, group: Group) -> list[str]:
    """Every rank's text; only for telling what went wrong."""
    found: list[Any] = [None] * group.size()
    _run_checked(lambda: dist.all_gather_object(found, text, group=group), group)
    return found


class RingTransfer:
    """Tensors on their way round a circle: sent to the rank ``after``, received from that ``before``, while work goes
    on."""

    def __init__(self, send: Sequence[Tensor], receive: Sequence[Tensor], group: Group, after: int, before: int):
        self.group, self.received, self.sent = group, list(receive), [t.contiguous() for t in send]
        after, before = (dist.get_global_rank(group, rank) for rank in (after, before))
        moves = [dist.P2POp(dist.isend, _view_bytes(t), after, group) for t in self.sent if t.numel()]
        moves += [dist.P2POp(dist.irecv, _view_bytes(t), before, group) for t in self.received if t.numel()]
        self.works = _run_checked(lambda: dist.batch_isend_irecv(moves), group) if moves else []

    def done(self) -> list[Tensor]:
        """What came, once it is all here."""
        for work in self.works:
            _run_checked(work.wait, self.group)
        return self.received


def _view_bytes(t: Tensor) -> Tensor:
    flat = t.view(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # the stride of one number may be anything


def _run_checked(call: Callable[[], Any], group: Group) -> Any:
    """Run a collective; where it fails, hang up and say so."""
    try:
        return call()
    except RuntimeError as error:
        abort_group(group)
        reason = str(error).strip().split("\n")[0].split("] ")[-1]
        raise RankError(detail=f"rank {group.rank()} of {group.size()} lost the others: {reason}") from error


def abort_group(group: Group) -> None:
    """Close the connections of this rank within the group, which a failure has made useless anyway."""
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
    """[...] of each rank to [ranks, ...] on all; a rank's gradient is its own part."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_gather(tensor, group)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        return OwnSlice.apply(g, ctx.group), None


class OwnSlice(torch.autograd.Function):
    """The transpose of :class:`AllGather`: of [ranks, ...], equal on all ranks, this rank's part."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return tensor[group.rank()].clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        return AllGather.apply(g, ctx.group), None


class ReplicatedInput(torch.autograd.Function):
    """A tensor that is the same on all ranks, about to meet sharded ones: its gradient is the sum of all ranks'."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        return AllReduceSum.apply(g, ctx.group), None


class AllReduceSum(torch.autograd.Function):
    """The transpose of :class:`ReplicatedInput`: the sum over the ranks, whose gradient every rank takes as it is."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_reduce(tensor.clone(memory_format=torch.contiguous_format), "SUM", group)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        return ReplicatedInput.apply(g, ctx.group), None

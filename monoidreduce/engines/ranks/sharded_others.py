"""Gradients of monoids that have no local one (``common/others.py``), over many ranks.

Where the folded axis is divided, a rank's share is one more block: the ranks' states are gathered, and the cotangent of
this rank's comes from their fold. All of it is differentiable, so that second derivatives communicate by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import NoGradientError
from ...program.expression import Expr
from ...program.lower import Fold
from ..common.collectives import AllGather, AllReduceSum, Group, OwnSlice, ReplicatedInput
from ..common.evaluate import Sizes
from ..common.others import Blocks, add_gradients, each_reduction
from ..common.shard import Shard


def sharded_other_gradients(
    fold: Fold, leaves: Sequence[Any], sizes: Sizes, wanted: Sequence[bool], cotangents: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients of this rank's leaves; see ``others.other_gradients``."""
    shard = sizes.shard
    assert shard is not None
    grads: list[Tensor | None] = [None] * len(leaves)
    used = [_replicate(v, e, shard) for v, e in zip(leaves, fold.leaves, strict=True)]
    for one, given in each_reduction(fold, cotangents):
        _refuse_ring(shard, one.reductions[0])
        job = Blocks(one, sizes, tuple(used), tuple(wanted))
        group = shard.axis(one.reductions[0].attrs[1]).group
        if group is not None:
            gathered = [AllGather.apply(t, group) for t in job.states()]
            pulled = torch.func.vjp(job.merge(0), *gathered)[1](tuple(job.filled(given)))
            given = [OwnSlice.apply(t, group) for t in pulled]
        add_gradients(grads, job, job.gradients(given))
    return [g if g is None else _sum_over_ranks(g, e, shard) for g, e in zip(grads, fold.leaves, strict=True)]


def _lacking(leaf: Expr, shard: Shard) -> list[Group]:
    """The groups over which a leaf is replicated: those of divided axes that it does not have."""
    axes = ((leaf.rows, shard.rows), (leaf.cols, shard.cols))
    return [axis.group for has, axis in axes if not has and axis.group is not None]


def _replicate(value: Any, leaf: Expr, shard: Shard) -> Any:
    """A leaf as this rank uses it: second derivatives by a replicated one are summed over the ranks."""
    if isinstance(value, Tensor) and value.requires_grad:
        for group in _lacking(leaf, shard):
            value = ReplicatedInput.apply(value, group)
    return value


def _sum_over_ranks(g: Tensor, leaf: Expr, shard: Shard) -> Tensor:
    for group in _lacking(leaf, shard):
        g = AllReduceSum.apply(g, group)
    return g


def _refuse_ring(shard: Shard, r: Expr) -> None:
    if shard.ring:
        raise NoGradientError(
            detail=f"the gradient of {r.attrs[2][0].__name__} needs all other pairs of a row at once, but rows and "
            "columns are divided over one group of ranks",
            fix="Divide rows or columns alone, or add pullback(c, a, g) to the monoid",
        )

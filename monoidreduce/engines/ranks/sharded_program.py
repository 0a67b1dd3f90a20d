"""Programs over many ranks: the passes in order, and the arithmetic between them on each rank's shard.

Each pass is one differentiable function of the global tensors: its backward is a symbolic program
(``gradient_program.py``) that is executed here in the same way, so that its communication, too, is that of folds.
Between passes the evaluator keeps replicated values and their gradients equal on all ranks (``shard.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import NoGradientError
from ...program.expression import Expr
from ...program.lower import Fold, Lowered
from ..common.evaluate import Evaluator, Sizes, from_layout, to_layout
from ..common.gradient_program import build_gradient_program, constant_results, detach_views, load_saved, zero_gradient
from ..common.others import Blocks, add_gradients, each_reduction, split_cotangents
from ..common.shard import AllGather, AllReduceSum, Group, OwnSlice, ReplicatedInput, Shard


@dataclass(frozen=True)
class Context:
    """The arguments of a pass that are not tensors."""

    fold: Fold
    sizes: Sizes
    engine: Callable[..., list[Tensor]]


def execute(
    program: Lowered, inputs: Mapping[str, Any], sizes: Sizes, engine: Callable[..., list[Tensor]]
) -> list[Any]:
    """Run a lowered program: feed each pass, fold it, then evaluate the outputs (in the evaluator's layout)."""
    evaluate = Evaluator(sizes, inputs)
    for p in program.passes:
        feeds = [from_layout(evaluate(e), e) for e in p.feeds]
        results = _Pass.apply(Context(p.fold, sizes, engine), *feeds)
        for value, nodes in zip(results, p.results, strict=True):
            for n in nodes:
                evaluate.memo[n] = to_layout(value, n)
    return [evaluate(e) for e in program.outputs]


class _Pass(torch.autograd.Function):
    """One pass over the pairs; its backward is a program."""

    @staticmethod
    def forward(context: Context, *leaves: Any) -> tuple[Tensor, ...]:
        detached = [v.detach() if isinstance(v, Tensor) else v for v in leaves]
        return detach_views(context.engine(context.fold, detached, context.sizes))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        ctx.context, *leaves = inputs
        ctx.set_materialize_grads(False)
        constant = constant_results(ctx.context.fold)
        ctx.mark_non_differentiable(*(o for o, is_constant in zip(output, constant, strict=True) if is_constant))
        ctx.constants = [None if isinstance(v, Tensor) else v for v in leaves]
        ctx.save_for_backward(*(v for v in leaves if isinstance(v, Tensor)), *output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple:
        context: Context = ctx.context
        first = ctx.constants.count(None)  # tensors among the leaves
        tensors, unchanged = load_saved(ctx, range(first, first + len(cotangents)))
        rest = iter(tensors)
        leaves = [c if c is not None else next(rest) for c in ctx.constants]
        results = list(rest if unchanged else _Pass.apply(context, *leaves))
        asked = tuple(ctx.needs_input_grad[1:])
        if not context.sizes.of("rows") or not context.sizes.of("cols"):  # no pairs: all gradients are zero
            return None, *(zero_gradient(leaf) if want else None for leaf, want in zip(leaves, asked, strict=True))
        local, others = split_cotangents(context.fold, cotangents)
        given = tuple(g is not None for g in local)
        made = build_gradient_program(context.fold, asked, given)
        values = execute(made.program, made.bind(leaves, results, local), context.sizes, context.engine)
        values = [from_layout(v, e) for v, e in zip(values, made.program.outputs, strict=True)]
        grads = made.gradients(values, leaves)[0]
        if any(g is not None for g in others):
            more = sharded_other_gradients(context.fold, leaves, context.sizes, asked, others)
            grads = [g if m is None or g is None else g + m for g, m in zip(grads, more, strict=True)]
        return None, *grads


# Gradients of monoids that have no local one (``common/others.py``), over many ranks.
# Where the folded axis is divided, a rank's share is one more block: the ranks' states are gathered, and the
# cotangent of this rank's comes from their fold. All of it is differentiable, so that second derivatives communicate
# by themselves.


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

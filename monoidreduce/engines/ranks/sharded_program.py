"""Programs over many ranks: the passes in order, and the arithmetic between them on each rank's shard.

Each pass is one differentiable function of the global tensors: its backward is a symbolic program
(``gradient_program.py``) that is executed here in the same way, so that its communication, too, is that of folds.
Between passes the evaluator keeps replicated values and their gradients equal on all ranks (``shard.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...program.lower import Fold, Lowered
from ..common.evaluate import Evaluator, Sizes, from_layout, to_layout
from ..common.gradient_program import build_gradient_program, constant_results, zero_gradient
from ..common.others import split_cotangents
from ..common.saved_tensors import detach_views, load_saved
from .sharded_others import sharded_other_gradients


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

"""Programs over many ranks: the walk over passes, with what lies between them evaluated on each rank's part.

Every pass is one differentiable function of global meaning: its backward is built symbolically, lowered like any
program and run by this same walk, so that its exchanges, too, are those of folds. Between passes the evaluator keeps
the books (``shard.py``): what is the same on all ranks stays so, values and gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...program.compile import compile_program
from ...program.expression import Expr
from ...program.gradient import FoldGradient
from ...program.lower import Fold, Lowered
from ...reductions import KINDS
from ..common.evaluate import Evaluator, Sizes, from_layout, to_layout
from ..common.saved_tensors import own, saved


@dataclass(frozen=True)
class Context:
    """What a pass needs besides its tensors."""

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
        return own(context.engine(context.fold, detached, context.sizes))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        ctx.context, *leaves = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(o for o, (r, k) in zip(output, ctx.context.fold.outputs, strict=True) if _fixed(o, r, k))
        )
        ctx.constants = [None if isinstance(v, Tensor) else v for v in leaves]
        ctx.save_for_backward(*(v for v in leaves if isinstance(v, Tensor)), *output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple:
        context: Context = ctx.context
        first = ctx.constants.count(None)  # tensors among the leaves
        tensors, unchanged = saved(ctx, range(first, first + len(cotangents)))
        rest = iter(tensors)
        leaves = [c if c is not None else next(rest) for c in ctx.constants]
        results = list(rest if unchanged else _Pass.apply(context, *leaves))
        asked = tuple(ctx.needs_input_grad[1:])
        if not context.sizes.of("rows") or not context.sizes.of(
            "cols"
        ):  # no pairs: nothing flows, whatever the cotangents are
            return None, *(_zero(leaf) if want else None for leaf, want in zip(leaves, asked, strict=True))
        given = tuple(g is not None for g in cotangents)
        program, names = _gradient_program(context.fold, asked, given)
        inputs = dict(zip(names.leaves, leaves, strict=True))
        inputs |= dict(zip(names.results, results, strict=True))
        inputs |= {n: g for n, g in zip(names.cotangents, cotangents, strict=True) if g is not None}
        values = iter(zip(execute(program, inputs, context.sizes, context.engine), program.outputs, strict=True))
        grads: list[Tensor | None] = []
        for leaf, expr, wanted, present in zip(leaves, context.fold.leaves, asked, names.present, strict=True):
            grads.append(as_gradient(next(values) if present else (None, expr), leaf, expr) if wanted else None)
        return None, *grads


def _fixed(value: Tensor, reduction: Expr, k: int) -> bool:
    """Whether a result is a constant to gradients."""
    kind, _, params = reduction.attrs
    count = len(KINDS[kind].outputs(reduction.args, params))
    return not value.dtype.is_floating_point or not KINDS[kind].moves(k, count)


@dataclass(frozen=True)
class _Names:
    leaves: tuple[str, ...]
    results: tuple[str, ...]
    cotangents: tuple[str, ...]
    present: tuple[bool, ...]  # which leaves have an output


@functools.lru_cache(maxsize=4096)
def _gradient_program(fold: Fold, asked: tuple[bool, ...], given: tuple[bool, ...]) -> tuple[Lowered, _Names]:
    source = FoldGradient(fold, asked, given)
    leaves = tuple(e.attrs[0] for e in fold.leaves)
    return compile_program(source), _Names(leaves, source.results, source.cotangents, source.present)


def _zero(leaf: Tensor) -> Tensor:
    """Zeros that still depend on the leaf, so that a second derivative of them is zero and not an error."""
    if not torch.is_grad_enabled():
        return torch.zeros_like(leaf)
    return torch.where(torch.ones((), dtype=torch.bool, device=leaf.device), torch.zeros_like(leaf), leaf)


def as_gradient(result: tuple[Any, Expr], leaf: Tensor, expr: Expr) -> Tensor:
    """A gradient in the shape and type of its leaf: summed over batch dimensions that were broadcast."""
    value, e = result
    if value is None:
        return _zero(leaf)
    if not isinstance(value, Tensor):
        return torch.full_like(leaf, value)
    if expr.feature is not None and e.feature is None:
        value = value.unsqueeze(-1)
    value = from_layout(value, expr)  # an axis that the gradient does not vary along has size 1
    return value.expand(torch.broadcast_shapes(value.shape, leaf.shape)).sum_to_size(leaf.shape).to(leaf.dtype)

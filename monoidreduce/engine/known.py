"""Sums over rows whose gradient is taken while the pairs are there.

Of a sum every row's cotangent is known beforehand, so forward and gradient are one program (``program/total.py``) and
one walk over panels (``panel.py``): three products where the ordinary road, which recomputes the pairs, needs four.
The gradients wait, unscaled, for the one number that the backward brings. They are given away once: a second backward,
or one that is itself to be differentiated, takes the ordinary road.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import NoGradientError
from ..plan import budget, panels
from ..program.expr import Expr, topological
from ..program.lower import Lowered, lower
from ..program.total import Total, total
from . import autograd, hardware, panel
from .evaluate import Sizes, from_layout
from .triton.spec import Unsupported
from .walks import split_means, walks

Engine = Callable[..., list[Tensor]]


@dataclass
class _Context:
    """What the sum needs besides its tensors, and what it keeps for the backward."""

    output: Expr
    asked: tuple[Expr, ...]  # the inputs whose gradient is wanted
    names: tuple[str, ...]  # of the tensors, in their order
    numbers: dict[str, Any]
    sizes: Sizes
    engine: Engine
    make: panel.Maker
    program: Total
    waiting: dict[str, Tensor] | None = field(default=None)


def summed(
    output: Expr,
    inputs: Mapping[str, Any],
    exprs: Mapping[str, Expr],
    sizes: Sizes,
    engine: Engine,
    make: panel.Maker,
) -> Tensor | None:
    """Σ over rows of a program's one number per row, as a float; None where the ordinary road is the better one."""
    tensors = {n: v for n, v in inputs.items() if isinstance(v, Tensor)}
    wanted = [n for n, v in tensors.items() if v.requires_grad]
    if not wanted or not torch.is_grad_enabled() or sizes.batch or not sizes.rows or not sizes.cols:
        return None
    if torch._C._are_functorch_transforms_active():
        return None
    try:
        program = total(output, tuple(exprs[n] for n in wanted))
    except NoGradientError:  # an expression that only torch can differentiate, or none: the usual road will say
        return None
    kinds = {v.dtype for n, v in tensors.items() if exprs[n].cols and exprs[n].feature is not None}
    if program is None or not _worthwhile(program.program, kinds, sizes, make):
        return None
    numbers = {n: v for n, v in inputs.items() if n not in tensors}
    asked = tuple(exprs[n] for n in wanted)
    context = _Context(output, asked, tuple(tensors), numbers, sizes, engine, make, program)
    return _Sum.apply(context, *tensors.values())


def _worthwhile(program: Lowered, kinds: set[torch.dtype], sizes: Sizes, make: panel.Maker) -> bool:
    """Whether products are wide enough to be worth keeping, and the budget holds panels of enough rows."""
    found = walks(split_means(program) if make.splits else program)
    products = [f for w in found for f in w.products]
    widest = max([0, *(sizes.of(str(f.args[0].feature)) for f in products)])
    if len(found) != 1 or widest <= panels.NARROW:
        return False
    try:
        held = make(found[0], sizes, kinds).choose(budget.limit(hardware.free_memory(sizes.device)))
    except Unsupported:
        return False
    return held is not None and held.rows >= min(panels.FEW, sizes.rows)


class _Sum(torch.autograd.Function):
    """Forward: the sum, and the gradients of it for a cotangent of one."""

    @staticmethod
    def forward(context: _Context, *tensors: Tensor) -> Tensor:
        inputs = {n: t.detach() for n, t in zip(context.names, tensors, strict=True)}
        rows, *grads = panel.execute(context.program.program, context.numbers | inputs, context.sizes, context.make)
        outputs = iter(zip(grads, context.program.program.outputs[1:], strict=True))
        context.waiting = {}
        for e, present in zip(context.asked, context.program.present, strict=True):
            leaf = inputs[str(e.attrs[0])]
            kind = torch.float32 if leaf.dtype is torch.float16 else leaf.dtype  # unscaled, it may leave float16
            found = next(outputs) if present else (None, e)
            context.waiting[str(e.attrs[0])] = autograd.as_gradient(found, leaf, e, kind)
        rows = from_layout(rows, context.output)
        return rows.expand(context.sizes.rows).sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.context, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        context: _Context = ctx.context
        waiting, context.waiting = context.waiting, None
        if waiting is None or torch.is_grad_enabled():
            return None, *_again(context, ctx.saved_tensors, ctx.needs_input_grad[1:], g)
        found: list[Tensor | None] = []
        for name, t in zip(context.names, ctx.saved_tensors, strict=True):
            grad = waiting.get(name)
            found.append(None if grad is None else grad.mul_(g).to(t.dtype))
        return None, *found


def _again(context: _Context, tensors: tuple, needs: tuple, g: Tensor) -> list[Tensor | None]:
    """The gradients by the ordinary road: differentiable, and as often as one likes."""
    graph = torch.is_grad_enabled()
    with torch.enable_grad():
        given = [
            t if graph or not need else t.detach().requires_grad_() for t, need in zip(tensors, needs, strict=True)
        ]
        inputs = context.numbers | dict(zip(context.names, given, strict=True))
        (rows,) = autograd.execute(lower((context.output,)), inputs, context.sizes, context.engine)
        value = from_layout(rows, context.output).expand(context.sizes.rows).sum()
        wanted = [t for t, need in zip(given, needs, strict=True) if need]
        grads = iter(torch.autograd.grad(value, wanted, g, create_graph=graph, allow_unused=True))
    found = [next(grads) if need else None for need in needs]
    return [
        autograd.zero(t) if need and grad is None else grad for t, need, grad in zip(given, needs, found, strict=True)
    ]


def inputs_of(output: Expr) -> dict[str, Expr]:
    """The inputs that a program reads, by name."""
    return {str(e.attrs[0]): e for e in topological([output]) if e.op == "input"}

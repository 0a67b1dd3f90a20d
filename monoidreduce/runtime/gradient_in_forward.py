"""Sums over rows whose gradient is taken while the pairs are there.

Of a sum every row's cotangent is known beforehand, so forward and gradient are one program
(``program/loss_and_gradient.py``) and
one walk over panels (``__init__.py``): three products where the ordinary road, which recomputes the pairs, needs four.
The gradients wait, unscaled, for the one number that the backward brings. They are given away once: a second backward,
or one that is itself to be differentiated, takes the ordinary road.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..engines import panel
from ..engines.common import matmul, oom_retry, skip_small_tiles
from ..engines.common.evaluate import Sizes, from_layout
from ..engines.common.gradient_program import as_gradient, zero_gradient
from ..engines.common.torch_code import script
from ..engines.panel.panel_program import split_into_loops, split_softmax_means
from ..engines.triton.codegen.kernel_spec import Unsupported
from ..errors import NoGradientError
from ..plan import budget, panel_layout, settings
from ..program.compile import compile_program
from ..program.expression import Expr, topological
from ..program.loss_and_gradient import LossAndGradient, compile_loss_and_gradient
from . import autograd, fused_expressions, logit_rounding
from .call_context import apply_settings

_ROOMS = 64  # whose panels are remembered: without a budget it is never the same


@dataclass
class _Context:
    """What the sums need besides their tensors, and what they keep for the backward."""

    outputs: tuple[Expr, ...]
    asked: tuple[Expr, ...]  # the inputs whose gradient is wanted
    names: tuple[str, ...]  # of the tensors, in their order
    numbers: dict[str, Any]
    sizes: Sizes
    engine: str
    make: panel.StepClass
    program: LossAndGradient
    waiting: dict[str, Tensor] | None = field(default=None)


def summed(
    outputs: tuple[Expr, ...], inputs: Mapping[str, Any], sizes: Sizes, engine: str, make: panel.StepClass
) -> list[Tensor] | None:
    """Σ over rows of each of a program's numbers per row; None where the ordinary road is the better one."""
    names = tuple(inputs_of(outputs))
    found = Road(outputs, names, sizes, engine, make, lambda *_: None)(*(inputs[n] for n in names))
    return None if found is None else list(found)


def is_wide(outputs: tuple[Expr, ...], sizes: Sizes) -> bool:
    """Whether a program can have products that are wide enough to be worth keeping."""
    vectors = [e for e in inputs_of(outputs).values() if e.feature is not None]
    return not sizes.batch and any(sizes.of(str(e.feature)) > panel_layout.NARROW for e in vectors)


class Road:
    """The sums of calls of one kind: what depends on their types and sizes alone is found out once.

    ``names``: of the inputs that it is called with; ``otherwise``: the ordinary road."""

    def __init__(
        self,
        outputs: tuple[Expr, ...],
        names: tuple[str, ...],
        sizes: Sizes,
        engine: str,
        make: panel.StepClass,
        otherwise: Callable[..., Any],
    ):
        self.outputs, self.names, self.sizes, self.engine, self.make = outputs, names, sizes, engine, make
        self.otherwise = otherwise
        self.plans: dict[tuple[str, ...], _Plan | None] = {}  # by the inputs that ask for gradients

    def __call__(self, *given: Any) -> Any:
        plan = self._plan(given) if torch.is_grad_enabled() else None
        if plan is None or not plan.pays():
            return self.otherwise(*given)
        tensors = {n: v for n, v in zip(self.names, given, strict=True) if isinstance(v, Tensor)}
        numbers = {n: v for n, v in zip(self.names, given, strict=True) if n not in tensors}
        context = _Context(
            self.outputs, plan.asked, tuple(tensors), numbers, self.sizes, self.engine, self.make, plan.program
        )
        return list(_summed(context, *tensors.values()))

    def _plan(self, given: Sequence[Any]) -> _Plan | None:
        asks = [isinstance(v, Tensor) and v.requires_grad for v in given]
        wanted = tuple([n for n, asks in zip(self.names, asks, strict=True) if asks])
        if wanted not in self.plans:
            inputs = dict(zip(self.names, given, strict=True))
            self.plans[wanted] = _planned(self.outputs, inputs, self.sizes, self.make)
        return self.plans[wanted]


@dataclass(frozen=True)
class _Plan:
    """A program of sums and gradients in one walk, whose panels ``step`` chooses; ``asked``: whose gradients."""

    program: LossAndGradient
    asked: tuple[Expr, ...]
    step: panel.Step
    sizes: Sizes
    known: dict[int, bool] = field(default_factory=dict, compare=False)  # by the room that there is

    @functools.cached_property
    def is_small(self) -> bool:
        """True if panels have enough rows in the least memory that is used without a budget, however little is free."""
        held = self.step.choose_layout(budget.LEAST)
        return held is not None and held.is_worthwhile(self.sizes.rows)

    def pays(self) -> bool:
        """Whether the budget holds panels of enough rows."""
        if self.is_small and budget.requested() is None and budget.shrink_factor() == 1:
            return True
        room = budget.allowed_bytes(lambda: matmul.free_memory(self.sizes.device))
        found = self.known.get(room)
        if found is None:
            held = self.step.choose_layout(room)
            found = held is not None and held.is_worthwhile(self.sizes.rows)
            if len(self.known) < _ROOMS:
                self.known[room] = found
        return found


def planned(
    outputs: tuple[Expr, ...], inputs: Mapping[str, Any], sizes: Sizes, make: panel.StepClass
) -> LossAndGradient | None:
    """The program of sums and gradients, where there is one and it is the better road."""
    found = _planned(outputs, inputs, sizes, make)
    return found.program if found is not None and found.pays() else None


def _planned(outputs: tuple[Expr, ...], inputs: Mapping[str, Any], sizes: Sizes, make: panel.StepClass) -> _Plan | None:
    """The same, whatever the budget; only where products are wide enough to be worth keeping."""
    exprs = inputs_of(outputs)
    tensors = {n: inputs[n] for n in exprs if isinstance(inputs[n], Tensor)}
    asked = tuple(exprs[n] for n, v in tensors.items() if v.requires_grad)
    if not asked or not is_wide(outputs, sizes) or not sizes.rows or not sizes.cols:
        return None
    try:
        program = compile_loss_and_gradient(outputs, asked)
    except NoGradientError:  # an expression that only torch can differentiate, or none: the usual road will say
        return None
    if program is None:
        return None
    kinds = {v.dtype for n, v in tensors.items() if exprs[n].cols and exprs[n].feature is not None}
    found = split_into_loops(split_softmax_means(program.program) if make.splits_softmax_means else program.program)
    products = [f for w in found for f in w.products]
    widest = max([0, *(sizes.of(str(f.args[0].feature)) for f in products)])
    if len(found) != 1 or widest <= panel_layout.NARROW:
        return None
    try:
        return _Plan(program, asked, make(found[0], sizes, kinds), sizes)
    except Unsupported:
        return None


class _Sum(torch.autograd.Function):
    """Forward: the sums, and the gradients of the moving one for a cotangent of one."""

    @staticmethod
    def forward(ctx: Any, context: _Context, *tensors: Tensor) -> tuple[Tensor, ...]:
        inputs = {n: t.detach() for n, t in zip(context.names, tensors, strict=True)}
        program, count = context.program.program, len(context.outputs)
        given = (program, context.numbers | inputs, context.sizes, context.make)
        with skip_small_tiles.apply_to_gradient() if _numbers(context) else contextlib.nullcontext():
            found = oom_retry.run_with_retry(panel.execute, given, context.sizes)
        values = [from_layout(v, e) for v, e in zip(found, program.outputs, strict=True)]
        grads = iter(zip(values[count:], program.outputs[count:], strict=True))
        context.waiting = {}
        for e, present in zip(context.asked, context.program.present, strict=True):
            leaf = inputs[str(e.attrs[0])]
            kind = torch.float32 if leaf.dtype is torch.float16 else leaf.dtype  # unscaled, it may leave float16
            made = as_gradient(*next(grads), leaf, e, kind) if present else torch.zeros_like(leaf)
            context.waiting[str(e.attrs[0])] = made
        sums = tuple(_sum(v, context.sizes) for v in values[:count])
        ctx.context, ctx.settings = context, settings.now()
        ctx.mark_non_differentiable(*(s for k, s in enumerate(sums) if k != context.program.moving))
        ctx.save_for_backward(*tensors)
        return sums

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple:
        context: _Context = ctx.context
        g = cotangents[context.program.moving]
        waiting, context.waiting = context.waiting, None
        if waiting is None or torch.is_grad_enabled():
            with apply_settings(ctx.settings):
                return None, *_again(context, ctx.saved_tensors, ctx.needs_input_grad[1:], g)
        found: list[Tensor | None] = []
        for name, t in zip(context.names, ctx.saved_tensors, strict=True):
            grad = waiting.get(name)
            found.append(None if grad is None else fused_expressions.scale_(grad, g).to(t.dtype))
        return None, *found


# ``apply`` without its look at transforms, for what is known to have none
_summed: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _Sum).apply


def _numbers(context: _Context) -> bool:
    """Whether tiles may be left out: asked for, and the sums are made of numbers, so that vectors are gradients."""
    if skip_small_tiles.requested() is None:
        return False
    return not any(e.op == "result" and e.feature is not None for e in topological(context.outputs))


def _sum(value: Any, sizes: Sizes) -> Tensor:
    value = value if isinstance(value, Tensor) else torch.full((), value, device=sizes.device)
    return value.expand(sizes.rows).sum()


def _again(context: _Context, tensors: tuple, needs: tuple, g: Tensor) -> list[Tensor | None]:
    """The gradients by the ordinary road: differentiable, and as often as one likes."""
    graph = torch.is_grad_enabled()
    with torch.enable_grad():
        given = [t.detach().requires_grad_(n) if not graph else t for t, n in zip(tensors, needs, strict=True)]
        inputs = context.numbers | dict(zip(context.names, given, strict=True))
        usual = compile_program((context.outputs[context.program.moving],))
        usual = logit_rounding.marked(usual, logit_rounding.asking(inputs), context.sizes)
        made = script(usual, frozenset(context.numbers), False, fused_expressions.row_dot)
        (rows,) = made.run(context.sizes, autograd.Walk(context.engine), *(inputs[n] for n in made.inputs))
        wanted = [t for t, need in zip(given, needs, strict=True) if need]
        grads = iter(torch.autograd.grad(_sum(rows, context.sizes), wanted, g, create_graph=graph, allow_unused=True))
    found = [next(grads) if need else None for need in needs]
    return [zero_gradient(t) if n and f is None else f for t, n, f in zip(given, needs, found, strict=True)]


@functools.lru_cache(maxsize=1024)
def inputs_of(outputs: tuple[Expr, ...]) -> Mapping[str, Expr]:
    """The inputs that a program reads, by name."""
    return {str(e.attrs[0]): e for e in topological(outputs) if e.op == "input"}
